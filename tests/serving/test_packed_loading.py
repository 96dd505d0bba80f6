"""Loading of packed weights into a layer, part by part and in any order; only refusals need an engine."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from edits import refused
from engines import Engines
from packed import packed
from strategies import assert_same_bits
from torch import Tensor

from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune

pytestmark = pytest.mark.vllm

SIX = SlidePattern.parse("6:8")
STORED = Path(__file__).parents[1] / "checkpoint" / "stored_sparse"


class Layer(torch.nn.Module):
    """A SlideSparse linear layer that records the tensors loaded into its weight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        from slidesparse.vllm_patch.loading import LoadCheck

        for name in ("rank", "world_size"):
            monkeypatch.setattr(f"vllm.model_executor.parameter.get_tensor_model_parallel_{name}", lambda: 0)
        self.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.int8), requires_grad=False)
        self.loaded: dict[str | None, Tensor] = {}

        def loader(param: Any, loaded_weight: Tensor, loaded_shard_id: str | None = None) -> None:
            assert param is self.weight
            assert loaded_shard_id not in self.loaded
            self.loaded[loaded_shard_id] = loaded_weight

        self.weight.weight_loader = loader
        LoadCheck("layers.0.qkv_proj", 44, 2).take_packed(self)

    def load(self, kind: str, tensor: Tensor, *part: str) -> None:
        """Load a tensor as a model's ``load_weights`` does, which reuses the tensor's memory."""
        param = getattr(self, kind)
        buffer = tensor.clone()
        param.weight_loader(param, buffer, *part)
        buffer.zero_()


def stored(rows: int, k: int, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    weight = torch.randint(-9, 9, (rows, k), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    weight = prune(weight, SIX)
    values, bitmask = packed(weight, 6 * (k // 8) + min(k % 8, 6))
    return weight, {"compressed": values, "bitmask": bitmask, "shape": torch.tensor([[rows], [k]])}


def test_packed_parts_load_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of one part come in any order, and so do the parts of a fused layer."""
    for order in itertools.permutations(("compressed", "bitmask", "shape")):
        layer = Layer(monkeypatch)
        q, k = stored(8, 44, 1), stored(4, 44, 2)
        layer.load("row_offsets", torch.zeros(8, dtype=torch.int64), "q")
        for kind in order:
            for part, (_, tensors) in {"q": q, "k": k}.items():
                assert part not in layer.loaded
                layer.load(kind, tensors[kind], part)
        assert_same_bits(layer.loaded["q"], q[0])
        assert_same_bits(layer.loaded["k"], k[0])


def test_packed_float_weights_are_refused_with_a_hint(engines: Engines) -> None:
    model = str(STORED / "bf16-sparse-24-bitmask")
    hint = ("weights are stored as sparse-24-bitmask", "convert it: slidesparse convert SRC OUT --sparsity")
    refused(engines, model, {"USE_CUSPARSELT": "1"}, "is W8A8 with dynamic activations", *hint)
    refused(engines, model, {}, *hint)  # vLLM's own error follows
