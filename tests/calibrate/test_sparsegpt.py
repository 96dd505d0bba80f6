"""Pruning with calibration data, against brute force over all choices in float64."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from calibration import hessian_of, inputs, weights
from strategies import NAMED
from torch import Tensor

from slidesparse.calibrate import sparsegpt as module
from slidesparse.calibrate.graphs import recordings
from slidesparse.calibrate.inputs import Hessian, output_error
from slidesparse.calibrate.sparsegpt import damped, factor, pruner, refine, sparsegpt
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8, quantize_rows
from slidesparse.slide import violations

PATTERNS = [SlidePattern.parse(name) for name in NAMED if name != "2_inf"]


def block_slices(columns: int, length: int) -> list[slice]:
    """Return the columns of each block of ``length``; the last block may be shorter."""
    return [slice(start, min(columns, start + length)) for start in range(0, columns, length)]


def best_row(w0: Tensor, h: Tensor, fixed: Tensor) -> Tensor:
    """Return the row nearest to ``w0`` in the norm of ``h`` that equals ``fixed`` where that is not NaN.

    With F the free columns and D the others, the gradient in F vanishes: H_FF (w - w0)_F = -H_FD (w - w0)_D.
    """
    free = fixed.isnan()
    row = torch.where(free, 0.0, fixed)
    if bool(free.any()):
        rhs = -h[free][:, ~free] @ (row - w0)[~free]
        row[free] = w0[free] + torch.linalg.solve(h[free][:, free], rhs)
    return row


def prune_by_brute_force(w0: Tensor, h: Tensor, pattern: SlidePattern) -> Tensor:
    """Prune block by block: try every choice of zeros with earlier blocks fixed, then fix the best."""
    fixed = torch.full_like(w0, torch.nan)
    row = w0.clone()
    for block in block_slices(len(w0), pattern.length):
        surplus = max(0, block.stop - block.start - (pattern.length - 2))
        tried = []
        for zeros in combinations(range(block.start, block.stop), surplus):
            trial = fixed.clone()
            trial[list(zeros)] = 0.0
            candidate = best_row(w0, h, trial)
            cost = float((candidate - w0) @ h @ (candidate - w0))
            tried.append((cost, zeros, candidate))
        _, zeros, row = min(tried, key=lambda entry: entry[0])
        fixed[block] = row[block]
        fixed[list(zeros)] = 0.0
    return row


@pytest.mark.parametrize("pattern", PATTERNS[:4], ids=str)
@pytest.mark.parametrize(("tail", "batch"), [(0, 128), (-1, 1), (1, 8)])
def test_rows_equal_the_exact_optimal_brain_surgeon(
    pattern: SlidePattern, tail: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of two rows, and of all columns, a block or some blocks; both are for speed alone."""
    monkeypatch.setattr(module, "BATCH_COLUMNS", batch)
    monkeypatch.setattr(module, "CHOICE_ELEMENTS", 2 * math.comb(pattern.length, 2))
    k = 3 * pattern.length + tail
    w, h = weights(3, k), hessian_of(inputs(300, k))
    actual = sparsegpt(w, factor(h, torch.float64), pattern)
    expected = torch.stack([prune_by_brute_force(row, damped(h), pattern) for row in w])
    assert torch.equal(actual == 0, expected == 0)
    # both solve systems with H's condition number, here below 1e4: errors are 1e-12 of the largest weight
    assert float((actual - expected).abs().max()) < 1e-11 * float(w.abs().max())


def test_memory_of_long_blocks_is_bounded() -> None:
    """With the longest block, 4096, a byte for each choice and column would take 34 GB."""
    choices = module._choices(512, torch.device("cpu"))
    assert sum(part.nbytes for part in choices) <= 32 * math.comb(512, 2)


def cost(w: Tensor, pruned: Tensor, h: Tensor) -> Tensor:
    """Return the cost of each row, which refinement reduces."""
    return (((pruned - w) @ h) * (pruned - w)).sum(-1)


@pytest.mark.parametrize("pattern", PATTERNS[:4], ids=str)
def test_refine_never_increases_cost_and_reaches_local_optimum(pattern: SlidePattern) -> None:
    k = 2 * pattern.length + 1
    w, hessian = weights(6, k), hessian_of(inputs(300, k))
    h, rounds = damped(hessian), [sparsegpt(w, factor(hessian, torch.float64), pattern)]
    for _ in range(40):
        rounds.append(refine(w, rounds[-1], hessian, pattern, 1))
        assert violations(rounds[-1], pattern) is None
        assert bool((cost(w, rounds[-1], h) <= cost(w, rounds[-2], h) * (1 + 1e-12)).all())
    assert float(cost(w, rounds[1], h).sum()) < float(cost(w, rounds[0], h).sum())
    settled = rounds[-1]
    for block in block_slices(k, pattern.length):  # every other choice of zeros in one block, solved exactly
        surplus = max(0, block.stop - block.start - (pattern.length - 2))
        for zeros in combinations(range(block.start, block.stop), surplus):
            for row in range(len(w)):
                trial = settled[row].clone()
                trial[block] = torch.nan
                trial[list(zeros)] = 0.0
                alternative = best_row(w[row], h, trial)
                better = float(cost(w[row], settled[row], h)) * (1 - 1e-6)
                assert float(cost(w[row], alternative, h)) > better


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("dtype", [INT8, FP8], ids=["int8", "fp8"])
def test_codes_obey_pattern_with_minimal_zeros_in_tail(pattern: SlidePattern, dtype: torch.dtype) -> None:
    """K modulo L takes every value."""
    for k in range(64, 64 + pattern.length):
        w, h = weights(16, k).float(), hessian_of(inputs(200, k), torch.float32)
        upper = factor(h)
        pruned = refine(w, sparsegpt(w, upper, pattern), h, pattern, 1)
        codes, _ = quantize_rows(pruned, dtype)
        assert violations(codes, pattern) is None
        tail = k % pattern.length
        lost = (pruned[:, k - tail :] == 0).sum(1) if tail else torch.zeros(16)
        assert bool((lost == max(0, tail - (pattern.length - 2))).all())


def test_inputs_that_are_zero_or_few_can_be_factored() -> None:
    """Without inputs, magnitudes decide; nine tokens give an H of rank nine."""
    w, pattern = weights(12, 80), SlidePattern(8)
    factor(hessian_of(inputs(200, 80).float() * 5e-23, torch.float32))  # of few bits, not positive definite
    pruned = sparsegpt(w, factor(torch.zeros(80, 80), dtype=torch.float64), pattern)
    assert torch.equal(pruned == 0, prune(w, pattern) == 0)
    h = hessian_of(inputs(9, 80), torch.float32)
    pruned = refine(w.float(), sparsegpt(w.float(), factor(h), pattern), h, pattern, 4)
    assert violations(pruned, pattern) is None
    assert bool(pruned.isfinite().all())


@pytest.mark.parametrize("band", [1, 5, 8, 17, 64])
def test_hessian_is_symmetric_and_exact(monkeypatch: pytest.MonkeyPatch, band: int) -> None:
    monkeypatch.setattr("slidesparse.calibrate.inputs.BAND_COLUMNS", band)
    x, hessian = inputs(60, 17), Hessian(17, dtype=torch.float64)
    for part in x.split(20):  # read between two updates
        hessian.add(part)
        added = x[: hessian.tokens]
        assert torch.equal(hessian.matrix[band:, :band], hessian.matrix[:band, band:].t())
        assert float((hessian.matrix - added.t() @ added).abs().max()) < 1e-12 * float(added.square().sum())


def test_output_error_is_the_error_of_the_output() -> None:
    x, w = inputs(200, 12), weights(5, 12)
    pruned = prune(w, SlidePattern(4))
    expected = float((x @ (w - pruned).t()).norm() / (x @ w.t()).norm())
    assert output_error(w, pruned, hessian_of(x)) == pytest.approx(expected, rel=1e-9)
    for size in (1e30, 1e-30):
        error = output_error(w.float() * size, pruned.float() * size, hessian_of(x).float())
        assert error == pytest.approx(expected, rel=1e-5)
    nothing = torch.zeros_like(w)
    assert output_error(nothing, nothing, hessian_of(x)) == 0.0
    assert output_error(nothing, w, hessian_of(x)) == float("inf")
    assert math.isnan(output_error(w, pruned, hessian_of(x * torch.nan)))  # must not pass as a small error


@pytest.mark.parametrize("ratio", ["6:8", "2:4"])
@pytest.mark.parametrize("k", [64, 62])  # with a tail
def test_pruned_ternary_rows_stay_on_their_grid(ratio: str, k: int) -> None:
    pattern, x = SlidePattern.parse(ratio), inputs(400, k)
    x += weights(400, k // 4) @ weights(k // 4, k, seed=2)  # correlated inputs
    h, steps = hessian_of(x), weights(128, 1, seed=3).abs() + 0.5
    w = steps * weights(128, k).mul(1.5).round().clamp(-1, 1)
    pruned = sparsegpt(w, factor(h, dtype=torch.float64), pattern, grid=steps)
    refined = refine(w, pruned, h, pattern, 3, grid=steps)
    for result in (pruned, refined):
        assert violations(result, pattern) is None
        assert torch.equal(result, steps * (result / steps).round().clamp(-1, 1))
    # 0.4 to 0.7, and 0.6 to 0.8, of each other
    errors = [output_error(w, result, damped(h)) for result in (prune(w, pattern), pruned, refined)]
    assert errors[0] > errors[1] > errors[2]
    rows = [((result - w) @ damped(h) * (result - w)).sum(1) for result in (pruned, refined)]
    assert bool((rows[1] <= rows[0] * (1 + 1e-9)).all())  # a sweep makes no row worse
    repeated = sparsegpt(refined, factor(h, dtype=torch.float64), pattern, grid=steps)
    assert torch.equal(repeated, refined)  # weights that obey the pattern are kept


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["6:8", "2:4"])
def test_graphs_compute_what_launches_do(name: str) -> None:
    problems = [
        (weights(48, 100, seed).float().cuda(), hessian_of(inputs(300, 100, seed)).float().cuda())
        for seed in range(3)
    ]

    def pruned() -> list[Tensor]:
        return [pruner(h, 2)(w, SlidePattern.parse(name)) for w, h in problems]

    expected = pruned()
    with recordings():
        found = pruned()  # the first problem's graphs, replayed for the others
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
