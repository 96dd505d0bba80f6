"""Models with nested models, drafts, heads of another dtype, or unloaded parts, and batch invariance; no engine is
needed.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import QWEN, quantization_config

from slidesparse import gemm
from slidesparse.checkpoint.metadata import KEY, QUANT_METHOD, LayerEntry, Metadata
from slidesparse.flags import Flags
from slidesparse.gemm import BackendError
from slidesparse.pattern import SlidePattern
from slidesparse.resolve import require_invariance, resolve

pytestmark = pytest.mark.vllm

FLAGS = ("USE_CUSPARSELT", "USE_CUBLASLT", "SPARSITY", "SLIDESPARSE_FUSE", "VLLM_BATCH_INVARIANT")
SIX_EIGHT = SlidePattern.parse("6:8")
PARTS = {
    f"model.layers.0.self_attn.{part}": LayerEntry(SIX_EIGHT, QWEN.hidden)
    for part in ("q_proj", "k_proj", "v_proj")
}


@pytest.fixture(autouse=True)
def no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FLAGS:
        monkeypatch.delenv(name, raising=False)


def config(layout: str | None = "dense", method: str = "compressed-tensors") -> dict[str, Any]:
    """The quantization config of an INT8 checkpoint; with a layout it has SlideSparse metadata."""
    block = {**quantization_config("int8"), "quant_method": method}
    if layout:
        block[KEY] = Metadata(SIX_EIGHT, layout, PARTS).to_json()
    return block


def test_resolution_is_kept_after_flags_are_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM parses a draft's quantization in its workers, but determines its method where the flags are set."""
    from slidesparse.vllm_patch.config import SlideSparseConfig

    block = config(None)
    monkeypatch.setenv("USE_CUSPARSELT", "1")
    monkeypatch.setenv("SPARSITY", "4:6")
    assert SlideSparseConfig.override_quantization_method(block, None) == QUANT_METHOD
    monkeypatch.delenv("USE_CUSPARSELT")
    monkeypatch.delenv("SPARSITY")
    parsed = SlideSparseConfig.from_config(copy.deepcopy(block))
    assert (parsed.resolution.pattern, parsed.resolution.asked) == ("4:6", True)


def test_metadata_of_fused_layers_are_found() -> None:
    """By the names of their parts, in a draft too, which has no mapping; or stored fused, as in GLM-4."""
    from slidesparse.vllm_patch.config import SlideSparseConfig

    name, block = "model.layers.0.mlp.gate_up_proj", config()
    entry = LayerEntry(SIX_EIGHT, QWEN.hidden)
    block[KEY] = Metadata(SIX_EIGHT, "dense", {**PARTS, name: entry}).to_json()
    for mapping in (
        {},
        {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]},
    ):
        parsed = SlideSparseConfig.from_config(block)
        parsed.packed_modules_mapping = mapping
        assert parsed._entry("model.layers.0.self_attn.qkv_proj") == PARTS["model.layers.0.self_attn.q_proj"]
        assert parsed._entry(name) == entry
        assert parsed._entry("model.layers.1.mlp.gate_up_proj") is None


def test_slided_config_gets_head_counts() -> None:
    """As in vLLM's own config, they are needed for scales of the KV cache per head."""
    from slidesparse.vllm_patch.config import SlideSparseConfig

    language = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2)
    for hf_config in (language, SimpleNamespace(text_config=language)):
        block = config("slided", QUANT_METHOD)
        SlideSparseConfig.override_quantization_method(block, None, hf_config)
        assert (block["total_num_heads"], block["total_num_kv_heads"]) == (8, 2)
    block = config("slided", QUANT_METHOD)
    SlideSparseConfig.override_quantization_method(block, None, SimpleNamespace(num_attention_heads=8))
    assert (block["total_num_heads"], block["total_num_kv_heads"]) == (8, 8)


def test_summary_does_not_wait_for_unloaded_layers() -> None:
    """vLLM creates towers that no request uses on the meta device, or moves them there, and drops them."""
    from slidesparse.vllm_patch.summary import LayerSummary

    summary = LayerSummary()
    layers = [torch.nn.Linear(2, 2) for _ in range(5)]
    for i, layer in enumerate(layers):
        summary.expect(str(i), layer)
    summary.expect("dropped", torch.nn.Linear(2, 2, device="meta"))
    unloaded = torch.nn.Module()  # it has no weight yet
    summary.expect("later", unloaded)
    layers[0].to("meta")
    del layers[1], layer
    assert summary.is_pending()
    assert [summary.count(name) for name in ("3", "later", "2")] == [False] * 3
    assert summary.count("lm_head", "lm_head") is False
    assert summary.count("4") is True
    assert not summary.is_pending()
    assert summary.count("4") is False  # after a reload


def scheme(monkeypatch: pytest.MonkeyPatch, model_dtype: torch.dtype, backend: str) -> Any:
    """The scheme of a layer served by ``backend``, in a model of that type."""
    from slidesparse.vllm_patch import compat
    from slidesparse.vllm_patch.scheme import SlideSparseScheme

    instance = object.__new__(SlideSparseScheme)
    instance.slided, instance.backend = False, gemm.get(backend)
    monkeypatch.setattr(compat, "model_dtype", lambda: model_dtype)
    return instance


@pytest.mark.parametrize(
    ("backend", "dtype", "model_dtype", "slided", "is_other_head"),
    [
        ("hopper", torch.float32, torch.bfloat16, False, True),
        ("hopper", torch.float32, torch.bfloat16, True, False),  # vLLM's own kernels could not read it
        ("hopper", torch.float32, torch.float32, False, False),  # the whole model: an error
        ("hopper", torch.bfloat16, torch.bfloat16, False, False),
        ("cusparselt", torch.float32, torch.bfloat16, False, False),  # which writes it
    ],
)
def test_head_of_another_dtype_is_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    dtype: torch.dtype,
    model_dtype: torch.dtype,
    slided: bool,
    is_other_head: bool,
) -> None:
    layer_scheme = scheme(monkeypatch, model_dtype, backend)
    layer_scheme.slided = slided
    assert layer_scheme._is_other_head(dtype) is is_other_head


@pytest.mark.parametrize(
    ("backend", "quant", "message"),
    [
        ("hopper", "int8", ""),
        ("hopper", "fp8", "backend hopper sums FP8 products in an order that depends on"),
        ("cusparselt", "fp8", "backend cusparselt sums FP8 products"),
    ],
)
def test_batch_invariance_is_refused_where_unsupported(
    monkeypatch: pytest.MonkeyPatch, backend: str, quant: str, message: str
) -> None:
    require_invariance(backend, quant)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    if message:
        with pytest.raises(BackendError, match=f"{message}.*or set DISABLE_SLIDESPARSE=1"):
            require_invariance(backend, quant)
    else:
        require_invariance(backend, quant)


def test_batch_invariance_disables_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    from slidesparse.resolve import ResolveError

    monkeypatch.setattr(type(gemm.get("hopper")), "unusable", lambda *_: None)
    assert resolve(config(), Flags(backend="hopper"), on_cuda=True).fuse
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not resolve(config(), Flags(backend="hopper"), on_cuda=True).fuse
    with pytest.raises(ResolveError, match="SLIDESPARSE_FUSE=1 computes norms in an order"):
        resolve(config(), Flags(backend="hopper", fuse=True), on_cuda=True)
