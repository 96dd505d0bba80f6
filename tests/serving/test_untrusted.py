"""Checkpoints with false metadata or invalid tensors, and flags that do not fit the model, in real vLLM."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from edits import SPARSE_FLAGS, edited, refused
from engines import Engines, Request
from models import QWEN, converted, write_float, write_w8a8
from safetensors.torch import load_file

from slidesparse.evaluate.engine import summaries

pytestmark = pytest.mark.vllm

DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model as BF16, as unpruned W8A8, and at 6:8 in both layouts."""
    folder = tmp_path_factory.mktemp("checkpoints")
    unpruned = write_w8a8(QWEN, folder / "w8a8")
    return {
        "float": write_float(QWEN, folder / "float"),
        "w8a8": unpruned,
        "dense": converted(unpruned, folder / "dense", "6:8"),
        "slided": converted(unpruned, folder / "slided", "6:8", "slided"),
    }


def quantization(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config["quantization_config"]


def test_invalid_flags_do_not_stop_other_models(engines: Engines, checkpoints: dict[str, Path]) -> None:
    """Log lines state that a flag has no effect on the model, and which variables are not read."""
    environment = {"SPARSITY": "0.5", "SLIDESPARSE_FUSED": "1"}
    assert not engines.serve(checkpoints["float"], env=environment).summary
    unpruned = engines.serve(checkpoints["w8a8"], env=environment)
    assert "SPARSITY has no effect on this checkpoint" in unpruned.log
    assert "variables that SlideSparse does not read: SLIDESPARSE_FUSED" in unpruned.log
    assert not unpruned.summary


def test_quantization_option_with_a_float_model_is_refused(
    engines: Engines, checkpoints: dict[str, Path]
) -> None:
    option = "--quantization slidesparse is for a quantized checkpoint"
    refused(engines, str(checkpoints["float"]), {}, option, quantization="slidesparse")


def test_disable_flag_overrides_invalid_flags(engines: Engines, checkpoints: dict[str, Path]) -> None:
    invalid = {"DISABLE_SLIDESPARSE": "1", "SPARSITY": "lots", "USE_CUSPARSELT": "1", "USE_CUBLASLT": "maybe"}
    assert not engines.serve(checkpoints["dense"], env=invalid).summary
    ambiguous = {"DISABLE_SLIDESPARSE": "on"}
    refused(engines, str(checkpoints["dense"]), ambiguous, "DISABLE_SLIDESPARSE='on': use 1 or 0")


def test_stamp_in_the_checkpoint_is_ignored(
    engines: Engines, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The plugin itself writes the stamp into the config, in memory."""
    expected = engines.serve(checkpoints["dense"])
    stamp = {"path": "dense", "backend": "hopper", "pattern": "4:6", "profile": True}
    planted = edited(checkpoints["dense"], tmp_path / "planted", {}, {"slidesparse_serving": stamp})
    answer = engines.serve(planted)
    assert answer.summary == expected.summary
    assert answer.tokens == expected.tokens


def test_draft_model_is_resolved_in_the_front_end(engines: Engines, checkpoints: dict[str, Path]) -> None:
    draft = {"model": str(checkpoints["dense"]), "num_speculative_tokens": 2, "method": "draft_model"}
    answer = engines.serve(  # without generation: not every CPU build has the kernels that drafts need
        checkpoints["dense"],
        env={"USE_CUBLASLT": "1"},
        task="strip_env",
        options={"speculative_config": draft},
        work={"prompts": []},
    )
    assert [served["path"] for served in summaries(answer.log)] == ["dense", "dense"]


def test_slided_layer_without_metadata_is_refused(
    engines: Engines, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """vLLM's loader would narrow [N, K'] to the first K columns."""
    block = copy.deepcopy(quantization(checkpoints["slided"])["slidesparse"])
    del block["layers"][DOWN]
    model = edited(checkpoints["slided"], tmp_path / "out", {}, {"slidesparse": block})
    refused(engines, model, {}, DOWN, str(QWEN.intermediate))


def test_slided_checkpoint_without_metadata_is_refused(
    engines: Engines, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A flag does not replace the metadata, which describe how the weights are stored."""
    model = edited(checkpoints["slided"], tmp_path / "out", {}, {"slidesparse": None})
    for environment in ({}, SPARSE_FLAGS):
        refused(
            engines, model, environment, "names slidesparse as its method but lacks the block 'slidesparse'"
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ignore": "lm_head"}, "ignore is 'lm_head', it must be a list of texts"),
        ({"ignore": [None]}, "ignore is [None], it must be a list of texts"),
        ({"ignore": ["re:("]}, "ignore holds 're:(', which is no regular expression"),
        (
            {"ignore": ["lm_head", DOWN]},
            f"{DOWN}: the metadata say that it was pruned, but ignore and targets",
        ),
        (
            {"targets": ["re:nothing"]},
            "qkv_proj: the metadata say that it was pruned, but ignore and targets",
        ),
        ({"targets": "Linear"}, "targets of 'group_0' is 'Linear', it must be a list of texts"),
        ({"kv_cache_scheme": [1]}, "kv_cache_scheme is [1], it must be an object or null"),
        (
            {"format": "zipped"},
            "qkv_proj: vLLM does not support the quantization that quantization_config declares",
        ),
    ],
)
def test_malformed_quantization_config_is_refused(
    engines: Engines, checkpoints: dict[str, Path], tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    if "targets" in changed:
        group = quantization(checkpoints["dense"])["config_groups"]["group_0"]
        changed = {"config_groups": {"group_0": {**group, **changed}}}
    refused(engines, edited(checkpoints["dense"], tmp_path / "out", {}, changed), {}, message)


@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_wrong_in_features_in_the_metadata_are_refused(
    engines: Engines, checkpoints: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    block = copy.deepcopy(quantization(checkpoints[layout])["slidesparse"])
    block["layers"][DOWN]["in_features"] = QWEN.intermediate + 1
    model = edited(checkpoints[layout], tmp_path / "out", {}, {"slidesparse": block})
    refused(
        engines, model, {}, f"{DOWN}: the metadata say {QWEN.intermediate + 1} in-features, the model has"
    )


def test_packed_weight_beside_a_plain_one_is_refused(
    engines: Engines, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """vLLM would keep the one that it loads last."""
    packed = converted(checkpoints["w8a8"], tmp_path / "packed", "6:8", "packed")
    weight = load_file(checkpoints["w8a8"] / "model.safetensors")[f"{DOWN}.weight"]
    model = edited(packed, tmp_path / "both", {f"{DOWN}.weight": weight}, {})
    refused(engines, model, {}, f"{DOWN}: the checkpoint holds a weight twice, packed and as it is")


def test_slided_weight_in_two_windows_is_refused(
    engines: Engines, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Each of the two windows obeys 2:4."""
    weight = load_file(checkpoints["slided"] / "model.safetensors")[f"{DOWN}.weight"]
    weight[3, :12] = 0
    weight[3, 2] = weight[3, 4] = 1
    model = edited(checkpoints["slided"], tmp_path / "out", {f"{DOWN}.weight": weight}, {})
    refused(engines, model, {}, f"{DOWN}: a weight stands in two windows")


@pytest.mark.parametrize(
    ("layout", "tensor", "become", "message"),
    [
        ("dense", "weight", None, "lacks its weight"),
        ("slided", "weight", None, "lacks its weight"),
        ("dense", "weight_scale", None, "lacks its weight_scale"),
        ("dense", "weight_scale", float("nan"), "weight_scale holds NaN"),
        ("dense", "weight", torch.bfloat16, "holds torch.bfloat16 weights"),
        ("slided", "weight", torch.bfloat16, "holds torch.bfloat16 weights"),
        ("dense", "bias", None, "lacks its bias: 2 of its 3 parts"),
        ("dense", "bias", float("nan"), "bias holds NaN"),
        ("dense", "weight_scale", slice(31), "weight_scale of shape [31, 1] does not fit the layer (another"),
        ("dense", "weight", slice(31), "weight of shape [31,"),
        ("slided", "weight", slice(31), "weight of shape [31,"),
    ],
)
def test_missing_or_nonfinite_tensors_are_refused(
    engines: Engines,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    layout: str,
    tensor: str,
    become: Any,
    message: str,
) -> None:
    in_qkv = tensor != "weight_scale"
    layer = "model.layers.1.self_attn.k_proj" if in_qkv else DOWN
    values = load_file(checkpoints[layout] / "model.safetensors")[f"{layer}.{tensor}"]
    if isinstance(become, float):
        values[3] = become
    if isinstance(become, slice):
        values, become = values[become].contiguous(), values.dtype
    replacement = None if become is None else values.to(become) if isinstance(become, torch.dtype) else values
    model = edited(checkpoints[layout], tmp_path / "out", {f"{layer}.{tensor}": replacement}, {})
    fused_layer = "model.layers.1.self_attn.qkv_proj" if in_qkv else DOWN
    refused(engines, model, {}, fused_layer, message)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_nan_codes_are_refused(engines: Engines, tmp_path: Path, code: int) -> None:
    source = converted(write_w8a8(QWEN, tmp_path / "w8a8", "fp8"), tmp_path / "pruned", "6:8")
    weight = load_file(source / "model.safetensors")[f"{DOWN}.weight"]
    row = weight[3].view(torch.uint8)
    row[int(row.nonzero()[0])] = code
    model = edited(source, tmp_path / "out", {f"{DOWN}.weight": weight}, {})
    refused(engines, model, {}, f"{DOWN}: weight holds NaN")


def test_kv_scales_per_head_do_not_break_slided_checkpoints(
    engines: Engines, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """vLLM adds the entries that KV scales per head need only if the method is named compressed-tensors."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}
    model = edited(checkpoints["slided"], tmp_path / "out", {}, {"kv_cache_scheme": scheme})
    answer = engines.ask(Request(model))
    assert "AssertionError" not in answer.error, answer.log[-3000:]
