"""Run vLLM engines cheaply: import vLLM once, then fork a child for every engine.

As a program it reads requests as JSON lines on stdin, one `Request` each, and answers each with one JSON line.
Importing vLLM takes some ten seconds, an engine for a tiny model in a forked child two.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import engine_tasks

from slidesparse import gemm
from slidesparse.evaluate.engine import summaries
from slidesparse.flags import DISABLE, MODE, REQUESTS

HERE = Path(__file__).resolve()
GRACE = 5.0  # seconds
ISA = "ONEDNN_MAX_CPU_ISA"  # as which processor oneDNN acts
FLAGS = (MODE, DISABLE, *REQUESTS)
IMPORTED_LATE = (
    "torch._dynamo",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.cli_args",
    "vllm.v1.engine.async_llm",
    "slidesparse.vllm_patch.fusion",
    "slidesparse.vllm_patch.scheme",
    "slidesparse.vllm_patch.bitnet",
    *(
        f"vllm.model_executor.models.{name}"
        for name in ("llama", "qwen2", "mixtral", "qwen2_moe", "qwen3_moe")
    ),
)
OF_CPUS = ("vllm.v1.worker.cpu_worker",)
OF_GPUS = ("vllm.v1.attention.backends.flash_attn", "vllm.v1.worker.gpu_worker")
OF_GPUS += ("vllm.v1.worker.gpu.model_runner",)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
STOCK = {"DISABLE_SLIDESPARSE": "1"}  # the environment of vLLM without the plugin


@dataclass
class Request:
    """An engine to start, and the task that it runs."""

    model: str
    env: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of vllm.LLM
    # or "config_hash", "strip_env", "damaged" (`fuzz_serving.run`, without an engine), or one of engine_tasks.TASKS
    task: str = "generate"
    work: dict[str, Any] = field(default_factory=dict)  # arguments of the task
    pretend_cuda: bool = False  # resolve as on a machine with a GPU
    pieces: bool = False  # compile as on a machine with a GPU: by vLLM's own backend, cut at attentions
    # serve with the reference backend and sums in "float64", or such sums rounded to "bfloat16"
    yardstick: str = ""
    registered: str = ""  # a module whose ENTRY is added to the registry of backends
    seconds: int = 600  # after which the engine is ended


@dataclass
class Answer:
    """The outcome of a request; ``log`` is the output of the engine's processes."""

    error: str = ""
    log: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)  # top-1, per prompt and position
    config_hash: str = ""
    data: dict[str, Any] = field(default_factory=dict)  # other results of the task

    @property
    def summary(self) -> str:
        """The plugin's words on the layers that it serves, or an empty text."""
        served = summaries(self.log)
        return str(served[-1]["words"]) if served else ""


class Engines:
    """A client of a fork server for vLLM engines."""

    def __init__(self) -> None:
        # a cache of its own, so that compiled graphs of other runs are not used
        self.cache = tempfile.TemporaryDirectory(prefix="vllm-cache-")
        env = {name: value for name, value in os.environ.items() if name not in FLAGS}
        env |= {
            **ENVIRONMENT,
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": self.cache.name,
            "TORCHINDUCTOR_CACHE_DIR": self.cache.name,
            "VLLM_LOGGING_LEVEL": "INFO",  # tests read the plugin's lines
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # initializing CUDA here would make it unusable in forked children
        }
        command = [sys.executable, str(HERE)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)

    def ask(self, request: Request) -> Answer:
        """Start the engine and wait for its answer."""
        self.process.stdin.write(json.dumps(asdict(request)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the vLLM process ended; its output is above")
        return Answer(**json.loads(line))

    def serve(self, model: Path | str, **settings: Any) -> Answer:
        """Ask for a request of this model and these settings, which must be answered without an error."""
        answer = self.ask(Request(str(model), **settings))
        assert not answer.error, f"{answer.error}\n{answer.log[-4000:]}"
        return answer

    def as_stock(self, model: Path | str, env: dict[str, str] | None = None, **settings: Any) -> Answer:
        """Serve a model, with the tokens of stock vLLM, which the plugin does not serve."""
        stock = self.serve(model, env=STOCK, **settings)
        assert not stock.summary
        answer = self.serve(model, env=env or {}, **settings)
        assert answer.tokens == stock.tokens
        return answer

    def close(self) -> None:
        """End the process by closing its standard input."""
        self.process.communicate()
        self.cache.cleanup()


class EnginePool:
    """Several fork servers, so that as many engines run at a time; all start to import vLLM immediately."""

    def __init__(self, count: int) -> None:
        self.all = [Engines() for _ in range(count)]
        self._free: queue.SimpleQueue[Engines] = queue.SimpleQueue()
        for engines in self.all:
            self._free.put(engines)
        self._pool = ThreadPoolExecutor(count)

    def submit(self, request: Request) -> Future[Answer]:
        """Queue a request for the next free server, and return its future answer."""
        return self._pool.submit(self._ask, request)

    def _ask(self, request: Request) -> Answer:
        engines = self._free.get()
        try:
            return engines.ask(request)
        finally:
            self._free.put(engines)

    def close(self) -> None:
        """Cancel pending requests and end the processes."""
        self._pool.shutdown(cancel_futures=True)
        for engines in self.all:
            engines.close()


def _run(request: Request) -> Answer:
    import torch
    from vllm.platforms import current_platform

    os.environ.update(request.env)
    if request.registered:
        gemm.REGISTRY.update(importlib.import_module(request.registered).ENTRY)
    if request.pretend_cuda or request.yardstick:
        _resolve_as(on_cuda=request.pretend_cuda)
    if request.yardstick:
        _accumulate_in_float64(request.yardstick)
    # share compiled kernels, but no graphs, as no pass runs on a cached one
    torch.compiler.config.cache_key_tag = str(os.getpid())
    if current_platform.is_cpu():
        _act_as_on_gpus(request.pieces)
        # vLLM compiles parts of its sampler
        torch._dynamo.config.disable = llm_options(request)["enforce_eager"]
        torch._inductor.config.compile_threads = 1  # in this process, not in others that import torch
        gc.unfreeze = lambda: None  # a worker that ends would copy all objects, too, which takes seconds
    if request.task == "config_hash":
        return Answer(config_hash=_config(request).compute_hash())
    if request.task == "damaged":
        import fuzz_serving

        return Answer(data=fuzz_serving.run(**request.work))
    factory = _engine_without_flags if request.task == "strip_env" else _engine
    data = engine_tasks.TASKS[request.task](factory(request), request.work)
    return Answer(data.pop("error", ""), "", data.pop("tokens", []), data.pop("logprobs", []), data=data)


def llm_options(request: Request) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``: those that all engines have, and those of the request."""
    from vllm.platforms import current_platform

    # float32, because vLLM's kernels for AVX2 truncate to bfloat16 where all others round
    common = {"skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 8, "dtype": "float32"}
    common["gpu_memory_utilization"] = 0.2  # of a CPU's memory too; other tests may run at the same time
    if current_platform.is_cpu():
        common["num_gpu_blocks_override"] = 64  # otherwise a GiB of the KV cache is filled with zeros
    return {**common, "enforce_eager": True, **request.options}


def _config(request: Request) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=request.model, **llm_options(request)).create_engine_config()


def _engine(request: Request) -> Any:
    from vllm import LLM

    return LLM(request.model, **llm_options(request))


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


def _resolve_as(on_cuda: bool) -> None:
    """Choose the backend of a machine with a GPU, or of one without, which is the reference."""
    from slidesparse.vllm_patch import config

    config._machine = lambda: ("cuda" if on_cuda else "cpu", None)


def _act_as_on_gpus(pieces: bool) -> None:
    """Fork workers on vLLM's CPU build too, which otherwise spawns them: each would import vLLM again.

    With ``pieces`` compile in pieces, too, instead of by torch.compile.  vLLM's last pass is skipped: it needs
    operators of the GPU build and changes nothing that the CPU build runs.
    """
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, config: Any) -> None:
        method = os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
        original(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
        compilation = config.compilation_config
        if pieces:
            compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "inductor"
            compilation.ir_enable_torch_wrap, compilation.compile_sizes = True, []
            compilation.splitting_ops = list(compilation._attention_ops)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    if pieces:
        FixFunctionalizationPass.__call__ = lambda self, graph: None


def _accumulate_in_float64(rounded_to: str) -> None:
    """Sum products in float64: exactly for INT8, whose sums stay below 2**53, and nearly so for FP8."""
    import torch

    from slidesparse import reference

    dtype = getattr(torch, rounded_to)
    reference.matmul = lambda q, w: (q.float().double() @ w.float().double().t()).to(dtype)


def _child(request: Request, log: str, out: int) -> None:
    os.setsid()  # so that it can be ended with all processes that it starts
    # so that the end of the pipe, and with it the answer, does not wait for its child processes
    os.register_at_fork(after_in_child=lambda: os.closerange(out, out + 1))
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


def _import_vllm() -> None:
    """Import what engines import later, without initializing CUDA, and not the plugin, which stock engines lack."""
    import torch
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    # vLLM's INT8 kernel for AMX refuses float32, in which tokens are compared: other kernels sum in bfloat16
    torch.cpu._is_amx_tile_supported = lambda: False
    if (
        ISA in os.environ
    ):  # torch lets oneDNN multiply FP8 by the real processor, and it refuses that as another
        torch._scaled_mm = _scaled_product
    registry._run_in_subprocess = lambda look: look()  # vLLM starts a process to look at the class of a model
    get_quantization_config("compressed-tensors")  # imports all methods
    for name in (*IMPORTED_LATE, *(OF_GPUS if current_platform.is_cuda() else OF_CPUS)):
        with suppress(ImportError):  # another release of vLLM has it elsewhere
            importlib.import_module(name)
    if torch.cuda.is_initialized():
        raise RuntimeError("importing vLLM has initialized CUDA: no forked child could use it")


def _scaled_product(a: Any, b: Any, *, scale_a: Any, scale_b: Any, out_dtype: Any, bias: Any = None) -> Any:
    """Return what torch does without oneDNN: the product of FP8 matrices in float32."""
    product = a.float() @ b.float() * scale_a * scale_b
    return (product if bias is None else product + bias).to(out_dtype)


def text_of(readable: int, seconds: float) -> str | None:
    """Read a pipe until its end; None if it has not ended after ``seconds``."""
    text, deadline = b"", time.monotonic() + seconds
    while select.select([readable], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(readable, 1 << 20)
        text += part
        if not part:
            return text.decode()
    return None


def _end(group: int) -> None:
    """Wait for the processes that an engine has started, and kill those that do not end."""
    deadline = time.monotonic() + GRACE
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.02)
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Serve requests until stdin ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # printed text must not mix with answers
    _import_vllm()
    gc.collect()
    gc.freeze()  # otherwise each child, which collects garbage, copies all objects

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
            text = text_of(readable, request.seconds)
            os.close(readable)
            if text is None:
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            _end(pid)
            timeout = f"the engine gave no answer in {request.seconds} s" if text is None else ""
            answer = Answer(**json.loads(text)) if text else Answer(error=timeout or "the process died")
            answer.log = Path(log.name).read_text(errors="replace")
        os.write(answers, (json.dumps(asdict(answer)) + "\n").encode())


if __name__ == "__main__":
    main()
