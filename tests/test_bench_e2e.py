"""``slidesparse bench e2e`` with a ``vllm`` that writes down what it was asked for, and once with the real one."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import QWEN, Decoder, converted, write_config, write_float
from typer.testing import CliRunner, Result

from slidesparse.bench import e2e_runs
from slidesparse.bench.e2e_runs import COLUMNS
from slidesparse.cli import app

FLAGS = ("USE_CUSPARSELT", "USE_CUBLASLT", "DISABLE_SLIDESPARSE", "SPARSITY", "VLLM_PLUGINS")
CONDITIONS = {"gpu": None, "capability": None, "cpu": "a test's", "versions": {"vllm": "0.28.0"}}
ANSI = re.compile(r"\x1b\[[0-9;]*m")

# Notes its arguments and flags in a file, behaves as another file says, and takes a time that its system alone decides.
FAKE = """\
#!{python}
import json, os, sys, time
words = sys.argv[1:]
option = lambda name: words[words.index(name) + 1]
flags = {{name: os.environ[name] for name in {flags!r} if name in os.environ}}
with open({calls!r}, "a") as file:
    file.write(json.dumps({{"words": words, "flags": flags}}) + "\\n")
config = json.load(open(os.path.join(option("--model"), "config.json")))
pattern = config["quantization_config"].get("slidesparse", {{}}).get("pattern", "2:4")
behave = json.load(open({behaviour!r}))
system = ("sparse" if "USE_CUSPARSELT" in flags else "cublaslt" if "USE_CUBLASLT" in flags
          else "off" if "DISABLE_SLIDESPARSE" in flags else "stock")
if system in behave.get("fail", ()):
    print("INFO starting")
    print("RuntimeError: the cause")
    print("\\n".join(f"line {{i}}" for i in range(30)))
    sys.exit(7)
time.sleep(behave.get("sleep", 0))
kind = {{"sparse": "sparse", "cublaslt": "on the cuBLASLt path, not slid"}}.get(system)
if kind and not behave.get("mute"):
    print(f"SlideSparse {{pattern}} (2 of every few pruned): 8 layers {{kind}}, 1 dense (1 lm_head); dense layout")
prompts = int(option("--num-prompts"))
elapsed = {{"stock": 2.0, "off": 2.0, "cublaslt": 4.0, "sparse": 1.0}}[system]
total = prompts * (int(option("--input-len")) + int(option("--output-len")))
with open(option("--output-json"), "w") as file:
    json.dump({{"elapsed_time": elapsed, "num_requests": prompts, "total_num_tokens": total,
               "requests_per_second": prompts / elapsed, "tokens_per_second": total / elapsed}}, file)
"""


class Fake:
    """A folder of checkpoints, a ``vllm`` on the PATH, and what it was called with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.calls_path, self.behaviour = folder / "calls", folder / "behaviour"
        self.behave()
        self.bin = folder / "bin"
        self.bin.mkdir()
        script = self.bin / "vllm"
        script.write_text(
            FAKE.format(
                python=sys.executable, flags=FLAGS, calls=str(self.calls_path), behaviour=str(self.behaviour)
            )
        )
        script.chmod(0o755)
        for name, pattern in (("2_4", "2:4"), ("2_8", "6:8")):
            write_config(folder / "tiny" / name, pattern)

    def behave(self, **how: Any) -> None:
        self.behaviour.write_text(json.dumps(how))

    def run(self, *options: str, model: bool = True) -> Result:
        """The command, with one small prefill cell unless ``options`` say otherwise."""
        given = ["--model", str(self.folder / "tiny")] if model else []
        if "--stages" not in options:
            given += ["--stages", "prefill", "--m", "64"]
        return CliRunner().invoke(app, ["bench", "e2e", *given, "--out", str(self.out), *options])

    @property
    def calls(self) -> list[dict[str, Any]]:
        if not self.calls_path.exists():
            return []
        return [json.loads(line) for line in self.calls_path.read_text().splitlines()]

    @property
    def rows(self) -> list[dict[str, str]]:
        with (self.out / "e2e.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    @property
    def systems(self) -> list[str]:
        return [f"{row['system']} {row['pattern']}" for row in self.rows]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    for name in FLAGS:
        monkeypatch.delenv(name, raising=False)
    made = Fake(tmp_path)
    monkeypatch.setenv("PATH", str(made.bin), prepend=os.pathsep)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # no vllm lies beside it
    monkeypatch.setattr(e2e_runs, "conditions", lambda systems: dict(CONDITIONS))
    return made


def option(call: dict[str, Any], name: str) -> str:
    words: list[str] = call["words"]
    return words[words.index(name) + 1]


def test_order_alternates_and_dense_systems_run_once(fake: Fake) -> None:
    done = fake.run("--rounds", "3")
    assert done.exit_code == 0, done.output
    forward = ["stock dense", "off dense", "cublaslt dense", "sparse 2:4", "sparse 6:8"]
    assert fake.systems == [*forward, *forward[::-1], *forward]
    assert [row["round"] for row in fake.rows] == ["1"] * 5 + ["2"] * 5 + ["3"] * 5
    assert (
        tuple(fake.rows[0])
        == COLUMNS
        == (*("model", "dtype", "stage", "M", "pattern", "system", "round", "tokens_per_s"),)
    )
    assert [fake.rows[0][name] for name in ("model", "dtype", "stage", "M")] == [
        "tiny",
        "int8",
        "prefill",
        "64",
    ]
    folders = [Path(option(call, "--model")).name for call in fake.calls[:5]]
    assert folders == ["2_8", "2_8", "2_8", "2_4", "2_8"]  # dense: that which lost the fewest weights


def test_only_the_environment_and_the_checkpoint_vary(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSITY", "2_8")  # of the user's shell; would contradict 2:4
    monkeypatch.setenv("USE_CUBLASLT", "1")
    assert fake.run("--rounds", "1", "--vllm-args", "--dtype 'float 32'").exit_code == 0
    flags = [call["flags"] for call in fake.calls]
    stock = flags.pop(0)
    assert set(stock) == {"VLLM_PLUGINS"}
    assert "slidesparse" not in stock["VLLM_PLUGINS"].split(",")
    sparse = {"USE_CUSPARSELT": "1"}
    assert flags == [{"DISABLE_SLIDESPARSE": "1"}, {"USE_CUBLASLT": "1"}, sparse, sparse]
    without = [re.sub(r"\S+/(tiny/2_\d|out/logs/\S+)", "", " ".join(call["words"])) for call in fake.calls]
    assert len(set(without)) == 1
    assert fake.calls[0]["words"][-2:] == ["--dtype", "float 32"]


def test_figures_are_total_tokens_for_prefill_and_output_tokens_for_decode(fake: Fake) -> None:
    """Stock takes 2 s: 3 prompts of 64 + 1 tokens, then 64 sequences of 5 output tokens."""
    options = ("--stages", "prefill,decode", "--m", "64", "--rounds", "1", "--systems", "stock")
    done = fake.run(*options, "--prefill-steps", "3", "--decode-steps", "5")
    assert done.exit_code == 0, done.output
    assert [(row["stage"], float(row["tokens_per_s"])) for row in fake.rows] == [
        ("prefill", 3 * 65 / 2),
        ("decode", 64 * 5 / 2),
    ]


def test_resumes_without_repeating_and_drops_a_torn_line(fake: Fake) -> None:
    options = ("--rounds", "2", "--systems", "stock,sparse")
    assert fake.run(*options).exit_code == 0
    table = fake.out / "e2e.csv"
    lines = table.read_text().splitlines(keepends=True)
    assert len(fake.calls) == len(lines) - 1 == 6
    table.write_text("".join(lines[:4]) + lines[4][:20])  # killed while it wrote the fourth row
    done = fake.run(*options, "--json")
    assert done.exit_code == 0, done.output
    assert table.read_text() == "".join(lines)
    assert len(fake.calls) == 9
    answer = json.loads(done.stdout)
    assert (answer["finished"], answer["rows"], answer["failed"]) == (True, 6, [])
    assert fake.run(*options, "--rounds", "3").exit_code == 0
    assert len(fake.calls) == 12


def test_one_folder_one_workload(fake: Fake) -> None:
    options = ("--rounds", "1", "--systems", "stock")
    assert fake.run(*options).exit_code == 0
    conditions = json.loads((fake.out / "e2e.json").read_text())
    assert conditions["cpu"] == "a test's"
    assert conditions["workload"]["prefill_steps"] == 128
    assert conditions["tiny dense checkpoint"] == str(fake.folder / "tiny" / "2_8")
    done = fake.run(*options, "--prefill-steps", "7")
    assert done.exit_code == 2
    assert "was measured with workload" in done.output


def test_a_failure_is_shown_and_the_others_go_on(fake: Fake) -> None:
    fake.behave(fail=["off", "sparse"])
    done = fake.run("--rounds", "1", "--patterns", "6:8")
    assert done.exit_code == 1
    assert fake.systems == ["stock dense", "cublaslt dense"]
    shown = ANSI.sub("", done.output)
    assert "failed: prefill M 64, off, round 1: vllm ended with status 7" in shown
    assert "failed: prefill M 64, sparse 6:8, round 1" in shown
    assert "RuntimeError: the cause" in shown
    assert "line 29" in shown
    assert "line 5\n" not in shown
    log = (fake.out / "logs" / "tiny-int8-prefill-64-dense-off-1.log").read_text()
    assert "DISABLE_SLIDESPARSE=1" in log.splitlines()[0]
    assert "bench throughput" in log.splitlines()[0]
    assert log.endswith("failed: vllm ended with status 7\n")
    fake.behave()
    assert fake.run("--rounds", "1", "--patterns", "6:8").exit_code == 0
    assert fake.systems == ["stock dense", "cublaslt dense", "off dense", "sparse 6:8"]


def test_a_run_without_the_plugin_does_not_count_as_sparse(fake: Fake) -> None:
    fake.behave(mute=True)
    done = fake.run("--rounds", "1", "--patterns", "6:8", "--systems", "sparse,stock")
    assert done.exit_code == 1
    assert "the plugin did not count its layers in the log" in done.output
    assert fake.systems == ["stock dense"]


def test_a_run_that_takes_too_long_is_ended(fake: Fake) -> None:
    fake.behave(sleep=60)
    began = time.monotonic()
    done = fake.run("--rounds", "1", "--systems", "stock", "--run-limit", "0.5")
    assert time.monotonic() - began < 20
    assert done.exit_code == 1
    assert "it took more than the 0.5 s of --run-limit" in done.output
    assert fake.rows == []


def test_the_time_limit_ends_the_run_in_progress_which_is_no_failure(fake: Fake) -> None:
    fake.behave(sleep=60)
    began = time.monotonic()
    done = fake.run("--rounds", "1", "--systems", "stock,off", "--time-limit", "1", "--json")
    assert time.monotonic() - began < 20
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["finished"], answer["rows"], answer["failed"]) == (False, 0, [])
    assert len(fake.calls) <= 1


def test_dry_run_prints_what_is_left_and_runs_nothing(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSITY", "2_4")
    options = ("--rounds", "1", "--systems", "off,sparse", "--patterns", "6:8")
    done = fake.run(*options, "--dry-run")
    assert done.exit_code == 0, done.output
    assert (fake.calls, fake.out.exists()) == ([], False)
    first, second = done.stdout.splitlines()
    assert first.startswith(
        f"env -u SPARSITY DISABLE_SLIDESPARSE=1 {fake.bin / 'vllm'} bench throughput --model"
    )
    assert second.startswith("env -u SPARSITY USE_CUSPARSELT=1 ")
    fake.behave(fail=["sparse"])
    fake.run(*options)
    assert fake.run(*options, "--dry-run").stdout.splitlines() == [second]


def test_no_vllm(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake.folder))
    done = fake.run("--systems", "stock")
    assert done.exit_code == 3
    assert "the vllm command is not installed" in done.output


REFUSED: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "neither": (lambda at: [], "give either --model DIR or --models"),
    "both": (lambda at: ["--model", f"{at}/tiny", "--models", f"6:8={at}"], "give either --model DIR"),
    "nothing there": (lambda at: ["--model", f"{at}/nowhere"], "holds neither a config.json nor checkpoints"),
    "no such pattern": (lambda at: ["--model", f"{at}/tiny", "--patterns", "8:10"], "no checkpoint of 8:10"),
    "wrong name": (
        lambda at: ["--models", f"8:10={at}/tiny/2_8"],
        "is named 8:10 (2 of every 10 pruned), but",
    ),
    "no folder": (lambda at: ["--models", "6:8"], "is not PATTERN=DIR"),
    "unpruned": (
        lambda at: ["--model", str(write_config(at / "whole", None))],
        "no checkpoint carries a pattern",
    ),
    "slided": (
        lambda at: ["--model", str(write_config(at / "slid", "6:8", layout="slided"))],
        "holds slided weights, which no dense system runs",
    ),
    "two types": (
        lambda at: [
            "--models",
            f"6:8={at}/tiny/2_8,2:4={write_config(at / 'f', '2:4', 'fp8')}",
        ],
        "are of fp8 and int8",
    ),
    "system": (lambda at: ["--model", f"{at}/tiny", "--systems", "cutlass"], "--systems 'cutlass'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(fake: Fake, what: str) -> None:
    options, said = REFUSED[what]
    done = fake.run(*options(fake.folder), model=False)
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert fake.calls == []


def tokenizer(folder: Path, model: Decoder) -> Path:
    """One word for each token, so that the lengths of random prompts are exact."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder.mkdir()
    made = Tokenizer(WordLevel({f"w{i}": i for i in range(model.vocabulary)}, unk_token="w0"))
    made.pre_tokenizer = Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.mark.vllm
@pytest.mark.slow
def test_real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages and systems, from a BF16 folder to a page of the report."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    for name, value in (settings | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    model = converted(write_float(QWEN, tmp_path / "source"), tmp_path / "tiny-2_8", "6:8")
    words = f"--enforce-eager --gpu-memory-utilization 0.2 --tokenizer {tokenizer(tmp_path / 'words', QWEN)}"
    options = ["--model", str(model), "--out", str(tmp_path / "out"), "--m", "32", "--rounds", "1"]
    options += ["--prompt-len", "16", "--prefill-steps", "4", "--decode-steps", "4", "--vllm-args", words]
    for stage, system in (("prefill", "sparse"), ("decode", "stock")):
        done = CliRunner().invoke(app, ["bench", "e2e", *options, "--stages", stage, "--systems", system])
        assert done.exit_code == 0, done.output
    with (tmp_path / "out" / "e2e.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(row["model"], row["stage"], row["system"], row["pattern"]) for row in rows]
    assert found == [("tiny", "prefill", "sparse", "6:8"), ("tiny", "decode", "stock", "dense")]
    assert all(float(row["tokens_per_s"]) > 0 for row in rows)
    logs = tmp_path / "out" / "logs"
    totals = {path.name: json.loads(path.read_text())["total_num_tokens"] for path in logs.glob("*-1.json")}
    assert totals == {
        "tiny-int8-prefill-32-6_8-sparse-1.json": 4 * 2 * (16 + 1),  # two prompts a step
        "tiny-int8-decode-32-dense-stock-1.json": 32 * (16 + 4),
    }
    conditions = json.loads((tmp_path / "out" / "e2e.json").read_text())
    assert "8 layers sparse" in conditions["tiny 6:8 sparse"]
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    assert "## tiny, prefill, INT8" in (tmp_path / "out" / "e2e.md").read_text()
