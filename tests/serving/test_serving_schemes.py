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
from slidesparse.pattern import SlidePattern

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


@pytest.mark.parametrize("layout", ["dense", None])
@pytest.mark.parametrize("flags", [FLAGS, {"USE_CUBLASLT": "1"}])
def test_flag_is_refused_where_vllm_uses_another_scheme(
    monkeypatch: pytest.MonkeyPatch, layout: str | None, flags: dict[str, str]
) -> None:
    from slidesparse.resolve import ResolveError

    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ResolveError) as caught:
        scheme(config(layout))
    for fragment in (
        f"{LAYER}: vLLM runs W8A8 layers of this checkpoint with its own CompressedTensorsW8A16Fp8",
        "compute capability below 8.9, but a SlideSparse flag is set",
        "--quant int8; to use vLLM's own kernels: unset the flag",
    ):
        assert fragment in str(caught.value)


def test_stamp_remembers_that_a_flag_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes may not see the environment."""
    from slidesparse.flags import Flags
    from slidesparse.resolve import ResolveError, resolve, stamp

    stamped = config("dense")
    stamp(resolve(stamped, Flags("sparse"), on_cuda=False), [stamped])
    with pytest.raises(ResolveError, match="but a SlideSparse flag is set"):
        scheme(stamped)


@pytest.mark.parametrize("layout", ["slided", "packed"])
def test_slided_and_packed_layouts_need_our_scheme(layout: str) -> None:
    from slidesparse.resolve import ResolveError

    with pytest.raises(ResolveError, match=rf"CompressedTensorsW8A16Fp8.*{layout} layout.*the dense layout"):
        scheme(config(layout))


def test_layer_without_metadata_may_use_another_scheme() -> None:
    assert scheme(config("slided"), "model.layers.1.mlp.down_proj") == "CompressedTensorsW8A16Fp8"


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
    "change", [{"dynamic": False, "strategy": "tensor"}, {"block": [64, 64]}, {"weight": None}]
)
def test_unsupported_layers_do_not_raise_with_a_flag(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """The layers have static activations, scales for blocks, or quantized weights alone, beside a supported
    group.
    """
    for name, value in FLAGS.items():
        monkeypatch.setenv(name, value)
    quantization = config(None)
    groups = quantization["config_groups"]
    group = copy.deepcopy(groups["group_0"])
    if "block" in change:
        group["weights"] |= {"strategy": "block", "block_structure": change["block"]}
    elif "weight" in change:
        group["input_activations"] = None
    else:
        group["input_activations"] |= change
    groups["other"] = {**group, "targets": ["re:.*down_proj"]}
    groups["group_0"]["targets"] = ["re:.*up_proj"]
    assert scheme(quantization) == "CompressedTensorsW8A16Fp8"


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("weights", {}, None),
        ("weights", {"num_bits": 4}, "object"),
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


def test_mxfp8_is_refused_with_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """llmcompressor 0.14 writes it as 8-bit weights and activations with scales for groups of 32."""
    from slidesparse.resolve import ResolveError

    for name, value in FLAGS.items():
        monkeypatch.setenv(name, value)
    mxfp8 = config(None)
    mxfp8["format"] = mxfp8["config_groups"]["group_0"]["format"] = "mxfp8-quantized"
    for part in ("weights", "input_activations"):
        mxfp8["config_groups"]["group_0"][part] |= {"strategy": "group", "group_size": 32}
    with pytest.raises(ResolveError, match="no group of layers .* is W8A8 with dynamic activations"):
        scheme(mxfp8)


def test_error_without_pattern_names_the_flag_or_option() -> None:
    from slidesparse.flags import Flags
    from slidesparse.resolve import ResolveError, resolve

    with pytest.raises(
        ResolveError, match=r"^USE_CUSPARSELT=1 needs to know.*unset USE_CUSPARSELT: that needs"
    ):
        resolve(config(None), Flags("sparse"), on_cuda=False)
    with pytest.raises(ResolveError, match=r"^--quantization slidesparse needs to know.*--sparsity 6:8$"):
        resolve(config(None), Flags(), on_cuda=False)


def test_unsupported_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from slidesparse.vllm_patch import config as module

    from slidesparse.resolve import ResolveError

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


@pytest.mark.parametrize(
    ("cuda", "size", "freed"), [(True, 20 << 20, True), (True, 1 << 20, False), (False, 1 << 30, False)]
)
def test_cached_gpu_memory_is_freed_before_packing_large_weights(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, size: int, freed: bool
) -> None:
    """It synchronizes first, so that no kernel can still read the memory."""
    from slidesparse.vllm_patch.scheme import _release_unused

    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"synchronize {device}"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    _release_unused(SimpleNamespace(is_cuda=cuda, nbytes=size, device="cuda:1"))  # type: ignore[arg-type]
    assert calls == (["synchronize cuda:1", "empty"] if freed else [])
