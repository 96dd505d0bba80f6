"""Tuned launches of the Triton kernels: search, tables, and lookup by the backends."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch
from fake_library import CPU, GPU, FakeClock, FakeLibrary, session

from slidesparse.gemm import launches, tuned
from slidesparse.gemm.launches import Kernel, launch_problem
from slidesparse.gemm.tuned import TableError, Tuned
from slidesparse.kernels import Config
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import INT8
from slidesparse.tune import launches as searching
from slidesparse.tune.inputs import Inputs
from slidesparse.tune.jobs import kernel_jobs, tune
from slidesparse.tune.shapes import Layer

BF16 = torch.bfloat16
LAYOUT = SlidePattern(8).layout(64)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a GPU without shipped tables, and a new folder for the user's tables."""
    monkeypatch.setenv(tuned.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: GPU.capability)
    launches._find_launch.cache_clear()
    launches._log_untuned.cache_clear()
    return tmp_path / "tuned"


def save_launch(launch: str, kind: str = "quant_slide", m: int = 64) -> Path:
    launches._find_launch.cache_clear()
    problem = launch_problem(BF16, INT8, LAYOUT.slided, 64, m)
    return tuned.save(GPU.subject(Kernel(kind)), [(problem, Tuned(launch, 1.0))])


def find(k: int = 64, m: int = 64, source: torch.dtype = BF16, dtype: torch.dtype = INT8) -> Config | None:
    layout = SlidePattern(8).layout(k)
    return launches._find_launch("quant_slide", source, dtype, layout.slided, k, m, CPU)


def test_find_launch_takes_tuned_or_nearby_launches(caplog: pytest.LogCaptureFixture) -> None:
    """A launch tuned for as many bytes comes first, then that of a nearby shape, which is logged, then None."""
    caplog.set_level(logging.INFO)
    save_launch("64x1x2")
    save_launch("128x1x4", m=512)
    assert [find(m=m) for m in (16, 64, 80, 10**6)] == [Config(64, 1, 2)] * 2 + [Config(128, 1, 4)] * 2
    assert find(source=torch.float16) == Config(64, 1, 2)
    assert "no tuned launch" not in "".join(caplog.messages[:-1])
    caplog.clear()
    launches._log_untuned.cache_clear()
    assert find(k=80) == Config(64, 1, 2)
    assert (
        "quant_slide has no tuned launch for some shapes on NVIDIA Test 100 and uses that of" in caplog.text
    )
    assert [find(k=128), find(source=torch.float32), find(dtype=torch.float8_e4m3fn)] == [None] * 3
    assert find(source=torch.float64) is None  # the kernel names its limits


@pytest.mark.parametrize(
    "text", ["64", "64x1", "64x1x3", "0x1x1", "64x1x64", "131072x1x1", "64x1x2x1", "axbxc"]
)
def test_invalid_launch_text_is_refused(text: str) -> None:
    path = save_launch(text)
    with pytest.raises(
        TableError, match=f"{text!r} for a launch, .*; delete {path} and run `slidesparse tune"
    ):
        find()


def test_launch_table_of_another_gpu_is_refused() -> None:
    path = save_launch("64x1x2")
    path.write_text(path.read_text().replace(GPU.name, "NVIDIA Other"))
    tuned._merged_table.cache_clear()
    with pytest.raises(TableError, match="is about gpu 'NVIDIA Other', not 'NVIDIA Test 100'"):
        find()


def test_launch_text_round_trip() -> None:
    for launch in (Config(1024, 1, 8), Config(256, 4, 32)):
        assert Config.parse(str(launch)) == launch


def test_quantize_uses_the_tuned_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch is looked up by the bucket of the number of tokens, and is None for an untuned shape."""
    pytest.importorskip("triton")
    calls: list[Any] = []
    monkeypatch.setattr(
        "slidesparse.kernels.quant_slide.quant_slide", lambda *arguments: calls.append(arguments)
    )
    save_launch("64x1x2")
    x = torch.zeros(50, 64, dtype=BF16)
    launches.quantize(x, LAYOUT, INT8, 96)
    launches.quantize(x, SlidePattern(4).layout(64), INT8, 64)
    assert [call[1:] for call in calls] == [
        (8, 0, INT8, 96, 64, Config(64, 1, 2)),
        (4, 0, INT8, 64, 64, None),
    ]


def test_search_takes_the_fastest_correct_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = launch_problem(BF16, INT8, 2048, 2048, 16)
    names = [str(candidate) for candidate in searching.candidates("quant_only", problem)]
    wrong_name, *correct_names = names[1:]
    library = FakeLibrary(
        times={name: 20.0 + i for i, name in enumerate(names)} | {wrong_name: 5.0, correct_names[2]: 10.0}
    )

    def run(i: int, config: Config) -> tuple[torch.Tensor, ...]:
        library.ran.append(str(config))
        return (torch.tensor([str(config) == wrong_name]),)

    monkeypatch.setattr(searching, "_make_run", lambda *_: run)
    result = searching.search_launches(
        "quant_only", problem, 4, Inputs(CPU, GPU.l2_bytes), FakeClock(library)
    )
    assert (result.algorithm, result.tried, result.wrong) == (correct_names[2], len(names), 1)
    assert [name for name, _ in result.others] == [names[0], correct_names[0]]


def check_tuning(device: str) -> None:
    """Check that tuning fills the tables that serving reads, once."""
    todo = kernel_jobs([Layer("a", 96, 768)], ["int8"], ["6:8"], [1, 2])
    first, second = tune(session(), todo), tune(session(), todo)
    # two quantizers, two accumulator types
    assert (first.tuned, first.wrong, first.skipped) == (2 * 4, 0, ())
    assert second.known == first.tuned
    for job in todo:
        best = tuned.find_entry(GPU.subject(job.library), job.problem)
        assert best
        assert best.algorithm in map(str, searching.candidates(job.library.name, job.problem))
        assert best.tried > len(best.others) == 2


INTERPRETED = {"tuning": check_tuning}


@pytest.mark.parametrize("name", INTERPRETED)
def test_tune_fills_launch_tables_interpreted(name: str) -> None:
    failure = interpreter.run(__file__)[name]
    assert failure is None, failure


if __name__ == "__main__":
    interpreter.report(INTERPRETED)
