"""The end-to-end benchmark: its plan, engines that take turns (a program stands in for vLLM), and the real one."""

from __future__ import annotations

import csv
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QWEN, Decoder, converted, write_config, write_float
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from benchmarks.cli import app
from benchmarks.e2e import run as e2e_run
from benchmarks.e2e import w4a16, worker
from benchmarks.e2e.plan import FLAGS, E2eError, Run, Workload, arguments, environment, find_model, runs
from benchmarks.e2e.run import RunError, bytes_per_token, cache_tokens, check_log, read_figures
from benchmarks.records import E2E, Records


def one_run(folder: Path, stage: str = "prefill", system: str = "stock", m: int = 128) -> Run:
    model = find_model(write_config(folder / "m", "6:8"))
    return runs(model, (stage,), {stage: (m,)}, (system,), None, 1, Workload(prompt=8))[0]


def test_each_system_has_its_flags_and_no_others() -> None:
    sparse = {"USE_CUSPARSELT": "1"}
    listed = {"VLLM_PLUGINS": "other,slidesparse", "HOME": "/h"}
    assert (
        environment("stock", listed) == environment("bf16", listed) == {"VLLM_PLUGINS": "other", "HOME": "/h"}
    )
    assert "slidesparse" not in environment("stock", {})["VLLM_PLUGINS"].split(",")
    assert environment("sparse", {"VLLM_PLUGINS": "other"}) == {"VLLM_PLUGINS": "other,slidesparse", **sparse}
    assert environment("cublaslt", {}) == {"USE_CUBLASLT": "1"}
    users = dict.fromkeys(FLAGS, "set by the user")
    assert environment("sparse", users) == sparse
    assert environment("cusparselt", users) == {**sparse, "SLIDESPARSE_BACKEND": "cusparselt"}
    assert environment("unfused", users) == {**sparse, "SLIDESPARSE_FUSE": "0"}


def test_steps_have_m_tokens(tmp_path: Path) -> None:
    """Prefill is bounded by the token budget, decode by the number of sequences."""
    work = Workload()
    small, large = work.size("prefill", 512), work.size("prefill", 65536)
    assert (small.prompt, small.prompts, small.batched, small.output) == (512, 128, 512, 1)
    assert (large.prompt, large.prompts, large.batched, large.output) == (1024, 128 * 64, 65536, 1)
    assert large.sequences >= 2 * 64
    decode = work.size("decode", 512)
    assert (decode.sequences, decode.prompts, decode.output, decode.batched) == (512, 512, 256, 512 * 16)
    assert Workload(context=8192).size("decode", 32).batched == 16384
    for m in (1, 64, 1024, 65536):
        assert work.size("prefill", m).sequences <= m  # vLLM refuses more sequences than tokens
    with pytest.raises(E2eError, match="1536"):
        work.size("prefill", 1536)
    model = find_model(write_config(tmp_path / "m", "6:8"))
    with pytest.raises(E2eError, match=r"513.*512"):  # more tokens than the model has positions
        runs(model, ("prefill",), {"prefill": (512,)}, ("stock",), None, 1, work)
    words = arguments(one_run(tmp_path / "one"), Workload(), tmp_path / "x.json")
    for option, value in (
        ("--random-input-len", 8),
        ("--max-num-batched-tokens", 128),
        ("--max-model-len", 43),
    ):
        assert words[words.index(option) + 1] == str(value)


def test_folders_become_systems_and_patterns(tmp_path: Path) -> None:
    """Dense systems run the unpruned checkpoint; folders that are not W8A8 are systems of their name."""
    for pattern in ("dense", "6:8", "2:4"):
        write_config(tmp_path / "qwen" / pattern, None if pattern == "dense" else pattern)
    (tmp_path / "qwen" / "bf16").mkdir()
    config = json.loads((tmp_path / "qwen" / "dense" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "qwen" / "bf16" / "config.json").write_text(json.dumps(config))
    model = find_model(tmp_path / "qwen")
    assert (model.name, model.dtype, model.dense.folder.name) == ("qwen", "int8", "dense")
    systems = ("stock", "bf16", "sparse")
    planned = runs(model, ("decode",), {"decode": (1,)}, systems, None, 2, Workload())
    forward = [("stock", "dense"), ("bf16", "bf16"), ("sparse", "2:4"), ("sparse", "6:8")]
    assert [(run.system, run.variant.folder.name) for run in planned] == [*forward, *forward[::-1]]
    for wrong in ("fp4", "cusparselt"):
        with pytest.raises(E2eError, match="fp4|no checkpoint of 4:6"):
            runs(model, ("decode",), {"decode": (1,)}, (wrong,), ("4:6",), 1, Workload())
    single = find_model(write_config(tmp_path / "llama-2_6", "4:6"))
    assert (single.name, single.dense.folder.name) == ("llama", "llama-2_6")
    write_config(tmp_path / "bad" / "2_8", "4:6")
    with pytest.raises(E2eError, match=r"named 2_8, but was pruned to 4:6"):
        find_model(tmp_path / "bad")


def test_figures_of_another_run_are_refused(tmp_path: Path) -> None:
    run = one_run(tmp_path)  # 128 steps of 16 prompts of 8 tokens, at most 128 tokens each
    valid = {"elapsed_time": 2.0, "num_requests": 2048, "total_num_tokens": 2048 * 9}
    rate, nothing = 2048 * 9 / 2, {"watts": None, "steps": []}
    unknown = {"step_ms": None, "tokens_per_s": rate, "tokens_per_joule": None}
    assert read_figures(run, valid, nothing) == unknown
    # medians are of steps of M tokens after another one: 0.25, 0.5 and 0.125
    steps = [(128, 0.9), (128, 0.25), (128, 0.5), (128, 0.125), (64, 0.0625), (128, 0.75)]
    figures = {"step_ms": 250.0, "tokens_per_s": rate, "tokens_per_joule": rate / 64}
    assert read_figures(run, valid, {"watts": 64.0, "steps": steps}) == figures
    for change in ({"num_requests": 2047}, {"elapsed_time": 0.0}, {"elapsed_time": "soon"}):
        with pytest.raises(RunError):
            read_figures(run, valid | change, nothing)
    with pytest.raises(RunError, match="not 8"):
        read_figures(run, valid | {"total_num_tokens": 2048}, nothing)
    decode = one_run(tmp_path / "decode", "decode", m=64)  # only output tokens: 256 per sequence
    assert read_figures(decode, valid | {"num_requests": 64}, nothing)["tokens_per_s"] == 64 * 256 / 2


def test_log_identifies_the_system(tmp_path: Path) -> None:
    sparse = (
        "SlideSparse 6:8 (2 of every 8 pruned): 8 layers sparse, 1 dense (1 lm_head); dense layout; backend x"
    )
    dense = "SlideSparse dense: 8 layers on the cuBLASLt path (dense), 1 dense (1 lm_head); dense layout"
    by = {s: one_run(tmp_path / s, system=s) for s in ("stock", "cublaslt", "sparse")}
    assert check_log(by["sparse"], f"INFO {sparse}\nmore").startswith(
        "6:8 (2 of every 8 pruned): 8 layers sparse"
    )
    assert "cuBLASLt" in check_log(by["cublaslt"], dense)
    assert check_log(by["stock"], "SlideSparse flags are set") == ""
    mixed = sparse.replace("6:8 (2 of every 8 pruned", "2:4@50% (2 of every 4 pruned in 50% of the blocks")
    wrong = [("sparse", text) for text in (dense, "", sparse.replace("8 layers", "0 layers"), mixed)]
    for system, text in (*wrong, ("cublaslt", sparse), ("stock", sparse)):
        with pytest.raises(RunError):
            check_log(by[system], text)


def test_the_cache_of_an_engine_holds_its_largest_run(tmp_path: Path) -> None:
    """Few short sequences still get some blocks of a CPU, of 128 tokens, without which vLLM waits forever."""
    small, large = one_run(tmp_path / "a", "decode", m=2), one_run(tmp_path / "b", "decode", m=64)
    assert cache_tokens([small]) == 4096
    assert cache_tokens([small, large]) == int(1.1 * 64 * (16 + 256))
    assert bytes_per_token(large.variant.folder) == 2 * QWEN.layers * QWEN.kv_heads * QWEN.head_dim * 2


# --- engines; a program stands in for `benchmarks.e2e.worker`: it reports times that depend only on the system

WORKER = """\
import json, os, sys
system = "sparse" if "USE_CUSPARSELT" in os.environ else "stock"
def note(message):
    with open({calls!r}, "a") as file:
        file.write(json.dumps([system, message]) + "\\n")
words = json.loads(sys.stdin.readline())
note(words)
option = lambda name: words[words.index(name) + 1]
if system == {broken!r}:
    sys.exit("RuntimeError: out of memory")
if system == "sparse":
    pattern = json.load(open(option("--model") + "/config.json"))["quantization_config"]["slidesparse"]["pattern"]
    print(f"SlideSparse {{pattern}} (2 of every few pruned): 8 layers sparse", file=sys.stderr, flush=True)
print("null", flush=True)
for line in sys.stdin:
    limit, words = json.loads(line)
    note([limit, words])
    prompts = int(option("--num-prompts"))
    total = prompts * (int(option("--random-input-len")) + int(option("--random-output-len")))
    with open(option("--output-json"), "w") as file:
        json.dump({{"elapsed_time": {{"stock": 2.0, "sparse": 1.0}}[system], "num_requests": prompts,
                   "total_num_tokens": total}}, file)
    m, step = limit or prompts, {{"stock": 0.5, "sparse": 0.25}}[system]
    print(json.dumps({{"watts": 4.0, "steps": [[m, 9.0], [m, step], [m, step], [m, 1.0]]}}), flush=True)
"""


class Fake:
    """A folder of checkpoints, and the messages to the engines."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str = "") -> None:
        self.folder, self.out, self.calls = folder, folder / "out", folder / "calls"
        script = folder / "worker.py"
        script.write_text(WORKER.format(calls=str(self.calls), broken=broken))
        monkeypatch.setattr(e2e_run, "WORKER", (sys.executable, str(script)))
        facts = {"gpu": None, "capability": None, "cpu": "a test's", "versions": {"vllm": "0.28.0"}}
        monkeypatch.setattr(e2e_run, "conditions", lambda: dict(facts))
        for name, pattern in (("2_4", "2:4"), ("2_8", "6:8")):
            write_config(folder / "tiny" / name, pattern)

    def run(self, *options: str) -> Result:
        self.calls.write_text("")
        common = ("--model", str(self.folder / "tiny"), "--out", str(self.out), "--systems", "stock,sparse")
        sizes = ("--m", "64,128", "--decode-m", "64,128", "--decode-steps", "8", "--rounds", "2", "--json")
        return CliRunner().invoke(app, ["e2e", *common, *sizes, *options])

    @property
    def messages(self) -> list[Any]:
        return [json.loads(line)[1] for line in self.calls.open()]

    @property
    def rows(self) -> list[dict[str, str]]:
        with (self.out / "e2e.csv").open(newline="") as file:
            return list(csv.DictReader(file))


def test_every_engine_starts_once_and_measures_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path, monkeypatch)
    result = fake.run()
    assert result.exit_code == 0, result.output
    starts = [message for message in fake.messages if isinstance(message[0], str)]
    assert len(starts) == 3
    for words in starts:
        # memory for 128 sequences of 24 tokens in blocks of 16, plus 10%; decode prefills 128 prompts of 16 at once
        token = 2 * QWEN.layers * QWEN.kv_heads * QWEN.head_dim * 2
        assert words[words.index("--kv-cache-memory-bytes") + 1] == str(
            max(4096, int(1.1 * 128 * 32)) * token
        )
        assert words[words.index("--max-num-batched-tokens") + 1] == "2048"
    limits = [message[0] for message in fake.messages if not isinstance(message[0], str)]
    assert limits == [64] * 3 + [128] * 3 + [0] * 6 + [64] * 3 + [128] * 3 + [0] * 6
    for row in fake.rows:
        assert float(row["step_ms"]) == (250 if row["system"] == "sparse" else 500)
        assert float(row["tokens_per_s"]) == pytest.approx(4 * float(row["tokens_per_joule"]), rel=1e-3)
        assert row["context"] == ("16" if row["stage"] == "decode" else row["M"])
    assert json.loads((fake.out / "e2e.json").read_text())["tiny 2:4 sparse"].startswith("2:4 (2 of every")
    lines = (fake.out / "e2e.csv").read_text().splitlines(keepends=True)
    (fake.out / "e2e.csv").write_text("".join(lines[:-2]) + lines[-2][:20])  # killed while writing a row
    assert fake.run().exit_code == 0
    assert [row["round"] for row in fake.rows] == ["1"] * 12 + ["2"] * 12
    assert len([message for message in fake.messages if not isinstance(message[0], str)]) == 2
    refused = fake.run("--prefill-steps", "7")  # results of another workload
    assert (refused.exit_code, "workload" in refused.output) == (2, True)


def test_engine_that_does_not_start_fails_only_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Fake(tmp_path, monkeypatch, broken="sparse").run()
    report = json.loads(result.stdout)
    assert (result.exit_code, report["cells"], report["planned"], len(report["failed"])) == (1, 8, 24, 16)
    assert "out of memory" in report["failed"][0]


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
    monkeypatch.setenv(worker.STEP_FILE, str(path))
    monkeypatch.setattr(worker, "MOST_STEPS", 3)
    file = worker.StepFile(str(path))  # the other process's
    scheduler = worker.StepScheduler(2048)
    for limit, tokens in ((64, 64), (4096, 2048), (0, 2048)):
        file.limit = limit
        assert scheduler.schedule() == tokens
    # a step without tokens, one too many
    for now, tokens in ((1.0, 64), (1.5, 64), (1.75, 0), (4.0, 32), (5.0, 8)):
        monkeypatch.setattr("time.perf_counter", lambda now=now: now)
        scheduled = types.SimpleNamespace(total_num_scheduled_tokens=tokens)
        assert scheduler.update_from_output(scheduled, "x") == "x"
    assert file.steps() == [(64, 0.5), (32, 2.5)]
    file.limit = 128
    file.clear()
    assert (file.steps(), file.limit) == ([], 128)


def test_4_bit_twin_has_the_shapes_of_the_source(tmp_path: Path) -> None:
    source = write_config(tmp_path / "source", None)
    name = "model.layers.0.mlp.up_proj"
    tensors = {
        f"{name}.weight": torch.zeros(24, 256, dtype=torch.int8),
        f"{name}.weight_scale": torch.ones(24, 1),
    }
    save_file(tensors | {"norm.weight": torch.ones(3)}, source / "model.safetensors")
    w4a16.write(source, tmp_path / "w4a16")
    written = load_file(tmp_path / "w4a16" / "model.safetensors")
    assert {key: tuple(t.shape) for key, t in written.items()} == {
        f"{name}.weight_packed": (24, 32),
        f"{name}.weight_scale": (24, 2),
        f"{name}.weight_shape": (2,),
        "norm.weight": (3,),
    }
    assert find_model(tmp_path / "source").dtype == "int8"


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
    """Measure prefill and decode by the plugin, from a BF16 checkpoint to rows of the table."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    for name, value in (settings | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    model, out = (
        converted(write_float(QWEN, tmp_path / "source"), tmp_path / "tiny-2_8", "6:8"),
        tmp_path / "out",
    )
    vllm_args = f"--enforce-eager --tokenizer {tokenizer(tmp_path / 'words', QWEN)}"
    options = ["--model", str(model), "--out", str(out), "--m", "32", "--decode-m", "4", "--rounds", "1"]
    options += ["--prompt", "16", "--prefill-steps", "4", "--decode-steps", "8", "--systems", "sparse"]
    result = CliRunner().invoke(app, ["e2e", *options, "--vllm-args", vllm_args])
    assert result.exit_code == 0, result.output
    prefill, decode = Records(out, E2E).rows
    assert (prefill["model"], prefill["system"], prefill["pattern"]) == ("tiny", "sparse", "6:8")
    assert float(prefill["step_ms"]) > 0 < float(decode["step_ms"])
    figures = json.loads(next((out / "logs").glob("*prefill*.json")).read_text())
    assert figures["total_num_tokens"] == 4 * 2 * (16 + 1)  # two prompts per step
    assert "8 layers sparse" in json.loads((out / "e2e.json").read_text())["tiny 6:8 sparse"]
