"""The command line as a user meets it: exit codes, stdout and stderr, and no torch where none is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import DOWN, LLAMA, MODEL, Q, config_of, llama, tensors_of, write
from rich.console import Console
from typer.testing import CliRunner

from slidesparse import __version__, cli
from slidesparse.bench import convert as bench
from slidesparse.cli import app

ROOT = Path(__file__).parent.parent


class Done:
    """The outcome of a command run in this process."""

    def __init__(self, *arguments: object) -> None:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama(tmp_path / "source")


@pytest.fixture
def converted(source: Path, tmp_path: Path) -> Path:
    assert Done("convert", source, tmp_path / "converted", "--sparsity", "6:8").code == 0
    return tmp_path / "converted"


@pytest.mark.parametrize("sparsity", ["6:8", "2_8"])
def test_convert_summarizes_on_stdout(source: Path, tmp_path: Path, sparsity: str) -> None:
    out = tmp_path / "two words"
    done = Done(
        "convert", source, out, "--sparsity", sparsity, "--ignore", r"0.*down", "--ignore", "self_attn"
    )
    assert done.code == 0
    assert done.err.startswith("warning: pruned by magnitude, without calibration data, which costs")
    assert len(done.err.splitlines()) == 1
    lines = done.out.splitlines()
    assert lines[:2] == [
        "pattern   6:8 (2 of every 8 pruned); as a flag, SPARSITY=2_8",
        "layers    5 in int8 W8A8, dense layout",
    ]
    assert lines[2].startswith(f"kept      9 as in the source (--ignore): {DOWN}, model.layers.0.self_attn.")
    assert lines[2].endswith("_proj, ...")
    assert lines[3] == "kept      1 as in the source (not a linear layer of a block): lm_head"
    before, after = (
        sum(tensor.nbytes for tensor in tensors_of(folder).values()) / 1e6 for folder in (source, out)
    )
    assert lines[4].startswith(f"bytes     {before:.1f} MB -> {after:.1f} MB in ")
    assert lines[5:] == [f"serve     vllm serve '{out}'"]


@pytest.mark.parametrize("layout", ["dense", "slided"])
@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_options_reach_the_conversion(source: Path, tmp_path: Path, layout: str, quant: str) -> None:
    options = ("--quant", quant, "--layout", layout, "--method", "random", "--seed", "5")
    assert Done("convert", source, tmp_path / "out", "-s", "4:6", *options).code == 0
    block = config_of(tmp_path / "out")["quantization_config"]
    assert (block["slidesparse"]["layout"], block["slidesparse"]["pattern"]) == (layout, "4:6")
    assert block["format"] == {"int8": "int-quantized", "fp8": "float-quantized"}[quant]
    other = tmp_path / "other"
    assert Done("convert", source, other, "-s", "4:6", *options[:-1], "6").code == 0
    assert (other / MODEL).read_bytes() != (tmp_path / "out" / MODEL).read_bytes()


def test_linear_for_an_unknown_architecture(tmp_path: Path) -> None:
    tensors = tensors_of(llama(tmp_path / "model"))
    source = write(tmp_path / "source", {"architectures": ["NewModel"]}, tensors)
    done = Done("convert", source, tmp_path / "out", "-s", "6:8")
    assert done.code == 2
    assert "'NewModel' is not known" in done.err
    assert Done("convert", source, tmp_path / "out", "-s", "6:8", "--linear", r"mlp\..*_proj$").code == 0
    layers = config_of(tmp_path / "out")["quantization_config"]["slidesparse"]["layers"]
    assert sorted(layers) == sorted(name for name in LLAMA.linears() if "mlp" in name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "'nonsense' is not a pattern; use one of 2:4, 4:6, 6:8"),
        ("5:7", "block length 7, but blocks of 4 or more, even"),
        ("4:8", "prunes 4 of every 8 weights, but the windows cover exactly 2"),
        ("8:6", "use one of"),
        ("", "is not a pattern"),
    ],
)
def test_sparsity_nonsense(source: Path, tmp_path: Path, text: str, words: str) -> None:
    done = Done("convert", source, tmp_path / "out", "--sparsity", text)
    assert done.code == 2
    assert f"error: --sparsity: sparsity {text!r}" in done.err
    assert words in done.err
    assert done.out == ""
    assert not (tmp_path / "out").exists()


def test_sparsity_is_required(source: Path, tmp_path: Path) -> None:
    done = Done("convert", source, tmp_path / "out")
    assert done.code == 2
    assert "--sparsity" in done.err


def test_unusable_input_exits_2(source: Path, tmp_path: Path) -> None:
    os.truncate(source / MODEL, 1000)
    for command in (
        ("convert", source, tmp_path / "out", "-s", "6:8"), ("inspect", source), ("verify", source, source),
    ):  # fmt: skip
        done = Done(*command)
        assert (done.code, done.out) == (2, "")
        assert f"error: {source / MODEL} is 1000 bytes" in done.err


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path) -> None:
    done = Done("inspect", tmp_path / "[red]model[/red]")
    assert done.code == 2
    assert "[red]model[/red] is not a folder" in done.err


def test_no_space_exits_3(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    done = Done("convert", source, tmp_path / "out", "-s", "6:8")
    assert done.code == 3
    assert "error: no space left for" in done.err


def test_a_folder_that_cannot_be_written_exits_3(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    done = Done("convert", source, tmp_path / "out", "-s", "6:8")
    assert done.code == 3
    assert f"error: Permission denied: {tmp_path}" in done.err


def test_interrupt_exits_130(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slidesparse import convert

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_write_tensors", interrupt)
    done = Done("convert", source, tmp_path / "out", "-s", "6:8")
    assert (done.code, done.out) == (130, "")
    assert "interrupted; nothing is left behind" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_inspect(converted: Path) -> None:
    done = Done("inspect", converted)
    assert done.code == 0
    assert "pattern 6:8 (dense layout)" in done.out
    (line,) = (line for line in done.out.splitlines() if Q in line)
    assert line.split() == [Q, "64", "x", "64", "I8", "6:8", "6:8", "0", "4,352", "1.500"]
    assert done.out.splitlines()[-1].startswith("14 layers, ")


@pytest.mark.parametrize("columns", [60, 200])
def test_inspect_hides_nothing_in_a_narrow_terminal(
    converted: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    terminal = Console(highlight=False, soft_wrap=True, force_terminal=True, color_system=None, width=columns)
    monkeypatch.setattr(cli, "out", terminal)
    lines = Done("inspect", converted).out.splitlines()
    (start,) = (i for i, line in enumerate(lines) if Q in line)
    row = lines[start : start + (3 if columns == 60 else 1)]
    assert max(map(len, row)) <= columns
    assert {"64", "x", "I8", "6:8", "4,352", "1.500"} <= set(
        " ".join(row).replace(",  ", " ").replace(", ", " ").split()
    )


def test_inspect_as_json(converted: Path) -> None:
    found = json.loads(Done("inspect", converted, "--json").out)
    assert (found["pattern"], found["layout"], found["violations"]) == ("6:8", "dense", 0)
    (layer,) = (layer for layer in found["layers"] if layer["name"] == Q)
    assert layer == {
        "name": Q, "out_features": 64, "in_features": 64, "dtype": "I8", "pattern": "6:8", "satisfies": "6:8",
        "violations": 0, "first_violation": None, "bytes": 4352, "expansion": 1.5,
    }  # fmt: skip


@pytest.mark.parametrize("as_json", [True, False])
def test_inspect_exits_1_for_a_violation(converted: Path, as_json: bool) -> None:
    tensors = tensors_of(converted)
    tensors[f"{Q}.weight"][45] = 1
    write(converted, config_of(converted), tensors)
    done = Done("inspect", converted, *(["--json"] if as_json else []))
    assert done.code == 1
    assert (
        f"{Q}: row 45, block 0 (columns from 0) has 8 non-zeros, 6:8 (2 of every 8 pruned) allows 6"
        in done.out
    )


def test_verify(source: Path, converted: Path, tmp_path: Path) -> None:
    slided = tmp_path / "slided"
    assert Done("convert", source, slided, "-s", "6:8", "--layout", "slided").code == 0
    done = Done("verify", converted, slided)
    assert done.code == 0
    assert (
        done.out
        == f"equal: {len(tensors_of(slided))} tensors, 14 of them compared through the slided layout\n"
    )
    assert json.loads(Done("verify", converted, slided, "--json").out)["equal"] is True
    tensors = tensors_of(converted)
    before = int(tensors[f"{Q}.weight"][45, 9])
    tensors[f"{Q}.weight"][45, 9] = before ^ 64
    write(converted, config_of(converted), tensors)
    done = Done("verify", converted, slided)
    assert done.code == 1
    assert done.out == f"different: {Q}.weight: row 45, column 9: {before ^ 64} and {before}\n"
    found = json.loads(Done("verify", converted, slided, "--json").out)
    assert (found["equal"], found["difference"]["row"], found["difference"]["column"]) == (False, 45, 9)


def test_version_and_help() -> None:
    assert Done("--version").out == f"slidesparse {__version__}\n"
    help_text = Done("--help")
    assert help_text.code == 0
    for command in ("convert", "inspect", "verify", "doctor", "bench"):
        assert command in help_text.out


# Without torch

WITHOUT_TORCH = """
import importlib.metadata, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "vllm", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
version = importlib.metadata.version
def version_without_torch(name):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = version_without_torch
from slidesparse.cli import main
sys.argv[0] = "slidesparse"
main()
"""


def without_torch(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["convert", "--help"], ["--version"], ["doctor", "--json"]]
)
def test_works_without_torch(arguments: list[str]) -> None:
    done = without_torch(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize(
    "command", [["convert", "a", "b", "-s", "6:8"], ["inspect", "a"], ["verify", "a", "b"]]
)
def test_missing_torch_is_explained(command: list[str]) -> None:
    done = without_torch(*command)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("error: this command needs torch, which cannot be imported")
    assert "pip install '.[cuda]'" in done.stderr
    assert "'.[cpu]' without an NVIDIA GPU" in done.stderr


def test_sparsity_is_read_without_torch() -> None:
    done = without_torch("convert", "a", "b", "-s", "7:8")
    assert done.returncode == 2
    assert "prunes 1 of every 8 weights" in done.stderr


# The benchmark, on a model of one small layer


@pytest.fixture
def small_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HIDDEN", 256), ("INTERMEDIATE", 512), ("VOCABULARY", 1000)):
        monkeypatch.setattr(bench, name, value)


@pytest.mark.usefixtures("small_bench")
def test_bench_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = Done("bench", "convert", "--size", "2MB", "--layout", "slided", "--folder", tmp_path, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["bytes_in"] >= 2_000_000
    assert found["largest_tensor"] == 1000 * 256 * 2
    assert found["rate"] == pytest.approx(found["bytes_in"] / 1e6 / found["seconds"])
    assert found["start_bytes"] <= found["peak_bytes"] <= found["allowed_bytes"]
    assert list(tmp_path.iterdir()) == []
    del found["allowed_bytes"]
    monkeypatch.setattr(bench, "run", lambda *_: bench.Result(**found))
    lines = Done("bench", "convert", "--size", "2MB").out.splitlines()
    assert [line.split()[0] for line in lines] == ["converted", "rate", "peak", "conditions"]
    assert lines[1].startswith(f"rate        {found['rate']:.0f} MB/s of input")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--size", "--size 'big' is not a size; use MB or GB, such as 500MB or 2GB"),
        ("--quant", "--quant 'big' is not known; use one of int8, fp8"),
        ("--layout", "--layout 'big' is not known; use one of dense, slided"),
    ],
)
def test_bench_refuses_options_at_once(option: str, words: str) -> None:
    done = Done("bench", "convert", option, "big")
    assert done.code == 2
    assert words in done.err
