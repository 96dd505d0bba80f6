"""The models that calibration can run, loaded from config.json and safetensors one transformer block at a time.

A `Block` is one decoder or encoder layer in float32.  It runs in stages: the linear layers of a stage share their
input, and the computation can be suspended there::

    decoder   norm -> [q k v] -> attention -> [o] -> norm, + x -> norm -> [gate up] -> act * -> [down] -> norm, + x
    encoder   [query key value] -> attention -> [attention.output.dense] + x, norm -> [intermediate.dense] -> act
              -> [output.dense] + x, norm

Only Gemma has all these norms, and BitNet has further ones before [o] and [down]: `DECODERS` lists them, with the other
properties of an architecture, and config.json holds the sizes of a model.  Weights of BitNet are codes times scales,
the values that are served.

The tests compare each block with that of transformers.

On a GPU, products of float32 tensors run in TF32 (see `fast_products`), whose factors have three more mantissa bits
than the BF16 that models are served in, and whose sums are float32.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

from slidesparse.checkpoint.architectures import (
    CAUSAL,
    MULTIMODAL,
    ROOT,
    SCALE,
    WEIGHT,
    architecture_of,
    other_use,
    size_of,
)
from slidesparse.checkpoint.storage import DTYPES, Checkpoint, CheckpointError, Reader, text_config
from slidesparse.errors import CalibrationError, shown

Config = Mapping[str, Any]

Stages = tuple[tuple[str, ...], ...]  # names of the linear layers that share an input, in order

SEPARATE: Stages = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
FUSED: Stages = (("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",))

# The norms before and after attention, and before and after the MLP; "" for none
PRE_NORMS = ("input_layernorm", "", "post_attention_layernorm", "")
POST_NORMS = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
PRE_AND_POST_NORMS = (PRE_NORMS[0], POST_NORMS[1], "pre_feedforward_layernorm", POST_NORMS[3])
HEAD = "lm_head.weight"  # unless it is tied to the embedding
QUERY_KEY_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class Decoder:
    """The properties of a decoder architecture."""

    stages: Stages = SEPARATE
    norms: tuple[str, str, str, str] = PRE_NORMS
    sub_norms: tuple[str, str] = ("", "")  # before o_proj and before down_proj
    query_key_norms: bool = False  # per head or over all heads, as the width of the weight tells
    norm_offset: float = 0.0  # added to the weights of norms
    embeddings_by_width: bool = False  # whether embeddings are multiplied by sqrt(hidden)
    defaults: Config = field(default_factory=dict)  # transformers' defaults of keys that config.json may lack


_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA: dict[str, Any] = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_GEMMA |= {"hidden_activation": "gelu_pytorch_tanh"}
_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208}
_GEMMA3 |= {"max_position_embeddings": 131072, "sliding_window_pattern": 6}
DECODERS: Mapping[str, Decoder] = {
    "Llama": Decoder(),
    "Mistral": Decoder(defaults={"sliding_window": 4096}),
    "Qwen2": Decoder(defaults=_QWEN),
    "Qwen3": Decoder(query_key_norms=True, defaults={**_QWEN, "head_dim": 128}),
    "Gemma2": Decoder(
        norms=PRE_AND_POST_NORMS,
        norm_offset=1.0,
        embeddings_by_width=True,
        defaults={**_GEMMA, "attn_logit_softcapping": 50.0, "sliding_window_pattern": 2},
    ),
    "Gemma3": Decoder(
        norms=PRE_AND_POST_NORMS,
        query_key_norms=True,
        norm_offset=1.0,
        embeddings_by_width=True,
        defaults={**_GEMMA, **_GEMMA3, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    ),
    "Phi3": Decoder(FUSED, defaults={"rms_norm_eps": 1e-5}),
    "Granite": Decoder(defaults={"attention_multiplier": 1.0}),
    "BitNet": Decoder(
        sub_norms=("self_attn.attn_sub_norm", "mlp.ffn_sub_norm"),
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    ),
    "Olmo2": Decoder(norms=POST_NORMS, query_key_norms=True, defaults={"rms_norm_eps": 1e-5}),
}
ENCODERS = ("Bert", "Roberta", "XLMRoberta")
# The decoders inside multimodal models, by the model_type of their text_config, or of an older Qwen2-VL without one
LANGUAGE_MODELS = {"llama": "Llama", "mistral": "Mistral", "gemma3_text": "Gemma3"}
LANGUAGE_MODELS |= dict.fromkeys(("qwen3", "qwen3_vl_text"), "Qwen3")
LANGUAGE_MODELS |= dict.fromkeys(
    ("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "Qwen2"
)
_EMBEDDING, _HEAD = re.compile(rf"({ROOT})embed_tokens\.weight"), re.compile(rf"{ROOT}lm_head\.weight")
_HEADS = (CAUSAL, "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
ROPES = ("default", "linear", "llama3", "longrope", "yarn")
_POSITIONS = ("original_max_position_embeddings", "max_position_embeddings")
_ROPE_KEYS = ("rope_theta", "partial_rotary_factor", *_POSITIONS)
MAX_HEAD_DIM = 2**16  # of heads with rotary embeddings
LAYER_TYPES = ("sliding_attention", "full_attention")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "swish": F.silu,
}


@dataclass(frozen=True)
class Scores:
    """The attention scores s = q k^T * scale, and the attention mask."""

    scale: float
    causal: bool = True
    window: int | None = None  # sliding window of causal attention, in tokens, including the query's own
    cap: float | None = None  # soft cap: s becomes cap * tanh(s / cap)


@dataclass(frozen=True)
class Rotary:
    """Rotary embeddings of the first channels of a head."""

    frequencies: Tensor  # [channels / 2], radians per position
    factor: float = 1.0  # on cosine and sine


@dataclass(frozen=True)
class BlockSizes:
    """The sizes and constants of a block."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float  # of norms
    activation: Callable[[Tensor], Tensor]
    scores: Scores = Scores(1.0)
    rotary: Rotary | None = None
    residual: float = 1.0  # factor on the outputs of attention and MLP
    decoder: Decoder = Decoder()


@dataclass(frozen=True)
class LayeredModel:
    """A checkpoint as embeddings and a sequence of transformer blocks."""

    checkpoint: Checkpoint
    kind: str  # one of DECODERS or ENCODERS
    root: str  # prefix of "layers.0." or "encoder.layer.0."
    sizes: tuple[BlockSizes, ...]  # of each block
    hidden: int
    vocabulary: int
    longest: int  # maximum sequence length in tokens
    embedding_factor: float = 1.0

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.sizes)

    @property
    def is_decoder(self) -> bool:
        """Whether attention is causal."""
        return self.kind in DECODERS

    @property
    def is_language_model(self) -> bool:
        """Whether it is a decoder that predicts tokens."""
        return self.other_use is None

    @property
    def other_use(self) -> str | None:
        """See `slidesparse.checkpoint.architectures.other_use`."""
        return other_use(self.checkpoint.folder, self.checkpoint.config)

    @property
    def stages(self) -> Stages:
        """The stages of each block."""
        return DECODERS[self.kind].stages if self.is_decoder else EncoderBlock.stages

    def prefix(self, number: int) -> str:
        """Return the prefix of the tensor names of a block."""
        return f"{self.root}{'layers' if self.is_decoder else 'encoder.layer'}.{number}."

    def linears(self, number: int) -> list[str]:
        """Return the names of the linear layers of a block, stage by stage."""
        return [self.prefix(number) + name for stage in self.stages for name in stage]

    def require_rows(self) -> None:
        """Raise CheckpointError unless the attention of each block has the rows that config.json says."""
        for number, sizes in enumerate(self.sizes):
            shares = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
            attention = self.stages[0]
            for name, share in zip(attention, shares if len(attention) > 1 else [sum(shares)], strict=True):
                spec = self.checkpoint.require(self.prefix(number) + name + WEIGHT)
                if spec.rows != share * sizes.head_dim or sizes.heads % sizes.kv_heads:
                    raise CheckpointError(
                        f"config.json says {sizes.heads} heads and {sizes.kv_heads} key-value heads of "
                        f"{sizes.head_dim} channels, which does not fit {spec.name} {list(spec.shape)}: fetch the "
                        "config again"
                    )

    def load(self, reader: Reader, number: int, device: torch.device) -> Block:
        """Read a block, its tensors in float32 on ``device``."""
        prefix, sizes = self.prefix(number), self.sizes[number]
        norms = [prefix + name for name in (norm_names(sizes.decoder) if self.is_decoder else ())]
        for layer in (*self.linears(number), *norms):
            self.checkpoint.require(layer + WEIGHT)
        names = [name for name in self.checkpoint.tensors if name.startswith(prefix)]
        weights = {_current(name[len(prefix) :]): reader.whole(name).to(device).float() for name in names}
        for name in (name for name in weights if name.endswith(SCALE)):
            weights[name.removesuffix(SCALE) + WEIGHT] *= weights[name]
        return (DecoderBlock if self.is_decoder else EncoderBlock)(sizes, weights)

    def embedder(
        self, reader: Reader, samples: Sequence[Tensor], device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """Return a function that embeds ids [batch, tokens] from ``samples`` as float32 [batch, tokens, hidden]."""
        name = f"{self.root}{'embed_tokens' if self.is_decoder else 'embeddings.word_embeddings'}.weight"
        used = torch.cat([sample.reshape(-1) for sample in samples]).unique()
        table = _read_embedding_rows(self.checkpoint, reader, name, used).to(device)
        rows = used.to(device)
        # The factor is rounded to the dtype of the weights, as in training and serving
        factor = float(torch.tensor(self.embedding_factor, dtype=table.dtype))

        def embed(ids: Tensor) -> Tensor:
            return F.embedding(torch.searchsorted(rows, ids.to(device)), table).float() * factor

        return embed if self.is_decoder else self._with_positions(reader, embed, device)

    def logits(self, reader: Reader, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return a function from a decoder's last hidden state [..., tokens, hidden] to its logits in float32."""
        config, sizes = text_config(self.checkpoint.config), self.sizes[-1]
        norm = f"{self.root}norm.weight"
        stored = None if is_tied(self.checkpoint) else _stored_head(self.checkpoint)
        head = stored or f"{self.root}embed_tokens.weight"
        spec = self.checkpoint.require(head)
        table = torch.cat([reader.rows(head, rows).to(device).float() for rows in spec.chunks()])
        self.checkpoint.require(norm)
        weight = reader.whole(norm).to(device).float() + sizes.decoder.norm_offset
        scale, cap = _number(config, "logits_scaling", 1.0), _optional(config, "final_logit_softcapping")

        def logits(x: Tensor) -> Tensor:
            scores = F.linear(rms_norm(x, weight, sizes.eps), table) / scale
            return torch.tanh(scores / cap) * cap if cap else scores

        return logits

    def _with_positions(
        self, reader: Reader, embed_words: Callable[[Tensor], Tensor], device: torch.device
    ) -> Callable[[Tensor], Tensor]:
        """Return an encoder's embedding function: words, positions and the first token type, normalized."""

        stored = {_current(name): name for name in self.checkpoint.tensors}

        def tensor(name: str) -> Tensor:
            full = f"{self.root}embeddings.{name}"
            full = stored.get(full, full)
            self.checkpoint.require(full)
            return reader.whole(full).to(device).float()

        positions, types = tensor("position_embeddings.weight"), tensor("token_type_embeddings.weight")
        weight, bias = tensor("LayerNorm.weight"), tensor("LayerNorm.bias")
        first = _first_position(self.checkpoint.config, self.kind)

        def embed(ids: Tensor) -> Tensor:
            x = embed_words(ids) + types[0] + positions[first : first + ids.shape[1]]
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.sizes[0].eps)

        return embed


def _current(name: str) -> str:
    """Return a tensor's name in today's form; the first BERT models call weight and bias of norms gamma and beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


class Block(ABC):
    """One transformer block.

    Args:
        weights: the block's tensors by name, such as "mlp.down_proj.weight", all on one device.
    """

    stages: Stages

    def __init__(self, sizes: BlockSizes, weights: dict[str, Tensor]) -> None:
        self.sizes = sizes
        self.weights = weights
        # Hooks on the inputs and outputs of linear layers, called with the layer's name
        self.read: Callable[[str, Tensor], Tensor] | None = None
        self.wrote: Callable[[str, Tensor], Tensor] | None = None
        self.attend: Callable[[Tensor, Tensor, Tensor, Scores], Tensor] = attention

    def copy(self) -> Block:
        """Return a block that shares this one's tensors; replacing some in one does not affect the other."""
        return type(self)(self.sizes, dict(self.weights))

    @abstractmethod
    def steps(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the input of each stage for ``x`` [batch, tokens, hidden], and finally the block's output.

        While suspended, the generator holds no activations but that input and one more hidden state.
        """

    def input(self, stage: int, x: Tensor) -> Tensor:
        """Return the input of a stage's linear layers, [batch, tokens, K]."""
        activations: Tensor = next(islice(self.steps(x), stage, None))
        return activations

    def output(self, x: Tensor) -> Tensor:
        """Return the block's output, [batch, tokens, hidden]."""
        return self.input(len(self.stages), x)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Run a linear layer of the block, with its bias if it has one."""
        x = self.read(name, x) if self.read else x
        out: Tensor = F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))
        return self.wrote(name, out) if self.wrote else out

    def split_heads(self, x: Tensor, count: int) -> Tensor:
        """Split [batch, tokens, count * head_dim] into heads, [batch, count, tokens, head_dim]."""
        heads: Tensor = x.unflatten(-1, (count, self.sizes.head_dim))
        return heads.transpose(1, 2)


class DecoderBlock(Block):
    """A block of one of `DECODERS`."""

    def __init__(self, sizes: BlockSizes, weights: dict[str, Tensor]) -> None:
        super().__init__(sizes, weights)
        self.stages = sizes.decoder.stages

    def steps(self, x: Tensor) -> Iterator[Tensor]:
        before_attention, after_attention, before_mlp, after_mlp = self.sizes.decoder.norms
        sub_norms = self.sizes.decoder.sub_norms
        h = self._norm(before_attention, x)
        yield h
        h = self._norm(sub_norms[0], self._attention(h))
        yield h
        x = x + self._norm(after_attention, self.linear("self_attn.o_proj", h)) * self.sizes.residual
        h = self._norm(before_mlp, x)
        yield h
        h = self._norm(sub_norms[1], self._gated_activation(h))
        yield h
        yield x + self._norm(after_mlp, self.linear("mlp.down_proj", h)) * self.sizes.residual

    def _gated_activation(self, h: Tensor) -> Tensor:
        gate, up = self._project(2, h, (1, 1))
        return self.sizes.activation(gate) * up

    def _norm(self, name: str, x: Tensor) -> Tensor:
        """Apply a norm to each part of x [..., n * width] as wide as the norm's weight; "" is the identity."""
        if not name:
            return x
        weight = self.weights[f"{name}.weight"] + self.sizes.decoder.norm_offset
        return rms_norm(x.unflatten(-1, (-1, len(weight))), weight, self.sizes.eps).flatten(-2)

    def _project(self, stage: int, x: Tensor, shares: tuple[int, ...]) -> Sequence[Tensor]:
        """Run the layers of a stage on x; the output of a single fused layer is split by ``shares``."""
        outputs = [self.linear(name, x) for name in self.stages[stage]]
        if len(outputs) == len(shares):
            return outputs
        unit = outputs[0].shape[-1] // sum(shares)
        parts: Sequence[Tensor] = outputs[0].split([share * unit for share in shares], dim=-1)
        return parts

    def _attention(self, h: Tensor) -> Tensor:
        sizes = self.sizes
        q, k, v = self._project(0, h, (sizes.heads, sizes.kv_heads, sizes.kv_heads))
        if sizes.decoder.query_key_norms:
            q, k = (self._norm(name, x) for name, x in zip(QUERY_KEY_NORMS, (q, k), strict=True))
        q = self.split_heads(q, sizes.heads)
        k, v = (self.split_heads(x, sizes.kv_heads) for x in (k, v))
        assert sizes.rotary is not None
        cos, sin = rotary_cos_sin(h.shape[1], sizes.rotary.frequencies.to(h.device))
        q, k = (apply_rotary(x, cos * sizes.rotary.factor, sin * sizes.rotary.factor) for x in (q, k))
        share = sizes.heads // sizes.kv_heads
        k, v = (t.repeat_interleave(share, dim=1) for t in (k, v))
        return self.attend(q, k, v, sizes.scores).transpose(1, 2).flatten(2)


def is_tied(checkpoint: Checkpoint) -> bool:
    """Return whether a decoder's output head is its embedding; a head that is stored all the same is not used then."""
    configs = (text_config(checkpoint.config), checkpoint.config)
    tied = next((c["tie_word_embeddings"] for c in configs if "tie_word_embeddings" in c), False)
    return _stored_head(checkpoint) is None or bool(tied)


def _stored_head(checkpoint: Checkpoint) -> str | None:
    return next(filter(_HEAD.fullmatch, checkpoint.tensors), None)


def norm_names(decoder: Decoder) -> list[str]:
    """Return the names of the norms of a block."""
    of_heads = QUERY_KEY_NORMS if decoder.query_key_norms else ()
    return [name for name in (*decoder.norms, *decoder.sub_norms, *of_heads) if name]


class EncoderBlock(Block):
    """A block of BERT, RoBERTa or XLM-RoBERTa; sequences are not padded, so attention has no mask."""

    stages = (
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        ("attention.output.dense",),
        ("intermediate.dense",),
        ("output.dense",),
    )

    def steps(self, x: Tensor) -> Iterator[Tensor]:
        yield x
        h = self._attention(x)
        yield h
        h = self._norm("attention.output", self.linear("attention.output.dense", h) + x)
        yield h
        inner = self.sizes.activation(self.linear("intermediate.dense", h))
        yield inner
        yield self._norm("output", self.linear("output.dense", inner) + h)

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (self.split_heads(self.linear(name, x), self.sizes.heads) for name in self.stages[0])
        return self.attend(q, k, v, self.sizes.scores).transpose(1, 2).flatten(2)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.weights[f"{name}.LayerNorm.{kind}"] for kind in ("weight", "bias"))
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.sizes.eps)


def attention(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Return softmax(s) v; all tensors are [batch, heads, tokens, head_dim]."""
    tokens, sdpa = q.shape[2], F.scaled_dot_product_attention
    window = min(scores.window or tokens, tokens)
    if scores.cap is None and window == tokens:
        plain: Tensor = sdpa(q, k, v, is_causal=scores.causal, scale=scores.scale)
        return plain
    assert scores.causal
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    if scores.cap is None:
        masked: Tensor = sdpa(q, k, v, attn_mask=mask, scale=scores.scale)
        return masked
    capped = torch.tanh((q @ k.transpose(-1, -2)).float() * (scores.scale / scores.cap)) * scores.cap
    return capped.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, with the mean over the last dimension."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def rotary_cos_sin(tokens: int, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [tokens, channels] of position times frequency, with two equal halves."""
    positions = torch.arange(tokens, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + channels / 2]) of the first channels of [batch, heads, tokens, head_dim]."""
    x, rest = x.tensor_split([cos.shape[-1]], dim=-1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((x * cos + torch.cat((-right, left), dim=-1) * sin, rest), dim=-1)


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Allow TF32 for products of float32 tensors on a GPU."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# Reading a config


def open_model(checkpoint: Checkpoint) -> LayeredModel:
    """Return the model of a checkpoint.

    Raises CalibrationError for one that is not supported, CheckpointError for sizes and numbers that are missing or
    impossible.
    """
    config = checkpoint.config
    kind = _architecture_kind(config)
    decoder = DECODERS.get(kind, Decoder())
    config = {**decoder.defaults, **text_config(config)}
    heads, hidden = size_of(config, "num_attention_heads"), size_of(config, "hidden_size")
    head_dim = size_of(config, "head_dim", hidden // heads)
    blocks, longest = size_of(config, "num_hidden_layers"), size_of(config, "max_position_embeddings")
    vocabulary, factor = size_of(config, "vocab_size"), 1.0
    if blocks > len(checkpoint.tensors):
        raise CheckpointError(
            f"config.json: num_hidden_layers is {blocks}, but the model has {len(checkpoint.tensors)} tensors: fetch "
            "the config again"
        )
    if kind in DECODERS:
        embeddings = filter(None, map(_EMBEDDING.fullmatch, checkpoint.tensors))
        root = next((match[1] for match in embeddings), "")
        factor = hidden**0.5 if decoder.embeddings_by_width else _number(config, "embedding_multiplier", 1.0)
        sizes, trained = _decoder_sizes(config, decoder, blocks, heads, head_dim)
        longest = min([longest, *trained])
    else:
        roots = ("", "bert.", "roberta.")
        root = next((r for r in roots if f"{r}embeddings.word_embeddings.weight" in checkpoint.tensors), "")
        longest -= _first_position(config, kind)
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise _unsupported_config(
                f"position embeddings of type {config['position_embedding_type']!r}", "absolute"
            )
        eps, scores = _number(config, "layer_norm_eps", 1e-12), Scores(head_dim**-0.5, causal=False)
        sizes = (BlockSizes(heads, heads, head_dim, eps, _activation(config), scores),) * blocks
    return LayeredModel(checkpoint, kind, root, sizes, hidden, vocabulary, longest, factor)


def _decoder_sizes(
    config: Config, decoder: Decoder, blocks: int, heads: int, head_dim: int
) -> tuple[tuple[BlockSizes, ...], list[int]]:
    """Return the sizes of each block, and the sequence lengths of which LongRoPE's short factors are trained."""
    kv_heads = size_of(config, "num_key_value_heads", heads)
    sliding = _sliding_blocks(config, blocks)
    ropes = {slides: _rope_parameters(config, slides) for slides in set(sliding)}
    rotaries = {slides: _make_rotary(rope, head_dim) for slides, rope in ropes.items()}
    trained = [
        size_of(rope, "original_max_position_embeddings")
        for rope in ropes.values()
        if rope["rope_type"] == "longrope"
    ]
    window = _count(config, "sliding_window") if config.get("use_sliding_window", True) else None
    scale = _number(config, "query_pre_attn_scalar", head_dim) ** -0.5
    scale = _number(config, "attention_multiplier", scale)
    cap = _optional(config, "attn_logit_softcapping")
    sizes = tuple(
        BlockSizes(
            heads,
            kv_heads,
            head_dim,
            _number(config, "rms_norm_eps", 1e-6),
            _activation(config),
            Scores(scale, window=window if slides and window else None, cap=cap),
            rotaries[slides],
            _number(config, "residual_multiplier", 1.0),
            decoder,
        )
        for slides in sliding
    )
    return sizes, trained


def _first_position(config: Config, kind: str) -> int:
    """Return the row of the first position in the position embeddings; in RoBERTa it follows the padding row."""
    return 0 if kind == "Bert" else _count(config, "pad_token_id") + 1


def _number(config: Config, key: str, default: float | None = None, above: float = 0.0) -> float:
    """Return a number of config.json, or ``default`` if it is missing.  CheckpointError unless it exceeds ``above``."""
    value: Any = default if config.get(key) is None else config[key]
    if type(value) not in (int, float) or not above < value < 1e38:
        raise CheckpointError(
            f"config.json: {key} is {shown(value)}; it must be a number above {above:g}: fetch the config again"
        )
    return float(value)


def _count(config: Config, key: str) -> int:
    """Return a whole number from config.json, or 0 if it is missing.  CheckpointError for anything else."""
    return size_of(config, key) if config.get(key) else 0


def _optional(config: Config, key: str) -> float | None:
    """Return a number from config.json, or None if it is missing or 0."""
    return _number(config, key) if config.get(key) else None


def _read_embedding_rows(checkpoint: Checkpoint, reader: Reader, name: str, ids: Tensor) -> Tensor:
    """Read the sorted rows ``ids`` of an embedding, a chunk at a time."""
    spec = checkpoint.require(name)
    if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < spec.rows:
        raise CalibrationError(
            f"the calibration ids run from {int(ids[0])} to {int(ids[-1])}, but {name} has {spec.rows} rows; "
            "they were made with another tokenizer"
        )
    table = torch.empty(len(ids), spec.columns, dtype=DTYPES[spec.dtype])
    for rows in spec.chunks():
        first, last = torch.searchsorted(ids, torch.tensor([rows.start, rows.stop])).tolist()
        if first < last:
            table[first:last] = reader.rows(name, rows)[ids[first:last] - rows.start]
    return table


def _architecture_kind(config: Config) -> str:
    named = architecture_of(config) or ""
    if named.endswith(MULTIMODAL) and (
        kind := LANGUAGE_MODELS.get(str(text_config(config).get("model_type")))
    ):
        return kind
    for head in _HEADS:
        if named.endswith(head) and named.removesuffix(head) in (*DECODERS, *ENCODERS):
            return named.removesuffix(head)
    raise CalibrationError(
        f"--calib supports {', '.join((*DECODERS, *ENCODERS))} models, and multimodal ones with a language model of "
        f"type {', '.join(LANGUAGE_MODELS)}, but config.json names the architecture {named!r}; prune it without "
        "--calib, by --method magnitude"
    )


def _unsupported_config(feature: str, allowed: str) -> CalibrationError:
    return CalibrationError(
        f"config.json asks for {feature}, which calibration cannot run (it can: {allowed}); "
        "without --calib, --method magnitude can prune the model"
    )


def _activation(config: Config) -> Callable[[Tensor], Tensor]:
    named = str(config.get("hidden_activation") or config.get("hidden_act", "silu"))
    if named not in ACTIVATIONS:
        raise _unsupported_config(f"the activation {named!r}", ", ".join(ACTIVATIONS))
    return ACTIVATIONS[named]


def _sliding_blocks(config: Config, blocks: int) -> list[bool]:
    """Return whether the attention of each block has a sliding window."""
    if config.get("use_bidirectional_attention"):
        raise _unsupported_config("bidirectional attention", "causal attention")
    types, interval = config.get("layer_types"), config.get("sliding_window_pattern")
    if types is not None:
        if not isinstance(types, list) or len(types) != blocks or any(t not in LAYER_TYPES for t in types):
            raise _unsupported_config(
                f"the layer_types {types}", f"{', '.join(LAYER_TYPES)}, {blocks} in all"
            )
        return [kind == LAYER_TYPES[0] for kind in types]
    if interval is not None:
        interval = size_of(config, "sliding_window_pattern")
        return [number % interval != 0 for number in range(1, blocks + 1)]
    first = _count(config, "max_window_layers")
    return [number >= first for number in range(blocks)]


def _rope_parameters(config: Config, slides: bool) -> Config:
    """Return the rotary parameters of blocks with a sliding window, or of those without.

    They are in rope_parameters, common or by layer type, or in rope_scaling and at the top level.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope, dict) and LAYER_TYPES[1] in rope:
        rope = rope.get(LAYER_TYPES[not slides])
    elif slides and "rope_local_base_freq" in config:
        rope = {"rope_theta": config["rope_local_base_freq"]}
    if not isinstance(rope, dict):
        raise CheckpointError(
            f"config.json: rope_parameters or rope_scaling are {shown(rope)}; they must be an object: fetch the "
            "config again"
        )
    top_level = {key: config[key] for key in _ROPE_KEYS if config.get(key) is not None}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    # In text, the positions of multimodal rotary embeddings in time, height and width are equal
    return {**top_level, **rope, "rope_type": "default" if kind == "mrope" else kind}


def _make_rotary(rope: Config, head_dim: int) -> Rotary:
    """Return the rotary embeddings for parameters from `_rope_parameters`."""
    kind = rope["rope_type"]
    if kind not in ROPES:
        raise _unsupported_config(f"rotary embeddings of type {kind!r}", ", ".join(ROPES))
    channels = int(head_dim * _number(rope, "partial_rotary_factor", 1.0))
    if not 1 < channels <= min(head_dim, MAX_HEAD_DIM):
        raise CheckpointError(
            f"config.json asks for rotary embeddings of {channels} of the {head_dim} channels of a head; it must be 2 "
            f"to {MAX_HEAD_DIM}, and no more than there are: fetch the config again"
        )
    exponents = torch.arange(0, channels, 2, dtype=torch.int64).float() / channels
    frequencies = 1.0 / _number(rope, "rope_theta", 10000.0) ** exponents
    if kind == "linear":
        return Rotary(frequencies / _number(rope, "factor"))
    if kind in ("longrope", "yarn"):
        return (_longrope if kind == "longrope" else _yarn)(frequencies, rope)
    return Rotary(_llama3(frequencies, rope) if kind == "llama3" else frequencies)


def _longrope(frequencies: Tensor, rope: Config) -> Rotary:
    """Scale frequencies as the long-context models of Phi-3 do for sequences within their original length."""
    original = _number(rope, "original_max_position_embeddings", above=1.0)
    stretch = _number(rope, "factor", _number(rope, "max_position_embeddings") / original)
    factor = math.sqrt(1 + max(0.0, math.log(stretch)) / math.log(original))
    factors = rope.get("short_factor")
    if not isinstance(factors, list) or len(factors) != len(frequencies):
        raise CheckpointError(
            f"config.json: short_factor is {shown(factors)}; it must be {len(frequencies)} numbers: fetch the config "
            "again"
        )
    short = [_number({"short_factor": value}, "short_factor") for value in factors]
    return Rotary(frequencies / torch.tensor(short), _number(rope, "attention_factor", factor))


def _yarn(frequencies: Tensor, rope: Config) -> Rotary:
    """Scale frequencies by YaRN (arXiv 2309.00071), as transformers computes it.

    Channels that turn less than ``beta_slow`` times within the original length are stretched, those that turn more than
    ``beta_fast`` times kept, and those between interpolated, linearly in the number of the channel.
    """
    longest = _number(rope, "max_position_embeddings")
    original = _number(rope, "original_max_position_embeddings", longest)
    factor = _number(rope, "factor", longest / original)
    pairs, theta = len(frequencies), _number(rope, "rope_theta", 10000.0, above=1.0)
    turns = [_optional(rope, "beta_fast") or 32.0, _optional(rope, "beta_slow") or 1.0]
    # The pair of channels, possibly between two, that turns so often
    low, high = (pairs * math.log(original / (2 * math.pi * often)) / math.log(theta) for often in turns)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    stretched = ((torch.arange(pairs) - low) / (high - low or 1e-3)).clamp(0, 1)

    def temperature(weight: float) -> float:
        return 1 + 0.1 * weight * max(0.0, math.log(factor))

    weights = _optional(rope, "mscale"), _optional(rope, "mscale_all_dim")
    default = (
        temperature(weights[0]) / temperature(weights[1]) if weights[0] and weights[1] else temperature(1)
    )
    scaled = frequencies * (1 - stretched) + frequencies / factor * stretched
    return Rotary(scaled, _number(rope, "attention_factor", default))


def _llama3(frequencies: Tensor, rope: Config) -> Tensor:
    """Scale frequencies as Llama 3.1 does: stretch long wavelengths, keep short ones, interpolate those between."""
    factor, low, high = (_number(rope, f"{n}factor") for n in ("", "low_freq_", "high_freq_"))
    original = _number(rope, "original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, between)
    return torch.where(wavelengths < original / high, frequencies, scaled)
