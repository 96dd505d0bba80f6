"""Rotate a decoder's residual stream, and the values of each head, without changing the model's outputs.

RMSNorm without a weight commutes with any orthogonal Q.  So norm weights are first folded into the linear layers that
follow, and then all weights that read the residual stream x, or add to it, are rotated::

    x' = x Q          embed' = embed Q
    reads x           W' = (W * norm) Q                  q, k, v, gate, up, lm_head
    adds to x         W' = Q^T W,  b' = Q^T b            o, down
    values of a head  W_v' = R^T W_v,  b_v' = R^T b_v,  W_o' = W_o R         one R for each key-value head

The result is an ordinary checkpoint of the same architecture, with an untied lm_head.  `slidesparse.calibrate.learning`
finds Q and R that minimize the loss of pruning.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slidesparse.calibrate.models import HEAD, LayeredModel, is_tied
from slidesparse.checkpoint.architectures import architecture_of
from slidesparse.checkpoint.storage import MODULES, Checkpoint, Reader, is_embedding_model

KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3")
# The tensors that a model of KINDS may have; any other might read the residual stream and is not rotated
_TENSOR = re.compile(
    r"lm_head\.weight|(?:model\.)?(?:rotary_emb\.inv_freq|(?:embed_tokens|norm)\.weight|layers\.(\d+)\."
    r"(self_attn\.(?:[qkvo]_proj\.(?:weight|bias)|[qk]_norm\.weight|rotary_emb\.inv_freq)"
    r"|mlp\.(?:gate|up|down)_proj\.(?:weight|bias)|(?:input|post_attention)_layernorm\.weight))"
)
# Weights that read the residual stream -> the norm before them
_NORMS = {f"self_attn.{x}_proj.weight": "input_layernorm.weight" for x in "qkv"}
_NORMS |= {f"mlp.{x}_proj.weight": "post_attention_layernorm.weight" for x in ("gate", "up")}
_ROWS_MIXED = tuple(f"{name}_proj.{kind}" for name in ("v", "o", "down") for kind in ("weight", "bias"))


@dataclass(frozen=True)
class Rotation:
    """Orthogonal matrices in float64."""

    q: Tensor  # [hidden, hidden]
    r: Tensor  # [blocks, key-value heads, head_dim, head_dim]


def rotation_obstacle(checkpoint: Checkpoint) -> str | None:
    """Return why a model cannot be rotated, or None."""
    architecture = architecture_of(checkpoint.config)
    supported = [f"{kind}ForCausalLM" for kind in KINDS]
    if architecture not in supported:
        return (
            f"{architecture or 'a model without a named architecture'} is not one of {', '.join(supported)}"
        )
    if is_embedding_model(checkpoint.folder):
        return f"{MODULES} marks this as an embedding model, whose embeddings rotation would change"
    unknown = next((name for name in checkpoint.tensors if not _TENSOR.fullmatch(name)), None)
    return f"tensor {unknown} is not one that rotation knows how to transform" if unknown else None


def untie_head(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with an untied lm_head, initially a copy of the embedding if it was tied."""
    tensors = dict(checkpoint.tensors)
    root = "" if "embed_tokens.weight" in tensors else "model."
    name = f"{root}embed_tokens.weight"
    for required in (name, f"{root}norm.weight"):
        checkpoint.require(required)
    if is_tied(checkpoint):
        tensors[HEAD] = tensors[name]._replace(spec=tensors[name].spec._replace(name=HEAD))
    return replace(checkpoint, tensors=tensors, config={**checkpoint.config, "tie_word_embeddings": False})


class RotatedReader(Reader):
    """Reads the tensors of a model with its norm weights folded, and with ``rotation`` also rotated.

    These tensors are computed in float64 on ``device`` and returned as float32, whatever the checkpoint's dtype.
    """

    def __init__(
        self, reader: Reader, model: LayeredModel, device: torch.device, rotation: Rotation | None = None
    ) -> None:
        super().__init__(model.checkpoint)
        self._reader, self._model, self._device = reader, model, device
        self._q = rotation.q.to(device) if rotation else None
        self._r = rotation.r.to(device) if rotation else None
        self._lock = threading.Lock()
        self._mixed: tuple[str, Tensor] | None = None  # the last tensor read whose rows are rotated

    def rows(self, name: str, rows: slice) -> Tensor:
        """Read rows of a tensor as [rows, columns]."""
        if name.endswith(_ROWS_MIXED):
            with self._lock:
                if self._mixed is None or self._mixed[0] != name:
                    self._mixed = None  # free it before computing the next
                    self._mixed = name, self._rotate_outputs(name).float().cpu()
                return self._mixed[1][rows]
        x = self._reader.rows(name, rows)
        if name.endswith("layernorm.weight") or name == f"{self._model.root}norm.weight":
            return torch.ones_like(x)
        if name == f"{self._model.root}embed_tokens.weight" or self._norm_before(name):
            return self._rotate_inputs(name, x).float().cpu()
        return x

    def _norm_before(self, name: str) -> str | None:
        """Return the norm before a weight that reads the residual stream, or None for other weights."""
        if name == HEAD:
            return f"{self._model.root}norm.weight"
        for weight, norm in _NORMS.items():
            if name.endswith(weight):
                return name.removesuffix(weight) + norm
        return None

    def _rotate_inputs(self, name: str, x: Tensor) -> Tensor:
        """Fold the norm into rows ``x`` of a weight, and rotate their inputs by Q."""
        x = x.to(self._device, torch.float64)
        if norm := self._norm_before(name):
            x = x * self._reader.whole(norm).to(self._device, torch.float64)
        return x if self._q is None else x @ self._q

    def _rotate_outputs(self, name: str) -> Tensor:
        """Return a whole weight or bias with its outputs rotated."""
        spec = self.checkpoint.require(name)
        x = self._reader.rows(name, slice(0, spec.rows))
        x = x.to(self._device, torch.float64)
        if name.endswith("v_proj.weight"):
            x = self._rotate_inputs(name, x)
        if self._q is None or self._r is None:
            return x
        match = _TENSOR.fullmatch(name)
        assert match
        number = int(match[1])
        r, sizes = self._r[number], self._model.sizes[number]
        if "v_proj" in name:
            rotated: Tensor = r.mT @ x.unflatten(0, (sizes.kv_heads, -1))
            return rotated.flatten(0, 1)
        if name.endswith("o_proj.weight"):
            heads = r.repeat_interleave(sizes.heads // sizes.kv_heads, 0)
            x = torch.einsum("nha,hab->nhb", x.unflatten(1, (sizes.heads, -1)), heads).flatten(1)
        return self._q.mT @ x
