"""``slidesparse bench e2e --resident``: engines that stay loaded and take turns."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from models import QWEN, write_config
from typer.testing import CliRunner

from slidesparse.bench import e2e_resident, e2e_worker
from slidesparse.bench.e2e import Run, Workload, runs
from slidesparse.bench.e2e_models import find_model
from slidesparse.bench.e2e_resident import Engine, bytes_per_token, cache_tokens, largest
from slidesparse.cli import app

# Behaves as the worker does, with a clock by system; notes what it is told.
FAKE = """\
import json, os, sys
system = ("sparse" if "USE_CUSPARSELT" in os.environ else "stock")
def note(message):
    with open({calls!r}, "a") as file:
        file.write(json.dumps([system, message]) + "\\n")
words = json.loads(sys.stdin.readline())
note(words)
option = lambda name: words[words.index(name) + 1]
if system in {broken!r}:
    sys.exit("RuntimeError: out of memory")
if system == "sparse":
    pattern = json.load(open(option("--model") + "/config.json"))["quantization_config"]["slidesparse"]["pattern"]
    print(f"SlideSparse {{pattern}} (2 of every few pruned): 8 layers sparse", file=sys.stderr, flush=True)
print("{{}}", flush=True)
for line in sys.stdin:
    limit, words = json.loads(line)
    note([limit, words])
    prompts = int(option("--num-prompts"))
    total = prompts * (int(option("--input-len")) + int(option("--output-len")))
    with open(option("--output-json"), "w") as file:
        json.dump({{"elapsed_time": {{"stock": 2.0, "sparse": 1.0}}[system], "num_requests": prompts,
                   "total_num_tokens": total}}, file)
    print("{{}}", flush=True)
"""
COMMAND = ["bench", "e2e", "--resident", "--systems", "stock,sparse", "--m", "64,128", "--prompt-len", "32"]
COMMAND += ["--prefill-steps", "3", "--decode-steps", "8", "--rounds", "2", "--json"]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    for name, pattern in (("2_4", "2:4"), ("2_8", "6:8")):
        write_config(tmp_path / "tiny" / name, pattern)
    return tmp_path / "tiny"


def planned(tiny: Path) -> list[Run]:
    model = find_model(tiny, None, None, None, dense=True, sparse=True)
    work = Workload(prompt_len=32, prefill_steps=3, decode_steps=8)
    return runs(
        model,
        ("prefill", "decode"),
        {"prefill": (64, 128), "decode": (64, 128)},
        ("stock", "sparse"),
        2,
        work,
    )


def test_an_engine_is_large_enough_for_all_its_runs(tiny: Path) -> None:
    of_sparse = [run for run in planned(tiny) if Engine.of(run).pattern == "6:8"]
    size = largest(of_sparse)
    assert (size.sequences, size.batched) == (128, 16 * 128)  # decode prefills 128 prompts of 16 at once
    assert size.prompt + size.output == 33
    assert cache_tokens(of_sparse) == int(1.1 * 128 * 32)  # blocks of 16: 24 tokens take 32
    folder = of_sparse[0].variant.folder
    assert bytes_per_token(folder) == 2 * QWEN.layers * QWEN.kv_heads * QWEN.head_dim * 2


def measure(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, *options: str, broken: tuple[str, ...] = ()
) -> tuple[int, dict[str, object], list[list[object]]]:
    """Exit code, the JSON printed, and (system, message) of all that the engines were told."""
    calls, script = tiny.parent / "calls", tiny.parent / "fake_worker.py"
    calls.write_text("")
    script.write_text(FAKE.format(calls=str(calls), broken=broken))
    monkeypatch.setattr(e2e_resident.e2e_worker, "__file__", str(script))
    monkeypatch.setattr("slidesparse.bench.e2e_runs.find_vllm", lambda: "vllm")
    found = {"gpu": None, "capability": None, "cpu": "a test's", "versions": {"vllm": "0.28.0"}}
    monkeypatch.setattr("slidesparse.bench.e2e_runs.conditions", lambda systems: dict(found))
    words = [*COMMAND, "--model", str(tiny), "--out", str(tiny.parent / "out"), *options]
    done = CliRunner().invoke(app, words)
    assert done.exit_code in (0, 1), done.output
    return done.exit_code, json.loads(done.stdout), [json.loads(line) for line in calls.open()]


def test_every_engine_starts_once_and_measures_all(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, found, calls = measure(tiny, monkeypatch)
    assert (code, found["finished"], found["rows"]) == (0, True, 2 * 2 * 3 * 2)
    starts = [message for _, message in calls if isinstance(message[0], str)]  # type: ignore[index]
    assert len(starts) == 3
    for words in starts:
        assert words[words.index("--kv-cache-memory-bytes") + 1] == str(int(1.1 * 128 * 32) * 512)
        assert words[words.index("--max-num-batched-tokens") + 1] == "2048"
    limits = [message[0] for _, message in calls if not isinstance(message[0], str)]  # type: ignore[index]
    assert limits == [64] * 3 + [128] * 3 + [0] * 6 + [64] * 3 + [128] * 3 + [0] * 6
    with (tiny.parent / "out" / "e2e.csv").open() as file:
        rows = list(csv.DictReader(file))
    prefill = {row["system"]: float(row["tokens_per_s"]) for row in rows if row["stage"] == "prefill"}
    assert prefill["sparse"] == 2 * prefill["stock"] > 0
    conditions = json.loads((tiny.parent / "out" / "e2e.json").read_text())
    assert conditions["workload"]["engines"] == "resident, side by side"
    assert measure(tiny, monkeypatch)[2] == []  # all is in the table: no engine starts


def test_an_engine_that_does_not_start_fails_its_runs_and_no_others(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found, _ = measure(tiny, monkeypatch, broken=("sparse",))
    assert (code, found["rows"]) == (1, 2 * 2 * 2)
    assert len(found["failed"]) == 2 * 2 * 2 * 2  # type: ignore[arg-type]
    assert "the engine's process ended; its log is" in found["failed"][0]["reason"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "patterns", "tokens"),
    [
        (["--profile-m", "128", "--profile-patterns", "6:8"], {"dense", "6:8"}, {128}),
        (["--profile-m", "64"], {"dense", "2:4", "6:8"}, {64}),
        ([], {"dense", "2:4", "6:8"}, {64, 128}),
    ],
)
def test_kernels_are_recorded_once_of_the_cells_asked_for(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], patterns: set[str], tokens: set[int]
) -> None:
    recorded = []
    monkeypatch.setattr(
        e2e_resident.ResidentBench, "_record", lambda bench, run, engine, worker: recorded.append(run)
    )
    measure(tiny, monkeypatch, "--profile", *options)
    wanted = {(stage, m, pattern) for stage in ("prefill", "decode") for m in tokens for pattern in patterns}
    assert sorted((run.stage, run.m, run.pattern) for run in recorded) == sorted(wanted)


@pytest.mark.parametrize("option", [["--profile-m", "64"], ["--profile-patterns", "6:8"]])
def test_cells_without_profile_are_refused(tiny: Path, option: list[str]) -> None:
    done = CliRunner().invoke(app, [*COMMAND, "--model", str(tiny), *option])
    assert done.exit_code == 2
    assert "need --profile" in done.output


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


def test_a_vllm_whose_engine_cannot_stay_is_named(tmp_path: Path) -> None:
    files = {
        "__init__": "class LLM: ...",
        "benchmarks/throughput": "",
        "engine/arg_utils": "class EngineArgs: ...",
        "utils/argparse_utils": "class FlexibleArgumentParser: ...",
    }
    for name, text in files.items():
        path = tmp_path / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command, environ = [sys.executable, e2e_worker.__file__], {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, input="[]\n", env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "leave --resident out, or use a later vLLM" in done.stderr
