"""vLLM uses another scheme for W8A8 layers: refused if a flag is set or the layout needs ours, otherwise warned once.

An example is FP8 without quantized activations on GPUs of compute capability below 8.9; no engine is needed.
"""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import QWEN, quantization_config

from slidesparse import gemm
from slidesparse.checkpoint.metadata import KEY, QUANT_METHOD, LayerEntry, Metadata
from slidesparse.gemm import BackendError
from slidesparse.gemm.problem import TWO_FOUR, Layer
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.resolve import ResolveError
from slidesparse.slide import slide

pytestmark = pytest.mark.vllm

LAYER = "model.layers.0.mlp.down_proj"
SIX_EIGHT = SlidePattern.parse("6:8")
FLAGS = {"USE_CUSPARSELT": "1", "SPARSITY": "2_8"}


def config(layout: str | None) -> dict[str, Any]:
    """The quantization config of an FP8 checkpoint; with a layout it has SlideSparse metadata."""
    block = quantization_config("fp8")
    if layout:
        block[KEY] = Metadata(SIX_EIGHT, layout, {LAYER: LayerEntry(SIX_EIGHT, QWEN.intermediate)}).to_json()
    return block


@pytest.fixture(autouse=True)
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU that cannot multiply FP8, with no SlideSparse flag set."""
    from slidesparse.vllm_patch import compat
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors, schemes

    def supported(*_: object, **__: object) -> bool:
        return False

    def init(*_: object, **__: object) -> None:
        """Without an engine's config."""

    monkeypatch.setattr(compressed_tensors.CompressedTensorsConfig, "_check_scheme_supported", supported)
    monkeypatch.setattr(schemes.CompressedTensorsW8A16Fp8, "__init__", init)
    for name in ("USE_CUSPARSELT", "USE_CUBLASLT", "SPARSITY"):
        monkeypatch.delenv(name, raising=False)
    compat.warn.cache_clear()


def scheme(quantization: dict[str, Any], name: str = LAYER) -> str:
    """Name of the class of a layer's scheme."""
    from slidesparse.vllm_patch.config import SlideSparseConfig
    from vllm.model_executor.layers.linear import RowParallelLinear

    parsed = SlideSparseConfig.from_config(copy.deepcopy(quantization))
    return type(parsed.get_scheme(object.__new__(RowParallelLinear), name)).__name__


@pytest.mark.parametrize(
    ("layout", "flags", "words"),
    [
        *(
            (layout, FLAGS, "but a SlideSparse flag is set. .*--quant int8; .*: unset the flag")
            for layout in ("dense", None)
        ),
        (
            "dense",
            {"USE_CUBLASLT": "1"},
            "capability below 8.9, but a SlideSparse flag is set. .*--quant int8",
        ),
        *(
            (layout, {}, f"the {layout} layout. .* convert to the dense layout")
            for layout in ("slided", "packed")
        ),
    ],
)
def test_another_scheme_of_vllm_is_refused(
    monkeypatch: pytest.MonkeyPatch, layout: str | None, flags: dict[str, str], words: str
) -> None:
    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    start = f"{LAYER}: vLLM runs W8A8 layers of this checkpoint with its own CompressedTensorsW8A16Fp8"
    with pytest.raises(ResolveError, match=f"^{start}.*{words}"):
        scheme(config(layout))
    if not flags:
        assert scheme(config(layout), "model.layers.1.mlp.down_proj") == "CompressedTensorsW8A16Fp8"


@pytest.mark.parametrize(
    ("backend", "ratio", "unslid"),
    [
        ("hopper", "6:8", True),
        ("hopper", "14:16", True),
        ("hopper", "4:6", False),
        ("cusparselt", "6:8", False),
    ],
)
def test_slided_weights_are_unslid_for_a_backend_that_stores_no_windows(
    backend: str, ratio: str, unslid: bool
) -> None:
    from slidesparse.vllm_patch.scheme import SlideSparseScheme

    pattern = SlidePattern.parse(ratio)
    weight = prune(torch.randn(16, 48, generator=torch.Generator().manual_seed(0)) * 40, pattern).to(
        torch.int8
    )
    layer: Any = object.__new__(SlideSparseScheme)
    layer.patterns, layer.slided, layer.backend = [pattern], True, gemm.get(backend)
    layer.config = SimpleNamespace(resolution=SimpleNamespace(path=gemm.SPARSE))
    layer._first_column, layer._unslid = 96, Layer.of(16, 48, None, 0, torch.int8, 128)
    slided = slide(weight, pattern)
    assert slided.shape[1] == layer._layout().slided
    source, found, phase = layer._source(slided)
    assert (found, phase) == ((pattern, 0) if unslid else (TWO_FOUR, 0))
    assert torch.equal(source, weight if unslid else slided)


def test_dense_layout_is_left_to_vllm_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from slidesparse.vllm_patch import compat

    monkeypatch.setattr(compat.logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger=compat.logger.name):
        for name in (LAYER, "model.layers.1.mlp.down_proj"):
            assert scheme(config("dense"), name) == "CompressedTensorsW8A16Fp8"
    (message,) = (record.getMessage() for record in caplog.records if record.name == compat.logger.name)
    assert message.startswith(
        "SlideSparse leaves them dense: vLLM runs W8A8 layers of this checkpoint with its own CompressedTensorsW8A16Fp8"
    )
    assert "slidesparse convert SRC OUT --sparsity 6:8 --quant int8" in message


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("weights", {}, None),
        ("weights", {"num_bits": 4}, "object"),
        ("weights", {"strategy": "group", "group_size": 32}, "object"),  # MXFP8 of llmcompressor 0.14
        ("weights", {"strategy": "block", "block_structure": [64, 64]}, "block FP8"),
        ("input_activations", {"dynamic": False, "strategy": "tensor"}, "static activations"),
        ("input_activations", {"symmetric": False}, "asymmetric activations"),
        ("input_activations", None, "object"),
    ],
)
def test_refusal(part: str, change: dict[str, Any] | None, reason: str | None) -> None:
    """8 bits are compressed-tensors' default, as they are `convert`'s."""
    from compressed_tensors.quantization import QuantizationArgs
    from slidesparse.vllm_patch.config import refusal

    group = copy.deepcopy(quantization_config("int8")["config_groups"]["group_0"])
    parts = {
        name: {k: v for k, v in group[name].items() if k != "num_bits"}
        for name in ("weights", "input_activations")
    }
    parts[part] = None if change is None else {**parts[part], **change}
    arguments = {
        name: arguments and QuantizationArgs.model_validate(arguments) for name, arguments in parts.items()
    }
    assert refusal(arguments, object()) == reason


def test_unsupported_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from slidesparse.vllm_patch import config as module

    platform = SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: False, device_name="rocm")
    monkeypatch.setattr(module, "current_platform", platform)
    override = module.SlideSparseConfig.override_quantization_method
    assert override(config("dense"), None) is None
    with pytest.raises(ResolveError, match="NVIDIA GPUs and CPUs, but vLLM's platform here is rocm"):
        override({**config("slided"), "quant_method": QUANT_METHOD}, None)
    monkeypatch.setenv("USE_CUSPARSELT", "1")
    with pytest.raises(ResolveError, match="unset the flags"):
        override(config("dense"), None)


@pytest.mark.parametrize(
    ("backend", "refused"), [("cusparselt", True), ("hopper", False), ("reference", False)]
)
def test_dual_batch_overlap_is_refused_where_unsupported(
    monkeypatch: pytest.MonkeyPatch, backend: str, refused: bool
) -> None:
    from slidesparse.vllm_patch import compat
    from slidesparse.vllm_patch.scheme import SlideSparseScheme

    layer_scheme = object.__new__(SlideSparseScheme)
    layer_scheme.backend = gemm.get(backend)
    parallel = SimpleNamespace(use_ubatching=True)
    monkeypatch.setattr(compat, "current_config", lambda: SimpleNamespace(parallel_config=parallel))
    if refused:
        with pytest.raises(BackendError, match=f"{backend}.*leave out --enable-dbo"):
            layer_scheme._require_no_threads()
    parallel.use_ubatching = refused is False
    layer_scheme._require_no_threads()
