"""Invalid input to a conversion: the error names the fault, and nothing is written."""

from __future__ import annotations

import copy
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    DOWN,
    LLAMA,
    MODEL,
    Q,
    bert,
    config_of,
    convert,
    edit_json,
    llama,
    refused,
    snapshot,
    tensors_of,
    w8a8,
    write,
)
from models import float_tensors

from slidesparse.calibrate.task import Calibration
from slidesparse.checkpoint import names as architectures
from slidesparse.checkpoint import storage
from slidesparse.checkpoint.inspection import inspect, verify
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.checkpoint.w8a8 import parse_block
from slidesparse.convert import stream
from slidesparse.convert.budget import Budget
from slidesparse.errors import CalibrationError, EnvironmentFault, SlideSparseError
from slidesparse.pattern import PatternError
from slidesparse.slide import bits

WEIGHT = f"{Q}.weight".replace(".", "__")


# Values, dtypes, shapes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_convert_refuses_nonfinite_weights(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    weight = float_tensors(LLAMA)[f"{Q}.weight"].to(dtype)
    weight[41, 7] = weight[63, 0] = value
    source = llama(tmp_path / "source", dtype=dtype, **{WEIGHT: weight})
    refused(source, f"{Q}.weight in {MODEL} holds 2 values", f"row 41, column 7 ({value})")


def test_convert_refuses_missing_part_of_a_fused_layer(tmp_path: Path) -> None:
    """Otherwise vLLM would serve uninitialized memory in its place."""
    source = llama(tmp_path / "source", **{WEIGHT: None})
    refused(source, f"{Q} is missing", "checkpoint is incomplete: fetch it again")


@pytest.mark.parametrize("out", ["closed/out", "closed/new/out"])
def test_convert_refuses_unwritable_folder_before_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    """Reading the source may take minutes; a dry run refuses the folder too."""
    source, closed = llama(tmp_path / "source"), tmp_path / "closed"
    closed.mkdir()
    monkeypatch.setattr(
        os, "access", lambda path, mode: path != closed or not mode & os.W_OK
    )  # root may write
    monkeypatch.setattr(stream, "_check_values", lambda *_: pytest.fail("the source was read"))
    for dry_run in (False, True):
        refused(source, f"{closed} is not writable", error=EnvironmentFault, out=out, dry_run=dry_run)


def test_convert_refuses_mount_point_as_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finished folder could not be renamed to it: "Device or resource busy"."""
    source, volume = llama(tmp_path / "source"), tmp_path / "out"
    volume.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == volume)
    refused(source, f"{volume} is where a disk or volume is mounted; name a folder in it")
    convert(source, volume / "model")


@pytest.mark.parametrize("make", [llama, w8a8, bert])
def test_convert_refuses_wrong_number_of_blocks(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """Nothing else shows that the first of several files, without their index, is incomplete."""
    source = make(tmp_path / "source")
    (source / MODEL).rename(source / "model-00001-of-00002.safetensors")
    edit_json(source / "config.json", num_hidden_layers=3)
    refused(source, "num_hidden_layers is 3, but", "has linear layers of 2 blocks;", "fetch it again")
    edit_json(source / "config.json", num_hidden_layers=1)
    refused(source, "num_hidden_layers is 1, but", "has linear layers of 2 blocks;", "fetch it again")


def test_convert_refuses_nonfinite_norms(tmp_path: Path) -> None:
    norm = torch.ones(64, dtype=torch.bfloat16)
    norm[5] = torch.nan
    source = llama(tmp_path / "source", model__norm__weight=norm)
    refused(source, "model.norm.weight", "element 5 (nan)")


@pytest.mark.parametrize("code", [0x7F, -1])
def test_convert_refuses_fp8_nan_codes(tmp_path: Path, code: int) -> None:
    source = w8a8(tmp_path / "source", "fp8")
    tensors = tensors_of(source)
    bits(tensors[f"{Q}.weight"])[3, 4] = code
    write(source, config_of(source), tensors)
    refused(source, f"{Q}.weight", "row 3, column 4 (nan)")


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.int8])
def test_convert_refuses_wrong_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    source = llama(tmp_path / "source", **{WEIGHT: torch.ones(64, 64, dtype=dtype)})
    refused(source, f"{Q}.weight is {storage.NAMES[dtype]}", "F32, F16, BF16")


@pytest.mark.parametrize("shape", [(64,), (2, 4, 8), (0, 64)])
def test_convert_refuses_wrong_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    source = llama(tmp_path / "source", **{WEIGHT: torch.ones(shape).bfloat16()})
    refused(source, f"{Q}.weight has shape {list(shape)}")


# Architectures and options


def test_convert_refuses_unknown_architectures(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    for value in ("MambaForCausalLM", None, [], {"a": 1}, [["LlamaForCausalLM"]]):
        edit_json(source / "config.json", architectures=[value] if isinstance(value, str) else value)
        named = repr(value) if isinstance(value, str) else "no architecture"
        message = refused(source, named, "Llama, ", "XLMRoberta, ", "--linear", "slidesparse inspect")
        assert len(message) < 600
    refused(bert(tmp_path / "bert", architecture="LlamaForCausalLM"), "none of the", "--linear")
    refused(bert(tmp_path / "gpt2", architecture="GPT2LMHeadModel"), "transposed", linear="dense")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_convert_refuses_tensor_names_with_wrapper_prefix(tmp_path: Path, prefix: str) -> None:
    source = llama(tmp_path / "source")
    write(source, config_of(source), {prefix + name: tensor for name, tensor in tensors_of(source).items()})
    message = refused(source, f"begin with {prefix!r}", "without its wrapper")
    assert "--linear" not in message


FUSED = "model.layers.1.mlp"


@pytest.mark.parametrize(
    ("options", "words", "error"),
    [
        ({"quant": "x"}, ["--quant 'x'", "int8, fp8"], CheckpointError),
        ({"layout": "x"}, ["--layout 'x'", "dense, slided"], CheckpointError),
        ({"method": "x"}, ["--method 'x'", "sparsegpt, wanda, magnitude, random"], CheckpointError),
        ({"ignore": ["mlp.(down"]}, ["--ignore 'mlp.(down'", "unterminated"], CheckpointError),
        ({"linear": "mlp.(down"}, ["--linear 'mlp.(down'"], CheckpointError),
        ({"ignore": ["o_proj", "down_porj"]}, ["--ignore 'down_porj'", "14 linear layers"], CheckpointError),
        ({"ignore": ["1.mlp.gate"]}, [f"{FUSED}.gate_proj but not {FUSED}.up_proj"], CheckpointError),
        ({"ignore": ["."]}, ["nothing is left"], CheckpointError),
        ({"skip": ["."]}, ["nothing is left"], CheckpointError),
        ({"skip": ["gate_proj"]}, ["--skip", f"not {FUSED.replace('1', '0')}.up_proj"], CheckpointError),
        ({"layer": ["down_proj"]}, ["--layer 'down_proj'", "REGEX=PATTERN"], CheckpointError),
        ({"layer": ["down_proj=7:8"]}, ["--layer 'down_proj=7:8'", "'7:8'"], PatternError),
        ({"layer": ["porj=6:8"]}, ["--layer 'porj'"], CheckpointError),
        ({"layer": ["q_proj=4:6"]}, ["--layer", "q_proj but not"], CheckpointError),
        ({"linear": "lm_head|embed"}, ["none of the 14 linear layers"], CheckpointError),
        ({"linear": "q_proj|k_proj"}, ["--linear", "covers", "q_proj but not", "v_proj"], CheckpointError),
        ({"method": "sparsegpt"}, ["--method sparsegpt", "--calib"], CalibrationError),
        ({"method": "wanda"}, ["--method wanda", "--calib"], CalibrationError),
        (
            {"method": "random", "calibration": Calibration("random")},
            ["--method random"],
            CalibrationError,
        ),
        ({"budget": Budget(zeros=0.2)}, ["--zeros 20%", "--calib"], CalibrationError),
    ],
)
def test_convert_refuses_invalid_options(
    tmp_path: Path, options: dict[str, Any], words: list[str], error: type[Exception]
) -> None:
    refused(llama(tmp_path / "source"), *words, error=error, **options)


ENDLESS = "(.*)*z$"


@pytest.mark.parametrize("option", ["ignore", "skip", "layer", "linear"])
def test_convert_refuses_slow_regexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setattr(architectures, "SECONDS", 1.0)
    value = {"layer": ["down_proj=8:10", f"{ENDLESS}=8:10"], "linear": ENDLESS}.get(
        option, ["o_proj", ENDLESS]
    )
    refused(llama(tmp_path / "source"), f"--{option} {ENDLESS!r} takes more than 1 s", **{option: value})


def test_convert_refuses_slow_regexes_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "SECONDS", 1.0)
    source = w8a8(tmp_path / "source")
    block = config_of(source)["quantization_config"]
    block["ignore"] += [r"re:.*\.(lm_head|.*norm)$", f"re:{ENDLESS}", "re:(a|b)*"]
    edit_json(source / "config.json", quantization_config=block)
    refused(source, f"the source's ignore list: {ENDLESS!r} takes more than 1 s")


@pytest.mark.parametrize(
    ("regex", "fact"),
    [("(" * 999, "(((...(("), ("a{99999999999}", "repetition"), ("a" * 1001, "more than 1000")],
)
def test_convert_refuses_invalid_regexes(tmp_path: Path, regex: str, fact: str) -> None:
    message = refused(llama(tmp_path / "source"), "--ignore", fact, ignore=[regex])
    assert len(message) < 500


# The output


def test_convert_refuses_the_current_folder_as_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = llama(tmp_path / "source")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(CheckpointError, match="is the current folder, which would be replaced"):
        convert(source, Path())
    assert Path().samefile(tmp_path / "out")


def test_convert_refuses_invalid_outputs(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    (tmp_path / "file").write_text("")
    refused(source, f"{tmp_path / 'full'} is not empty", out="full")
    refused(source, "is not empty", out="source")
    refused(source, "is a file", out="file")
    refused(source, f"below {tmp_path / 'file'}", out="file/new/below")
    refused(source, "inside the source", out="source/out")
    assert (tmp_path / "full" / "mine.txt").read_text() == "kept"


def test_convert_refuses_invalid_modules_json(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (source / "modules.json").write_text('[{"name": "1"}]')
    refused(source, "modules.json")


def test_convert_refuses_pickled_module_weights(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (source / "modules.json").write_text('[{"path": ""}, {"path": "2_Dense"}]')
    (source / "2_Dense").mkdir()
    (source / "2_Dense" / "pytorch_model.bin").write_bytes(b"a pickle")
    refused(source, "2_Dense/pytorch_model.bin", "safe_serialization")
    (source / "2_Dense" / MODEL).write_bytes(b"the same")
    assert convert(source, tmp_path / "out").left_out == ("2_Dense/pytorch_model.bin",)
    assert "2_Dense/model.safetensors" in snapshot(tmp_path / "out")


def test_convert_refuses_output_filled_by_another_process(tmp_path: Path) -> None:
    source, out = llama(tmp_path / "source"), tmp_path / "out"

    def fill(phase: str, done: int, total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "theirs").write_text("kept")

    with pytest.raises(CheckpointError, match="another process"):
        convert(source, out, progress=fill)
    assert snapshot(tmp_path).keys() == {*(f"source/{name}" for name in snapshot(source)), "out/theirs"}


def test_convert_checks_disk_space_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama(tmp_path / "source")
    convert(source, tmp_path / "first")
    needed = sum(len(raw) for name, raw in snapshot(tmp_path / "first").items() if name != "config.json")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    refused(source, "no space left", f"{needed / 1e6:.1f} MB", error=EnvironmentFault)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    convert(source, tmp_path / "out")


@pytest.mark.parametrize("call", [0, 1, 20])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_convert_reports_full_disk_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, number: int
) -> None:
    """pwrite fails as on a full disk: at the header, at the first tensor, in the middle."""
    calls, pwrite = [], os.pwrite

    def full(descriptor: int, view: memoryview, position: int) -> int:
        calls.append(position)
        if len(calls) > call:
            raise OSError(number, os.strerror(number))
        return pwrite(descriptor, view, position)

    monkeypatch.setattr(os, "pwrite", full)
    facts = "no space left", str(tmp_path), os.strerror(number)
    refused(llama(tmp_path / "source"), *facts, error=EnvironmentFault)
    assert len(calls) > call


def test_convert_reports_full_disk_while_syncing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refused(llama(tmp_path / "source"), "no space left", error=EnvironmentFault)


# Quantized sources


def group(block: dict[str, Any], part: str) -> dict[str, Any]:
    return block["config_groups"]["group_0"][part]


def second_group(block: dict[str, Any]) -> None:
    weights = {**group(block, "weights"), "num_bits": 4, "strategy": "group", "group_size": 128}
    block["config_groups"]["group_1"] = {"targets": ["re:.*mlp.*"], "weights": weights}


# A change of a W8A8 quantization_config, and the fact that its refusal names
KINDS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "method": (lambda b: b.update(quant_method="gptq"), "'gptq'"),
    "static": (lambda b: group(b, "input_activations").update(dynamic=False), "not quantized per token"),
    "per group": (
        lambda b: group(b, "input_activations").update(strategy="group"),
        "not quantized per token",
    ),
    "local": (lambda b: group(b, "input_activations").update(dynamic="local"), "not quantized per token"),
    "w8a16": (lambda b: b["config_groups"]["group_0"].update(input_activations=None), "W8A16"),
    "a16 float": (lambda b: group(b, "input_activations").update(type="float"), "another type"),
    "w4": (lambda b: group(b, "weights").update(num_bits=4), "4-bit 'int'"),
    "block": (lambda b: group(b, "weights").update(strategy="block"), "per 'block'"),
    "zero points": (lambda b: group(b, "weights").update(symmetric=False), "asymmetric or dynamic weights"),
    "outputs": (
        lambda b: b["config_groups"]["group_0"].update(output_activations={"num_bits": 8}),
        "outputs",
    ),
    "groups": (second_group, "4-bit 'int' weights in 'group_1'"),
    "no targets": (lambda b: b["config_groups"]["group_0"].pop("targets"), "no list of targets in 'group_0'"),
    "bad target": (
        lambda b: b["config_groups"]["group_0"].update(targets=["re:mlp.(up"]),
        "targets: 'mlp.(up'",
    ),
    "no weights": (lambda b: b["config_groups"]["group_0"].update(weights=None), "no weights in group_0"),
    "bad block": (
        lambda b: group(b, "weights").update(strategy="block", block_structure=[128]),
        "block_structure in 'group_0' [128]",
    ),
    "no groups": (lambda b: b.pop("config_groups"), "config_groups None"),
    "groups a list": (lambda b: b.update(config_groups=[1]), "config_groups [1]"),
    "groups a text": (lambda b: b.update(config_groups="W8A8"), "config_groups 'W8A8'"),
    "bits a list": (lambda b: group(b, "weights").update(num_bits=[8]), "[8]-bit"),
    "bad weights": (
        lambda b: b["config_groups"]["group_0"].update(weights="int8"),
        "no objects in 'group_0'",
    ),
    "bad sparsity": (lambda b: b.update(sparsity_config="dense, I think"), "'dense, I think'"),
    "bad group": (lambda b: b["config_groups"].update(group_0=3), "group_0"),
    "packed": (lambda b: b.update(format="pack-quantized"), "'pack-quantized'"),
    "bitmask": (lambda b: b.update(sparsity_config={"format": "marlin-24"}), "marlin-24"),
    "packed group": (
        lambda b: b["config_groups"]["group_0"].update(format="pack-quantized"),
        "'pack-quantized' in 'group_0'",
    ),
    "rotated": (lambda b: b.update(transform_config={"config_groups": {}}), "transform_config"),
    "ignore": (lambda b: b.update(ignore="lm_head"), "ignore list"),
    "bad regex": (lambda b: b.update(ignore=["re:mlp.(down"]), "'mlp.(down'"),
}


def test_convert_refuses_unsupported_quantization_configs(tmp_path: Path) -> None:
    source = w8a8(tmp_path / "source")
    for change, fact in KINDS.values():
        block = config_of(source)["quantization_config"]
        parse_block(block)
        change(block)
        with pytest.raises(CheckpointError) as error:
            parse_block(block)
        assert fact in str(error.value)
    edit_json(source / "config.json", quantization_config=block)  # the last of them
    refused(source, fact)


def test_convert_drops_the_serving_stamp(tmp_path: Path) -> None:
    """The plugin writes the stamp into the config, in memory."""
    source = w8a8(tmp_path / "source")
    block = config_of(source)["quantization_config"]
    edit_json(
        source / "config.json", quantization_config={**block, "slidesparse_serving": {"pattern": "4:6"}}
    )
    convert(source, tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "again", layout="slided")
    for name in ("out", "again"):
        assert "slidesparse_serving" not in config_of(tmp_path / name)["quantization_config"]


def test_convert_refuses_w8a8_that_contradicts_its_config(tmp_path: Path) -> None:
    source = w8a8(tmp_path / "source")
    refused(source, "--quant fp8", "int8 already", quant="fp8")
    refused(source, "int8 ones", error=CalibrationError, calibration=Calibration("random", 1, 8))
    config, tensors = config_of(source), tensors_of(source)
    block = config["quantization_config"]
    edit_json(source / "config.json", quantization_config={**block, "ignore": ["lm_head"]})
    refused(source, f"{DOWN}.weight is BF16", "promises I8")
    edit_json(source / "config.json", quantization_config=block)
    for scale in (torch.ones(63, 1), torch.ones(1), torch.ones(64, 1, dtype=torch.int32)):
        write(source, config, {**tensors, f"{Q}.weight_scale": scale})
        refused(source, f"{Q}.weight_scale is", "64 rows")
    del tensors[f"{Q}.weight_scale"]
    write(source, config, tensors)
    refused(source, f"no tensor {Q}.weight_scale")
    source = w8a8(tmp_path / "fp8", "fp8")
    block = config_of(source)["quantization_config"]
    for part in ("weights", "input_activations"):
        group(block, part)["type"] = "int"
    edit_json(source / "config.json", quantization_config=block)
    refused(source, "F8_E4M3", "promises I8")


def test_convert_refuses_w8a8_without_quantization_config(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", **{f"{Q}.weight_scale".replace(".", "__"): torch.ones(64, 1)})
    refused(source, f"{Q}.weight_scale but no quantization_config")


# Sources that are already pruned


@pytest.fixture(params=["dense", "slided"])
def converted(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    convert(llama(tmp_path / "source"), tmp_path / "converted", layout=request.param)
    return tmp_path / "converted"


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"pattern": "4:6"}, "asks for 4:6"),
        ({"ignore": ["down"]}, "--ignore"),
        ({"linear": "down"}, "--linear"),
        ({"skip": ["q_proj"]}, "--skip"),
        ({"layer": ["down_proj=8:10"]}, "--layer"),
        ({"method": "random"}, "--method random"),
        ({"calibration": Calibration("random", 1, 8)}, "--calib"),
    ],
)
def test_convert_refuses_options_for_a_pruned_source(
    converted: Path, options: dict[str, Any], fact: str
) -> None:
    refused(converted, fact, "already pruned", **options)


def test_convert_refuses_violated_pattern(converted: Path) -> None:
    tensors = tensors_of(converted)
    tensors[f"{Q}.weight"][45] = 0
    tensors[f"{Q}.weight"][45, 16:24] = 1  # a whole block; in the slided layout two whole windows
    write(converted, config_of(converted), tensors)
    message = refused(converted, f"{Q}: row 45", error=PatternError)
    if config_of(converted)["quantization_config"]["slidesparse"]["layout"] == "dense":
        assert "row 45, block 2 (columns from 16) has 8 non-zeros" in message


def layer_of(block: dict[str, Any]) -> dict[str, Any]:
    return block["slidesparse"]["layers"][Q]


# A false entry in the quantization_config of a converted checkpoint, and the fact that each command names
METADATA: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "absent layer": (
        lambda b: b["slidesparse"]["layers"].update(ghost={"pattern": "6:8", "in_features": 64}),
        "no tensor ghost.weight",
    ),
    "another size": (lambda b: layer_of(b).update(in_features=72), "72 in-features"),
    "infinite": (lambda b: layer_of(b).update(in_features=float("inf")), f"{Q!r}: in_features is inf"),
    "no layer": (lambda b: b["slidesparse"].update(layers={}), "lists no layer"),
    "newer": (lambda b: b["slidesparse"].update(version=99), "version: found 99"),
    "groups a list": (lambda b: b.update(config_groups=[]), "config_groups []"),
    "another type": (lambda b: group(b, "weights").update(type="float"), "activations of another type"),
    "another scale": (lambda b: group(b, "weights").update(strategy="tensor"), "scales per tensor"),
    "embedding": (
        lambda b: b["slidesparse"]["layers"].update(
            {"model.embed_tokens": {"pattern": "6:8", "in_features": 64}}
        ),
        "model.embed_tokens.weight is BF16",
    ),
}
SLIDED = {
    "another pattern": (lambda b: layer_of(b).update(pattern="8:10"), f"{Q}.weight has shape [64, 96]"),
    "unlisted": (
        lambda b: b["slidesparse"]["layers"].pop(DOWN),
        f"{DOWN}.weight, which they do not list, has 132",
    ),
    "another layout": (lambda b: b["slidesparse"].update(layout="dense"), "in the dense layout have"),
}
DENSE = {"another layout": (lambda b: b["slidesparse"].update(layout="slided"), "in the slided layout have")}


def commands_refuse(folder: Path, fact: str) -> None:
    """Check that `convert`, `inspect` and `verify` refuse with the same message."""
    message = refused(folder, fact, error=SlideSparseError)
    assert "\n" not in message
    for read in (inspect, lambda folder: verify(folder, folder)):
        with pytest.raises(SlideSparseError) as caught:
            read(folder)
        assert fact in str(caught.value)


@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_commands_refuse_inconsistent_metadata(tmp_path: Path, layout: str) -> None:
    source = llama(tmp_path / "source")
    convert(source, tmp_path / "out0", layout=layout)
    valid = config_of(tmp_path / "out0")["quantization_config"]
    for change, fact in [*METADATA.values(), *(SLIDED if layout == "slided" else DENSE).values()]:
        block = copy.deepcopy(valid)
        change(block)
        edit_json(tmp_path / "out0" / "config.json", quantization_config=block)
        commands_refuse(tmp_path / "out0", fact)


def test_convert_refuses_slidesparse_method_without_metadata(converted: Path) -> None:
    block = config_of(converted)["quantization_config"]
    del block["slidesparse"]
    edit_json(converted / "config.json", quantization_config={**block, "quant_method": "slidesparse"})
    refused(converted, "'slidesparse' but has no")


@pytest.mark.parametrize(
    ("tensor", "become", "fact"),
    [
        ("weight", None, f"no tensor {Q}.weight"),
        ("weight", torch.bfloat16, f"{Q}.weight is BF16"),
        ("weight_scale", None, f"no tensor {Q}.weight_scale"),
        ("weight_scale", torch.int8, f"{Q}.weight_scale is I8"),
        ("weight_scale", float("nan"), f"{Q}.weight_scale holds NaN"),
        ("weight_scale", float("inf"), f"{Q}.weight_scale holds"),
    ],
)
def test_commands_refuse_missing_or_invalid_tensors(
    converted: Path, tensor: str, become: Any, fact: str
) -> None:
    tensors, name = tensors_of(converted), f"{Q}.{tensor}"
    if become is None:
        del tensors[name]
    elif isinstance(become, float):
        tensors[name][3] = become
    else:
        tensors[name] = tensors[name].to(become)
    write(converted, config_of(converted), tensors)
    commands_refuse(converted, fact)


def test_commands_refuse_sizes_that_contradict_config(converted: Path) -> None:
    edit_json(converted / "config.json", intermediate_size=80)
    commands_refuse(
        converted, f"metadata of {DOWN} declare 88 in-features, but the sizes in config.json imply 80"
    )
