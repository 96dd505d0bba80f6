"""SLIDESPARSE_PROFILE: times of layers by operator, sizes and number of tokens."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys

import pytest
import torch

from slidesparse import gemm, ops, profiling
from slidesparse.flags import FlagError, Flags
from slidesparse.gemm.problem import Layer
from slidesparse.quantize import INT8

PROGRAM = """
import multiprocessing, sys
from test_profiling import run_profiled
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=run_profiled)
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


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_worker_processes_print_their_profile_at_exit(method: str) -> None:
    folder = __file__.rpartition("/")[0]
    process = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n{PROGRAM}", method],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.stderr.count("SlideSparse profile") == 1, process.stderr


def test_profile_flag_parsing() -> None:
    assert Flags.from_environment({"SLIDESPARSE_PROFILE": "1"}).profile
    assert not Flags.from_environment({}).profile
    with pytest.raises(FlagError, match="SLIDESPARSE_PROFILE"):
        Flags.from_environment({"SLIDESPARSE_PROFILE": "maybe"})
    assert profiling.KERNELS[0] == ops.NAMESPACE
