"""``python -m benchmarks e2e`` with a fake ``vllm`` that records its arguments, and once with the real one.

With ``--resident``, engines stay loaded and take turns; a fake worker program stands in for them.
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
    vllm = Fake(tmp_path)
    monkeypatch.setenv("PATH", str(vllm.bin), prepend=os.pathsep)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # no vllm is beside it
    monkeypatch.setattr(e2e_runs, "conditions", lambda systems: dict(CONDITIONS))
    return vllm


def test_order_alternates_and_dense_systems_run_once(fake: Fake) -> None:
    result = fake.run("--rounds", "3")
    assert result.exit_code == 0, result.output
    forward = ["stock dense", "cublaslt dense", "sparse 2:4", "sparse 6:8"]
    assert fake.systems == [*forward, *forward[::-1], *forward]
    assert [row["round"] for row in fake.rows] == ["1"] * 4 + ["2"] * 4 + ["3"] * 4
    assert list(fake.rows[0].values())[:4] == ["tiny", "int8", "prefill", "64"]
    assert fake.run("--rounds", "1", "--first-round", "4", "--systems", "stock").exit_code == 0
    assert [row["round"] for row in fake.rows[12:]] == ["4"]
    folders = [Path(call["words"][call["words"].index("--model") + 1]).name for call in fake.calls[:4]]
    # dense systems use the checkpoint with the fewest pruned weights
    assert folders == ["2_8", "2_8", "2_4", "2_8"]


def test_only_the_environment_and_the_checkpoint_vary(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSITY", "2_8")  # from the user's shell; contradicts 2:4
    monkeypatch.setenv("USE_CUBLASLT", "1")
    assert fake.run("--rounds", "1", "--vllm-args", "--dtype 'float 32'").exit_code == 0
    flags = [call["flags"] for call in fake.calls]
    stock = flags.pop(0)
    assert set(stock) == {"VLLM_PLUGINS"}
    assert "slidesparse" not in stock["VLLM_PLUGINS"].split(",")
    sparse = {"USE_CUSPARSELT": "1"}
    assert flags == [{"USE_CUBLASLT": "1"}, sparse, sparse]
    without = [re.sub(r"\S+/(tiny/2_\d|out/logs/\S+)", "", " ".join(call["words"])) for call in fake.calls]
    assert len(set(without)) == 1
    assert fake.calls[0]["words"][-2:] == ["--dtype", "float 32"]


def test_resumes_without_repeating_and_drops_a_torn_line(fake: Fake) -> None:
    options = ("--rounds", "2", "--systems", "stock,sparse")
    assert fake.run(*options).exit_code == 0
    table = fake.out / "e2e.csv"
    lines = table.read_text().splitlines(keepends=True)
    assert len(fake.calls) == len(lines) - 1 == 6
    table.write_text("".join(lines[:4]) + lines[4][:20])  # as if killed while writing the fourth row
    result = fake.run(*options, "--json")
    assert result.exit_code == 0, result.output
    assert table.read_text() == "".join(lines)
    assert len(fake.calls) == 9
    report = json.loads(result.stdout)
    assert (report["finished"], report["rows"], report["failed"]) == (True, 6, [])
    assert fake.run(*options, "--rounds", "3").exit_code == 0
    assert len(fake.calls) == 12
    conditions = json.loads((fake.out / "e2e.json").read_text())
    assert conditions["workload"]["prefill_steps"] == 128
    assert conditions["tiny dense checkpoint"] == str(fake.folder / "tiny" / "2_8")
    refused = fake.run(*options, "--prefill-steps", "7")  # results of another workload
    assert (refused.exit_code, "workload" in refused.output) == (2, True)


def test_failed_run_is_reported_and_others_continue(fake: Fake) -> None:
    fake.behave(fail=["cublaslt", "sparse"])
    result = fake.run("--rounds", "1", "--patterns", "6:8")
    assert result.exit_code == 1
    assert fake.systems == ["stock dense"]
    shown = ANSI.sub("", result.output)
    for fact in ("M 64, cublaslt, round 1", "status 7", "sparse 6:8", "RuntimeError: the cause", "line 29"):
        assert fact in shown
    assert "line 5\n" not in shown  # only the cause and the last lines
    log = (fake.out / "logs" / "tiny-int8-prefill-64-dense-cublaslt-1.log").read_text()
    assert re.match(r"\$ env .*USE_CUBLASLT=1 .* bench throughput", log)
    fake.behave()
    assert fake.run("--rounds", "1", "--patterns", "6:8").exit_code == 0
    assert fake.systems == ["stock dense", "cublaslt dense", "sparse 6:8"]


@pytest.mark.parametrize(("limit", "seconds", "code"), [("--run-limit", "0.5", 1), ("--time-limit", "1", 0)])
def test_run_is_stopped_at_its_time_limit(fake: Fake, limit: str, seconds: str, code: int) -> None:
    """A run beyond its own limit has failed; a run at the end of the command's time is left for the next call."""
    fake.behave(sleep=60)
    began = time.monotonic()
    result = fake.run("--rounds", "1", "--systems", "stock", limit, seconds, "--json")
    assert time.monotonic() - began < 20
    assert result.exit_code == code, result.output
    report = json.loads(result.stdout)
    assert (report["finished"], report["rows"], len(report["failed"])) == (bool(code), 0, code)


def test_dry_run_prints_remaining_commands_and_runs_nothing(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSITY", "2_4")
    options = ("--rounds", "1", "--systems", "cublaslt,sparse", "--patterns", "6:8")
    result = fake.run(*options, "--dry-run")
    assert result.exit_code == 0, result.output
    assert (fake.calls, fake.out.exists()) == ([], False)
    first, second = result.stdout.splitlines()
    assert first.startswith(f"env -u SPARSITY USE_CUBLASLT=1 {fake.bin / 'vllm'} bench throughput")
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
}


@pytest.mark.parametrize("fact", REFUSED)
def test_invalid_options_are_refused(fake: Fake, fact: str) -> None:
    result = fake.run(*REFUSED[fact](fake.folder), model=False)
    assert result.exit_code == 2, result.output
    assert fact in result.output
    assert fake.calls == []


# --- resident engines

RESIDENT = ["--resident", "--stages", "prefill,decode", "--systems", "stock,sparse", "--m", "64,128"]
RESIDENT += ["--prompt-len", "32", "--prefill-steps", "3", "--decode-steps", "8", "--rounds", "2", "--json"]


def measure(fake: Fake, monkeypatch: pytest.MonkeyPatch, *options: str, broken: str = "") -> Any:
    """Return the printed JSON with the exit code, and all messages to the engines as (system, message)."""
    script, calls = fake.folder / "worker.py", fake.folder / "told"
    calls.write_text("")
    script.write_text(WORKER.format(calls=str(calls), broken=[broken]))
    monkeypatch.setattr(e2e_resident, "WORKER", (PYTHON, str(script)))
    result = fake.run(*RESIDENT, *options)
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout) | {"code": result.exit_code}, [json.loads(line) for line in calls.open()]


def test_every_engine_starts_once_and_measures_all(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    report, calls = measure(fake, monkeypatch)
    assert (report["code"], report["finished"], report["rows"]) == (0, True, 2 * 2 * 3 * 2)
    starts = [message for _, message in calls if isinstance(message[0], str)]
    assert len(starts) == 3
    for arguments in starts:
        # memory for 128 sequences of 24 tokens in blocks of 16, plus 10%; decode prefills 128 prompts of 16 at once
        token = 2 * QWEN.layers * QWEN.kv_heads * QWEN.head_dim * 2
        assert arguments[arguments.index("--kv-cache-memory-bytes") + 1] == str(int(1.1 * 128 * 32) * token)
        assert arguments[arguments.index("--max-num-batched-tokens") + 1] == "2048"
    limits = [message[0] for _, message in calls if not isinstance(message[0], str)]
    assert limits == [64] * 3 + [128] * 3 + [0] * 6 + [64] * 3 + [128] * 3 + [0] * 6
    prefill = {row["system"]: float(row["tokens_per_s"]) for row in fake.rows if row["stage"] == "prefill"}
    assert prefill["sparse"] == 2 * prefill["stock"] > 0
    for row in fake.rows:  # joules per second
        power = float(row["tokens_per_s"]) / float(row["tokens_per_joule"])
        assert power == pytest.approx(4.0, rel=1e-3)
        assert float(row["step_ms"]) == (250 if row["system"] == "sparse" else 500)
    conditions = json.loads((fake.out / "e2e.json").read_text())
    assert conditions["workload"]["engines"] == "resident, side by side"
    assert measure(fake, monkeypatch)[1] == []  # the table is complete: no engine starts


def test_engine_that_does_not_start_fails_only_its_runs(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = measure(fake, monkeypatch, broken="sparse")
    assert (report["code"], report["rows"], len(report["failed"])) == (1, 2 * 2 * 2, 2 * 2 * 2 * 2)
    assert (report["cells"], report["planned"]) == (8, 8 + 16)


def test_the_scheduler_limits_and_records_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class AsyncScheduler:
        def __init__(self, max_tokens: int) -> None:
            self.max_num_scheduled_tokens = max_tokens

        def schedule(self) -> int:
            return self.max_num_scheduled_tokens

        def update_from_output(self, scheduled: Any, output: str) -> str:
            return output

    stub = types.ModuleType("vllm.v1.core.sched.async_scheduler")
    stub.AsyncScheduler = AsyncScheduler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.async_scheduler", stub)
    for parent in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    path = tmp_path / "steps"
    path.touch()
    monkeypatch.setenv(e2e_worker.STEP_FILE, str(path))
    monkeypatch.setattr(e2e_worker, "MOST_STEPS", 3)
    file = e2e_worker.StepFile(str(path))  # the other process's
    scheduler = e2e_worker.StepScheduler(2048)
    assert scheduler.schedule() == 2048
    for limit, tokens in ((64, 64), (4096, 2048), (0, 2048)):
        file.limit = limit
        assert scheduler.schedule() == tokens
    assert file.steps() == []
    for now, tokens in (
        (1.0, 64),
        (1.5, 64),
        (1.75, 0),
        (4.0, 32),
        (5.0, 8),
    ):  # a step without tokens, one too many
        monkeypatch.setattr(time, "perf_counter", lambda now=now: now)
        assert (
            scheduler.update_from_output(types.SimpleNamespace(total_num_scheduled_tokens=tokens), "x") == "x"
        )
    assert file.steps() == [(64, 0.5), (32, 2.5)]
    file.limit = 128
    file.clear()
    assert (file.steps(), file.limit) == ([], 128)


# --- the real vLLM


def tokenizer(folder: Path, model: Decoder) -> Path:
    """Write a tokenizer of one word per token, with which lengths of random prompts are exact."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder.mkdir()
    word_tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(model.vocabulary)}, unk_token="w0"))
    word_tokenizer.pre_tokenizer = Whitespace()
    word_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.mark.vllm
@pytest.mark.slow
def test_e2e_with_real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure a prefill by the plugin, from a BF16 checkpoint to a row of the table."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    for name, value in (settings | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    model, out = (
        converted(write_float(QWEN, tmp_path / "source"), tmp_path / "tiny-2_8", "6:8"),
        tmp_path / "out",
    )
    vllm_args = (
        f"--enforce-eager --gpu-memory-utilization 0.2 --tokenizer {tokenizer(tmp_path / 'words', QWEN)}"
    )
    options = ["--model", str(model), "--out", str(out), "--m", "32", "--rounds", "1"]
    options += ["--vllm-args", vllm_args]
    options += ["--prompt-len", "16", "--prefill-steps", "4", "--stages", "prefill", "--systems", "sparse"]
    result = CliRunner().invoke(app, ["e2e", *options])
    assert result.exit_code == 0, result.output
    (row,) = Records(out, E2E).rows
    assert (row["model"], row["system"], row["pattern"]) == ("tiny", "sparse", "6:8")
    assert float(row["tokens_per_s"]) > 0
    figures = json.loads((out / "logs" / "tiny-int8-prefill-32-6_8-sparse-1.json").read_text())
    assert figures["total_num_tokens"] == 4 * 2 * (16 + 1)  # two prompts per step
    assert "8 layers sparse" in json.loads((out / "e2e.json").read_text())["tiny 6:8 sparse"]
