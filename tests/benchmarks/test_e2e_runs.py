"""``python -m benchmarks e2e`` with a ``vllm`` that writes down what it was asked for, and once with the real one.

With ``--resident`` engines stay loaded and take turns; a program stands in for them, too.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import CONDITIONS, FLAGS, PYTHON, WORKER, Fake
from models import QWEN, Decoder, converted, write_config, write_float
from typer.testing import CliRunner

from benchmarks import e2e_resident, e2e_runs, e2e_worker
from benchmarks.cli import app
from benchmarks.records import E2E, Records

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    for name in FLAGS:
        monkeypatch.delenv(name, raising=False)
    made = Fake(tmp_path)
    monkeypatch.setenv("PATH", str(made.bin), prepend=os.pathsep)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # no vllm lies beside it
    monkeypatch.setattr(e2e_runs, "conditions", lambda systems: dict(CONDITIONS))
    return made


def test_order_alternates_and_dense_systems_run_once(fake: Fake) -> None:
    done = fake.run("--rounds", "3")
    assert done.exit_code == 0, done.output
    forward = ["stock dense", "off dense", "cublaslt dense", "sparse 2:4", "sparse 6:8"]
    assert fake.systems == [*forward, *forward[::-1], *forward]
    assert [row["round"] for row in fake.rows] == ["1"] * 5 + ["2"] * 5 + ["3"] * 5
    assert list(fake.rows[0].values())[:4] == ["tiny", "int8", "prefill", "64"]
    assert fake.run("--rounds", "1", "--first-round", "4", "--systems", "stock").exit_code == 0
    assert [row["round"] for row in fake.rows[15:]] == ["4"]
    folders = [Path(call["words"][call["words"].index("--model") + 1]).name for call in fake.calls[:5]]
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
    conditions = json.loads((fake.out / "e2e.json").read_text())
    assert conditions["workload"]["prefill_steps"] == 128
    assert conditions["tiny dense checkpoint"] == str(fake.folder / "tiny" / "2_8")
    other = fake.run(*options, "--prefill-steps", "7")  # figures of another workload
    assert (other.exit_code, "workload" in other.output) == (2, True)


def test_a_failure_is_shown_and_the_others_go_on(fake: Fake) -> None:
    fake.behave(fail=["off", "sparse"])
    done = fake.run("--rounds", "1", "--patterns", "6:8")
    assert done.exit_code == 1
    assert fake.systems == ["stock dense", "cublaslt dense"]
    shown = ANSI.sub("", done.output)
    for fact in ("M 64, off, round 1", "status 7", "sparse 6:8", "RuntimeError: the cause", "line 29"):
        assert fact in shown
    assert "line 5\n" not in shown  # the cause, and the end
    log = (fake.out / "logs" / "tiny-int8-prefill-64-dense-off-1.log").read_text()
    assert re.match(r"\$ env .*DISABLE_SLIDESPARSE=1 .* bench throughput", log)
    fake.behave()
    assert fake.run("--rounds", "1", "--patterns", "6:8").exit_code == 0
    assert fake.systems == ["stock dense", "cublaslt dense", "off dense", "sparse 6:8"]


@pytest.mark.parametrize(("limit", "seconds", "code"), [("--run-limit", "0.5", 1), ("--time-limit", "1", 0)])
def test_a_run_that_takes_too_long_is_ended(fake: Fake, limit: str, seconds: str, code: int) -> None:
    """A run of its own limit has failed; when the time of the command is up, it is left for the next time."""
    fake.behave(sleep=60)
    began = time.monotonic()
    done = fake.run("--rounds", "1", "--systems", "stock", limit, seconds, "--json")
    assert time.monotonic() - began < 20
    assert done.exit_code == code, done.output
    answer = json.loads(done.stdout)
    assert (answer["finished"], answer["rows"], len(answer["failed"])) == (bool(code), 0, code)


def test_dry_run_prints_what_is_left_and_runs_nothing(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSITY", "2_4")
    options = ("--rounds", "1", "--systems", "off,sparse", "--patterns", "6:8")
    done = fake.run(*options, "--dry-run")
    assert done.exit_code == 0, done.output
    assert (fake.calls, fake.out.exists()) == ([], False)
    first, second = done.stdout.splitlines()
    assert first.startswith(f"env -u SPARSITY DISABLE_SLIDESPARSE=1 {fake.bin / 'vllm'} bench throughput")
    assert second.startswith("env -u SPARSITY USE_CUSPARSELT=1 ")
    fake.behave(fail=["sparse"])
    fake.run(*options)
    assert fake.run(*options, "--dry-run").stdout.splitlines() == [second]


REFUSED: dict[str, Callable[[Path], list[str]]] = {
    "--model": lambda at: [],
    "nowhere": lambda at: ["--model", f"{at}/nowhere"],
    "8:10": lambda at: ["--model", f"{at}/tiny", "--patterns", "8:10"],
    "odd/2_10": lambda at: ["--model", str(write_config(at / "odd" / "2_10", "6:8").parent)],
    "no checkpoint": lambda at: ["--model", str(write_config(at / "whole", None))],
    "slided": lambda at: ["--model", str(write_config(at / "slid", "6:8", layout="slided"))],
    "fp8": lambda at: ["--model", str(write_config(at / "tiny" / "2_6", "4:6", "fp8").parent)],
    "cutlass": lambda at: ["--model", f"{at}/tiny", "--systems", "cutlass"],
    "--profile": lambda at: ["--model", f"{at}/tiny", "--resident", "--profile-m", "64"],
}


@pytest.mark.parametrize("fact", REFUSED)
def test_refused(fake: Fake, fact: str) -> None:
    done = fake.run(*REFUSED[fact](fake.folder), model=False)
    assert done.exit_code == 2, done.output
    assert fact in done.output
    assert fake.calls == []


# --- engines that stay

RESIDENT = ["--resident", "--stages", "prefill,decode", "--systems", "stock,sparse", "--m", "64,128"]
RESIDENT += ["--prompt-len", "32", "--prefill-steps", "3", "--decode-steps", "8", "--rounds", "2", "--json"]


def measure(fake: Fake, monkeypatch: pytest.MonkeyPatch, *options: str, broken: str = "") -> Any:
    """The JSON printed and the exit code, and all that the engines were told: (system, message)."""
    script, calls = fake.folder / "worker.py", fake.folder / "told"
    calls.write_text("")
    script.write_text(WORKER.format(calls=str(calls), broken=[broken]))
    monkeypatch.setattr(e2e_resident, "WORKER", (PYTHON, str(script)))
    done = fake.run(*RESIDENT, *options)
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout) | {"code": done.exit_code}, [json.loads(line) for line in calls.open()]


def test_every_engine_starts_once_and_measures_all(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    found, calls = measure(fake, monkeypatch)
    assert (found["code"], found["finished"], found["rows"]) == (0, True, 2 * 2 * 3 * 2)
    starts = [message for _, message in calls if isinstance(message[0], str)]
    assert len(starts) == 3
    for words in starts:
        # room for 128 sequences of 24 tokens, in blocks of 16, and a tenth; decode prefills 128 prompts of 16 at once
        token = 2 * QWEN.layers * QWEN.kv_heads * QWEN.head_dim * 2
        assert words[words.index("--kv-cache-memory-bytes") + 1] == str(int(1.1 * 128 * 32) * token)
        assert words[words.index("--max-num-batched-tokens") + 1] == "2048"
    limits = [message[0] for _, message in calls if not isinstance(message[0], str)]
    assert limits == [64] * 3 + [128] * 3 + [0] * 6 + [64] * 3 + [128] * 3 + [0] * 6
    prefill = {row["system"]: float(row["tokens_per_s"]) for row in fake.rows if row["stage"] == "prefill"}
    assert prefill["sparse"] == 2 * prefill["stock"] > 0
    for row in fake.rows:  # seconds over joules
        power = float(row["tokens_per_s"]) / float(row["tokens_per_joule"])
        assert power == pytest.approx(4.0, rel=1e-3)
    conditions = json.loads((fake.out / "e2e.json").read_text())
    assert conditions["workload"]["engines"] == "resident, side by side"
    assert measure(fake, monkeypatch)[1] == []  # all is in the table: no engine starts


def test_an_engine_that_does_not_start_fails_its_runs_and_no_others(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = measure(fake, monkeypatch, broken="sparse")
    assert (found["code"], found["rows"], len(found["failed"])) == (1, 2 * 2 * 2, 2 * 2 * 2 * 2)
    assert (found["cells"], found["planned"]) == (8, 8 + 16)


@pytest.mark.parametrize(
    ("options", "patterns", "tokens"),
    [
        (["--profile-m", "128", "--profile-patterns", "6:8"], {"dense", "6:8"}, {128}),
        ([], {"dense", "2:4", "6:8"}, {64, 128}),
    ],
)
def test_kernels_are_recorded_once_of_the_cells_asked_for(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, options: list[str], patterns: set[str], tokens: set[int]
) -> None:
    recorded = []
    monkeypatch.setattr(
        e2e_resident.ResidentBench, "_record", lambda bench, run, engine, worker: recorded.append(run)
    )
    measure(fake, monkeypatch, "--profile", *options)
    wanted = {(stage, m, pattern) for stage in ("prefill", "decode") for m in tokens for pattern in patterns}
    assert sorted((run.stage, run.m, run.pattern) for run in recorded) == sorted(wanted)


def test_the_scheduler_keeps_steps_below_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class AsyncScheduler:
        def __init__(self, most: int) -> None:
            self.max_num_scheduled_tokens = most

        def schedule(self) -> int:
            return self.max_num_scheduled_tokens

    stub = types.ModuleType("vllm.v1.core.sched.async_scheduler")
    stub.AsyncScheduler = AsyncScheduler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.async_scheduler", stub)
    for parent in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    path = tmp_path / "limit"
    path.write_bytes(bytes(8))
    monkeypatch.setenv(e2e_worker.LIMIT_FILE, str(path))
    scheduler = e2e_worker.StepScheduler(2048)
    assert scheduler.schedule() == 2048
    for limit, steps in ((64, 64), (4096, 2048), (0, 2048)):
        path.write_bytes(limit.to_bytes(8, "little"))
        assert scheduler.schedule() == steps


# --- the real vLLM


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
    """A prefill of the plugin's, from a BF16 folder to a table."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    for name, value in (settings | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    model, out = (
        converted(write_float(QWEN, tmp_path / "source"), tmp_path / "tiny-2_8", "6:8"),
        tmp_path / "out",
    )
    words = f"--enforce-eager --gpu-memory-utilization 0.2 --tokenizer {tokenizer(tmp_path / 'words', QWEN)}"
    options = ["--model", str(model), "--out", str(out), "--m", "32", "--rounds", "1", "--vllm-args", words]
    options += ["--prompt-len", "16", "--prefill-steps", "4", "--stages", "prefill", "--systems", "sparse"]
    done = CliRunner().invoke(app, ["e2e", *options])
    assert done.exit_code == 0, done.output
    (row,) = Records(out, E2E).rows
    assert (row["model"], row["system"], row["pattern"]) == ("tiny", "sparse", "6:8")
    assert float(row["tokens_per_s"]) > 0
    found = json.loads((out / "logs" / "tiny-int8-prefill-32-6_8-sparse-1.json").read_text())
    assert found["total_num_tokens"] == 4 * 2 * (16 + 1)  # two prompts a step
    assert "8 layers sparse" in json.loads((out / "e2e.json").read_text())["tiny 6:8 sparse"]
