"""The plan of an end-to-end benchmark: checkpoints, command lines, environments, and validation of results."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from models import write_config
from packaging.version import Version

from benchmarks import e2e_runs
from benchmarks.e2e import Workload, command, environment, runs
from benchmarks.e2e_models import E2eError, Model, find_model
from benchmarks.e2e_resident import cache_tokens
from benchmarks.e2e_runs import Figures, RunError, check_log, check_room, read_figures


def model_of(folder: Path, **systems: bool) -> Model:
    return find_model(folder, None, None, **{"dense": True, "sparse": True, **systems})


def one_run(tmp_path: Path, stage: str = "prefill", system: str = "stock", m: int = 128) -> Any:
    model = model_of(write_config(tmp_path / "m", "6:8"))
    return runs(model, (stage,), {stage: (m,)}, (system,), 1, Workload(prompt_len=8))[0]


def test_each_system_has_its_flags_and_no_others() -> None:
    sparse = {"USE_CUSPARSELT": "1"}
    listed = {"VLLM_PLUGINS": "other,slidesparse", "HOME": "/h"}
    assert environment("stock", listed) == {"VLLM_PLUGINS": "other", "HOME": "/h"}
    assert "slidesparse" not in environment("stock", {})["VLLM_PLUGINS"].split(",")
    assert environment("sparse", {"VLLM_PLUGINS": "other"}) == {"VLLM_PLUGINS": "other,slidesparse", **sparse}
    assert environment("cublaslt", {}) == {"USE_CUBLASLT": "1"}
    users = {
        "SLIDESPARSE_BACKEND": "hopper",
        "SLIDESPARSE_FUSE": "1",
        "SPARSITY": "2_8",
        "DISABLE_SLIDESPARSE": "1",
    }
    assert environment("sparse", users) == sparse
    assert environment("cusparselt", users) == {**sparse, "SLIDESPARSE_BACKEND": "cusparselt"}
    assert environment("unfused", users) == {**sparse, "SLIDESPARSE_FUSE": "0"}


def test_steps_have_m_tokens(tmp_path: Path) -> None:
    """Prefill is bounded by the token budget, decode by the number of sequences."""
    work = Workload()
    small, large = work.size("prefill", 512), work.size("prefill", 65536)
    assert (small.prompt, small.prompts, small.batched, small.output) == (512, 128, 512, 1)
    assert (large.prompt, large.prompts, large.batched, large.output) == (1024, 128 * 64, 65536, 1)
    assert small.sequences >= 2
    assert large.sequences >= 2 * 64
    decode = work.size("decode", 512)
    assert (decode.sequences, decode.prompts, decode.output, decode.batched) == (512, 512, 256, 512 * 16)
    long = Workload(decode_prompt_len=8192).size("decode", 32)
    assert (long.sequences, long.prompts, long.prompt, long.batched) == (32, 32, 8192, 16384)
    for m in (1, 64, 1024, 65536):
        assert work.size("prefill", m).sequences <= m  # vLLM refuses more sequences than tokens
    with pytest.raises(E2eError, match="1536"):
        work.size("prefill", 1536)
    model = model_of(write_config(tmp_path / "m", "6:8"))
    with pytest.raises(E2eError, match=r"513.*512"):  # more tokens than the model has positions
        runs(model, ("prefill",), {"prefill": (512,)}, ("stock",), 1, work)


@pytest.mark.parametrize(("version", "random", "warm"), [("0.13.0", False, False), ("0.25.1", True, True)])
def test_options_missing_in_a_vllm_release_are_omitted(
    tmp_path: Path, version: str, random: bool, warm: bool
) -> None:
    run = one_run(tmp_path)
    arguments = command("vllm", Version(version), run, Workload(), tmp_path / "x.json")
    assert ("--random-input-len" in arguments, "--num-warmups" in arguments) == (random, warm)
    assert arguments[arguments.index("--input-len") + 1] == "8"
    assert arguments[arguments.index("--max-num-batched-tokens") + 1] == "128"
    assert arguments[arguments.index("--max-model-len") + 1] == str((8 + 1) * 5 // 4 + 32)
    assert "--no-enable-prefix-caching" in arguments


def test_find_model_reads_names_and_patterns_of_folders(tmp_path: Path) -> None:
    """Dense systems run the unpruned checkpoint; a model's name is that of its folder without the pattern."""
    for pattern in ("dense", "6:8", "2:4"):
        write_config(tmp_path / "qwen" / pattern, None if pattern == "dense" else pattern)
    model = model_of(tmp_path / "qwen")
    assert (model.name, model.dtype, list(model.sparse)) == ("qwen", "int8", ["2:4", "6:8"])
    assert model.dense.folder.name == "dense"
    assert find_model(tmp_path / "qwen", "q", None, dense=True, sparse=True).name == "q"
    single = model_of(write_config(tmp_path / "llama" / "2_6", "4:6"))
    assert (single.name, single.dense.folder.name) == ("llama", "2_6")
    assert model_of(write_config(tmp_path / "llama-2_6", "4:6")).name == "llama"


def test_figures_of_another_run_are_refused(tmp_path: Path) -> None:
    run = one_run(tmp_path)  # 128 steps of 16 prompts of 8 tokens, at most 128 tokens each
    valid = {"elapsed_time": 2.0, "num_requests": 2048, "total_num_tokens": 2048 * 9}
    assert read_figures(run, valid) == Figures(2048 * 9 / 2, "", "")
    steps = [(128, 0.9), (128, 0.25), (128, 0.5), (128, 0.125), (64, 0.0625), (128, 0.75)]
    assert read_figures(run, valid, {"joules": 64.0, "steps": steps}) == Figures(
        2048 * 9 / 2, 2048 * 9 / 64, 250
    )
    assert read_figures(run, valid, {"joules": None, "steps": steps[4:]}) == Figures(2048 * 9 / 2, "", "")
    for change in ({"num_requests": 2047}, {"elapsed_time": 0.0}, {"elapsed_time": "soon"}):
        with pytest.raises(RunError):
            read_figures(run, valid | change)
    with pytest.raises(RunError, match="not 8"):
        read_figures(run, valid | {"total_num_tokens": 2048})
    decode = one_run(tmp_path / "decode", "decode", m=64)  # only output tokens: 256 per sequence
    assert read_figures(decode, valid | {"num_requests": 64}).tokens_per_s == 64 * 256 / 2


def test_log_identifies_the_system(tmp_path: Path) -> None:
    sparse = (
        "SlideSparse 6:8 (2 of every 8 pruned): 8 layers sparse, 1 dense (1 lm_head); dense layout; backend x"
    )
    dense = "SlideSparse dense: 8 layers on the cuBLASLt path (dense), 1 dense (1 lm_head); dense layout; backend x"
    names = iter("abcdefgh")
    by = {s: one_run(tmp_path / next(names), system=s) for s in ("stock", "cublaslt", "sparse")}
    assert check_log(by["sparse"], f"INFO {sparse}\nmore").startswith(
        "6:8 (2 of every 8 pruned): 8 layers sparse"
    )
    assert "cuBLASLt" in check_log(by["cublaslt"], dense)
    assert check_log(by["stock"], "SlideSparse flags are set") == ""
    for system, text in (
        ("sparse", dense),
        ("cublaslt", sparse),
        ("stock", sparse),
        ("sparse", ""),
    ):
        with pytest.raises(RunError):
            check_log(by[system], text)
    for text in (sparse.replace("8 layers", "0 layers"), sparse.replace("6:8", "4:6")):
        with pytest.raises(RunError, match="6:8"):
            check_log(by["sparse"], text)
    mixed = sparse.replace("6:8 (2 of every 8 pruned", "2:4@50% (2 of every 4 pruned in 50% of the blocks")
    with pytest.raises(RunError, match=r"served 2:4@50% .* not .* 6:8"):
        check_log(by["sparse"], mixed)


def test_the_cache_of_an_engine_holds_its_largest_run(tmp_path: Path) -> None:
    """Few short sequences still get some blocks of a CPU, of 128 tokens, without which vLLM waits forever."""
    small, large = one_run(tmp_path / "a", "decode", m=2), one_run(tmp_path / "b", "decode", m=64)
    assert cache_tokens([small]) == 4096
    assert cache_tokens([small, large]) == int(1.1 * 64 * (16 + 256))


def test_a_cache_too_small_for_m_is_refused(tmp_path: Path) -> None:
    run = one_run(tmp_path, "decode", m=64)  # 64 sequences of 16 + 256 tokens
    check_room(run, "GPU KV cache size: 17,408 tokens")
    with pytest.raises(RunError, match="17407.*17408"):
        check_room(run, "GPU KV cache size: 17,407 tokens")


@pytest.mark.parametrize("seconds", [30.0, 0.3])
def test_no_process_outlives_a_run(tmp_path: Path, seconds: float) -> None:
    """An engine process left by vLLM would keep GPU memory, whether the run ended or was killed."""
    log = tmp_path / "log"
    wait = "" if seconds > 1 else "; wait"
    status = e2e_runs.execute(
        ["sh", "-c", f"sleep 300 & echo $!{wait}"], {"PATH": "/usr/bin:/bin"}, log, seconds
    )
    assert status == (0 if seconds > 1 else None)
    stat_file = Path(f"/proc/{log.read_text().strip()}/stat")
    deadline = time.monotonic() + 5
    while stat_file.exists() and stat_file.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.02)
