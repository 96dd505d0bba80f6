"""The plugin's decisions on layers and models, without an engine.

Where vLLM uses another scheme for W8A8 layers, such as FP8 without quantized activations on GPUs of compute capability
below 8.9, it refuses if a flag is set or the layout needs ours, and otherwise warns once.
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
from slidesparse.errors import LOGGER
from slidesparse.flags import Flags
from slidesparse.gemm import BackendError
from slidesparse.pattern import SlidePattern
from slidesparse.resolve import ResolveError, require_invariance, resolve

pytestmark = pytest.mark.vllm

LAYER = "model.layers.0.mlp.down_proj"
SIX_EIGHT = SlidePattern.parse("6:8")
ENTRY = LayerEntry(SIX_EIGHT, QWEN.hidden)
PARTS = {f"model.layers.0.self_attn.{part}_proj": ENTRY for part in "qkv"}
FLAGS = {"USE_CUSPARSELT": "1", "SPARSITY": "2_8"}
FLAG_IS_SET = "but a SlideSparse flag is set."


def config(layout: str | None, quant: str = "fp8", method: str = "compressed-tensors") -> dict[str, Any]:
    """The quantization config of a checkpoint; with a layout it has SlideSparse metadata."""
    block = {**quantization_config(quant), "quant_method": method}
    if layout:
        layers = {LAYER: LayerEntry(SIX_EIGHT, QWEN.intermediate), **PARTS}
        block[KEY] = Metadata(SIX_EIGHT, layout, layers).to_json()
    return block


@pytest.fixture(autouse=True)
def no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*FLAGS, "USE_CUBLASLT", "SLIDESPARSE_FUSE", "VLLM_BATCH_INVARIANT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU that cannot multiply FP8."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors, schemes

    of_vllm, scheme = compressed_tensors.CompressedTensorsConfig, schemes.CompressedTensorsW8A16Fp8
    monkeypatch.setattr(of_vllm, "_check_scheme_supported", lambda *_, **__: False)
    monkeypatch.setattr(scheme, "__init__", lambda *_, **__: None)  # without an engine's config


def scheme_of(quantization: dict[str, Any], name: str = LAYER) -> str:
    """Name of the class of a layer's scheme."""
    from slidesparse.vllm_patch.config import SlideSparseConfig
    from vllm.model_executor.layers.linear import RowParallelLinear

    parsed = SlideSparseConfig.from_config(copy.deepcopy(quantization))
    return type(parsed.get_scheme(object.__new__(RowParallelLinear), name)).__name__


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    ("layout", "flags", "words"),
    [
        ("dense", FLAGS, f"{FLAG_IS_SET} .*--quant int8; .*: unset the flag"),
        (None, FLAGS, f"{FLAG_IS_SET} .*--quant int8; .*: unset the flag"),
        ("dense", {"USE_CUBLASLT": "1"}, f"capability below 8.9, {FLAG_IS_SET} .*--quant int8"),
        ("slided", {}, "the slided layout. .* convert to the dense layout"),
        ("packed", {}, "the packed layout. .* convert to the dense layout"),
    ],
)
def test_another_scheme_of_vllm_is_refused(
    monkeypatch: pytest.MonkeyPatch, layout: str | None, flags: dict[str, str], words: str
) -> None:
    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    start = f"{LAYER}: vLLM runs W8A8 layers of this checkpoint with its own CompressedTensorsW8A16Fp8"
    with pytest.raises(ResolveError, match=f"^{start}.*{words}"):
        scheme_of(config(layout))
    if not flags:
        assert scheme_of(config(layout), "model.layers.1.mlp.down_proj") == "CompressedTensorsW8A16Fp8"


@pytest.mark.usefixtures("ampere")
def test_vllm_serves_dense_layouts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        for name in (LAYER, "model.layers.1.mlp.down_proj"):
            assert scheme_of(config("dense"), name) == "CompressedTensorsW8A16Fp8"
    (message,) = (record.getMessage() for record in caplog.records if record.name == LOGGER)
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
        ("input_activations", {"type": "float"}, "8-bit int weights with float activations"),
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
    arguments = {name: part and QuantizationArgs.model_validate(part) for name, part in parts.items()}
    assert refusal(arguments, object()) == reason


def test_unsupported_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from slidesparse.vllm_patch import config as module

    platform = SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: False, device_name="rocm")
    monkeypatch.setattr(module, "current_platform", platform)
    override = module.SlideSparseConfig.override_quantization_method
    assert override(config("dense"), None) is None
    with pytest.raises(ResolveError, match="NVIDIA GPUs and CPUs, but vLLM's platform here is rocm"):
        override(config("slided", method=QUANT_METHOD), None)
    monkeypatch.setenv("USE_CUSPARSELT", "1")
    with pytest.raises(ResolveError, match="unset the flags"):
        override(config("dense"), None)


def test_dual_batch_overlap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By cuSPARSELt alone."""
    from slidesparse.vllm_patch import compat
    from slidesparse.vllm_patch.scheme import SlideSparseScheme

    layer_scheme = object.__new__(SlideSparseScheme)
    parallel = SimpleNamespace(use_ubatching=True)
    monkeypatch.setattr(compat, "current_config", lambda: SimpleNamespace(parallel_config=parallel))
    for backend in ("hopper", "reference"):
        layer_scheme.backend = gemm.get(backend)
        layer_scheme._require_no_threads()
    layer_scheme.backend = gemm.get("cusparselt")
    with pytest.raises(BackendError, match="cusparselt.*leave out --enable-dbo"):
        layer_scheme._require_no_threads()
    parallel.use_ubatching = False
    layer_scheme._require_no_threads()


def test_metadata_of_fused_layers_are_found() -> None:
    """By the names of their parts, in a draft too, which has no mapping; or stored fused, as in GLM-4."""
    from slidesparse.vllm_patch.config import SlideSparseConfig

    name, block = "model.layers.0.mlp.gate_up_proj", config(None)
    block[KEY] = Metadata(SIX_EIGHT, "dense", {**PARTS, name: ENTRY}).to_json()
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for mapping in ({}, fused):
        parsed = SlideSparseConfig.from_config(block)
        parsed.packed_modules_mapping = mapping
        assert parsed._entry("model.layers.0.self_attn.qkv_proj") == ENTRY
        assert parsed._entry(name) == ENTRY
        assert parsed._entry("model.layers.1.mlp.gate_up_proj") is None


def test_experts_are_ignored_by_the_names_of_the_checkpoint() -> None:
    """compressed-tensors lists each matrix that it leaves as it is; vLLM asks for these names since 0.32."""
    from slidesparse.vllm_patch import experts
    from slidesparse.vllm_patch.config import SlideSparseConfig
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    name = "model.layers.0.block_sparse_moe.experts"
    ignore = [f"{name}.{expert}.w{part}" for expert in range(2) for part in (1, 2, 3)]
    layer = object.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.ckpt_gate_proj_name, layer.ckpt_down_proj_name, layer.ckpt_up_proj_name = "w1", "w2", "w3"
    parsed = SlideSparseConfig.from_config({**config("dense"), "ignore": ignore})
    assert experts.method(parsed, layer, name) == ""


def test_products_of_mixtures_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's kernel reads the wrong rows of padded router logits; a test on GPUs forces Inductor to pad."""
    from slidesparse.vllm_patch import compat, experts
    from slidesparse.vllm_patch.config import SlideSparseConfig
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    ours = object()
    monkeypatch.setattr(experts, "method", lambda *_: ours)
    for chosen, expected in (({}, False), ({"shape_padding": True}, True)):
        compilation = SimpleNamespace(inductor_compile_config=chosen)
        vllm_config = SimpleNamespace(compilation_config=compilation)
        monkeypatch.setattr(compat, "current_config", lambda vllm_config=vllm_config: vllm_config)
        parsed = SlideSparseConfig.from_config(config("dense"))
        assert parsed._method(object.__new__(RoutedExperts), "experts") is ours
        assert compilation.inductor_compile_config["shape_padding"] is expected


def test_slided_config_gets_head_counts() -> None:
    """As in vLLM's own config, they are needed for scales of the KV cache per head."""
    from slidesparse.vllm_patch.config import SlideSparseConfig

    language = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2)
    for hf_config in (language, SimpleNamespace(text_config=language)):
        block = config("slided", method=QUANT_METHOD)
        SlideSparseConfig.override_quantization_method(block, None, hf_config)
        assert (block["total_num_heads"], block["total_num_kv_heads"]) == (8, 2)
    block = config("slided", method=QUANT_METHOD)
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


def test_head_of_another_dtype_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from slidesparse.vllm_patch import compat
    from slidesparse.vllm_patch.scheme import SlideSparseScheme

    layer_scheme, model = object.__new__(SlideSparseScheme), SimpleNamespace()
    monkeypatch.setattr(compat, "current_config", lambda: SimpleNamespace(model_config=model))
    for backend, dtype, model.dtype, is_other_head in (
        ("hopper", torch.float32, torch.bfloat16, True),
        ("hopper", torch.float32, torch.float32, False),  # the whole model: an error
        ("hopper", torch.bfloat16, torch.bfloat16, False),
        ("cusparselt", torch.float32, torch.bfloat16, False),  # which writes it
    ):
        layer_scheme.backend = gemm.get(backend)
        assert layer_scheme._is_other_head(dtype) is is_other_head


@pytest.mark.parametrize("stages", [1, 2])
def test_pruned_layers_that_vllm_builds_unasked_are_refused(
    monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    """In each stage of a pipeline, too, but not beside a draft model, whose layers may have the same names."""
    from slidesparse.vllm_patch.config import SlideSparseConfig
    from vllm.config import vllm as current
    from vllm.model_executor.layers.linear import RowParallelLinear

    layer: Any = object.__new__(RowParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.quant_config, layer.prefix = None, LAYER
    made = SimpleNamespace(
        quant_config=SlideSparseConfig.from_config(config("dense")),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        speculative_config=SimpleNamespace(),
    )
    monkeypatch.setattr(current, "_current_vllm_config", made)
    torch.nn.ModuleList([layer])
    made.speculative_config = None
    with pytest.raises(ResolveError, match=f"^{LAYER}: this vLLM builds the layer without quantization"):
        torch.nn.ModuleList([layer])


def test_batch_invariance_is_refused_where_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    require_invariance("hopper", "fp8")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    require_invariance("hopper", "int8")
    message = "backend hopper sums FP8 products in an order that depends on.*or set DISABLE_SLIDESPARSE=1"
    with pytest.raises(BackendError, match=message):
        require_invariance("hopper", "fp8")


def test_batch_invariance_disables_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(gemm.get("hopper")), "unusable", lambda *_: None)
    assert resolve(config("dense"), Flags(backend="hopper"), on_cuda=True).fuse
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not resolve(config("dense"), Flags(backend="hopper"), on_cuda=True).fuse
    with pytest.raises(ResolveError, match="SLIDESPARSE_FUSE=1 computes norms in an order"):
        resolve(config("dense"), Flags(backend="hopper", fuse=True), on_cuda=True)
