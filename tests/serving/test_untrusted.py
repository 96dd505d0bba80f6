"""Checkpoints that claim what is not so, and flags that mean others: on the objects that vLLM itself passes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from edits import SPARSE_FLAGS, edited, refused
from engines import Answer, Engines, Request
from models import QWEN, converted, write_float, write_w8a8
from safetensors.torch import load_file

pytestmark = pytest.mark.vllm

DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model as BF16, as unpruned W8A8, and at 6:8 in both layouts."""
    folder = tmp_path_factory.mktemp("made")
    plain = write_w8a8(QWEN, folder / "w8a8")
    return {
        "float": write_float(QWEN, folder / "float"),
        "w8a8": plain,
        "dense": converted(plain, folder / "dense", "6:8"),
        "slided": converted(plain, folder / "slided", "6:8", "slided"),
    }


def quantization(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def served(engines: Engines, model: Path | str, **request: Any) -> Answer:
    answer = engines.ask(Request(str(model), **request))
    assert not answer.error, f"{answer.error}\n{answer.log[-4000:]}"
    return answer


@pytest.mark.parametrize("environment", [{"SPARSITY": "0.5"}, {"SLIDESPARSE_BACKEND": "none"}])
def test_variables_of_others_do_not_stop_other_models(
    engines: Engines, made: dict[str, Path], environment: dict[str, str]
) -> None:
    """One line says that they have no effect on a float model."""
    answer = served(engines, made["float"], env=environment)
    assert f"no effect on {made['float']}, which is not quantized: {next(iter(environment))}" in answer.log
    assert not answer.summary
    plain = served(engines, made["w8a8"], env=environment)
    assert f"{next(iter(environment))} has no effect on this checkpoint" in plain.log
    assert not plain.summary


def test_a_path_flag_on_a_float_model(engines: Engines, made: dict[str, Path]) -> None:
    for environment in (SPARSE_FLAGS, {"USE_CUBLASLT": "1"}):
        flag = next(iter(environment))
        refused(
            engines,
            str(made["float"]),
            environment,
            f"{flag} is set, but",
            "is not quantized",
            "slidesparse convert",
        )
    refused(
        engines,
        str(made["float"]),
        {},
        "--quantization slidesparse is for a quantized checkpoint",
        quantization="slidesparse",
    )


def test_everything_is_off_when_it_is_switched_off(engines: Engines, made: dict[str, Path]) -> None:
    nonsense = {
        "DISABLE_SLIDESPARSE": "1",
        "SPARSITY": "lots",
        "USE_CUSPARSELT": "1",
        "USE_CUBLASLT": "maybe",
    }
    assert not served(engines, made["dense"], env=nonsense).summary
    unclear = {"DISABLE_SLIDESPARSE": "on"}
    refused(engines, str(made["dense"]), unclear, "DISABLE_SLIDESPARSE='on': use 1 or 0")


@pytest.mark.parametrize("backend", ["hopper", None, 3])
def test_a_planted_stamp_decides_nothing(
    engines: Engines, made: dict[str, Path], tmp_path: Path, backend: Any
) -> None:
    """It is what the plugin itself writes into the config, in memory."""
    plain = served(engines, made["dense"])
    stamp = {"path": "dense", "backend": backend, "pattern": "4:6", "profile": True}
    planted = edited(made["dense"], tmp_path / "planted", {}, {"slidesparse_serving": stamp})
    answer = served(engines, planted)
    assert answer.summary == plain.summary
    assert answer.tokens == plain.tokens


def test_the_stamp_reaches_workers(engines: Engines, made: dict[str, Path]) -> None:
    """Whose environment has no flags, as on Ray; in the config that vLLM itself hands to them."""
    with_flags = served(engines, made["dense"], env={"USE_CUBLASLT": "1"}, task="strip_env")
    assert "on the cuBLASLt path" in with_flags.summary


def test_a_draft_is_resolved_in_the_front_end(engines: Engines, made: dict[str, Path]) -> None:
    draft = {"model": str(made["dense"]), "num_speculative_tokens": 2, "method": "draft_model"}
    answer = served(  # it generates nothing: not every CPU build has the kernels that drafts want
        engines,
        made["dense"],
        env={"USE_CUBLASLT": "1"},
        task="strip_env",
        options={"speculative_config": draft},
        work={"prompts": []},
    )
    lines = [line for line in answer.log.splitlines() if "SlideSparse " in line and "layers" in line]
    assert len(lines) == 2
    assert all("on the cuBLASLt path" in line for line in lines)


def test_a_slided_layer_that_the_metadata_lacks(
    engines: Engines, made: dict[str, Path], tmp_path: Path
) -> None:
    """Its loader would narrow [N, K'] to the first K columns."""
    block = copy.deepcopy(quantization(made["slided"])["slidesparse"])
    del block["layers"][DOWN]
    model = edited(made["slided"], tmp_path / "out", {}, {"slidesparse": block})
    refused(engines, model, {}, DOWN, str(QWEN.intermediate))


def test_metadata_that_are_gone(engines: Engines, made: dict[str, Path], tmp_path: Path) -> None:
    """A flag does not stand in for them: nobody knows any more how the weights are stored."""
    model = edited(made["slided"], tmp_path / "out", {}, {"slidesparse": None})
    for environment in ({}, SPARSE_FLAGS):
        refused(
            engines, model, environment, "names slidesparse as its method but lacks the block 'slidesparse'"
        )


@pytest.mark.parametrize(
    ("changed", "words"),
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
        ({"format": "zipped"}, "qkv_proj: vLLM serves no layer quantized as quantization_config says"),
    ],
)
def test_quantization_that_vllm_would_trip_over(
    engines: Engines, made: dict[str, Path], tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    if "targets" in changed:
        group = quantization(made["dense"])["config_groups"]["group_0"]
        changed = {"config_groups": {"group_0": {**group, **changed}}}
    refused(engines, edited(made["dense"], tmp_path / "out", {}, changed), {}, words)


@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_in_features_that_are_not_the_models(
    engines: Engines, made: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    block = copy.deepcopy(quantization(made[layout])["slidesparse"])
    block["layers"][DOWN]["in_features"] = QWEN.intermediate + 1
    model = edited(made[layout], tmp_path / "out", {}, {"slidesparse": block})
    refused(
        engines, model, {}, f"{DOWN}: the metadata say {QWEN.intermediate + 1} in-features, the model has"
    )


def test_slided_weights_that_are_the_form_of_none(
    engines: Engines, made: dict[str, Path], tmp_path: Path
) -> None:
    """A weight stands in two windows, each of which is 2:4."""
    weight = load_file(made["slided"] / "model.safetensors")[f"{DOWN}.weight"]
    weight[3, :12] = 0
    weight[3, 2] = weight[3, 4] = 1
    model = edited(made["slided"], tmp_path / "out", {f"{DOWN}.weight": weight}, {})
    refused(engines, model, {}, f"{DOWN}: a weight stands in two windows")


@pytest.mark.parametrize("layout", ["dense", "slided"])
@pytest.mark.parametrize(
    ("tensor", "become", "words"),
    [
        ("weight", None, "lacks its weight"),
        ("weight_scale", None, "lacks its weight_scale"),
        ("weight_scale", float("nan"), "weight_scale holds NaN"),
        ("weight_scale", float("inf"), "weight_scale holds NaN"),
        ("weight_scale", -0.5, "weight_scale holds NaN, Inf or negative"),
        ("weight", torch.bfloat16, "holds torch.bfloat16 weights"),
        ("bias", None, "lacks its bias: 2 of its 3 parts"),
        ("bias", float("nan"), "bias holds NaN"),
        ("weight_scale", slice(31), "weight_scale of shape [31, 1] does not fit the layer (another shape is"),
        ("weight", slice(31), "weight of shape [31,"),
    ],
)
def test_tensors_that_are_missing_or_no_numbers(
    engines: Engines, made: dict[str, Path], tmp_path: Path, layout: str, tensor: str, become: Any, words: str
) -> None:
    in_qkv = tensor != "weight_scale"
    layer = "model.layers.1.self_attn.k_proj" if in_qkv else DOWN
    found = load_file(made[layout] / "model.safetensors")[f"{layer}.{tensor}"]
    if isinstance(become, float):
        found[3] = become
    if isinstance(become, slice):
        found, become = found[become].contiguous(), found.dtype
    other = None if become is None else found.to(become) if isinstance(become, torch.dtype) else found
    model = edited(made[layout], tmp_path / "out", {f"{layer}.{tensor}": other}, {})
    vllms_name = "model.layers.1.self_attn.qkv_proj" if in_qkv else DOWN
    refused(engines, model, {}, vllms_name, words)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_codes_that_are_nan(engines: Engines, tmp_path: Path, code: int) -> None:
    source = converted(write_w8a8(QWEN, tmp_path / "w8a8", "fp8"), tmp_path / "pruned", "6:8")
    weight = load_file(source / "model.safetensors")[f"{DOWN}.weight"]
    row = weight[3].view(torch.uint8)
    row[int(row.nonzero()[0])] = code
    model = edited(source, tmp_path / "out", {f"{DOWN}.weight": weight}, {})
    refused(engines, model, {}, f"{DOWN}: weight holds NaN")


def test_heads_of_kv_caches_are_told(engines: Engines, made: dict[str, Path], tmp_path: Path) -> None:
    """A slided checkpoint is no compressed-tensors one by name, so vLLM does not add what KV scales by head need."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}
    model = edited(made["slided"], tmp_path / "out", {}, {"kv_cache_scheme": scheme})
    answer = engines.ask(Request(model))
    assert "AssertionError" not in answer.error, answer.log[-3000:]
