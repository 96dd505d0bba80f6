"""The search for algorithms, and tuning on top of it, with a library and a clock that need no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_library import CPU, GPU, FakeClock, FakeLibrary, Ticks, session

from slidesparse.bench.inputs import Inputs
from slidesparse.bench.measure import SAMPLES
from slidesparse.bench.search import FINAL_SAMPLES, Found, agree, search
from slidesparse.bench.session import served
from slidesparse.bench.shapes import Layer
from slidesparse.gemm import cublaslt, cusparselt, hopper, tuned
from slidesparse.gemm.library import DTYPES, LibraryError, Problem
from slidesparse.tune import jobs, tune

LAYERS = (Layer("a", 64, 64), Layer("b", 32, 128))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tuned.CACHE, str(tmp_path))
    tuned._tables.cache_clear()
    return tmp_path


def find(library: FakeLibrary, problem: Problem, clock: FakeClock | None = None) -> Found:
    inputs = Inputs(CPU, GPU.l2_bytes)
    weights = inputs.packed(library, problem, inputs.copies(problem))
    return search(library, problem, inputs.rotation(problem, weights), clock or FakeClock(library), CPU)


INT8 = Problem("int8", "int32", 64, 64, 16)
FP8 = Problem("fp8", "bf16", 64, 64, 16, "both")


@pytest.mark.parametrize("problem", [INT8, FP8], ids=str)
def test_the_fastest_right_algorithm_wins(problem: Problem) -> None:
    bad = {"refused": 1.0, "fails": 2.0, "wrong": 3.0, "wrong too": 4.0, "unwritten": 5.0}
    library = FakeLibrary(times=bad | {"slow": 30.0, "good": 10.0, "middle": 20.0}, scale="both")
    found = find(library, problem)
    assert (found.algorithm, found.tried, found.refused, found.wrong) == ("good", 8, 2, 3)
    assert 10.0 < found.timing.p20 < found.timing.p50 < found.timing.p80 < 10.2
    assert found.label == "good"


def test_only_finalists_are_timed_well_and_slow_ones_never() -> None:
    library = FakeLibrary(times={"good": 10.0, "b": 11.0, "c": 12.0, "d": 13.0, "awful": 500.0})
    clock = FakeClock(library)
    assert find(library, INT8, clock).algorithm == "good"
    quick = 2
    assert clock.sampled == {
        "good": quick + SAMPLES,
        "b": quick + FINAL_SAMPLES,
        "c": quick + FINAL_SAMPLES,
        "d": quick,
    }


def test_k_is_split_for_the_algorithms_that_are_fast_without() -> None:
    times = {str(i): 10.0 + i for i in range(8)} | {f"{i}/2x1": 9.0 + i for i in range(8)}
    library = FakeLibrary(times=times | {"7/2x1": 1.0})
    found = find(library, INT8)
    assert (found.algorithm, found.tried) == ("0/2x1", 8 + 4)
    only_split = FakeLibrary(times={"refused": 1.0, "1/2x1": 3.0, "2/2x1": 2.0})
    assert find(only_split, INT8).algorithm == "2/2x1"


def test_a_stroke_in_a_name_alone_is_no_way_of_splitting_k() -> None:
    """Of a library without such ways, every algorithm is tried."""
    times = {f"a{i}": 10.0 + i for i in range(8)} | {"stream:1x8/1/2": 9.0, "split:1x8/1x4/2": 1.0}
    found = find(FakeLibrary(times=times, splits=False), INT8)
    assert (found.algorithm, found.tried) == ("split:1x8/1x4/2", 10)
    assert find(FakeLibrary(times=times), INT8).tried == 8


def test_which_algorithms_are_ways_of_splitting_k() -> None:
    assert [cusparselt.LIBRARY.unsplit(name) for name in ("3", "3/2x1", "12/1x4")] == [None, "3", "12"]
    assert hopper.LIBRARY.unsplit("split:1x8/1x4/2") is None
    assert cublaslt.LIBRARY.unsplit("0a1f-00000000") is None


def test_without_a_graph_the_algorithm_is_marked() -> None:
    library = FakeLibrary()
    assert find(library, INT8, FakeClock(library, graphs=False)).label == "good (no graph)"


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"refused": 1.0, "wrong": 1.0}, "of 2 algorithms .* 1 were refused and 1 gave another result"),
        ({}, "of 0 algorithms"),
    ],
)
def test_a_problem_without_a_usable_algorithm(times: dict[str, float], words: str) -> None:
    with pytest.raises(LibraryError, match=words):
        find(FakeLibrary(times=times), INT8)


@pytest.mark.parametrize(
    ("dtype", "out", "scale"), [("fp8", "bf16", "both"), ("fp8", "fp32", "none"), ("bf16", "bf16", "none")]
)
def test_rounding_agrees_and_a_wrong_tile_does_not(dtype: str, out: str, scale: str) -> None:
    """Two roundings of one product agree; without one of 64 tiles, or scaled twice, it does not."""
    problem = Problem(dtype, out, 256, 512, 256, scale)
    exact = torch.randn(256, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 100
    first = exact.to(DTYPES[out])
    other = (exact * (1 + torch.finfo(DTYPES[out]).eps / 2)).to(DTYPES[out])
    assert not torch.equal(first, other)
    assert agree(other, first, problem)
    assert agree(first, first, problem)
    lacking = first.clone()
    lacking[:32, :32] = 0
    assert not agree(lacking, first, problem)
    assert not agree(first * 2, first, problem)
    lacking[0, 0] = torch.nan
    assert not agree(lacking, first, problem)
    assert not agree(first, lacking, problem)


def test_int8_sums_agree_only_bit_for_bit() -> None:
    problem = Problem("int8", "int32", 8, 8, 8)
    sums = torch.arange(64, dtype=torch.int32).view(8, 8) + 2**30
    assert agree(sums.clone(), sums, problem)
    sums_off = sums.clone()
    sums_off[7, 7] += 1
    assert not agree(sums_off, sums, problem)


def test_what_serving_runs() -> None:
    sparse, dense = (
        FakeLibrary(scale="channel"),
        FakeLibrary("cublaslt", sparse=False, outs=("int32", "int8")),
    )
    assert served(sparse, "int8") == [("bf16", "channel"), ("int32", "none")]
    assert served(sparse, "fp8") == [("bf16", "channel")]
    assert served(dense, "int8") == [("int32", "none")]
    assert served(FakeLibrary(outs=("int32",)), "int8") == [("int32", "none")]
    assert served(dense, "bf16") == []


def test_jobs_are_distinct_problems() -> None:
    """6:8 of 64 has K' 96; two layers alike, and two patterns with one K', are one job."""
    sparse, dense = FakeLibrary(), FakeLibrary("cublaslt", sparse=False, outs=("int32",))
    found = jobs([sparse, dense], [*LAYERS, LAYERS[0]], ["int8"], ["2:4", "6:8", "14:16"], [16, 32])
    problems = [(job.library.name, job.problem.out, job.problem.n, job.problem.k) for job in found]
    assert len(problems) == len(set(problems))
    sparse_k = {(64, 64), (64, 96), (64, 128), (32, 128), (32, 192), (32, 224)}
    assert {(n, k) for name, _, n, k in problems if name == "cusparselt"} == sparse_k
    assert {out for name, out, *_ in problems if name == "cusparselt"} == {"bf16", "int32"}
    assert [entry for entry in problems if entry[0] == "cublaslt"] == [
        ("cublaslt", "int32", 64, 64),
        ("cublaslt", "int32", 32, 128),
    ]


def test_tuning_saves_resumes_and_is_forced() -> None:
    library = FakeLibrary(times={"refused": 1.0, "wrong": 2.0, "good": 10.0, "slow": 30.0})
    todo = jobs([library], LAYERS, ["int8"], ["6:8"], [16, 48])
    steps: list[str] = []
    run = session(library)
    run.advance = steps.append
    first = tune(run, todo)
    assert (first.tuned, first.known, first.finished, first.skipped) == (8, 0, True, ())
    assert (first.algorithms, first.refused, first.wrong) == (32, 8, 8)
    assert len(steps) == 8
    for m in (1, 16, 40, 96):
        problem = Problem("int8", "bf16", 64, 96, m)
        assert tuned.choice(library.name, "1.2.3", GPU.name, GPU.capability, problem) == "good"

    library.searched.clear()
    again = tune(session(library), todo)
    assert (again.tuned, again.known, library.searched) == (0, 8, [])
    library.times["slow"] = 1.0
    assert tune(session(library), todo, force=True).tuned == 8
    assert tuned.choice(library.name, "1.2.3", GPU.name, GPU.capability, todo[0].problem) == "slow"


def test_weights_are_packed_once_for_all_token_counts() -> None:
    library = FakeLibrary()
    tune(session(library), jobs([library], LAYERS[:1], ["fp8"], ["6:8"], [16, 32, 64]))
    assert library.packed == [(64, 96)]


def test_the_time_limit_keeps_what_was_found() -> None:
    library = FakeLibrary()
    todo = jobs([library], LAYERS, ["fp8"], ["2:4", "6:8"], [16, 32])
    stopped = tune(session(library, limit=3.5, now=Ticks()), todo)
    assert (stopped.tuned, stopped.finished) == (3, False)
    rest = tune(session(library), todo)
    assert (rest.tuned, rest.known, rest.finished) == (5, 3, True)


def test_an_interrupted_search_keeps_what_was_found() -> None:
    library = FakeLibrary()
    todo = jobs([library], LAYERS, ["fp8"], ["2:4"], [16, 32])
    run = session(library)

    def interrupt(label: str) -> None:
        if "M=32" in label:
            raise KeyboardInterrupt

    run.advance = interrupt
    with pytest.raises(KeyboardInterrupt):
        tune(run, todo)
    assert tune(session(library), todo).known == 2


def test_refused_problems_are_reported() -> None:
    library = FakeLibrary(times={"refused": 1.0})
    found = tune(session(library), jobs([library], LAYERS[:1], ["fp8"], ["2:4"], [16]))
    assert (found.tuned, found.finished, len(found.skipped)) == (0, True, 1)
    assert "1 were refused" in found.skipped[0]
