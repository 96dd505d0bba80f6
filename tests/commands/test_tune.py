"""``slidesparse tune``: shapes, operands and the search for algorithms, with a fake library and clock."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import bert, block_of, edit_block, edit_json, llama
from fake_library import CPU, GPU, FakeClock, FakeLibrary, session
from tiny import tiny
from typer.testing import CliRunner

from slidesparse import gemm, ops, reference
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.cli.main import app
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.stream import convert
from slidesparse.gemm import tuned
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.problem import DTYPES, LibraryError, Problem
from slidesparse.pattern import PatternError, SlidePattern
from slidesparse.tune import machine, measure, shapes
from slidesparse.tune.inputs import Inputs
from slidesparse.tune.search import MARGIN, SearchResult, gemm_contest, outputs_agree, search
from slidesparse.tune.session import plan_jobs, tune
from slidesparse.tune.shapes import Layer, ShapeError

LAYERS = (Layer("a", 64, 64), Layer("b", 32, 128))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tuned.CACHE_VARIABLE, str(tmp_path))
    return tmp_path


def find(library: FakeLibrary, problem: Problem, clock: FakeClock | None = None) -> SearchResult:
    inputs = Inputs(CPU, GPU.l2_bytes)
    weights = inputs.packed(library, problem, inputs.copies(problem))
    operands = inputs.operands(problem, weights)
    return search(gemm_contest(library, problem, operands, CPU), clock or FakeClock(library))


INT8 = Problem("int8", "int32", 64, 64, 16)
FP8 = Problem("fp8", "bf16", 64, 64, 16, "both")


@pytest.mark.parametrize("problem", [INT8, FP8], ids=str)
def test_search_takes_the_fastest_correct_algorithm(problem: Problem) -> None:
    unusable = {"refused": 1.0, "fails": 2.0, "wrong": 3.0, "wrong too": 4.0, "unwritten": 5.0}
    library = FakeLibrary(times=unusable | {"slow": 30.0, "good": 10.0, "middle": 20.0}, scale="both")
    result = find(library, problem)
    assert (result.algorithm, result.tried, result.refused, result.wrong) == ("good", 8, 2, 3)
    assert 10.0 <= result.timing.p20 < result.timing.p50 < result.timing.p80 < 10.2


def test_a_host_that_is_late_hides_no_algorithm() -> None:
    """Eager launches wait for the host: only ones that are far slower are left out."""
    library = FakeLibrary(times={"middle": 20.0, "good": 10.0, "slow": 30.0})
    assert find(library, INT8, FakeClock(library, {"good": 150.0})).algorithm == "good"
    library.times["slow"] = 500.0
    assert find(library, INT8, FakeClock(library, {"good": 1e4, "slow": 1e4})).algorithm == "middle"


BLOCK = (Layer("qkv", 96, 32), Layer("o", 32, 32), Layer("gate_up", 128, 32), Layer("down", 32, 64))


def test_a_backend_that_fuses_is_tuned_by_blocks() -> None:
    """An algorithm that is the fastest in a layer alone is slow if a second layer beside it has it, too."""

    def block_us(served: list[str]) -> float:
        return sum(library.times[name] for name in served) + 100.0 * max(0, served.count("good") - 1)

    times = {"slow": 30.0, "refused": 1.0, "wrong": 2.0, "good": 10.0, "middle": 20.0}
    library = FakeLibrary(fuses=True, outs=("bf16",), scale="both", times=times, block_us=block_us)
    todo = plan_jobs([library], [BLOCK, BLOCK], ["int8", "fp8"], ["2:4", "6:8"], [1, 16])
    assert [len(job.problems) for job in todo] == [4] * 4
    run = session(library)
    finished, counts = tune(run, todo)
    assert (finished, counts["tuned"], counts["refused"], run.skipped) == (True, 32, 32, [])
    assert counts["wrong"] >= 32
    assert (library.served, run.cells) == ({}, 32)
    for problem in (problem for job in todo for problem in job.problems):
        best = "good" if problem.n == 128 else "middle"
        assert tuned.tuned_algorithm(GPU.subject(library), problem) == best


def test_what_is_served_stays_unless_another_is_clearly_faster() -> None:
    """Each search begins with the tables, and repetitions differ by about MARGIN."""
    library = FakeLibrary(
        fuses=True, outs=("bf16",), scale="both", times={"a": 10.0, "b": 10 * (1 - MARGIN / 2)}
    )
    library.block_us = lambda served: sum(library.times[name] for name in served)
    todo = plan_jobs([library], [BLOCK], ["int8"], ["2:4"], [16])
    for faster, best in ((library.times["b"], "a"), (10 * (1 - 8 * MARGIN), "b"), (10.0, "b")):
        library.times["b"] = faster
        tune(session(library), todo, force=True)
        found = [tuned.tuned_algorithm(GPU.subject(library), problem) for problem in todo[0].problems]
        assert found == [best] * 4


def test_an_operator_that_fails_is_an_algorithm_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ raises RuntimeError, which ended the command."""
    library = FakeLibrary(
        fuses=True, outs=("bf16",), scale="both", times={"bad": 1.0, "good": 10.0, "slow": 30.0}
    )
    library.block_us = lambda served: sum(library.times[name] for name in served)
    run_layer = ops._linear_by

    def fail(*arguments: Any) -> torch.Tensor:
        if "bad" in library.served.values():
            raise RuntimeError("the kernel was not launched")
        return run_layer(*arguments)

    monkeypatch.setattr(ops, "_linear_by", fail)
    run, todo = session(library), plan_jobs([library], [BLOCK], ["int8"], ["2:4"], [16])
    tuned.save(GPU.subject(library), [(problem, "slow") for problem in todo[0].problems])
    finished, counts = tune(run, todo, force=True)
    assert (finished, counts["tuned"], counts["refused"], run.skipped) == (True, 4, 4, [])
    found = [tuned.tuned_algorithm(GPU.subject(library), problem) for problem in todo[0].problems]
    assert found == ["good"] * 4


def test_memory_that_an_operator_lacks_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's error is a RuntimeError, too: all algorithms seemed to be refused."""
    library = FakeLibrary(fuses=True, outs=("bf16",), scale="both", block_us=lambda served: 1.0)

    def fail(*arguments: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ops, "_linear_by", fail)
    run = session(library)
    tune(run, plan_jobs([library], [BLOCK], ["int8"], ["2:4"], [16]))
    assert [note.partition(";")[0] for note in run.skipped] == [
        "cusparselt int8 96x32 M=16 does not fit into the GPU's memory"
    ]


def test_what_does_not_fit_into_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one line, and other numbers of tokens are tuned."""
    for fuses in (True, False):
        library = FakeLibrary(fuses=fuses, outs=("bf16",), scale="both", block_us=lambda served: 1.0)
        algorithms = library.algorithms

        def fail(problem: Problem, device: torch.device, of: Any = algorithms) -> list[str]:
            if problem.m == 32:
                raise torch.OutOfMemoryError("CUDA out of memory.\nSee the documentation")
            return of(problem, device)

        monkeypatch.setattr(library, "algorithms", fail)
        run = session(library)
        finished, counts = tune(run, plan_jobs([library], [BLOCK[:1]], ["int8"], ["2:4"], [16, 32, 48]), True)
        assert (finished, counts["tuned"], run.cells) == (True, 2, 3)
        assert run.skipped == [
            "cusparselt int8 96x32 M=32 does not fit into the GPU's memory; give fewer tokens by --m"
        ]


def test_a_damaged_table_is_refused_before_a_search() -> None:
    """With --force, too: what was found could not be saved."""
    library = FakeLibrary()
    todo = plan_jobs([library], [LAYERS], ["int8"], ["2:4"], [16])
    tuned.save(GPU.subject(library), [(todo[0].problems[0], "good")]).write_text("[]")
    for force in (True, False):
        with pytest.raises(tuned.TableError, match="delete it"):
            tune(session(library), todo, force)
    assert not library.searched


@pytest.mark.parametrize(
    ("layers", "silu", "norms"),
    [
        (BLOCK, {64}, {32}),
        # half as many keys and values as queries: attention has half the inputs that it gives
        ((Layer("qkv", 256, 32), Layer("o", 32, 128), *BLOCK[2:]), {64}, {32}),
        # an MLP without a gate
        ((*BLOCK[:2], Layer("up", 160, 32), Layer("down", 32, 160)), set(), {32}),
        ((Layer("alone", 32, 32),), set(), {32}),
        ((Layer("alone", 64, 32),), {32}, set()),
        ((Layer("alone", 96, 32),), set(), set()),
    ],
    ids=["decoder", "grouped queries", "no gate", "square", "wide", "other"],
)
def test_what_stands_between_the_layers_of_a_block(
    layers: tuple[Layer, ...], silu: set[int], norms: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By sizes alone, what stands there in a model."""
    library = FakeLibrary(fuses=True, outs=("bf16",), scale="both", block_us=lambda served: 1.0)
    silu_mul, rms_norm, found = reference.silu_mul, reference.rms_norm, (set[int](), set[int]())

    def note_silu(x: torch.Tensor) -> torch.Tensor:
        found[0].add(x.shape[-1] // 2)
        return silu_mul(x)

    def note_norm(x: torch.Tensor, *others: Any) -> Any:
        found[1].add(x.shape[-1])
        return rms_norm(x, *others)

    monkeypatch.setattr(reference, "silu_mul", note_silu)
    monkeypatch.setattr(reference, "rms_norm", note_norm)
    run = session(library)
    assert tune(run, plan_jobs([library], [layers], ["int8"], ["2:4"], [16]))[1]["tuned"] == len(layers)
    assert (found, run.skipped) == ((silu, norms), [])


def test_search_fails_without_a_usable_algorithm() -> None:
    message = "of the 2 algorithms .* 1 cannot run here and 1 give wrong results"
    with pytest.raises(LibraryError, match=message):
        find(FakeLibrary(times={"refused": 1.0, "wrong": 1.0}), INT8)
    library = FakeLibrary(times={})
    run = session(library)
    finished, counts = tune(run, plan_jobs([library], [LAYERS[:1]], ["fp8"], ["2:4"], [16]))
    assert (counts["tuned"], finished, len(run.skipped)) == (0, True, 1)
    assert "of the 0 algorithms" in run.skipped[0]


@pytest.mark.parametrize(
    ("dtype", "out", "scale"), [("fp8", "bf16", "both"), ("fp8", "fp32", "none"), ("bf16", "bf16", "none")]
)
def test_outputs_agree_up_to_rounding_only(dtype: str, out: str, scale: str) -> None:
    """Two roundings of one product agree; without one of 64 tiles, or scaled twice, it does not."""
    problem = Problem(dtype, out, 256, 512, 256, scale)
    exact = torch.randn(256, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 100
    first = exact.to(DTYPES[out])
    other = (exact * (1 + torch.finfo(DTYPES[out]).eps / 2)).to(DTYPES[out])
    assert not torch.equal(first, other)
    assert outputs_agree(other, first, problem)
    assert outputs_agree(first, first, problem)
    lacking = first.clone()
    lacking[:32, :32] = 0
    assert not outputs_agree(lacking, first, problem)
    assert not outputs_agree(first * 2, first, problem)
    lacking[0, 0] = torch.nan
    assert not outputs_agree(lacking, first, problem)
    assert not outputs_agree(first, lacking, problem)


def test_plan_jobs_are_distinct_problems() -> None:
    """6:8 of K = 64 has K' = 96; two equal layers, and two patterns with the same K', are one job."""
    sparse, dense = FakeLibrary(), FakeLibrary("cublaslt", sparse=False, outs=("int32",))
    jobs = plan_jobs(
        [sparse, dense], [[*LAYERS, LAYERS[0]], LAYERS], ["int8"], ["2:4", "6:8", "14:16"], [16, 32]
    )
    problems = [(job.library.name, p.out, p.n, p.k) for job in jobs for p in job.problems]
    assert len(problems) == len(set(problems))
    sparse_k = {(64, 64), (64, 96), (64, 128), (32, 128), (32, 192), (32, 224)}
    assert {(n, k) for name, _, n, k in problems if name == "cusparselt"} == sparse_k
    assert {out for name, out, *_ in problems if name == "cusparselt"} == {"bf16", "int32"}
    assert "cublaslt" not in {name for name, *_ in problems}


def test_tune_saves_resumes_and_can_be_forced() -> None:
    library = FakeLibrary(times={"refused": 1.0, "wrong": 2.0, "good": 10.0, "slow": 30.0})
    todo = plan_jobs([library], [LAYERS], ["int8"], ["6:8"], [16, 48])
    steps: list[str] = []
    run = session(library)
    run.show = steps.append
    counts = {"tuned": 8, "known": 0, "algorithms": 32, "refused": 8, "wrong": 8}
    assert (tune(run, todo), run.skipped) == ((True, counts), [])
    assert len(steps) == 8
    for m in (1, 16, 40):
        problem = Problem("int8", "bf16", 64, 96, m)
        assert tuned.tuned_algorithm(GPU.subject(library), problem) == "good"
    assert sorted(library.packed) == [(32, 192)] * 2 + [(64, 96)] * 2  # once for all token counts
    library.searched.clear()
    _, second = tune(session(library), todo)
    assert (second["tuned"], second["known"], library.searched) == (0, 8, [])
    library.times["slow"] = 1.0
    assert tune(session(library), todo, force=True)[1]["tuned"] == 8
    assert tuned.tuned_algorithm(GPU.subject(library), todo[0].problems[0]) == "slow"


def test_what_ships_is_searched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is from another machine, and of another search perhaps: whoever tunes wants what is the fastest here."""
    library = FakeLibrary()
    todo = plan_jobs([library], [LAYERS], ["int8"], ["2:4"], [16])
    first = tune(session(library), todo)[1]
    monkeypatch.setattr(tuned, "SHIPPED_TABLES", cache / "shipped")
    (cache / "tuned").rename(cache / "shipped")
    assert tune(session(library), todo)[1] == first
    assert tune(session(library), todo)[1]["known"] == first["tuned"] > 0


def test_tune_keeps_results_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary()
    todo = plan_jobs([library], [LAYERS], ["fp8"], ["2:4", "6:8"], [16, 32])
    with monkeypatch.context() as patch:
        ticks = SimpleNamespace(monotonic=itertools.count(1).__next__)
        patch.setattr("slidesparse.tune.session.time", ticks)
        finished, stopped = tune(session(library, deadline=3.5), todo)
    assert (stopped["tuned"], finished) == (3, False)
    finished, resumed = tune(session(library), todo)
    assert (resumed["tuned"], resumed["known"], finished) == (5, 3, True)


def test_command_tunes_a_converted_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = bert(tmp_path / "bert"), tmp_path / "out"
    layer_patterns = (("intermediate", SlidePattern(6)),)
    convert(source, out, ConvertOptions(SlidePattern(8), "fp8", layer_patterns=layer_patterns))
    received: list[Any] = []
    monkeypatch.setattr(machine, "require_gpu", lambda: GPU)
    monkeypatch.setattr(machine, "require_libraries", lambda gpu, names: [])
    monkeypatch.setattr(gemm, "choose", lambda path, device: ("hopper", ""))
    monkeypatch.setattr("slidesparse.tune.session.plan_jobs", lambda *a: received.append(a[2:4]) or [])
    monkeypatch.setattr(measure, "own_stream", lambda device: nullcontext(FakeClock(FakeLibrary())))
    defaults = (("int8", "fp8"), (*shapes.PATTERNS, *shapes.MIXED_PATTERNS))
    for folder, options, expected in (
        (out, [], (("fp8",), ("4:6", "6:8", "dense"))),
        (out, ["--pattern", "2:4", "--dtype", "int8"], (("int8",), ("2:4",))),
        (source, [], defaults),
    ):
        result = CliRunner().invoke(app, ["tune", str(folder), *options], catch_exceptions=False)
        assert (result.exit_code, received.pop()) == (0, expected), result.stderr


def test_layer_shapes_of_stored_weights(tmp_path: Path) -> None:
    """An encoder has no gate; unquantized layers of a converted model are not tuned."""
    source = bert(tmp_path / "bert")

    def found(folder: Path) -> list[tuple[int, int]]:
        return sorted((layer.n, layer.k) for layer in shapes.find_model(str(folder))[1])

    assert found(source) == [(32, 32), (32, 48), (48, 32), (96, 32)]
    options = ConvertOptions(SlidePattern(8), layout="slided", ignore=("output",))
    convert(source, tmp_path / "out", options)
    assert found(tmp_path / "out") == [(48, 32), (96, 32)]
    with pytest.raises(ShapeError, match="Llama9"):
        shapes.find_model("Llama9")


def test_an_incomplete_model_is_refused_in_words(tmp_path: Path) -> None:
    """Here the config is that of a model with one more block."""
    edit_json(llama(tmp_path) / "config.json", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"model.layers.2.self_attn.q_proj.weight is missing"):
        shapes.find_model(str(tmp_path))


@pytest.mark.parametrize("named", [True, False])
def test_shape_of_a_quantized_lm_head(tmp_path: Path, named: bool) -> None:
    """By whatever name, if a target names it; vLLM does not load one of the class Linear, nor heed idle groups."""
    source, out = tiny("gpt_neox", tmp_path / "source"), tmp_path / "out"
    convert(source, out, ConvertOptions(SlidePattern(8), layer_patterns=(("embed_out", SlidePattern(None)),)))
    groups = block_of(out)["config_groups"]
    groups = groups if named else {"group_0": groups["group_0"]}
    edit_block(out, config_groups={**groups, "idle": {"targets": ["re:vision"], "weights": {"num_bits": 4}}})
    found = [(layer.n, layer.k) for layer in shapes.find_model(str(out))[1] if layer.name == "embed_out"]
    assert found == [(128, 64)] * named
    assert not any(layer.name == "embed_out" for layer in shapes.find_model(str(source))[1])


def test_parse_shapes_tokens_and_patterns() -> None:
    assert shapes.parse_shapes("4608x3584, 3584X18944") == (
        Layer("4608x3584", 4608, 3584),
        Layer("3584x18944", 3584, 18944),
    )
    assert shapes.parse_tokens("64,1") == (64, 1)
    assert shapes.parse_patterns("6:8,2_10,2_inf") == ("6:8", "8:10", "2_inf")
    assert shapes.parse_patterns("2_8,2:4@50%", mixed=True) == ("6:8", "2:4@50%")
    refused = [(shapes.parse_shapes, text) for text in ("", "64", "64x0", "axb", "64x64x64")]
    refused += [(shapes.parse_tokens, text) for text in ("", "0", "a", "1.5")]
    refused += [(shapes.parse_patterns, text) for text in (" ,", "2:4@50%")]
    for parse, text in refused:
        with pytest.raises((ShapeError, PatternError)):
            parse(text)


def test_packed_columns_are_aligned_for_the_library() -> None:
    """8:10 of 2048: 205 blocks of 16 are 3280, and 32 divides 3296; coded weights keep their columns."""
    found = [shapes.packed_columns(2048, "8:10", alignment) for alignment in (16, 32, 128)]
    assert found == [(columns, "2:4") for columns in (3280, 3296, 3328)]
    assert shapes.packed_columns(2000, "6:8", 128, coded=Hopper.coded) == (2048, "coded")
    for pattern in ("8:10", "14:16"):
        assert shapes.packed_columns(2000, pattern, 128, coded=Hopper.coded) == (2048, "dense")
