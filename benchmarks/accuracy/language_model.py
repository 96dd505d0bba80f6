"""The language model of protocol A: Llama's architecture in plain torch, and its checkpoints in Hugging Face's layout.

A layer is a pure function of its input and weights, so that it is compiled only once::

    x [B, T, hidden] -> norm -> [q k v] -> rotary, attention -> o + x -> norm -> [gate up] -> silu * -> down + x

Weights are float32 and are cast to ``dtype`` for computation; q, k, v and gate, up are fused while training.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

EPS, THETA = 1e-5, 10000.0
INIT = 0.02
LOGSUMEXP = 1e-4  # weight of logsumexp(logits)^2 in the loss (z-loss); keeps logits small
LAYER = ("norm", "qkv", "o", "norm2", "gate_up", "down")
NAMES = {
    "norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "norm2": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
EMBEDDING, LAST_NORM = "model.embed_tokens.weight", "model.norm.weight"
EXTRA_FILES = ("tokenizer.json", "tokenizer_config.json")

Weights = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """The shape of a model: about 30 million weights."""

    vocabulary: int = 8192
    hidden: int = 512
    intermediate: int = 1408
    layers: int = 8
    heads: int = 8
    window: int = 1024

    def config(self) -> dict[str, object]:
        """Return the content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.hidden // self.heads,
            "max_position_embeddings": 2 * self.window,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }


def initial(shape: Shape, device: str) -> Weights:
    """Return random float32 weights by key: "embedding", "last_norm", and "0.qkv" and so on for each layer."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int, scale: float = INIT) -> Tensor:
        return torch.empty(rows, columns, device=device).normal_(0, scale, generator=generator)

    hidden, inner = shape.hidden, shape.intermediate
    last = INIT / math.sqrt(2 * shape.layers)  # of matrices that add to the residual
    weights = {
        "embedding": normal(shape.vocabulary, hidden),
        "last_norm": torch.ones(hidden, device=device),
    }
    for i in range(shape.layers):
        weights[f"{i}.norm"] = torch.ones(hidden, device=device)
        weights[f"{i}.qkv"] = normal(3 * hidden, hidden)
        weights[f"{i}.o"] = normal(hidden, hidden, last)
        weights[f"{i}.norm2"] = torch.ones(hidden, device=device)
        weights[f"{i}.gate_up"] = normal(2 * inner, hidden)
        weights[f"{i}.down"] = normal(hidden, inner, last)
    return {name: tensor.requires_grad_() for name, tensor in weights.items()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the RMS norm in float32; return it in the dtype of ``x``."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + head_dim / 2]) of [batch, heads, tokens, head_dim]."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def layer(x: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> Tensor:
    """Run one layer; ``weights`` in the order of LAYER."""
    first, qkv, o, second, gate_up, down = weights
    heads = qkv.shape[1] // (2 * cos.shape[-1])
    h = F.linear(norm(x, first), qkv.to(x.dtype))
    q, k, v = h.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    attended = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
    x = x + F.linear(attended.transpose(1, 2).flatten(2), o.to(x.dtype))
    gate, up = F.linear(norm(x, second), gate_up.to(x.dtype)).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, down.to(x.dtype))


def logits_of(x: Tensor, last_norm: Tensor, embedding: Tensor) -> Tensor:
    """Return the logits [..., vocabulary] in the dtype of ``x``."""
    return F.linear(norm(x, last_norm), embedding.to(x.dtype))


def cross_entropy(x: Tensor, targets: Tensor, last_norm: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
    """Return the training loss, and the mean cross entropy in nats, which is its larger part."""
    logits = logits_of(x, last_norm, embedding).float()
    nats = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    return nats + LOGSUMEXP * logits.logsumexp(-1).square().mean(), nats.detach()


compiled_form = cache(torch.compile)  # once for all models


class Model:
    """The weights of a model, and methods to run it."""

    run = staticmethod(layer)
    names: tuple[str, ...] = LAYER  # of the weights of a layer

    def __init__(self, shape: Shape, weights: Weights, dtype: torch.dtype, compiled: bool) -> None:
        self.shape, self.weights, self.dtype = shape, weights, dtype
        self._layer, self._cross_entropy = (
            compiled_form(function) if compiled else function for function in (self.run, cross_entropy)
        )
        half = shape.hidden // shape.heads // 2
        device = weights["embedding"].device
        frequencies = THETA ** -(torch.arange(half, device=device).double() / half)
        angles = torch.outer(torch.arange(shape.window, device=device).double(), frequencies)
        self._cos, self._sin = angles.cos().float(), angles.sin().float()

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the hidden states [B, T, hidden] of ids [B, T], before the last norm."""
        x = F.embedding(ids, self.weights["embedding"]).to(self.dtype)
        cos, sin = self._cos[: ids.shape[1]], self._sin[: ids.shape[1]]
        for i in range(self.shape.layers):
            x = self._layer(x, cos, sin, *(self.weights[f"{i}.{name}"] for name in self.names))
        return x

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The weights of the last norm and of the logits."""
        return self.weights["last_norm"], self.weights["embedding"]

    def loss(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the `cross_entropy` of windows [B, T + 1]."""
        return self._cross_entropy(self.hidden(windows[:, :-1]), windows[:, 1:], *self.ends)

    @torch.no_grad()
    def perplexity(self, windows: Tensor) -> float:
        """Return the perplexity of all tokens of windows [B, T] but the first of each, without compilation."""
        plain = type(self)(self.shape, self.weights, self.dtype, compiled=False)
        losses = [float(plain.loss(part)[1]) * len(part) for part in windows.split(16)]
        return math.exp(sum(losses) / len(windows))


def save(
    folder: Path,
    shape: Shape,
    weights: Weights,
    tokenizer: Path | None = None,
    layer_names: Mapping[str, Sequence[str]] = NAMES,
) -> None:
    """Write a checkpoint in BF16: config.json, model.safetensors, and the tokenizer of a folder if it has one."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {EMBEDDING: weights["embedding"], LAST_NORM: weights["last_norm"]}
    for i in range(shape.layers):
        for key, names in layer_names.items():
            for name, part in zip(names, weights[f"{i}.{key}"].chunk(len(names)), strict=True):
                tensors[f"model.layers.{i}.{name}.weight"] = part
    plain = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in tensors.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1) + "\n")
    for path in (tokenizer / name for name in EXTRA_FILES) if tokenizer else ():
        if path.exists():
            (folder / path.name).write_bytes(path.read_bytes())


def load(folder: Path, device: str) -> tuple[Shape, Weights]:
    """Read a checkpoint that `save` wrote, or another with the same tensor names, as float32."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        config["vocab_size"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["max_position_embeddings"] // 2,
    )
    weights = from_stored(load_file(folder / "model.safetensors"), shape, NAMES, device)
    return shape, {name: t.requires_grad_() for name, t in weights.items()}


def from_stored(
    stored: Mapping[str, Tensor], shape: Shape, layer_names: Mapping[str, Sequence[str]], device: str
) -> Weights:
    """Return the weights, as float32, from the tensors of a checkpoint."""
    weights = {"embedding": stored[EMBEDDING], "last_norm": stored[LAST_NORM]}
    for i in range(shape.layers):
        for key, names in layer_names.items():
            weights[f"{i}.{key}"] = torch.cat([stored[f"model.layers.{i}.{name}.weight"] for name in names])
    return {name: t.to(device, torch.float32) for name, t in weights.items()}


def read_stream(part: Path, device: str) -> Tensor:
    """Return the training ids, int32, of a file that corpus.py wrote."""
    raw = lzma.decompress(part.read_bytes())
    return torch.from_numpy(np.frombuffer(raw, np.uint16).astype(np.int32)).to(device)


def batches(stream: Tensor, batch: int, window: int) -> Iterator[Tensor]:
    """Yield windows [batch, window + 1] of a stream forever: each epoch covers all of it, with new cuts and order."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(window + 1, device=stream.device)
    while True:
        shift = int(torch.randint(window, (), generator=generator))
        starts = torch.arange(shift, len(stream) - window, window)
        order = starts[torch.randperm(len(starts), generator=generator)].to(stream.device)
        for chosen in order.split(batch)[: len(order) // batch]:
            yield stream[chosen[:, None] + offsets].long()


def describe(shape: Shape) -> dict[str, int]:
    """Return the facts about a model for the log."""
    linear = shape.layers * shape.hidden * (4 * shape.hidden + 3 * shape.intermediate)
    return {**asdict(shape), "linear_weights": linear, "weights": linear + shape.vocabulary * shape.hidden}
