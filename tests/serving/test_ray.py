"""vLLM's Ray executors give the tokens of the multiprocess one, and their workers need no SlideSparse flags.

The CPU build of vLLM refuses Ray only because its platform names no resource; `ray_on_cpu` names one.  Everything else
is vLLM's own: workers find plugins by their entry points, and two ranks serve the model.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from edits import edited
from engines import Engines, Request, llm_options
from models import QWEN, converted, write_w8a8
from ray_engine import FLAGS, RANKS, RayRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray"
    ),
    pytest.mark.skipif(torch.version.cuda is not None, reason="for the CPU build of vLLM"),
]

SUPPORT = Path(__file__).parents[1] / "support"
SECONDS = 600
SPARSE = {"USE_CUSPARSELT": "1", "SPARSITY": "2_8"}
EXECUTOR = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"  # vLLM's default is 1
LAYERS = [
    f"model.layers.{i}.{name}"
    for i in range(QWEN.layers)
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]


@dataclass(frozen=True)
class Case:
    """The arguments of an engine, and the expected config and layers of its workers."""

    model: str
    env: dict[str, str]
    executor: str
    method: str
    path: str | None  # of the resolution; None if there is none
    profile: bool
    block: int | None  # block length: 8 slides, 4 only pads; None if vLLM's own layers are used


# No worker would do so without the driver's config: ``bare`` needs flags, and ``pruned`` is served sparse by default.
CASES = {
    "sparse, message queues": Case(
        "bare", SPARSE | {EXECUTOR: "1"}, "RayExecutorV2", "SlideSparseConfig", "sparse", False, 8
    ),
    "dense and profiled, compiled graphs of Ray": Case(
        "pruned",
        {"USE_CUBLASLT": "1", "SLIDESPARSE_PROFILE": "1", EXECUTOR: "0"},
        *("RayDistributedExecutor", "SlideSparseConfig", "dense", True, 4),
    ),
    "switched off, message queues": Case(
        "pruned",
        {"DISABLE_SLIDESPARSE": "1", EXECUTOR: "1"},
        *("RayExecutorV2", "CompressedTensorsConfig", None, False, None),
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same pruned weights with metadata (``pruned``) and without, so that they need flags (``bare``)."""
    folder = tmp_path_factory.mktemp("models")
    pruned = converted(write_w8a8(QWEN, folder / "source"), folder / "pruned", "6:8")
    return {"pruned": str(pruned), "bare": edited(pruned, folder / "bare", {}, {"slidesparse": None})}


@pytest.fixture(scope="module")
def tokens(engines: Engines, models: dict[str, str]) -> list[list[int]]:
    """Tokens of the multiprocess executor, equal for sparse, dense and stock, as sums of INT8 products are exact."""
    answer = engines.serve(models["bare"], env=SPARSE, options={"tensor_parallel_size": RANKS})
    assert f"{len(LAYERS)} layers sparse" in answer.summary
    return answer.tokens


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_ray_workers_equal_multiprocess_and_need_no_flags(
    case: Case, models: dict[str, str], tokens: list[list[int]], tmp_path: Path
) -> None:
    answer = run(RayRequest(models[case.model], case.env, llm_options(Request(""))), tmp_path)
    assert answer["executor"] == case.executor
    assert answer["tokens"] == tokens
    driver, workers = answer["driver"], answer["workers"]
    assert driver["method"] == case.method
    resolution = driver["resolution"]
    assert (resolution and resolution["path"]) == case.path
    assert not resolution or (resolution["pattern"], resolution["profile"]) == ("6:8", case.profile)
    layers = {name: [case.block, "reference"] for name in LAYERS} if case.block else {}
    assert len({worker.pop("actor") for worker in workers} - {None}) == RANKS
    expected = {**driver, "layers": layers, "flags": {}, "platform": "RayOnCpu", "plugins_loaded": True}
    assert workers == [expected] * RANKS


def run(request: RayRequest, folder: Path) -> dict[str, Any]:
    """Return the answer of `ray_engine`, with the platform plugin installed for it and for Ray's workers."""
    plugin, settings = folder / "ray_on_cpu-1.0.dist-info", folder / "settings"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-on-cpu\nVersion: 1.0\n")
    (plugin / "entry_points.txt").write_text("[vllm.platform_plugins]\nray_on_cpu = ray_on_cpu:activate\n")
    settings.mkdir()
    # RayExecutorV2 passes on the driver's environment, except these variables
    (settings / "ray_non_carry_over_env_vars.json").write_text(json.dumps(FLAGS))
    env = {name: value for name, value in os.environ.items() if name not in FLAGS}
    env |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{folder}{os.pathsep}{SUPPORT}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CONFIG_ROOT": str(settings),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    request_path, answer_path, log_path = folder / "request", folder / "answer", folder / "log"
    request_path.write_text(json.dumps(asdict(request)))
    command = [sys.executable, str(SUPPORT / "ray_engine.py"), str(request_path), str(answer_path)]
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # its path is part of a socket's
        status = _finished(command, env | {"RAY_TMPDIR": short}, log_path)
    assert status == 0, f"ended with {status}:\n{log_path.read_text()[-6000:]}"
    return json.loads(answer_path.read_text())  # type: ignore[no-any-return]


def _finished(command: list[str], env: dict[str, str], log_path: Path) -> int | None:
    """Run the command and return its exit status, None after SECONDS; Ray's processes end with it."""
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
