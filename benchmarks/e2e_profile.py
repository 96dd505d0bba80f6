"""The time of a step by kernel, from vLLM's own profiler, as rows of ``e2e_profile.csv``.

vLLM writes a Chrome trace of PyTorch's profiler: JSON whose ``traceEvents`` have a name, a category, a start and a
duration in microseconds.  A step's time is that from the first kernel to the end of the last, divided by the number of
steps; time that no kernel covers is the row ``idle``.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slidesparse.errors import SlideSparseError

STEPS = 4  # recorded, after the same number of warm-up steps
IDLE = "idle"
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the trace
NAME = 120  # characters kept of a kernel's name; those of C++ templates have thousands

# The first regex that matches a kernel's name classifies it.
CLASSES = {
    "norm and activation": r"^triton_|rms_?norm|silu|act_and_mul",  # Inductor names its kernels after what they feed
    "scale": r"dequant_bias",
    "quantize": r"quant_(only|slide)|per_token.*quant|(int8|fp8).*quant|quant.*(int8|fp8)|hopper::quantize",
    "attention": r"flash|attention|fmha|reshape_and_cache|rotary|merge_attn",
    "product": r"cutlass|gemm|nvjet|cusparse|_sp_|spmma|wgmma|splitk|hopper",
    "sampling and the rest": r"",
}


class ProfileError(SlideSparseError, RuntimeError):
    """The trace cannot be read."""


@dataclass(frozen=True)
class Kernel:
    """One kind of kernel in one step."""

    name: str
    kind: str  # a key of CLASSES, or IDLE
    calls: float
    us: float


def options(folder: Path) -> list[str]:
    """Return command-line options with which an engine can be profiled into ``folder``."""
    config = {
        "profiler": "torch",
        "torch_profiler_dir": str(folder.resolve()),
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
        "delay_iterations": STEPS,
        "max_iterations": STEPS,
    }
    return ["--profiler-config", json.dumps(config)]


def read(folder: Path, steps: int = STEPS) -> list[Kernel]:
    """Return the kernels of one step, longest first, from the newest trace in ``folder``.  Raises ProfileError."""
    traces = sorted(folder.glob("*.json*"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise ProfileError(f"vLLM left no trace in {folder}")
    opened = gzip.open if traces[-1].suffix == ".gz" else open
    try:
        with opened(traces[-1], "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ProfileError(f"{traces[-1]} is no trace of PyTorch's profiler: {error}") from error
    launches = list(_kernels(events))
    if not launches:
        raise ProfileError(f"{traces[-1]} holds no kernel: was there work for {2 * steps} steps on a GPU?")
    return summarize(launches, steps)


def _kernels(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float, float]]:
    for event in events:
        if event.get("cat") in KERNELS and "dur" in event:
            yield str(event["name"]), float(event["ts"]), float(event["dur"])


def summarize(launches: Iterable[tuple[str, float, float]], steps: int) -> list[Kernel]:
    """Return the kernels of one step, and its idle time, from (name, start, duration) of ``steps`` steps."""
    calls: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    covered, first, end = 0.0, None, 0.0
    for name, start, duration in sorted(launches, key=lambda launch: launch[1]):
        calls[name] += 1
        times[name] += duration
        first = start if first is None else first
        covered += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    kernels = [Kernel(name, kind(name), calls[name] / steps, times[name] / steps) for name in calls]
    idle = Kernel(IDLE, IDLE, 0, (end - (first or 0.0) - covered) / steps)
    return [*sorted(kernels, key=lambda kernel: -kernel.us), idle]


def kind(name: str) -> str:
    """Return the class of a kernel called ``name``, a key of CLASSES."""
    return next(word for word, pattern in CLASSES.items() if re.search(pattern, name, re.IGNORECASE))


def rows(key: Mapping[str, object], kernels: Iterable[Kernel]) -> Iterator[dict[str, object]]:
    """Yield rows of the table; ``key`` holds the other columns.  Kernels with equal truncated names are merged."""
    merged: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kernel in kernels:
        entry = merged[" ".join(kernel.name.split())[:NAME], kernel.kind]
        entry[0] += kernel.calls
        entry[1] += kernel.us
    for (name, category), (calls, us) in merged.items():
        yield {**key, "kernel": name, "class": category, "calls": f"{calls:g}", "us": round(us, 3)}
