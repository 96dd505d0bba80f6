"""Times of layers: ``SLIDESPARSE_PROFILE=1`` prints a table of torch's profiler when a serving process ends.

    SlideSparse profile                    calls  us of a call  share
    silu_mul_linear 3584x18944 M=64           28          60.1  12.3%

A layer is its operator, N x K and M; its time is that of its kernels on a GPU, the share is of the whole process.
CUDA graphs run no operators, so their kernels have lines of their own.  Every event is kept: run it for some minutes.
"""

from __future__ import annotations

import sys
from collections import Counter
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.profiler import profile

KERNELS = ("slidesparse", "quant_slide", "dequant_bias")  # parts of the names of our operators and kernels
_profiler: Any = None


def enable() -> None:
    """Profile this thread from now on, and print the table when the process ends.  Idempotent."""
    global _profiler
    if _profiler is None:
        _profiler = profile(record_shapes=True)  # of the CPU and the GPUs
        _profiler.start()
        Finalize(None, lambda: print(table(), file=sys.stderr, flush=True), exitpriority=1)  # in workers, too


def table() -> str:
    """Stop profiling, and return the times of layers and of our kernels, the costliest first."""
    global _profiler
    if _profiler is None:
        return ""
    _profiler.stop()
    events, _profiler = _profiler.key_averages(group_by_input_shape=True), None
    calls, times = Counter[str](), Counter[str]()
    total = "device_time_total" if torch.cuda.is_available() else "cpu_time_total"
    for event in events:
        if any(part in event.key for part in KERNELS) and (name := _name(event)):
            calls[name] += event.count
            times[name] += getattr(event, total)
    everything = sum(getattr(event, f"self_{total}") for event in events) or 1.0
    lines = [f"{'SlideSparse profile':<60}{'calls':>8}{'us of a call':>14}{'share':>8}"]
    for name, us in times.most_common():
        lines.append(f"{name[:58]:<60}{calls[name]:>8}{us / calls[name]:>14.1f}{us / everything:>8.1%}")
    return "\n".join(lines)


def _name(event: Any) -> str:
    """Return a layer's operator, N x K and M, or the name of a kernel; "" for a call that is only traced."""
    namespace, _, name = event.key.partition("::")
    shapes = [shape for shape in event.input_shapes if shape]
    n = next((shape[0] for shape in shapes[1:] if shape[1:] == [1]), None)  # scale_w
    if namespace != KERNELS[0] or n is None:
        return str(event.key)
    if len(event.input_shapes[0]) != 2:  # of symbols, which the profiler does not record
        return ""
    m, width = event.input_shapes[0]
    return f"{name} {n}x{width // 2 if name == 'silu_mul_linear' else width} M={m}"
