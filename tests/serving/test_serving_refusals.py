"""Unsupported layers are left to vLLM's kernels and counted by reason; invalid checkpoints and flags are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from edits import SPARSE_FLAGS, edited, refused
from engines import STOCK, Engines, Request
from models import QWEN, converted, write_w8a8
from safetensors.torch import load_file

from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.pattern import SlidePattern

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 6:8 checkpoint in dense layout with SlideSparse metadata."""
    folder = tmp_path_factory.mktemp("pruned")
    return converted(write_w8a8(QWEN, folder / "qwen2-source"), folder / "qwen2-6_8", "6:8")


def test_unsupported_schemes_are_left_to_vllm_and_counted(
    engines: Engines, pruned: Path, tmp_path: Path
) -> None:
    """Static, asymmetric, unquantized and unpruned layers beside sparse ones give stock's tokens, and all are
    counted.

    Static ones have a zero point, which is INT8 like a weight.
    """
    group = json.loads((pruned / "config.json").read_text())["quantization_config"]["config_groups"][
        "group_0"
    ]
    weights, activations = group["weights"], group["input_activations"]
    static = {**activations, "strategy": "tensor", "dynamic": False, "symmetric": False}
    asymmetric = {**activations, "symmetric": False}
    groups = {
        "static": {"targets": ["re:.*0.mlp.down_proj"], "weights": weights, "input_activations": static},
        "asymmetric": {
            "targets": ["re:.*1.mlp.down_proj"],
            "weights": weights,
            "input_activations": asymmetric,
        },
        "group_0": {**group, "targets": ["re:.*(qkv|o|gate_up|q|k|v|gate|up)_proj"]},
    }
    generator = torch.Generator().manual_seed(1)
    dense = torch.randint(
        -60, 61, (QWEN.hidden, QWEN.heads * QWEN.head_dim), dtype=torch.int8, generator=generator
    )
    tensors = {
        "model.layers.0.mlp.down_proj.input_scale": torch.tensor([0.05]),
        "model.layers.0.mlp.down_proj.input_zero_point": torch.tensor([3], dtype=torch.int8),
        "model.layers.0.self_attn.o_proj.weight_scale": None,
        "model.layers.0.self_attn.o_proj.weight": torch.randn(dense.shape, generator=generator) * 0.05,
        "model.layers.1.self_attn.o_proj.weight": dense,
    }
    model = edited(
        pruned,
        tmp_path / "mixed",
        tensors,
        {
            "config_groups": groups,
            "ignore": ["lm_head", "model.layers.0.self_attn.o_proj"],
            "slidesparse": None,
        },
    )
    stock = engines.serve(model, env=STOCK)
    sparse = engines.serve(model, env=SPARSE_FLAGS)
    assert sparse.summary.startswith(
        "6:8 (2 of every 8 pruned): 4 layers sparse, 5 dense (1 asymmetric activations, 1 lm_head, 1 not quantized, "
        "1 static activations, 1 whose weights break the pattern)"
    ), sparse.summary
    assert sparse.tokens == stock.tokens


@pytest.mark.parametrize("missing", ["", "weight", "weight_scale", "bias"])
def test_missing_tensors_of_a_one_row_layer_are_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """The bias of a layer with one out-feature has the shape of its scale, [1]."""
    from slidesparse.vllm_patch import compat
    from slidesparse.vllm_patch.scheme import SlideSparseScheme
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Int8

    for attribute in ("rank", "world_size"):
        monkeypatch.setattr(f"vllm.model_executor.parameter.get_tensor_model_parallel_{attribute}", lambda: 0)
    for name in ("loads_dummy_weights", "loads_a_dump"):
        monkeypatch.setattr(compat, name, lambda: False)
    layer = torch.nn.Module()
    layer.weight_loader = lambda parameter, tensor: parameter.data.copy_(tensor)
    config: Any = SimpleNamespace(
        resolution=SimpleNamespace(layout="dense", backend="reference", path="sparse")
    )
    inner = CompressedTensorsW8A8Int8("tensor", is_static_input_scheme=False, input_symmetric=True)
    scheme = SlideSparseScheme(config, inner, "score", None, [SlidePattern(8)], "not pruned")
    sizes = {"input_size_per_partition": 16, "input_size": 16, "output_partition_sizes": [1]}
    scheme.create_weights(
        layer, **sizes, output_size=1, params_dtype=torch.float32, weight_loader=layer.weight_loader
    )
    layer.bias = torch.nn.Parameter(torch.empty(1))
    layer.bias.weight_loader = layer.weight_loader
    tensors = {
        "weight": torch.ones(1, 16, dtype=torch.int8),
        "weight_scale": torch.tensor([0.5]),
        "bias": torch.tensor([-2.0]),
    }
    for kind in tensors.keys() - {missing}:
        parameter = getattr(layer, kind)
        parameter.weight_loader(parameter, tensors[kind])
    if missing:
        with pytest.raises(CheckpointError, match=f"score: the checkpoint lacks its {missing}"):
            scheme.load_check.require_all(layer)
    else:
        scheme.load_check.require_all(layer)


def test_unpruned_model_with_sparse_flags_is_refused(engines: Engines, tmp_path: Path) -> None:
    model = str(write_w8a8(QWEN, tmp_path / "unpruned"))
    refused(
        engines,
        model,
        SPARSE_FLAGS,
        "0 layers sparse, 9 dense (1 lm_head, 8 whose weights break the pattern)",
        "nothing to run sparse",
        "slidesparse convert SRC OUT --sparsity 6:8",
        "DISABLE_SLIDESPARSE=1",
    )


def test_sharded_state_load_format_is_refused(engines: Engines, pruned: Path) -> None:
    """vLLM copies tensors of other shapes into parts of parameters, so packed weights must not get there."""
    refused(engines, str(pruned), {}, "--load-format sharded_state loads a dump", load_format="sharded_state")


def test_flags_that_contradict_quantization_option_are_refused(engines: Engines, pruned: Path) -> None:
    fragments = ("--quantization compressed-tensors", "remove one of the two")
    refused(engines, str(pruned), SPARSE_FLAGS, *fragments, quantization="compressed-tensors")
    stock = engines.ask(Request(str(pruned), options={"quantization": "compressed-tensors"}))
    assert not stock.error
    assert not stock.summary


def test_weights_that_violate_their_pattern_are_refused(
    engines: Engines, pruned: Path, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.down_proj"
    weight = load_file(pruned / "model.safetensors")[f"{name}.weight"]
    weight[5, 16:24] = 1  # row 5, block 2
    weight[9, 312:320] = 1
    model = edited(pruned, tmp_path / "broken", {f"{name}.weight": weight}, {})
    refused(
        engines,
        model,
        {},
        f"{name}: row 5, block 2 (columns from 16) has 8 non-zeros, 6:8 (2 of every 8 pruned) allows 6",
        "2 blocks of the layer break the pattern",
    )


def test_slided_weights_that_violate_2_4_are_refused(engines: Engines, pruned: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    slided = converted(pruned, tmp_path / "qwen2-slided", "6:8", "slided")
    weight = load_file(slided / "model.safetensors")[f"{name}.weight"]
    weight[0, 0:4] = 1
    model = edited(slided, tmp_path / "broken", {f"{name}.weight": weight}, {})
    refused(engines, model, {}, f"{name}: row 0, block 0", "4 non-zeros, 2:4 (2 of every 4 pruned) allows 2")


def test_stock_vllm_refuses_the_slided_layout_by_name(engines: Engines, pruned: Path, tmp_path: Path) -> None:
    slided = converted(pruned, tmp_path / "qwen2-slided", "6:8", "slided")
    refused(engines, str(slided), STOCK, "Unknown quantization method: slidesparse")


def test_fused_layer_of_differently_pruned_parts_is_refused(
    engines: Engines, pruned: Path, tmp_path: Path
) -> None:
    block = json.loads((pruned / "config.json").read_text())["quantization_config"]["slidesparse"]
    del block["layers"]["model.layers.0.self_attn.k_proj"]
    model = edited(pruned, tmp_path / "partly", {}, {"slidesparse": block})
    fragments = (
        "vLLM fuses q_proj, k_proj, v_proj into ",
        "k_proj unpruned",
        "convert again with the same pattern",
    )
    refused(engines, model, {}, *fragments)


def test_layers_without_metadata_tokens_equal_stock(engines: Engines, pruned: Path, tmp_path: Path) -> None:
    """One of the two layers obeys the pattern, the other does not."""
    block = json.loads((pruned / "config.json").read_text())["quantization_config"]["slidesparse"]
    for name in ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"):
        del block["layers"][name]
    dense = torch.ones(QWEN.hidden, QWEN.intermediate, dtype=torch.int8)
    tensors = {"model.layers.0.mlp.down_proj.weight": dense}
    model = edited(pruned, tmp_path / "partly", tensors, {"slidesparse": block})
    answer = engines.serve(model)
    assert "6 layers sparse, 2 not pruned (by the same backend), 1 dense (1 lm_head)" in answer.summary
    assert answer.tokens == engines.serve(model, env=STOCK).tokens


def test_flags_without_w8a8_layers_are_refused(engines: Engines, pruned: Path, tmp_path: Path) -> None:
    group = json.loads((pruned / "config.json").read_text())["quantization_config"]["config_groups"][
        "group_0"
    ]
    static = {**group, "input_activations": {**group["input_activations"], "dynamic": False}}
    model = edited(
        pruned, tmp_path / "static", {}, {"config_groups": {"group_0": static}, "slidesparse": None}
    )
    refused(
        engines,
        model,
        SPARSE_FLAGS,
        "no group of layers of this checkpoint is W8A8",
        "or unset USE_CUSPARSELT",
    )
    awq = edited(pruned, tmp_path / "awq", {}, {"quant_method": "awq", "slidesparse": None})
    refused(
        engines, awq, SPARSE_FLAGS, "this checkpoint is quantized by 'awq'", "slidesparse convert SRC OUT"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuSPARSELt can run here")
def test_unusable_backend_is_refused_before_loading(engines: Engines, pruned: Path) -> None:
    """A missing backend of a GPU is an error before weights are read; there is no fallback."""
    answer = engines.ask(Request(str(pruned), pretend_cuda=True))
    assert "no backend serves the sparse path on cuda" in answer.error + answer.log
    assert "Loading safetensors" not in answer.log
