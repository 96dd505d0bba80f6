"""The layers of a model's block in a row: what a backend that fuses is tuned in.

Its kernels begin while the ones before them still run, so which configuration of a layer is the fastest depends on the
layers around it.  On an H200 a block of Qwen2.5-7B at 6:8 took 79 us for one token with the configurations that were
the fastest in repetitions of a single layer, and 70 us with those that are found here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from slidesparse import ops
from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.hopper.native import Plan
from slidesparse.gemm.problem import ALL_DENSE, DTYPES, MIXED, LibraryError, Problem
from slidesparse.gemm.problem import Layer as Called
from slidesparse.pattern import Pattern, SlidePattern, round_up
from slidesparse.tune.inputs import Inputs
from slidesparse.tune.measure import CudaClock, Launch
from slidesparse.tune.search import Contest, SearchResult, gemm_contest, search
from slidesparse.tune.shapes import Layer, packed_columns

FLOAT = torch.bfloat16
EPS = 1e-6
ROUNDS = 2  # in which each layer is searched with the others as they are
NORM, SILU, OTHER = "norm", "silu", "other"
FINALISTS, QUICK_ERROR = 6, 1.05  # by the block's time, of which a layer's is a part


@dataclass(frozen=True)
class _Step:
    """A layer, as operators are called."""

    problem: Problem  # with any m
    called: Called
    weights: list[Tensor]  # packed, a copy for each copy of the block
    scale_w: Tensor  # [n, 1] float32
    norm: Tensor  # [k]
    prologue: str  # what stands before it: NORM, SILU or OTHER


class Block:
    """Layers with random weights that run one after the other, in bfloat16.

    What stands before a layer follows from sizes, as in a decoder, see `prologues`; the last layer stands before the
    first one.  Their operators run by the tuned tables but while `tune` searches.

    Args:
        problems: of the layers, from `block_problems`, with any m.
        pattern: of all weights.
    """

    def __init__(
        self,
        library: Hopper,
        layers: Sequence[Layer],
        problems: Sequence[Problem],
        pattern: Pattern,
        inputs: Inputs,
    ) -> None:
        self._library, self._inputs = library, inputs
        self._plans: dict[Called, Plan] = {}  # what is served, which must not be deleted
        slid, share = (pattern, 0.0) if isinstance(pattern, SlidePattern) else (None, float(pattern.share))
        self.copies = inputs.copies_exceeding_l2(sum(layer.n * layer.k for layer in layers))
        packed = {
            problem: inputs.packed(library, problem, self.copies, share)
            for problem in dict.fromkeys(problems)
        }
        self._width = layers[-1].n  # of what the first layer's prologue reads
        self._steps = [
            _Step(
                problem,
                library.layer(layer.n, layer.k, slid, 0, DTYPES[problem.dtype]),
                packed[problem],
                inputs.scale(layer.n).view(-1, 1),
                inputs.floats((layer.k,), FLOAT),
                prologue,
            )
            for layer, problem, prologue in zip(layers, problems, prologues(layers), strict=True)
        ]

    def tune(
        self, m: int, clock: CudaClock, device: torch.device, known: Callable[[Problem], str | None]
    ) -> dict[Problem, SearchResult]:
        """Return the configuration of each of the problems, for m tokens, with which the block is the fastest.

        The layers are searched one after the other, the largest first.

        Args:
            known: the configuration to begin with, if there is one.

        Raises LibraryError.
        """
        run = self.launch(m)
        steps = {replace(step.problem, m=m): step for step in reversed(self._steps)}
        by_size = sorted(steps, key=lambda problem: -problem.n * problem.k)
        contests = {problem: self._contest(steps[problem], problem, device, run) for problem in by_size}
        for problem, contest in contests.items():
            names = list(dict.fromkeys(filter(None, [known(problem), *contest.names])))
            first = self._serve_first(steps[problem].called, names)
            contests[problem] = replace(contest, names=names, incumbent=first)
        results: dict[Problem, SearchResult] = {}
        for _ in range(ROUNDS):
            changed = False
            for problem, contest in contests.items():
                results[problem] = search(contest, clock)
                best = results[problem].algorithm
                changed |= best != contest.incumbent
                self._serve_first(steps[problem].called, [best])
                contests[problem] = replace(contest, incumbent=best, warm_up_seconds=0.0)
            if not changed:
                break
        return results

    def _serve_first(self, called: Called, names: Sequence[str]) -> str:
        """Have operators run a layer by the first of the configurations that fits; return it."""
        refused: LibraryError | None = None
        for name in names:
            try:
                plan = self._plans[called] = self._library.layer_plan(called, name)
                self._library.serve(plan)
                return name
            except LibraryError as error:
                refused = error
        raise refused or LibraryError(f"the library has no algorithm for {called}")

    def _contest(self, step: _Step, problem: Problem, device: torch.device, run: Launch) -> Contest:
        """Return the contest of a layer, whose outputs are those of its GEMM and whose times those of the block."""
        operands = self._inputs.operands(problem, step.weights[:1])

        def launch(name: str) -> Launch:
            plan = self._library.layer_plan(step.called, name)

            def serve_and_run(i: int) -> object:
                self._library.serve(plan)
                try:
                    return run(i)
                except torch.OutOfMemoryError:  # for any algorithm
                    raise
                except RuntimeError as error:  # as operators raise it
                    raise LibraryError(f"a block with {name} for {step.called}: {error}") from error

            return serve_and_run

        return replace(
            gemm_contest(self._library, problem, operands, device),
            launch=launch,
            copies=self.copies,
            finalists=FINALISTS,
            quick_error=QUICK_ERROR,
        )

    def launch(self, m: int) -> Launch:
        """Return what runs copy i of the block on m tokens."""
        ours, steps = getattr(torch.ops, ops.NAMESPACE), self._steps
        widths = {self._width, *(step.called.k for step in steps if step.prologue != SILU)}
        floats = {width: self._inputs.floats((m, width), FLOAT) for width in widths}

        def run(i: int) -> object:
            y, residual = floats[self._width], floats.get(steps[0].called.k)
            for step in steps:
                layer = step.weights[i], step.scale_w, None, [*step.called], FLOAT
                if step.prologue == NORM:
                    y, residual = ours.add_rms_norm_linear(y, residual, step.norm, EPS, *layer)
                elif step.prologue == SILU:
                    y = ours.silu_mul_linear(y, *layer)
                else:
                    y = ours.linear(floats[step.called.k].clone(), *layer)
            return y

        return run


def prologues(layers: Sequence[Layer]) -> list[str]:
    """Return what stands before each layer of a block: NORM, SILU or OTHER.

    A norm of the sum with the residual, which is as wide as what the first layer reads, before one that reads as much
    if the one before gives it.  SiLU of one half times the other before the last layer that reads half of what the one
    before gives: attention may, too.  Else a kernel of torch's in the place of attention, during which ours cannot
    begin.
    """
    found = list[str]()
    for last, layer in pairwise((layers[-1], *layers)):
        if last.n == 2 * layer.k:
            found = [OTHER if prologue == SILU else prologue for prologue in found]
            found.append(SILU)
        else:
            found.append(NORM if last.n == layer.k == layers[0].k else OTHER)
    return found


def block_problems(
    library: CudaBackend,
    layers: Sequence[Layer],
    dtype: str,
    out: str,
    pattern: Pattern,
    m: int = 1,
    scale: str = "none",
) -> list[Problem]:
    """Return the GEMM of each layer at a pattern as a library stores the weights; none if it takes no dense ones."""
    if isinstance(pattern, SlidePattern):
        columns = [
            packed_columns(layer.k, pattern.ratio, library.alignment, library.coded) for layer in layers
        ]
    elif library.takes_dense:
        blocks = MIXED if pattern.share else ALL_DENSE
        columns = [(round_up(layer.k, library.alignment), blocks) for layer in layers]
    else:
        return []
    return [
        Problem(dtype, out, layer.n, k, m, scale, blocks=blocks)
        for layer, (k, blocks) in zip(layers, columns, strict=True)
    ]
