"""Serve with one of vLLM's Ray executors on a new Ray cluster, whose workers have none of our flags, and query them.

``ray_engine.py REQUEST ANSWER`` runs a `RayRequest` and writes {"executor", "tokens", "driver", "workers"}.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import engine_tasks

from slidesparse import flags

FLAGS = (
    *(flags.USE_CUSPARSELT, flags.USE_CUBLASLT, flags.DISABLE),
    *(flags.SPARSITY, flags.PROFILE, flags.BACKEND, flags.FUSE),
)
RANKS = 2


@dataclass(frozen=True)
class RayRequest:
    """An engine of RANKS tensor-parallel ranks."""

    model: str
    env: dict[str, str]  # of the driver only
    options: dict[str, Any]  # of vllm.LLM


def describe(config: Any) -> dict[str, Any]:
    """The quantization method and the resolution in a process's VllmConfig."""
    quantization = config.quant_config
    resolution = asdict(quantization.resolution) if "resolution" in vars(quantization) else None
    return {"method": type(quantization).__name__, "resolution": resolution}


def describe_worker(worker: Any) -> dict[str, Any]:
    """Run `describe` in a worker, and add the block length and the backend of each SlideSparse layer, the identity of
    the process, the flags in its environment, and its shared memory.
    """
    import ray
    import vllm.plugins
    from vllm.platforms import current_platform

    schemes = {name: getattr(module, "scheme", None) for name, module in worker.get_model().named_modules()}
    layers = {name: getattr(scheme, "arguments", None) for name, scheme in schemes.items()}
    return {
        **describe(worker.vllm_config),
        "layers": {name: [arguments[0], arguments[-1]] for name, arguments in layers.items() if arguments},
        "actor": ray.get_runtime_context().get_actor_id(),
        "platform": type(current_platform).__name__,
        "plugins_loaded": vllm.plugins.plugins_loaded,
        "flags": {name: value for name, value in os.environ.items() if name in FLAGS},
        "shared": re.findall(r"/dev/shm/\S+", Path("/proc/self/maps").read_text()),
    }


def serve(request: RayRequest) -> dict[str, Any]:
    """Run an engine.  Ray starts before the flags are set, as a cluster does that does not know SlideSparse."""
    import ray

    ray.init(
        address="local",
        num_cpus=1,
        num_gpus=RANKS,
        include_dashboard=False,
        object_store_memory=100 << 20,  # bytes
        _temp_dir=os.environ["RAY_TMPDIR"],
    )
    # vLLM searches for a free port below this one and names shared memory after it; by default root gets port 100.
    os.environ["VLLM_DP_MASTER_PORT"] = str(_free_port() - 100)
    os.environ.update(request.env)

    from vllm import LLM

    ranks = {"tensor_parallel_size": RANKS, "distributed_executor_backend": "ray"}
    llm = LLM(request.model, **request.options, **ranks)
    answer = {
        "executor": type(llm.llm_engine.model_executor).__name__,
        "tokens": engine_tasks.generate(llm, {})["tokens"],
        "driver": describe(llm.llm_engine.vllm_config),
        "workers": llm.collective_rpc(describe_worker),
    }
    llm.llm_engine.engine_core.shutdown()
    ray.shutdown()
    for worker in answer["workers"]:  # vLLM kills them before they can clean up
        for path in worker.pop("shared"):
            Path(path).unlink(missing_ok=True)
    return answer


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    request = RayRequest(**json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(serve(request)))
