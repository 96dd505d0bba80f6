"""What ``bench e2e`` plans, asks vLLM for, and accepts as a figure."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from models import write_config
from packaging.version import Version

from slidesparse.bench import e2e_runs
from slidesparse.bench.e2e import (
    CUBLASLT,
    CUSPARSELT,
    KEPT,
    OFF,
    SPARSE,
    STOCK,
    TOKENS,
    Workload,
    command,
    environment,
    runs,
)
from slidesparse.bench.e2e_models import DENSE, E2eError, find_model
from slidesparse.bench.e2e_runs import RunError, check_log, check_room, tokens_per_second


def test_plugins_that_the_user_lists_stay() -> None:
    listed = {"VLLM_PLUGINS": "other,slidesparse", "HOME": "/h"}
    assert environment(STOCK, listed) == {"VLLM_PLUGINS": "other", "HOME": "/h"}
    assert environment(SPARSE, {"VLLM_PLUGINS": "other"}) == {
        "VLLM_PLUGINS": "other,slidesparse",
        "USE_CUSPARSELT": "1",
    }
    assert environment(OFF, {}) == {"DISABLE_SLIDESPARSE": "1"}
    assert "VLLM_PLUGINS" in environment(STOCK, {})


def test_the_steps_have_m_tokens() -> None:
    """Prefill is bounded by the token budget, decode by the number of sequences."""
    work = Workload()
    small, large = work.size("prefill", 512), work.size("prefill", 65536)
    assert (small.prompt, small.prompts, small.batched, small.output) == (512, 128, 512, 1)
    assert (large.prompt, large.prompts, large.batched, large.output) == (1024, 128 * 64, 65536, 1)
    assert small.sequences >= 2
    assert large.sequences >= 2 * 64
    decode = work.size("decode", 512)
    assert (decode.sequences, decode.prompts, decode.output, decode.batched) == (512, 512, 256, 512 * 16)
    for m in (1, 64, 1024, 65536):
        assert work.size("prefill", m).sequences <= m  # vLLM refuses more sequences than tokens
    with pytest.raises(E2eError, match="M 1536 is no multiple of the prompt length 1024"):
        work.size("prefill", 1536)
    with pytest.raises(E2eError, match="at least 1, found 0"):
        Workload(prefill_steps=0)


def test_the_paper_s_cells_are_the_default(tmp_path: Path) -> None:
    model = find_model(write_config(tmp_path / "m", "6:8"), None, None, None, dense=True, sparse=True)
    cells = runs(
        model, ("prefill", "decode"), TOKENS, (STOCK,), 1, Workload(prompt_len=256, decode_steps=100)
    )
    assert [run.m for run in cells if run.stage == "prefill"] == [2**i for i in range(9, 17)]
    assert [run.m for run in cells if run.stage == "decode"] == [64, 128, 256, 512]
    with pytest.raises(E2eError, match=r"prefill M 512 needs sequences of 513 tokens, .* takes 512"):
        runs(model, ("prefill",), {"prefill": (512,)}, (STOCK,), 1, Workload())


@pytest.mark.parametrize(("version", "random", "warm"), [("0.13.0", False, False), ("0.25.1", True, True)])
def test_options_that_a_vllm_lacks_are_left_out(
    tmp_path: Path, version: str, random: bool, warm: bool
) -> None:
    model = find_model(write_config(tmp_path / "m", "6:8"), None, None, None, dense=True, sparse=True)
    (run,) = runs(model, ("prefill",), {"prefill": (128,)}, (STOCK,), 1, Workload())
    words = command("vllm", Version(version), run, Workload(), tmp_path / "x.json")
    assert ("--random-input-len" in words, "--num-warmups" in words) == (random, warm)
    assert words[words.index("--input-len") + 1] == "128"
    assert words[words.index("--max-num-batched-tokens") + 1] == "128"
    assert words[words.index("--max-model-len") + 1] == str((128 + 1) * 5 // 4 + 32)
    assert "--no-enable-prefix-caching" in words


def test_models_by_name(tmp_path: Path) -> None:
    """The dense systems take the checkpoint that was not pruned; names are the folders' without pattern."""
    listed = ",".join(
        f"{pattern}={write_config(tmp_path / folder, None if pattern == DENSE else pattern)}"
        for pattern, folder in ((DENSE, "qwen-dense"), ("6:8", "qwen-2_8"), ("2:4", "qwen_2:4"))
    )
    model = find_model(None, listed, None, None, dense=True, sparse=True)
    assert (model.name, model.dtype, list(model.sparse)) == ("qwen", "int8", ["2:4", "6:8"])
    assert model.dense.folder.name == "qwen-dense"
    listed += f",8:10={write_config(tmp_path / 'other-2_10', '8:10')}"
    with pytest.raises(E2eError, match="are called other, qwen; give the model's --name"):
        find_model(None, listed, None, None, dense=True, sparse=True)
    assert find_model(None, listed, "q", None, dense=True, sparse=True).name == "q"
    single = find_model(
        write_config(tmp_path / "llama" / "2_6", "4:6"), None, None, None, dense=True, sparse=True
    )
    assert (single.name, single.dense.folder.name) == ("llama", "2_6")


def one_run(tmp_path: Path, stage: str = "prefill", system: str = STOCK, m: int = 128) -> Any:
    model = find_model(write_config(tmp_path / "m", "6:8"), None, None, None, dense=True, sparse=True)
    return runs(model, (stage,), {stage: (m,)}, (system,), 1, Workload(prompt_len=8))[0]


def test_figures_of_another_run_are_refused(tmp_path: Path) -> None:
    run = one_run(tmp_path)  # 128 steps of 16 prompts of 8 tokens, at most 128 together
    good = {"elapsed_time": 2.0, "num_requests": 2048, "total_num_tokens": 2048 * 9}
    assert tokens_per_second(run, good) == 2048 * 9 / 2
    for change in ({"num_requests": 2047}, {"elapsed_time": 0.0}, {"elapsed_time": "soon"}):
        with pytest.raises(RunError):
            tokens_per_second(run, good | change)
    with pytest.raises(RunError, match=r"prompts had 0\.0 tokens, not 8"):
        tokens_per_second(run, good | {"total_num_tokens": 2048})


def test_the_log_tells_which_system_ran(tmp_path: Path) -> None:
    sparse = (
        "SlideSparse 6:8 (2 of every 8 pruned): 8 layers sparse, 1 dense (1 lm_head); dense layout; backend x"
    )
    dense = "SlideSparse dense: 8 layers on the cuBLASLt path, not slid, 1 dense (1 lm_head); dense layout; backend x"
    names = iter("abcdefgh")
    by = {s: one_run(tmp_path / next(names), system=s) for s in (STOCK, OFF, CUBLASLT, SPARSE)}
    assert check_log(by[SPARSE], f"INFO {sparse}\nmore").startswith(
        "6:8 (2 of every 8 pruned): 8 layers sparse"
    )
    assert "cuBLASLt" in check_log(by[CUBLASLT], dense)
    assert check_log(by[STOCK], "SlideSparse flags are set") == ""
    for system, text in ((SPARSE, dense), (CUBLASLT, sparse), (STOCK, sparse), (OFF, dense), (SPARSE, "")):
        with pytest.raises(RunError):
            check_log(by[system], text)
    for text in (sparse.replace("8 layers", "0 layers"), sparse.replace("6:8", "4:6")):
        with pytest.raises(RunError, match="not prefill M 128, sparse 6:8"):
            check_log(by[SPARSE], text)


def test_a_cache_too_small_for_m_is_refused(tmp_path: Path) -> None:
    run = one_run(tmp_path, "decode", m=64)  # 64 sequences of 16 + 256 tokens
    check_room(run, "GPU KV cache size: 17,408 tokens")
    with pytest.raises(RunError, match="holds 17407 tokens, 17408 are needed for M 64"):
        check_room(run, "GPU KV cache size: 17,407 tokens")


def test_conditions_of_a_machine_without_a_gpu_name_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = e2e_runs.conditions((CUBLASLT, SPARSE))
    assert found["gpu"] is None
    assert found["cpu"]
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("seconds", [30.0, 0.3])
def test_no_process_outlives_a_run(tmp_path: Path, seconds: float) -> None:
    """An engine that vLLM leaves behind would keep the GPU's memory, whether the run ended or was ended."""
    log = tmp_path / "log"
    wait = "" if seconds > 1 else "; wait"
    status = e2e_runs.execute(
        ["sh", "-c", f"sleep 300 & echo $!{wait}"], {"PATH": "/usr/bin:/bin"}, log, seconds
    )
    assert status == (0 if seconds > 1 else None)
    left = Path(f"/proc/{log.read_text().strip()}/stat")
    deadline = time.monotonic() + 5
    while left.exists() and left.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.02)


def test_the_library_is_a_system_beside_what_the_plugin_takes(tmp_path: Path) -> None:
    write_config(tmp_path / "2_8", "6:8")
    model = find_model(tmp_path, None, None, None, dense=False, sparse=True)
    found = runs(model, ("decode",), {"decode": (64,)}, (SPARSE, CUSPARSELT), 2, Workload(decode_steps=8))
    assert [(run.system, run.pattern) for run in found] == [
        (SPARSE, "6:8"),
        (CUSPARSELT, "6:8"),
        (CUSPARSELT, "6:8"),
        (SPARSE, "6:8"),
    ]
    flags = {"USE_CUSPARSELT": "1", "SLIDESPARSE_BACKEND": "cusparselt"}
    assert environment(CUSPARSELT, {"SLIDESPARSE_BACKEND": "hopper", "HOME": "/"}).items() >= flags.items()
    assert "SLIDESPARSE_BACKEND" not in environment(SPARSE, {"SLIDESPARSE_BACKEND": "hopper"})
    assert environment(KEPT, {})["SLIDESPARSE_KEEP_DENSE"] == "1"
    assert "SLIDESPARSE_KEEP_DENSE" not in environment(SPARSE, {"SLIDESPARSE_KEEP_DENSE": "1"})
