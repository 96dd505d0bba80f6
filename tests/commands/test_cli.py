"""The command line: exit codes, stdout and stderr, and commands that need no torch."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from calibration import write_ids
from checkpoints import DOWN, LLAMA, MODEL, Q, config_of, convert, llama, snapshot, tensors_of, w8a8, write
from commands import Done
from rich.console import Console

from slidesparse import __version__
from slidesparse.calibrate.resume import WorkFolder
from slidesparse.cli import console
from slidesparse.convert import stream
from slidesparse.convert.options import ConvertOptions
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suppress progress lines, which would mix with tested output on a busy machine."""
    monkeypatch.setattr(console, "LINE_SECONDS", float("inf"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama(tmp_path / "source")


@pytest.fixture
def converted(source: Path, tmp_path: Path) -> Path:
    convert(source, tmp_path / "converted")
    return tmp_path / "converted"


@pytest.fixture
def calib(tmp_path: Path) -> tuple[object, ...]:
    return ("--calib", write_ids(tmp_path / "ids.npy"), "--seqlen", 24, "--device", "cpu")


def convert_command(*arguments: object) -> tuple[object, ...]:
    """Arguments of ``slidesparse convert SOURCE OUT -s 6:8`` with further options."""
    return ("convert", *arguments[:2], "-s", "6:8", *arguments[2:])


def test_doctor_escapes_unprintable_paths(converted: Path, tmp_path: Path) -> None:
    folder = converted.rename(tmp_path / "mod\u00e8le-\u6a21")
    result = subprocess.run(
        [sys.executable, "-c", "import slidesparse.cli as cli; cli.main()", "doctor", folder],
        env={**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "mod\\xe8le-\\u6a21: Llama" in result.stdout


# convert


@pytest.mark.parametrize("sparsity", ["6:8", "2_8"])
def test_convert_summarizes_on_stdout(source: Path, tmp_path: Path, sparsity: str) -> None:
    out = tmp_path / "two words"
    result = Done(
        "convert", source, out, "--sparsity", sparsity, "--ignore", "0.*down", "--ignore", "self_attn"
    )
    assert result.code == 0
    assert result.err.startswith("warning: weights were pruned by magnitude, without calibration data")
    assert len(result.err.splitlines()) == 1
    lines = result.out.splitlines()
    before, after = (sum(t.nbytes for t in tensors_of(folder).values()) / 1e6 for folder in (source, out))
    facts = ("SPARSITY=2_8", "5 linear layers, INT8 W8A8, dense layout", f"again (--ignore): {DOWN},")
    facts += (
        "(not a linear layer of a transformer block): lm_head",
        f"{before:.1f} MB -> {after:.1f} MB in ",
    )
    assert all(fact in line for fact, line in zip(facts, lines, strict=False)), lines
    assert lines[5:] == [f"serve     vllm serve '{out}'"]


def test_convert_does_not_warn_of_pruning_weights_that_are_sparse(tmp_path: Path) -> None:
    """llmcompressor 0.14 writes 2:4 models of SparseGPTModifier as ordinary W8A8; 6:8 keeps all of their weights."""
    source = w8a8(tmp_path / "source")
    tensors = tensors_of(source)
    for name in set(LLAMA.linears()) - {DOWN}:
        tensors[f"{name}.weight"] = prune(tensors[f"{name}.weight"], SlidePattern(4))
    write(source, config_of(source), tensors)
    for out, warnings in (("out", 0), ("again", 1)):
        result = Done("convert", source, tmp_path / out, "--sparsity", "6:8")
        assert result.code == 0
        assert result.err.count("warning: weights were pruned by magnitude") == warnings
        tensors[f"{Q}.weight"][-1] = 1
        write(source, config_of(source), tensors)


def test_convert_does_not_say_pruned_where_nothing_is(source: Path, tmp_path: Path) -> None:
    result = Done("convert", source, tmp_path / "out", "--sparsity", "dense")
    assert "\nlayers    14 linear layers, INT8 W8A8, dense layout\n" in result.out
    assert "\npruned " not in result.out


def test_sparsegpt_is_the_default_with_calibration(
    source: Path, tmp_path: Path, calib: tuple[object, ...]
) -> None:
    report = tmp_path / "report.json"
    options = ("--layer", "down_proj=8:10", "--skip", "1.*o_proj", "--report", report)
    result = Done(*convert_command(source, tmp_path / "out", *calib, *options))
    assert result.code == 0, result.err
    assert result.err == "note: ids.npy gives 6 samples of at most 24 tokens, 128 were requested\n"
    lines = result.out.splitlines()
    facts = (
        "13 linear layers, INT8 W8A8",
        "2 of them at 8:10",
        "sparsegpt, calibrated with ids.npy, 6 samples, 144 tokens",
    )
    assert [fact for fact in (*facts, "model.layers.1.self_attn.o_proj") if fact not in result.out] == []
    labels = [line.split()[0] for line in lines]
    assert labels[-8:] == ["unchanged", *["error"] * 5, "size", "serve"]
    assert "smoothing" in labels
    content = json.loads(report.read_text())
    assert lines[-7].startswith(f"error     {content['sensitivity'][0]}: ")
    assert (content["method"], content["violations"], content["dead_columns"]) == ("sparsegpt", 0, 0)
    assert (content["pattern"], content["quant"], content["layout"]) == ("6:8", "int8", "dense")
    assert content["skipped"] == {"model.layers.1.self_attn.o_proj": "--skip"}
    rows = {row["name"]: row for row in content["layers"]}
    assert sorted(rows) == sorted(config_of(tmp_path / "out")["quantization_config"]["slidesparse"]["layers"])
    assert (rows[DOWN]["pattern"], rows[Q]["pattern"]) == ("8:10", "6:8")
    assert set(rows[Q]) == {
        "name", "pattern", "out_features", "in_features", "zeros", "violations", "dead_columns", "scale_min",
        "scale_max", "method", "error_pruned", "error_quantized", "error_finetuned", "block_error",
        "block_error_finetuned", "tokens", "seconds",
    }  # fmt: skip
    ranked = [rows[name]["error_finetuned"] for name in content["sensitivity"]]
    assert ranked == sorted(ranked, reverse=True)
    assert len(ranked) == 13


def test_report_without_calibration(source: Path, tmp_path: Path) -> None:
    result = Done(*convert_command(source, tmp_path / "out", "--report", tmp_path / "report.json"))
    assert result.code == 0
    assert result.err.startswith("warning: weights were pruned by magnitude")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["error_pruned"] for row in report["layers"]] == [None] * len(LLAMA.linears())
    assert report["sensitivity"] == []
    result = Done(*convert_command(tmp_path / "out", tmp_path / "slided", "--layout", "slided"))
    assert (result.code, result.err) == (0, "")  # nothing is pruned there, so there is no warning


def test_every_option_reaches_the_conversion(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[ConvertOptions] = []
    original = stream.convert

    def record(source: Path, out: Path, options: ConvertOptions, **more: Any) -> Any:
        received.append(options)
        return original(source, out, options, **more)

    monkeypatch.setattr(stream, "convert", record)
    common = shlex.split("--quant fp8 --layout slided --method random --seed 5 --linear 'mlp|o_proj'")
    more = shlex.split("--ignore 0.*o_ --skip 1.*o_ --layer 'up|gate=4:6' --layer down=8:10 --dry-run")
    result = Done(*convert_command(source, tmp_path / "out", *common, *more))
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1] == "dry run   nothing was written"
    data = ("--calib", "random", "--samples", 3, "--seqlen", 9, "--device", "cpu", "--resume", "--dry-run")
    more = ("--sweeps", 1, "--target", "own", "--finetune", 0, "--rotate", "on")
    result = Done(*convert_command(source, tmp_path / "out", *data, *more))
    assert result.code == 0, result.err
    assert "only to try things out" in result.err
    assert "rotation  the residual stream" in result.out
    first, second = received
    assert (first.quant, first.layout, first.method, first.seed) == ("fp8", "slided", "random", 5)
    assert (first.linear, first.ignore, first.skip) == ("mlp|o_proj", ("0.*o_",), ("1.*o_",))
    assert [(regex, p.ratio) for regex, p in first.layer_patterns] == [("up|gate", "4:6"), ("down", "8:10")]
    settings = second.calibration
    assert settings is not None
    assert (settings.data, settings.samples, settings.seqlen) == ("random", 3, 9)
    assert (settings.device, settings.resume) == ("cpu", True)
    assert (settings.sweeps, settings.target, settings.finetune) == (1, "own", 0)
    assert settings.rotate == "on"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (("-s", "nonsense"), "'nonsense'"),
        (("-s", ""), "''"),
        (("--resume",), "--resume would have no effect without calibration data"),
        (("--samples", "9", "--finetune", "2"), "--samples and --finetune"),
        (("--calib", "random", "--method", "wanda", "--sweeps", "9"), "wanda does not use --sweeps"),
        (("--calib", "missing.jsonl"), "'missing.jsonl'"),
        (("--calib", "random", "--samples", "9" * 12), "more than the limit of 268435456 tokens"),
        (("--rotate", "on"), "--rotate would have no effect"),
        (("--calib", "random", "--rotate", "yes"), "--rotate 'yes' is not known"),
        (("--zeros", "25%"), "found --sparsity and --zeros"),
        (("--plot", "plot.svg"), "--plot needs a budget"),
        (("--tokens", "16"), "--tokens would have no effect, because --sparsity"),
        (("--report", "/proc/report.json"), "--report /proc/report.json"),
        (("--report", "missing/report.json"), "--report missing/report.json"),
    ],
)
def test_convert_with_invalid_usage_exits_2(
    source: Path, tmp_path: Path, options: tuple[str, ...], fact: str
) -> None:
    result = Done(*convert_command(source, tmp_path / "out", *options))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert fact in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--report", "--plot"])
def test_convert_refuses_report_path_equal_to_output(source: Path, tmp_path: Path, option: str) -> None:
    out = tmp_path / "out"
    goal = ("--zeros", "25%", "--calib", "random") if option == "--plot" else ("--sparsity", "6:8")
    result = Done("convert", source, out, *goal, option, tmp_path / "." / "out")
    assert result.code == 2
    assert f"{option} {out} is the folder that the model is written to" in result.err
    assert not out.exists()


def test_interrupted_convert_resumes(
    source: Path, tmp_path: Path, calib: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = WorkFolder.save

    def interrupt(self: WorkFolder, number: int, *rest: Any) -> None:
        if number:
            raise KeyboardInterrupt
        save(self, number, *rest)

    command = convert_command(source, tmp_path / "out", *calib, "--finetune", 1)
    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "save", interrupt)
        result = Done(*command)
    assert result.code == 130
    assert result.err.startswith("interrupted; --resume continues")
    refused = Done(*command)
    assert refused.code == 2
    assert "--resume" in refused.err
    assert Done(*command, "--resume").code == 0
    assert Done(*convert_command(source, tmp_path / "whole", *calib, "--finetune", 1)).code == 0
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_interrupt_without_calibration_removes_output(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stream, "_write_tensors", interrupt)
    result = Done(*convert_command(source, tmp_path / "out"))
    assert (result.code, result.out, result.err) == (130, "", "interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("typer", "SIGINT"),
        ("rich.table", "SIGINT"),
        ("slidesparse.cli.evaluate", "SIGINT"),
        ("typer", "SIGTERM"),
        ("typer", "SIGHUP"),
    ],
)
def test_interrupt_during_import_prints_no_traceback(module: str, name: str) -> None:
    program = f"""
import os, signal, sys
class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{name})
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with the signal ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup with this one
sys.meta_path.insert(0, Interrupter())
from slidesparse.cli import main
main()
"""
    command = [sys.executable, "-c", program, "--version"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("module", ["benchmarks", "slidesparse.demo"])
def test_sigterm_interrupts_commands_that_start_engines(module: str) -> None:
    """Engines are in sessions of their own, and would outlive the command."""
    program = f"""
import os, runpy, signal, typer
typer.Typer.__call__ = lambda app: os.kill(os.getpid(), signal.SIGTERM)
try:
    runpy.run_module({module!r}, run_name="__main__")
except KeyboardInterrupt:
    print("interrupted")
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, "interrupted\n"), result.stderr


@pytest.mark.parametrize("ignored", [False, True])
def test_hangup_removes_unfinished_output_unless_ignored(source: Path, tmp_path: Path, ignored: bool) -> None:
    """A second SIGHUP, which comes during the removal, does not stop it."""
    program = f"""
import os, shutil, signal, sys
from slidesparse.cli import main
from slidesparse.convert import stream
def hang_up(function):
    def wrapped(*arguments, **settings):
        os.kill(os.getpid(), signal.SIGHUP)
        return function(*arguments, **settings)
    return wrapped
stream._write_tensors, shutil.rmtree = hang_up(stream._write_tensors), hang_up(shutil.rmtree)
signal.signal(signal.SIGHUP, signal.SIG_{"IGN" if ignored else "DFL"})
main()
"""
    words = map(str, convert_command(source, tmp_path / "out"))
    command = [sys.executable, "-c", program, *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert result.returncode == (0 if ignored else 130), result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"source", *(["out"] if ignored else [])}


def test_budget_prints_and_plots_losses(
    source: Path, tmp_path: Path, calib: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run writes nothing; the second prints the chosen patterns and their loss."""
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "cache"))
    dry = Done(
        "convert",
        source,
        tmp_path / "out",
        "--zeros",
        "30%",
        *calib,
        "--plot",
        tmp_path / "plot.svg",
        "--dry-run",
    )
    assert dry.code == 0, dry.err
    assert not (tmp_path / "out").exists()
    svg = ElementTree.parse(tmp_path / "plot.svg").getroot()
    assert len(svg.findall(f"{SVG}circle")) == 5  # four patterns and the choice
    assert len(svg.find(f"{SVG}polyline").get("points").split()) > 2
    assert {"8:10", "6:8", "4:6", "2:4", "--zeros 30%"} <= {text.text for text in svg.iter(f"{SVG}text")}
    lines = dry.out.splitlines()
    assert lines[0].split() == ["perplexity", "zeros", "layers", "per", "pattern"]
    losses = [
        float(line.split("%")[0]) for line in lines[1:] if "uniform" not in line and line.startswith(" ")
    ]
    assert losses[0] == 0.0
    assert losses[-2] == max(losses)
    assert sum("uniform" in line for line in lines) == 4
    assert any("chosen: " in line for line in lines)
    assert lines[-1] == "dry run   no checkpoint was written; the measured losses are cached for the next run"
    result = Done(
        "convert", source, tmp_path / "out", "--max-loss", "50%", "--tokens", 16, *calib, "--finetune", 0
    )
    assert result.code == 0, result.err
    assert "budget    --max-loss 50%" in result.out
    assert re.search(
        r"loss      perplexity [+-][\d.e-]+% relative to the unpruned model with the same quantization",
        result.out,
    )
    assert re.search(r"chosen: ", result.out)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ((), "neither a pattern nor a budget"),
        (("--zeros", "25"), "--zeros '25' is not a percentage"),
        (("--max-loss", "1%"), "--max-loss 1% needs calibration data"),
        (("--max-loss", "1%", "--min-speedup", "1.2"), "found --max-loss and --min-speedup"),
        (("--max-loss", "1%", "--tokens", "many"), "--tokens 'many'"),
        (("--zeros", "25%", "--gpu", "h100"), "--gpu would have no effect, because --zeros"),
        (("--max-loss", "1%", "--tokens", "9" * 5000), "99...99"),
        # before calibration, which takes hours
        (("--max-loss", "1%", "--gpu", "k80"), "--gpu 'k80': times of layers were measured on"),
    ],
)
def test_invalid_budget_options_exit_2(
    source: Path, tmp_path: Path, options: tuple[str, ...], fact: str
) -> None:
    result = Done("convert", source, tmp_path / "out", *options, "--dry-run")
    assert (result.code, result.out) == (2, "")
    assert fact in result.err


def test_calibration_logs_progress(
    source: Path, tmp_path: Path, calib: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    result = Done(*convert_command(source, tmp_path / "out", *calib, "--finetune", 1))
    assert result.code == 0, result.err
    lines = [line for line in result.err.splitlines() if line.startswith("pruning")]
    matches = [re.fullmatch(r"(\w+) (\d+)% in \d+ s, about \d+ s left", line) for line in lines]
    assert all(matches), lines
    assert [(m[1], 50 <= int(m[2]) < 100) for m in matches if m] == [("pruning", True)]


# The machine


def test_environment_faults_exit_3(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disk space, permission to write, or a library is missing."""
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        result = Done(*convert_command(source, tmp_path / "out"))
    assert (result.code, "no space left" in result.err) == (3, True)

    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        result = Done(*convert_command(source, tmp_path / "out"))
    assert (result.code, f"Permission denied: {tmp_path}" in result.err) == (3, True)
    (tmp_path / "calib.jsonl").write_text('"some text"\n')
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    result = Done(*convert_command(source, tmp_path / "out", "--calib", tmp_path / "calib.jsonl"))
    assert (result.code, "pip install tokenizers" in result.err) == (3, True)


# inspect


def test_unusable_input_exits_2(source: Path, tmp_path: Path) -> None:
    os.truncate(source / MODEL, 1000)
    for command in (
        convert_command(source, tmp_path / "out"),
        ("inspect", source),
    ):
        result = Done(*command)
        assert (result.code, result.out) == (2, "")
        assert f"error: {source / MODEL} is 1000 bytes" in result.err
    result = Done("inspect", tmp_path / "[red]model[/red]")  # a name with brackets is printed as it is
    assert result.code == 2
    assert "[red]model[/red] is not a folder" in result.err


def test_inspect_output(converted: Path) -> None:
    result = Done("inspect", converted)
    assert result.code == 0
    assert "pattern 6:8 (dense layout)" in result.out
    (line,) = (line for line in result.out.splitlines() if Q in line)
    assert line.split() == [Q, "64", "x", "64", "I8", "6:8", "6:8", "0", "4,352", "1.500"]
    assert result.out.splitlines()[-1].startswith("14 layers, ")
    report = json.loads(Done("inspect", converted, "--json").out)
    assert (report["pattern"], report["layout"], report["violations"]) == ("6:8", "dense", 0)
    (layer,) = (layer for layer in report["layers"] if layer["name"] == Q)
    assert layer == {
        "name": Q, "out_features": 64, "in_features": 64, "dtype": "I8", "pattern": "6:8", "satisfies": "6:8",
        "violations": 0, "first_violation": None, "bytes": 4352, "expansion": 1.5,
    }  # fmt: skip


@pytest.mark.parametrize(("columns", "kind"), [(60, "xterm"), (200, "xterm"), (200, "dumb")])
def test_inspect_truncates_nothing_in_a_narrow_terminal(
    converted: Path, monkeypatch: pytest.MonkeyPatch, columns: int, kind: str
) -> None:
    monkeypatch.setenv("TERM", kind)
    if kind == "dumb":
        monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take stdout for a terminal
    terminal = Console(
        highlight=False, soft_wrap=True, force_terminal=True, color_system=None, width=columns, height=20
    )
    monkeypatch.setattr(sys.modules["slidesparse.cli.main"], "out", terminal)
    lines = Done("inspect", converted).out.splitlines()
    (start,) = (i for i, line in enumerate(lines) if Q in line)
    row = lines[start : start + (3 if columns == 60 else 1)]
    assert max(map(len, row)) <= columns
    assert {"64", "x", "I8", "6:8", "4,352", "1.500"} <= set(
        " ".join(row).replace(",  ", " ").replace(", ", " ").split()
    )


@pytest.mark.parametrize("as_json", [True, False])
def test_inspect_exits_1_for_a_violation(converted: Path, as_json: bool) -> None:
    tensors = tensors_of(converted)
    tensors[f"{Q}.weight"][45] = 1
    write(converted, config_of(converted), tensors)
    result = Done("inspect", converted, *(["--json"] if as_json else []))
    assert result.code == 1
    assert f"{Q}: row 45, block 0 (columns from 0) has 8 non-zeros" in result.out


def test_closed_pipe_prints_no_error(converted: Path) -> None:
    """Its reader, such as `head`, has read enough."""
    program = "import slidesparse.cli as cli; cli.main()"
    inspect = shlex.join([sys.executable, "-u", "-c", program, "inspect", str(converted), "--json"])
    process = subprocess.run(
        ["bash", "-c", f"{inspect} | true; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (process.returncode, process.stderr) == (1, "")


# Without torch


def test_version_and_help() -> None:
    assert Done("--version").out == f"slidesparse {__version__}\n"
    result = Done("--help")
    assert result.code == 0
    for command in ("convert", "inspect", "doctor", "synth", "tune", "eval"):
        assert command in result.out


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
from slidesparse.cli.main import main
sys.argv[0] = "slidesparse"
main()
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)


@pytest.mark.parametrize("arguments", [["convert", "--help"], ["--version"], ["doctor", "--json"]])
def test_works_without_torch(arguments: list[str]) -> None:
    result = without_torch(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout


@pytest.mark.parametrize("command", [["convert", "a", "b", "-s", "6:8"], ["inspect", "a"]])
def test_missing_torch_is_explained(command: list[str]) -> None:
    result = without_torch(*command)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.startswith("error: this command needs torch")
    assert result.stderr.endswith(": pip install torch\n")


def test_sparsity_is_validated_without_torch() -> None:
    result = without_torch("convert", "a", "b", "-s", "7:8")
    assert result.returncode == 2
    assert "'7:8'" in result.stderr
