"""The models that calibration can run, read from config.json and safetensors, a transformer block at a time.

A `Block` is one decoder or encoder layer in float32 torch.  It goes through its stages in order; the linear layers of a
stage read the same input, and the block can be stopped there::

    decoder   norm -> [q k v] -> attention -> [o] + x -> norm -> [gate up] -> silu * -> [down] + x
    encoder   [query key value] -> attention -> [attention.output.dense] + x, norm -> [intermediate.dense] -> act
              -> [output.dense] + x, norm

Sources: the published architectures of Llama, Qwen2, Qwen3 and BERT; tests compare the blocks with transformers'.

On a GPU the products of float32 tensors run in TF32 (see `fast_products`).  TF32 keeps three more bits of a factor than
the BF16 that models are served in, and sums in float32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

from slidesparse.checkpoint.architectures import WEIGHT, architecture_of
from slidesparse.checkpoint.storage import DTYPES, Checkpoint, Reader
from slidesparse.errors import CalibrationError

Config = Mapping[str, Any]

DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3")
ENCODERS = ("Bert", "Roberta", "XLMRoberta")
_HEADS = ("ForCausalLM", "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
ROPES = ("default", "linear", "llama3")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


@dataclass(frozen=True)
class BlockSizes:
    """The sizes and constants that all blocks of a model share."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float  # of norms
    activation: Callable[[Tensor], Tensor]
    frequencies: Tensor | None = None  # [head_dim / 2] of rotary embeddings, radians a position


@dataclass(frozen=True)
class LayeredModel:
    """A checkpoint seen as embeddings and a row of like blocks."""

    checkpoint: Checkpoint
    kind: str  # one of DECODERS or ENCODERS
    root: str  # before "layers.0." or "encoder.layer.0."
    sizes: BlockSizes
    blocks: int
    hidden: int
    vocabulary: int
    longest: int  # the most tokens of a sequence

    @property
    def is_decoder(self) -> bool:
        """Whether tokens see only those before them."""
        return self.kind in DECODERS

    @property
    def block_type(self) -> type[Block]:
        """The class of the model's blocks."""
        return DecoderBlock if self.is_decoder else EncoderBlock

    def prefix(self, number: int) -> str:
        """Return how the tensor names of a block start."""
        return f"{self.root}{'layers' if self.is_decoder else 'encoder.layer'}.{number}."

    def linears(self, number: int) -> list[str]:
        """Return the names of the linear layers of a block, stage by stage."""
        return [self.prefix(number) + name for stage in self.block_type.stages for name in stage]

    def load(self, reader: Reader, number: int, device: torch.device) -> Block:
        """Read a block, its tensors in float32 on ``device``."""
        for layer in self.linears(number):
            self.checkpoint.require(layer + WEIGHT)
        prefix = self.prefix(number)
        names = [name for name in self.checkpoint.tensors if name.startswith(prefix)]
        weights = {name.removeprefix(prefix): reader.whole(name).to(device).float() for name in names}
        return self.block_type(self.sizes, weights)

    def embedder(
        self, reader: Reader, samples: Sequence[Tensor], device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """Return a function from ids [batch, tokens] of ``samples`` to what the first block reads, in float32."""
        name = f"{self.root}{'embed_tokens' if self.is_decoder else 'embeddings.word_embeddings'}.weight"
        used = torch.cat([sample.reshape(-1) for sample in samples]).unique()
        table = _rows(self.checkpoint, reader, name, used).to(device)
        words = used.to(device)

        def embed(ids: Tensor) -> Tensor:
            return F.embedding(torch.searchsorted(words, ids.to(device)), table).float()

        return embed if self.is_decoder else self._with_positions(reader, embed, device)

    def _with_positions(
        self, reader: Reader, words: Callable[[Tensor], Tensor], device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """Add positions and the first token type to embeddings, and normalize, as encoders do."""

        def tensor(name: str) -> Tensor:
            found = f"{self.root}embeddings.{name}"
            self.checkpoint.require(found)
            return reader.whole(found).to(device).float()

        positions, types = tensor("position_embeddings.weight"), tensor("token_type_embeddings.weight")
        weight, bias = tensor("LayerNorm.weight"), tensor("LayerNorm.bias")
        first = _first_position(self.checkpoint.config, self.kind)

        def embed(ids: Tensor) -> Tensor:
            x = words(ids) + types[0] + positions[first : first + ids.shape[1]]
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.sizes.eps)

        return embed


class Block(ABC):
    """One transformer block.

    Args:
        weights: the block's tensors by name, such as "mlp.down_proj.weight", on one device.
    """

    stages: tuple[tuple[str, ...], ...]  # names of linear layers that read the same input, in order

    def __init__(self, sizes: BlockSizes, weights: dict[str, Tensor]) -> None:
        self.sizes = sizes
        self.weights = weights
        # Fine-tuning replaces these two: how a linear layer changes its input first, and how attention is computed
        self.read: Callable[[str, Tensor], Tensor] | None = None
        self.attend: Callable[[Tensor, Tensor, Tensor, bool], Tensor] = attention

    def copy(self) -> Block:
        """Return another block of the same weights, to replace some of them in one of the two."""
        return type(self)(self.sizes, dict(self.weights))

    @abstractmethod
    def steps(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the input of each stage for ``x`` [batch, tokens, hidden], and at last the block's output."""

    def input(self, stage: int, x: Tensor) -> Tensor:
        """Return what the linear layers of a stage read, [batch, tokens, K]."""
        found: Tensor = next(islice(self.steps(x), stage, None))
        return found

    def output(self, x: Tensor) -> Tensor:
        """Return what the next block reads, [batch, tokens, hidden]."""
        return self.input(len(self.stages), x)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Run a linear layer of the block, with its bias if it has one."""
        x = self.read(name, x) if self.read else x
        out: Tensor = F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))
        return out

    def heads_of(self, x: Tensor, count: int) -> Tensor:
        """[batch, tokens, count * head_dim] -> [batch, count, tokens, head_dim]."""
        heads: Tensor = x.unflatten(-1, (count, self.sizes.head_dim))
        return heads.transpose(1, 2)


class DecoderBlock(Block):
    """A block of Llama, Mistral, Qwen2 or Qwen3."""

    stages = (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    )

    def steps(self, x: Tensor) -> Iterator[Tensor]:
        h = rms_norm(x, self.weights["input_layernorm.weight"], self.sizes.eps)
        yield h
        h = self._attention(h)
        yield h
        x = x + self.linear("self_attn.o_proj", h)
        h = rms_norm(x, self.weights["post_attention_layernorm.weight"], self.sizes.eps)
        yield h
        h = self.sizes.activation(self.linear("mlp.gate_proj", h)) * self.linear("mlp.up_proj", h)
        yield h
        yield x + self.linear("mlp.down_proj", h)

    def _attention(self, h: Tensor) -> Tensor:
        sizes = self.sizes
        q = self.heads_of(self.linear("self_attn.q_proj", h), sizes.heads)
        k = self.heads_of(self.linear("self_attn.k_proj", h), sizes.kv_heads)
        v = self.heads_of(self.linear("self_attn.v_proj", h), sizes.kv_heads)
        if "self_attn.q_norm.weight" in self.weights:
            q = rms_norm(q, self.weights["self_attn.q_norm.weight"], sizes.eps)
            k = rms_norm(k, self.weights["self_attn.k_norm.weight"], sizes.eps)
        assert sizes.frequencies is not None
        cos, sin = rotary(h.shape[1], sizes.frequencies.to(h.device))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        share = sizes.heads // sizes.kv_heads
        k, v = (t.repeat_interleave(share, dim=1) for t in (k, v))
        return self.attend(q, k, v, True).transpose(1, 2).flatten(2)


class EncoderBlock(Block):
    """A block of BERT, RoBERTa or XLM-RoBERTa; sequences have no padding, so every token sees all others."""

    stages = (
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        ("attention.output.dense",),
        ("intermediate.dense",),
        ("output.dense",),
    )

    def steps(self, x: Tensor) -> Iterator[Tensor]:
        yield x
        q, k, v = (self.heads_of(self.linear(name, x), self.sizes.heads) for name in self.stages[0])
        h = self.attend(q, k, v, False).transpose(1, 2).flatten(2)
        yield h
        h = self._norm("attention.output", self.linear("attention.output.dense", h) + x)
        yield h
        inner = self.sizes.activation(self.linear("intermediate.dense", h))
        yield inner
        yield self._norm("output", self.linear("output.dense", inner) + h)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.weights[f"{name}.LayerNorm.{kind}"] for kind in ("weight", "bias"))
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.sizes.eps)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v, all [batch, heads, tokens, head_dim]."""
    seen: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return seen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def rotary(tokens: int, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [tokens, head_dim] of position times frequency, both halves alike."""
    positions = torch.arange(tokens, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + head_dim / 2]) of [batch, heads, tokens, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Compute products of float32 tensors on a GPU in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# Reading a config


def open_model(checkpoint: Checkpoint) -> LayeredModel:
    """Return the model of a checkpoint.  CalibrationError names what cannot be run here, and what can."""
    config = checkpoint.config
    kind = _kind(config)
    heads, hidden = _number(config, "num_attention_heads"), _number(config, "hidden_size")
    head_dim = config.get("head_dim") or hidden // heads
    blocks, longest = _number(config, "num_hidden_layers"), _number(config, "max_position_embeddings")
    vocabulary = _number(config, "vocab_size")
    if kind in DECODERS:
        root = "model." if "model.embed_tokens.weight" in checkpoint.tensors else ""
        window = _window(config)
        longest = min(longest, window) if window else longest
        sizes = BlockSizes(
            heads,
            config.get("num_key_value_heads") or heads,
            head_dim,
            float(config.get("rms_norm_eps") or 1e-6),
            _activation(config),
            _frequencies(config, head_dim),
        )
    else:
        roots = ("", "bert.", "roberta.")
        root = next((r for r in roots if f"{r}embeddings.word_embeddings.weight" in checkpoint.tensors), "")
        longest -= _first_position(config, kind)
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise _not_run(f"position embeddings of type {config['position_embedding_type']!r}", "absolute")
        eps = float(config.get("layer_norm_eps", 1e-12))
        sizes = BlockSizes(heads, heads, head_dim, eps, _activation(config))
    return LayeredModel(checkpoint, kind, root, sizes, blocks, hidden, vocabulary, longest)


def _first_position(config: Config, kind: str) -> int:
    """Return the first position's row in the table of positions; RoBERTa starts behind that of padding."""
    return 0 if kind == "Bert" else int(config.get("pad_token_id") or 0) + 1


def _rows(checkpoint: Checkpoint, reader: Reader, name: str, wanted: Tensor) -> Tensor:
    """Read the rows ``wanted`` (sorted) of an embedding, a chunk at a time."""
    spec = checkpoint.require(name)
    if len(wanted) and not 0 <= int(wanted[0]) <= int(wanted[-1]) < spec.rows:
        raise CalibrationError(
            f"the calibration ids run from {int(wanted[0])} to {int(wanted[-1])}, but {name} has {spec.rows} rows; "
            "they were made with another tokenizer"
        )
    table = torch.empty(len(wanted), spec.columns, dtype=DTYPES[spec.dtype])
    for rows in spec.chunks():
        first, last = torch.searchsorted(wanted, torch.tensor([rows.start, rows.stop])).tolist()
        if first < last:
            table[first:last] = reader.rows(name, rows)[wanted[first:last] - rows.start]
    return table


def _kind(config: Config) -> str:
    named = architecture_of(config) or ""
    for head in _HEADS:
        if named.endswith(head) and named.removesuffix(head) in (*DECODERS, *ENCODERS):
            return named.removesuffix(head)
    raise CalibrationError(
        f"calibration runs the layers of {', '.join((*DECODERS, *ENCODERS))} models, config.json names the "
        f"architecture {named!r}; without --calib, --method magnitude takes it"
    )


def _not_run(found: str, allowed: str) -> CalibrationError:
    return CalibrationError(
        f"config.json asks for {found}, which calibration cannot run (it can: {allowed}); "
        "without --calib, --method magnitude takes the model"
    )


def _number(config: Config, key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise CalibrationError(
            f"config.json: {key} is {value!r}; it must be a whole number of at least 1: fetch the config again"
        )
    return value


def _activation(config: Config) -> Callable[[Tensor], Tensor]:
    named = config.get("hidden_act", "silu")
    if named not in ACTIVATIONS:
        raise _not_run(f"the activation {named!r}", ", ".join(ACTIVATIONS))
    return ACTIVATIONS[named]


def _window(config: Config) -> int | None:
    """Return how many tokens a layer looks back at most; a longer sample would need another mask."""
    window = config.get("sliding_window")
    return window if isinstance(window, int) and config.get("use_sliding_window", True) else None


def _frequencies(config: Config, head_dim: int) -> Tensor:
    """Return rotary frequencies, scaled as config.json says (its rope_parameters, or rope_theta and rope_scaling)."""
    scaling: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPES or float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise _not_run(f"rotary embeddings of type {kind!r}, or partial ones", ", ".join(ROPES))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / theta**exponents
    try:
        if kind == "linear":
            return frequencies / float(scaling["factor"])
        return _llama3(frequencies, scaling) if kind == "llama3" else frequencies
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CalibrationError(
            f"config.json: rotary embeddings of type {kind!r} lack a usable {error}: fetch the config again"
        ) from error


def _llama3(frequencies: Tensor, scaling: Config) -> Tensor:
    """Scale as Llama 3.1 does: long wavelengths are stretched, short ones kept, those between interpolated."""
    factor, low, high = (float(scaling[f"{n}factor"]) for n in ("", "low_freq_", "high_freq_"))
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, between)
    return torch.where(wavelengths < original / high, frequencies, scaled)
