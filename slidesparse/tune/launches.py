"""Search for the fastest launch of a Triton kernel: block, rows and warps (`slidesparse.kernels.Config`).

Stages are not searched: the kernels have no loop that Triton pipelines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from slidesparse.gemm.problem import DTYPES, Problem
from slidesparse.kernels import MOST_WARPS, Config, config
from slidesparse.tune.inputs import Inputs
from slidesparse.tune.measure import Clock
from slidesparse.tune.search import Candidate, Found, correct, decide, quick

LANES = (2, 4, 8, 16)  # words per thread in one step of a quantizing kernel
MOST_STEPS = 8  # steps of a quantizing kernel
COLUMNS = (256, 512, 1024, 2048)  # columns per program of dequant_bias
ROWS = (1, 4)
ELEMENTS = (8, 16)  # elements per thread of dequant_bias


class Run(Protocol):
    """Launches a kernel on copy i of its inputs; returns its results."""

    def __call__(self, i: int, how: Config) -> tuple[Tensor, ...]: ...


def candidates(kind: str, problem: Problem) -> list[Config]:
    """List the launches to try for ``kind``, the one of `kernels.TABLE` first."""
    return list(dict.fromkeys((config(kind, problem.k, problem.m), *_grid(kind, problem))))


def _grid(kind: str, problem: Problem) -> Iterator[Config]:
    if kind == "dequant_bias":
        shapes = ((block, rows, each) for block, rows, each in product(COLUMNS, ROWS, ELEMENTS))
    else:
        whole = 1 << (-(-problem.n // 4) - 1).bit_length()  # words of a row in one step
        shapes = ((whole >> halved, 1, each) for halved in range(MOST_STEPS.bit_length()) for each in LANES)
    for block, rows, each in shapes:
        warps = block * rows // (32 * each)
        if 1 <= warps <= MOST_WARPS:
            yield Config(block, rows, warps)


def search_launches(kind: str, problem: Problem, length: int, inputs: Inputs, clock: Clock) -> Found:
    """Time the candidates for ``problem`` (see `slidesparse.gemm.launches`) on random inputs.

    ``length`` is that of the blocks that quant_slide lifts.  A launch whose bits differ from the first one's counts as
    wrong; it would indicate a compiler bug.
    """
    size = DTYPES[problem.dtype].itemsize * problem.k + DTYPES[problem.out].itemsize * problem.n
    copies = inputs.cold(problem.m * size)
    run = _runner(kind, problem, length, inputs, copies)
    todo = candidates(kind, problem)
    expected = _bits(run(0, todo[0]))
    timed: list[Candidate] = []
    for how in todo:
        launch = partial(run, how=how)
        best = min((one.us for one in timed), default=math.inf)
        timed.append(Candidate(str(how), launch, quick(clock, launch, copies, best)))

    def is_correct(one: Candidate) -> bool:
        found = _bits(run(0, Config.parse(one.algorithm)))
        return all(map(torch.equal, found, expected))

    finalists, wrong = correct(timed, is_correct)
    return decide(clock, finalists, copies, len(todo), 0, wrong)


def _runner(kind: str, problem: Problem, length: int, inputs: Inputs, copies: int) -> Run:
    from slidesparse.kernels.dequant_bias import dequant_bias  # late: they need Triton
    from slidesparse.kernels.quant_slide import quant_slide

    source = inputs.activations(problem.dtype, problem.m, problem.k, copies)
    out = DTYPES[problem.out]
    if kind != "dequant_bias":
        return lambda i, how: quant_slide(source[i], length, 0, out, launch=how)
    scale_x, scale_w, bias = (
        inputs.scale(problem.m),
        inputs.scale(problem.n),
        inputs.floats((problem.n,), out),
    )
    return lambda i, how: (dequant_bias(source[i], scale_x, scale_w, bias, out, launch=how),)


def _bits(found: tuple[Tensor, ...]) -> list[Tensor]:
    return [one.view(torch.uint8) for one in found]
