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
from slidesparse.kernels import MAX_WARPS, Config, default_config
from slidesparse.tune.inputs import Inputs
from slidesparse.tune.measure import Clock
from slidesparse.tune.search import Candidate, SearchResult, estimate_us, select_correct, time_finalists

WORDS_PER_THREAD = (2, 4, 8, 16)  # words per thread in one step of a quantizing kernel
MAX_STEPS = 8  # steps of a quantizing kernel
COLUMNS = (256, 512, 1024, 2048)  # columns per program of dequant_bias
ROWS = (1, 4)
ELEMENTS_PER_THREAD = (8, 16)  # elements per thread of dequant_bias


class KernelRun(Protocol):
    """A function that launches a kernel on copy i of its inputs and returns its results."""

    def __call__(self, i: int, config: Config) -> tuple[Tensor, ...]: ...


def candidates(kind: str, problem: Problem) -> list[Config]:
    """List the launches to try for ``kind``, the one of `kernels.TABLE` first."""
    return list(dict.fromkeys((default_config(kind, problem.k, problem.m), *_grid(kind, problem))))


def _grid(kind: str, problem: Problem) -> Iterator[Config]:
    if kind == "dequant_bias":
        shapes = (
            (block, rows, per_thread)
            for block, rows, per_thread in product(COLUMNS, ROWS, ELEMENTS_PER_THREAD)
        )
    else:
        row_words = 1 << (-(-problem.n // 4) - 1).bit_length()  # words of a row in one step
        shapes = (
            (row_words >> halved, 1, per_thread)
            for halved in range(MAX_STEPS.bit_length())
            for per_thread in WORDS_PER_THREAD
        )
    for block, rows, per_thread in shapes:
        warps = block * rows // (32 * per_thread)
        if 1 <= warps <= MAX_WARPS:
            yield Config(block, rows, warps)


def search_launches(kind: str, problem: Problem, length: int, inputs: Inputs, clock: Clock) -> SearchResult:
    """Time the candidates for ``problem`` (see `slidesparse.gemm.launches`) on random inputs.

    ``length`` is that of the blocks that quant_slide lifts.  A launch whose bits differ from the first one's counts as
    wrong; it would indicate a compiler bug.
    """
    size = DTYPES[problem.dtype].itemsize * problem.k + DTYPES[problem.out].itemsize * problem.n
    copies = inputs.copies_exceeding_l2(problem.m * size)
    run = _make_run(kind, problem, length, inputs, copies)
    configs = candidates(kind, problem)
    expected = _as_bytes(run(0, configs[0]))
    timed: list[Candidate] = []
    for config in configs:
        launch = partial(run, config=config)
        best = min((candidate.us for candidate in timed), default=math.inf)
        timed.append(Candidate(str(config), launch, estimate_us(clock, launch, copies, best)))

    def is_correct(candidate: Candidate) -> bool:
        outputs = _as_bytes(run(0, Config.parse(candidate.algorithm)))
        return all(map(torch.equal, outputs, expected))

    finalists, wrong = select_correct(timed, is_correct)
    return time_finalists(clock, finalists, copies, len(configs), 0, wrong)


def _make_run(kind: str, problem: Problem, length: int, inputs: Inputs, copies: int) -> KernelRun:
    from slidesparse.kernels.dequant_bias import dequant_bias  # late: they need Triton
    from slidesparse.kernels.quant_slide import quant_slide

    source = inputs.activations(problem.dtype, problem.m, problem.k, copies)
    out = DTYPES[problem.out]
    if kind != "dequant_bias":
        return lambda i, config: quant_slide(source[i], length, 0, out, launch=config)
    scale_x, scale_w, bias = (
        inputs.scale(problem.m),
        inputs.scale(problem.n),
        inputs.floats((problem.n,), out),
    )
    return lambda i, config: (dequant_bias(source[i], scale_x, scale_w, bias, out, launch=config),)


def _as_bytes(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [output.view(torch.uint8) for output in outputs]
