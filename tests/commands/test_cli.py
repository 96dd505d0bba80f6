"""The command line: exit codes, stdout and stderr, and commands that need no torch."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from calibration import write_ids, write_layer_times
from checkpoints import DOWN, LLAMA, MODEL, Q, config_of, convert, llama, snapshot, tensors_of, w8a8, write
from commands import ROOT, Done, run
from typer.main import get_command
from typer.testing import CliRunner

from slidesparse import __version__, demo
from slidesparse.calibrate.resume import WorkFolder
from slidesparse.calibrate.task import Calibration
from slidesparse.cli import console
from slidesparse.cli.main import app
from slidesparse.convert import budget, stream
from slidesparse.convert.options import ConvertOptions
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune

pytestmark = pytest.mark.usefixtures("warm")


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


# convert


@pytest.mark.parametrize("sparsity", ["6:8", "2_8"])
def test_convert_summarizes_on_stdout(source: Path, tmp_path: Path, sparsity: str) -> None:
    out = tmp_path / "two words"
    ignored = ("--ignore", "0.*down", "--ignore", "self_attn")
    result = Done("convert", source, out, "--sparsity", sparsity, *ignored)
    assert result.code == 0
    assert result.err.startswith("warning: weights were pruned by magnitude, without calibration data")
    assert len(result.err.splitlines()) == 1
    lines = result.out.splitlines()
    before, after = (sum(t.nbytes for t in tensors_of(folder).values()) / 1e6 for folder in (source, out))
    for fact in (
        "5 linear layers, INT8 W8A8, dense layout",
        "speed     of 5 linear layers relative to unpruned ones: ",
        "unchanged 9 weights neither pruned nor quantized again (--ignore): ",
        "(not a linear layer of a transformer block): lm_head",
        f"{before:.1f} MB -> {after:.1f} MB in ",
    ):
        assert sum(fact in line for line in lines) == 1, fact
    assert (lines[0], lines[-1]) == ("pattern   6:8 (2 of every 8 pruned)", f"serve     vllm serve '{out}'")
    unpruned = Done("convert", source, tmp_path / "unpruned", "--sparsity", "dense").out
    assert "\nlayers    14 linear layers, INT8 W8A8, dense layout\n" in unpruned


def test_hints_for_a_name_with_a_dash_can_be_pasted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else vLLM takes the folder for an option."""
    monkeypatch.chdir(tmp_path)
    assert Done(*convert_command(source, "./-v2")).out.endswith("\nserve     vllm serve ./-v2\n")
    lines = Done("synth", source, "--quant", "bf16", "--", "-v 3").out.splitlines()
    assert lines[-2].startswith("convert   slidesparse convert './-v 3' PRUNED ")
    assert lines[-1] == "serve     vllm serve './-v 3' --tokenizer './-v 3'/tokenizer"


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


def test_options_reach_the_conversion(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[ConvertOptions] = []
    original = stream.convert

    def record(source: Path, out: Path, options: ConvertOptions, **more: Any) -> Any:
        received.append(options)
        return original(source, out, options, **more)

    monkeypatch.setattr(stream, "convert", record)
    for options in (
        "--quant fp8 --layout slided --ignore 0.*o_ --layer 'up|gate=4:6' --layer down=8:10",
        "--calib random --samples 3 --seqlen 9 --device cpu --rotate off --resume",
    ):
        result = Done(*convert_command(source, tmp_path / "out", *shlex.split(options), "--dry-run"))
        assert result.code == 0, result.err
        assert result.out.splitlines()[-1] == "dry run   nothing was written"
    patterns = ("up|gate", SlidePattern(6)), ("down", SlidePattern(10))
    calibration = Calibration(("random",), samples=3, seqlen=9, device="cpu", rotate="off", resume=True)
    assert received == [
        ConvertOptions(SlidePattern(8), "fp8", "slided", ("0.*o_",), patterns),
        ConvertOptions(SlidePattern(8), calibration=calibration),
    ]
    assert not (tmp_path / "out").exists()


CALIBRATE = "convert source out -s 6:8 --calib random"
INVALID = [
    ("convert source out -s nonsense", "'nonsense'"),
    ("convert source out", "neither a pattern nor a budget"),
    ("convert source out -s 6:8 --quant ''", "--quant '' is not known; use one of int8, fp8"),
    ("convert source out -s 6:8 --max-loss 25%", "found --sparsity and --max-loss"),
    ("convert source out --max-loss 25", "--max-loss '25' is not a percentage"),
    *((f"convert source out --max-loss {x}", f"--max-loss {x} is not between") for x in ("0%", "100%")),
    ("convert source out -s 6:8 --samples 9 --resume", "--samples and --resume would have no effect"),
    ("convert source out -s 6:8 --calib missing.jsonl", "missing.jsonl"),
    (f"{CALIBRATE} --rotate yes", "--rotate 'yes' is not known"),
    (f"{CALIBRATE} --device tpu", "--device 'tpu'"),
    (f"{CALIBRATE} --samples 0", "--samples 0"),
    (f"{CALIBRATE} --samples 1{30 * '0'}", "--samples 10"),
    (f"{CALIBRATE} --seqlen 1000", "--seqlen 1000 must be from 2 to 512"),
    (f"{CALIBRATE} --minutes 3", "--minutes 3 is the duration of distillation"),
    *((f"{CALIBRATE} --distill x --minutes={m}", "must be finite") for m in (0, -1, "nan", "inf")),
    ("synth BitNet-2B out --quant fp8", "INT8 activations"),
    ("synth Qwen9-7B out", "'Qwen9-7B'"),
    ("synth looped out", "'looped' is neither one of"),
    ("synth unnamed.json out", "architectures is None; let it list the model"),
    ("synth source out --quant int4", "int8, fp8, bf16"),
    ("synth source out --layout slided", "--layout slided"),
    ("synth source out --layers 3", "--layers 3 must be from 1 to 2"),
    ("synth text.json out --layers 1", "num_hidden_layers is '2'; let it be a number"),
    ("synth source out --layer down_proj=budget", "give a pattern, as in --layer down_proj=6:8"),
    ("synth source out --quant bf16 --sparsity 6:8", "--quant bf16"),
    ("synth source out --quant bf16 --layout slided", "--quant bf16"),
    ("eval perplexity source --data ids.npy --seqlen 9 --option dtype", "--option 'dtype'"),
    ("eval perplexity source --data ids.npy --seqlen 9 --option logprobs_mode=raw_logits", "logprobs_mode"),
    ("eval perplexity source --data missing.npy", "'missing.npy' is not a file; give FILE.jsonl"),
    ("eval perplexity source --data ids.npy --seqlen 1", "--seqlen 1"),
    ("eval perplexity source --data ids.npy --samples 0", "--samples 0"),
    ("eval perplexity source --data ids.npy --against nowhere", "nowhere is not a folder"),
    ("eval perplexity source --data ids.npy --against ''", "the model has no name"),
    *((f"{command} ''", "the model has no name") for command in ("doctor", "inspect")),
    ("tune Llama9", "Llama9"),
    ("tune ''", "neither one of the models"),
    ("tune --shapes=", "--shapes '' is not a shape"),
    ("tune --pattern=", "--pattern '' is not a pattern"),
    ("tune BitNet-2B --shapes 1x1", "--shapes"),
    ("tune --shapes " + "9" * 5000 + "x8", "99...99"),
    ("tune --m " + "9" * 5000, "99...99"),
    ("tune --dtype fp16", "fp16"),
    ("tune --pattern 2:8", "6:8"),
    ("tune --library cutlass", "cutlass"),
]


@pytest.mark.usefixtures("source", "calib")
@pytest.mark.parametrize(("command", "fact"), INVALID)
def test_wrong_use_exits_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, fact: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": "2"}')
    Path("looped").symlink_to("looped")
    Path("unnamed.json").write_text('{"model_type": "llama"}')
    result = Done(*shlex.split(command))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert fact in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command",
    [
        *("doctor none", "inspect none", "build none", "tune none", "eval perplexity none --data ids.npy"),
        *("none", "inspect . --none", "eval none"),
    ],
)
def test_an_error_is_a_json_document_where_one_is_asked_for(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that reads stdout finds it, and one document alone."""
    monkeypatch.chdir(tmp_path)
    result = Done(*command.split(), "--json")
    document = json.loads(result.out)
    assert (result.code, document["code"]) == (2, 2)
    assert result.err == f"error: {document['verdict']}\n"
    assert "none" in document["verdict"]


def test_interrupted_convert_resumes(
    source: Path, tmp_path: Path, calib: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = WorkFolder.save

    def interrupt(self: WorkFolder, number: int, *rest: Any) -> None:
        if number:
            raise KeyboardInterrupt
        save(self, number, *rest)

    command = convert_command(source, tmp_path / "out", *calib)
    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "save", interrupt)
        result = Done(*command)
    assert result.code == 130
    assert result.err.splitlines()[-1].startswith("interrupted; --resume continues")
    refused = Done(*command)
    assert (refused.code, "--resume" in refused.err) == (2, True)
    assert Done(*command, "--resume").code == 0
    assert Done(*convert_command(source, tmp_path / "whole", *calib)).code == 0
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_work_of_an_earlier_run_is_named(
    source: Path, tmp_path: Path, calib: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a dry run, and, where the run was ended after it had published its output, by what reads or refuses that."""
    command = convert_command(source, tmp_path / "out", *calib)
    monkeypatch.setattr(WorkFolder, "remove", Mock(side_effect=KeyboardInterrupt))
    assert Done(*command).code == 130
    work = tmp_path / ".out.calibrated"
    for reads in (("inspect", tmp_path / "out"), command):
        assert (
            f"{work} holds the work of an interrupted run; if {tmp_path / 'out'} is its" in Done(*reads).err
        )
    (tmp_path / "out").rename(tmp_path / "moved")
    before = snapshot(tmp_path)
    for options in ((), ("--resume",)):
        dry = Done(*command, "--dry-run", *options)
        assert (dry.code, f"{work} holds the finished layers" in dry.err) == (0, True)
    changed = Done(*command, "--dry-run", "--resume", "--samples", 3)
    assert (changed.code, "--samples was 128" in changed.err) == (2, True)
    assert snapshot(tmp_path) == before
    assert "holds" not in Done("inspect", tmp_path / "moved").err


def test_budget_prints_losses(
    source: Path, tmp_path: Path, calib: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run writes nothing; the second prints the chosen patterns and their loss, which may be below 0."""
    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(budget, "FILE", write_layer_times(tmp_path / "times.csv"))
    dry = Done("convert", source, tmp_path / "out", "--max-loss", "50%", *calib, "--dry-run")
    assert dry.code == 0, dry.err
    assert not (tmp_path / "out").exists()
    lines = dry.out.splitlines()
    assert lines[0].split() == ["perplexity", "speed", "zeros", "layers", "per", "pattern"]
    rows = [line for line in lines[1:] if "uniform" not in line and line.startswith(" ")]
    losses = [float(line.split("%")[0]) for line in rows]
    assert (losses[0], losses[-2]) == (0.0, max(losses))
    assert ["uniform" in line for line in lines].count(True) == 3
    assert any("chosen: " in line for line in lines)
    assert lines[-1].startswith("dry run   no checkpoint was written")
    result = Done("convert", source, tmp_path / "out", "--max-loss", "50%", *calib)
    assert result.code == 0, result.err
    assert "budget    --max-loss 50%" in result.out
    percent = r"[+-]\d[\d.e-]*%"
    losses = rf"loss      perplexity {percent} on ids.npy, {percent} on the reference of .*, relative to the unpruned"
    assert re.search(losses, result.out)


# Signals


@pytest.mark.parametrize(
    ("module", "name"),
    [("typer", "SIGINT"), ("slidesparse.cli.evaluate", "SIGINT"), ("typer", "SIGTERM"), ("typer", "SIGHUP")],
)
def test_interrupt_during_import_prints_no_traceback(module: str, name: str) -> None:
    program = f"""
import os, runpy, signal, sys
class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{name})
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with the signal ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup with this one
sys.meta_path.insert(0, Interrupter())
runpy.run_module("slidesparse", run_name="__main__")
"""
    result = run(program, "--version")
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
    result = run(program)
    assert (result.returncode, result.stdout) == (0, "interrupted\n"), result.stderr


@pytest.mark.parametrize("ignored", [False, True])
def test_hangup_removes_unfinished_output_unless_ignored(source: Path, tmp_path: Path, ignored: bool) -> None:
    """A second SIGHUP, which comes during the removal, does not stop it."""
    program = f"""
import os, shutil, signal, sys
from slidesparse import serving
from slidesparse.cli import main
from slidesparse.convert import budget, stream
serving.is_available = lambda: False  # vLLM need not be imported
def hang_up(function):
    def wrapped(*arguments, **settings):
        os.kill(os.getpid(), signal.SIGHUP)
        return function(*arguments, **settings)
    return wrapped
stream.write_output, shutil.rmtree = hang_up(stream.write_output), hang_up(shutil.rmtree)
signal.signal(signal.SIGHUP, signal.SIG_{"IGN" if ignored else "DFL"})
main()
"""
    result = run(program, *convert_command(source, tmp_path / "out"))
    assert result.returncode == (0 if ignored else 130), result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"source", *(["out"] if ignored else [])}


# The machine


def test_errors_of_the_system_exit_3(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os, "pwrite", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied", "x"))
    )
    result = Done(*convert_command(source, tmp_path / "out"))
    assert (result.code, result.err.splitlines()[-1]) == (3, "error: Permission denied: x")


def test_full_memory_exits_3(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_gpu = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    for fill, words in (
        (bytearray, console.NO_MEMORY),
        (torch.empty, console.NO_MEMORY),
        (of_gpu, console.NO_GPU_MEMORY),
    ):
        monkeypatch.setattr(os, "preadv", lambda *_, fill=fill: fill(2**50))
        result = Done("inspect", source)
        assert (result.code, result.err) == (3, f"error: {words}\n")


def test_demo_does_not_overwrite_other_files(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    result = CliRunner().invoke(demo.app, ["--out", str(tmp_path)])
    assert (result.exit_code, "the demo's" in result.stderr) == (2, True)
    assert (tmp_path / "precious.txt").read_text() == "mine"


# inspect


def test_unusable_input_exits_2(source: Path, tmp_path: Path) -> None:
    os.truncate(source / MODEL, 1000)
    for command in (convert_command(source, tmp_path / "out"), ("inspect", source), ("doctor", source)):
        result = Done(*command)
        assert (result.code, result.out) == (2, "")
        assert str(source / MODEL) in result.err
    result = Done("inspect", tmp_path / "[red]model[/red]")  # a name with brackets is printed as it is
    assert (result.code, "[red]model[/red] is not a folder" in result.err) == (2, True)


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
    inspect = shlex.join([sys.executable, "-c", program, "inspect", str(converted), "--json"])
    command = ["bash", "-c", f"{inspect} | true; exit ${{PIPESTATUS[0]}}"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (process.returncode, process.stderr) == (1, "")


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("--help > /dev/full", 3, "error: No space left on device: while writing\n"),
        ("--version > /dev/full", 3, "error: No space left on device: while reading or writing\n"),
        ("inspect . --json > /dev/full", 2, "error: config.json (the model's configuration) is missing"),
        ("inspect . 2> /dev/full", 2, ""),
        ("convert --nope 2> /dev/full", 2, ""),
    ],
)
def test_full_disks_of_outputs_keep_errors_and_codes(
    tmp_path: Path, command: str, code: int, words: str
) -> None:
    program = shlex.join([sys.executable, "-c", "import slidesparse.cli as cli; cli.main()"])
    script = f"unset PYTHONUNBUFFERED; {program} {command}"
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr[: len(words)]) == (code, words)
    assert ran.stderr.count("\n") == bool(words)


def test_a_full_disk_keeps_no_remarks() -> None:
    """A remark that cannot be printed is not printed again with each one that follows."""
    file = Mock(spec=["write"], write=Mock(side_effect=OSError(errno.ENOSPC, "full")))
    remarks = console.Remarks(file=file)
    for _ in range(2):
        remarks.print("short")
    assert [call.args for call in file.write.call_args_list] == [("short\n",)] * 2


def test_names_that_the_terminal_cannot_show_are_printed_by_codes(converted: Path, tmp_path: Path) -> None:
    """Such as of files in another encoding; the command has done its work when it prints them."""
    named = tmp_path / "model-\xfc"
    named.symlink_to(converted)
    environ = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    process = run("import slidesparse.cli.main as cli; cli.main()", "inspect", named, env=environ)
    assert process.returncode == 0, process.stderr
    assert r"model-\xfc: pattern 6:8" in process.stdout


# Without torch


def test_version_and_help() -> None:
    assert Done("--version").out == f"slidesparse {__version__}\n"
    result = Done("--help")
    assert result.code == 0
    for command in ("convert", "inspect", "doctor", "synth", "tune", "eval", "build"):
        assert command in result.out


def test_commands_of_the_readme_are_complete() -> None:
    """They are parsed, but not run: no option is unknown or missing."""
    commands = re.findall(r"(?:^\$ |`)slidesparse ([^`#\n]+)", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) > 7
    group: Any = get_command(app)
    for words in map(shlex.split, commands):
        context = group.make_context("slidesparse", list(words))
        while hasattr(context.command, "commands"):
            name, command, words = context.command.resolve_command(context, words)
            context = command.make_context(name, list(words), context)


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


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        ("convert --help", 0, ""),
        ("--version", 0, ""),
        ("doctor --json", 0, ""),
        ("convert a b -s 6:8", 3, "error: this command needs torch"),
        ("inspect a", 3, "error: this command needs torch"),
        ("convert a b -s 7:8", 2, "'7:8'"),
    ],
)
def test_commands_work_without_torch_or_explain_what_is_missing(command: str, code: int, error: str) -> None:
    result = run(WITHOUT_TORCH, *command.split())
    assert (result.returncode, bool(result.stdout), bool(result.stderr)) == (code, not error, bool(error))
    assert error in result.stderr


def test_progress_of_a_phase_counts_from_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first phase begins with its own work, as vLLM may start before it."""
    now, lines = [0.0], list[str]()
    monkeypatch.setattr(console, "LINE_SECONDS", 30)
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(console.err, "print", lines.append)
    advance = console._progress_lines()
    for now[0], phase, done in (
        (40, "checking", 0),
        (60, "checking", 50),
        (70, "checking", 100),
        (100, "pruning", 20),
    ):
        advance(phase, done, 100)
    assert lines == ["checking 50% in 20 s, about 20 s left", "pruning 20% in 30 s, about 120 s left"]
