"""Run vLLM engines cheaply: import vLLM once, then fork a child for every engine.

As a program it reads requests as JSON lines on stdin, one `Request` each, and answers each with one JSON line.
Importing vLLM takes some ten seconds, an engine for a tiny model in a forked child two.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
FLAGS = ("USE_CUSPARSELT", "USE_CUBLASLT", "DISABLE_SLIDESPARSE", "SPARSITY")
PROMPTS = [[(7 * i * j + 3) % 500 for j in range(1, 5 + 9 * i)] for i in range(1, 6)]


@dataclass
class Request:
    """An engine to start and what to ask of it."""

    model: str
    env: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of vllm.LLM
    task: str = "generate"  # or "logprobs", "config_hash", "strip_env", "reload"
    pretend_cuda: bool = False  # resolve as on a machine with a GPU
    exact_fp8: bool = False  # accumulate FP8 in float64: the yardstick for everybody's error


@dataclass
class Answer:
    """What came of a request; ``log`` holds all that the engine's processes printed."""

    error: str = ""
    log: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)  # top-1, per prompt and position
    config_hash: str = ""

    @property
    def summary(self) -> str:
        """The plugin's one line, or nothing."""
        lines = [line for line in self.log.splitlines() if "SlideSparse " in line and "layers" in line]
        return lines[-1].split("SlideSparse ", 1)[1] if lines else ""


class Zygote:
    """The parent's side."""

    def __init__(self) -> None:
        self.cache = tempfile.TemporaryDirectory(
            prefix="vllm-cache-"
        )  # compiled graphs of this run, no others
        env = {name: value for name, value in os.environ.items() if name not in FLAGS}
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CACHE_ROOT": self.cache.name,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(HERE)]
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, request: Request) -> Answer:
        """Start the engine, wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asdict(request)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the vLLM process ended; its output is above")
        return Answer(**json.loads(line))

    def close(self) -> None:
        """End the process; its input ending tells it to."""
        self.process.communicate()
        self.cache.cleanup()


def _run(request: Request) -> Answer:
    os.environ.update(request.env)
    if request.exact_fp8:
        _accumulate_fp8_in_float64()
    if request.pretend_cuda:
        from slidesparse.vllm_patch import config

        plain = config.resolve
        config.resolve = lambda quantization, flags, on_cuda: plain(quantization, flags, True)
    if request.task == "config_hash":
        return Answer(config_hash=_config(request).compute_hash())
    from vllm import SamplingParams

    make = _engine_without_flags if request.task == "strip_env" else _engine
    llm = make(request)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False)
    if request.task == "logprobs":
        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
    if request.task == "reload":
        llm.collective_rpc("reload_weights")
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    answer = Answer(tokens=[list(output.outputs[0].token_ids) for output in outputs])
    if request.task == "logprobs":
        answer.logprobs = [
            [max(entry.logprob for entry in position.values()) for position in output.prompt_logprobs[1:]]
            for output in outputs
        ]
    return answer


def _options(request: Request) -> dict[str, Any]:
    # float32, because vLLM's kernels for AVX2 truncate to bfloat16 where everybody else rounds
    common = {"skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 8, "dtype": "float32"}
    common["gpu_memory_utilization"] = 0.2  # of the memory of a CPU too, and other tests may run beside
    return {**common, "enforce_eager": True, **request.options}


def _config(request: Request) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=request.model, **_options(request)).create_engine_config()


def _engine(request: Request) -> Any:
    from vllm import LLM

    return LLM(request.model, **_options(request))


def _engine_without_flags(request: Request) -> Any:
    """An engine whose processes do not see the flags under which its config was made."""
    from vllm.engine.arg_utils import EngineArgs

    make = EngineArgs.create_engine_config

    def make_then_forget(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = make(self, *args, **kwargs)
        for name in FLAGS:
            os.environ.pop(name, None)
        return config

    EngineArgs.create_engine_config = make_then_forget
    return _engine(request)


def _accumulate_fp8_in_float64() -> None:
    from slidesparse import reference

    plain = reference.matmul
    reference.matmul = lambda q, w: (
        (q.double() @ w.double().t()) if q.dtype.is_floating_point else plain(q, w)
    )


def _child(request: Request, log: str, out: int) -> None:
    with open(log, "w") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    try:
        answer = _run(request)
    except BaseException as error:
        traceback.print_exc()
        answer = Answer(error=f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(out, "w") as pipe:
        json.dump(asdict(answer), pipe)


def main() -> None:
    """Serve requests until stdin ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever is printed is not an answer
    import vllm
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen2
    import vllm.v1.worker.cpu_worker  # noqa: F401

    for line in sys.stdin:
        request = Request(**json.loads(line))
        with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
            readable, writable = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(readable)
                _child(request, log.name, writable)
                os._exit(0)
            os.close(writable)
            with os.fdopen(readable) as pipe:
                text = pipe.read()
            os.waitpid(pid, 0)
            answer = Answer(**json.loads(text)) if text else Answer(error="the engine's process died")
            answer.log = Path(log.name).read_text(errors="replace")
        os.write(answers, (json.dumps(asdict(answer)) + "\n").encode())


if __name__ == "__main__":
    main()
