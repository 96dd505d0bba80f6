"""SLIDESPARSE_PROFILE: times of layers by operator, sizes and number of tokens."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import torch
from commands import run

from slidesparse import gemm, ops, profiling
from slidesparse.gemm.problem import Layer
from slidesparse.quantize import INT8

PROGRAM = """
import multiprocessing
from test_profiling import run_profiled
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=run_profiled)
        process.start(), process.join()
"""


def run_profiled() -> None:
    weight = gemm.get("reference").pack(torch.ones(32, 64, dtype=INT8), None)
    of_layer = weight, torch.ones(32, 1), None, [*Layer.of(32, 64, None, 0, INT8, 4)], torch.float32
    profiling.enable()
    profiling.enable()
    for m in (1, 5, 5):
        torch.ops.slidesparse.linear(torch.ones(m, 64), *of_layer)
        torch.ops.slidesparse.silu_mul_linear(torch.ones(m, 128), *of_layer)
        torch.ops.slidesparse.linear_by(torch.ones(m, 64), *of_layer, "reference")


def test_table_names_operators_sizes_and_tokens() -> None:
    run_profiled()
    head, *rows = profiling.table().splitlines()
    assert head.split() == ["SlideSparse", "profile", "calls", "us", "of", "a", "call", "share"]
    calls = {re.split(r"  +", row)[0]: int(re.split(r"  +", row)[1]) for row in rows}
    assert calls == {
        f"{name} 32x64 M={m}": n
        for name in ("linear", "silu_mul_linear", "linear_by")
        for m, n in ((1, 1), (5, 2))
    }
    assert profiling.table() == ""
    assert profiling.KERNELS[0] == ops.NAMESPACE


def test_calls_that_are_only_traced_have_no_name() -> None:
    """torch 2.11 records no shape of an input with symbolic sizes."""
    traced = SimpleNamespace(key="slidesparse::linear", input_shapes=[[], [2048], [32, 1]])
    assert profiling._name(traced) == ""


def test_worker_processes_print_their_profile_at_exit() -> None:
    process = run(PROGRAM, cwd=Path(__file__).parent)
    assert process.stderr.count("SlideSparse profile") == 2, process.stderr
