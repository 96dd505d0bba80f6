"""One layer of a model in float32 torch, stopped where its linear layers read their inputs.

A block goes through its stages in order; the linear layers of a stage read the same input::

    decoder   norm -> [q k v] -> attention -> [o] + x -> norm -> [gate up] -> silu * -> [down] + x
    encoder   [query key value] -> attention -> [attention.output.dense] + x, norm -> [intermediate.dense] -> act
              -> [output.dense] + x, norm

Sources: the published architectures of Llama, Qwen2, Qwen3 and BERT; tests hold them against transformers.

On a GPU its products, and the sums over tokens that layers are pruned by, are in TF32 (see `fast_products`): it keeps
three more bits of a factor than the BF16 that models are served in, and sums in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


@dataclass(frozen=True)
class Shape:
    """What a config says of the layers of a model."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float  # of norms
    activation: Callable[[Tensor], Tensor]
    frequencies: Tensor | None = None  # [head_dim / 2] of rotary embeddings, radians a position


class Block(ABC):
    """One layer.  ``weights``: tensors of the layer by name, such as "mlp.down_proj.weight", on one device."""

    stages: tuple[tuple[str, ...], ...]  # names of linear layers that read the same input, in order

    def __init__(self, shape: Shape, weights: dict[str, Tensor]) -> None:
        self.shape = shape
        self.weights = weights
        self.reads: Callable[[str, Tensor], Tensor] | None = (
            None  # what a linear layer makes of its input first
        )
        self.attend: Callable[[Tensor, Tensor, Tensor, bool], Tensor] = attention

    def copy(self) -> Block:
        """Another block of the same weights, to replace some of them in one of the two."""
        return type(self)(self.shape, dict(self.weights))

    @abstractmethod
    def steps(self, x: Tensor) -> Iterator[Tensor]:
        """From ``x`` [batch, tokens, hidden]: the input of each stage, and at last the block's output."""

    def input(self, stage: int, x: Tensor) -> Tensor:
        """What the linear layers of a stage read, [batch, tokens, K]."""
        found: Tensor = next(islice(self.steps(x), stage, None))
        return found

    def output(self, x: Tensor) -> Tensor:
        """What the next block reads."""
        return self.input(len(self.stages), x)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """A linear layer of the block, with its bias if it has one."""
        x = self.reads(name, x) if self.reads else x
        out: Tensor = F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))
        return out

    def heads_of(self, x: Tensor, count: int) -> Tensor:
        """[batch, tokens, count * head_dim] -> [batch, count, tokens, head_dim]."""
        heads: Tensor = x.unflatten(-1, (count, self.shape.head_dim))
        return heads.transpose(1, 2)


class DecoderBlock(Block):
    """Llama, Mistral, Qwen2, Qwen3."""

    stages = (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    )

    def steps(self, x: Tensor) -> Iterator[Tensor]:
        h = rms_norm(x, self.weights["input_layernorm.weight"], self.shape.eps)
        yield h
        h = self._attention(h)
        yield h
        x = x + self.linear("self_attn.o_proj", h)
        h = rms_norm(x, self.weights["post_attention_layernorm.weight"], self.shape.eps)
        yield h
        h = self.shape.activation(self.linear("mlp.gate_proj", h)) * self.linear("mlp.up_proj", h)
        yield h
        yield x + self.linear("mlp.down_proj", h)

    def _attention(self, h: Tensor) -> Tensor:
        shape = self.shape
        q = self.heads_of(self.linear("self_attn.q_proj", h), shape.heads)
        k = self.heads_of(self.linear("self_attn.k_proj", h), shape.kv_heads)
        v = self.heads_of(self.linear("self_attn.v_proj", h), shape.kv_heads)
        if "self_attn.q_norm.weight" in self.weights:
            q = rms_norm(q, self.weights["self_attn.q_norm.weight"], shape.eps)
            k = rms_norm(k, self.weights["self_attn.k_norm.weight"], shape.eps)
        assert shape.frequencies is not None
        cos, sin = rotary(h.shape[1], shape.frequencies.to(h.device))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        share = shape.heads // shape.kv_heads
        k, v = (t.repeat_interleave(share, dim=1) for t in (k, v))
        return self.attend(q, k, v, True).transpose(1, 2).flatten(2)


class EncoderBlock(Block):
    """BERT, RoBERTa, XLM-RoBERTa; sequences without padding, so that every token sees all others."""

    stages = (
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        ("attention.output.dense",),
        ("intermediate.dense",),
        ("output.dense",),
    )

    def steps(self, x: Tensor) -> Iterator[Tensor]:
        yield x
        q, k, v = (self.heads_of(self.linear(name, x), self.shape.heads) for name in self.stages[0])
        h = self.attend(q, k, v, False).transpose(1, 2).flatten(2)
        yield h
        h = self._norm("attention.output", self.linear("attention.output.dense", h) + x)
        yield h
        inner = self.shape.activation(self.linear("intermediate.dense", h))
        yield inner
        yield self._norm("output", self.linear("output.dense", inner) + h)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.weights[f"{name}.LayerNorm.{kind}"] for kind in ("weight", "bias"))
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.shape.eps)


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
    """Products of float32 tensors on a GPU in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
