"""What packs weights gets ready while weights are read: once each, in the background; errors are left to packing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from slidesparse import gemm
from slidesparse.gemm import ahead
from slidesparse.pattern import SlideLayout, SlidePattern

PATTERN = SlidePattern.parse("6:8")


class Backend:
    """A `gemm.SlidingProvider` that notes its calls, waits until it may go on, and fails if told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], torch.dtype, SlideLayout, str]] = []
        self.may_go_on = threading.Event()
        self.error: Exception | None = None

    def slide_and_pack(self, weight: Tensor, layout: SlideLayout) -> tuple[Tensor, int]:
        assert self.may_go_on.wait(30)
        self.calls.append((tuple(weight.shape), weight.dtype, layout, threading.current_thread().name))
        if self.error:
            raise self.error
        return weight, 0


class OnGpu:
    """As much of a weight on a GPU as is looked at; what is made for it lies on the CPU."""

    is_cuda, device = True, torch.device("cpu")

    def __init__(self, n: int, k: int, dtype: torch.dtype = torch.int8) -> None:
        self.shape, self.dtype = torch.Size((n, k)), dtype

    def numel(self) -> int:
        return self.shape.numel()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    made = Backend()
    monkeypatch.setattr(gemm, "provider", lambda name: made)
    ahead._begun.clear()
    yield made
    made.may_go_on.set()
    made.error = None
    ahead.finish()
    ahead._begun.clear()


def begin(weight: object, phase: int = 0) -> None:
    ahead.begin("hopper", weight, PATTERN, phase)  # type: ignore[arg-type]


def test_it_runs_beside_what_comes_next_and_finish_waits(backend: Backend) -> None:
    begin(OnGpu(4608, 3584))
    assert not backend.calls  # returned while the other thread waits
    backend.may_go_on.set()
    ahead.finish()
    ((shape, dtype, layout, thread),) = backend.calls
    assert (shape, dtype, layout) == ((ahead.ROWS, 3584), torch.int8, PATTERN.layout(3584))
    assert thread.startswith("slidesparse")
    assert all(not thread.name.startswith("slidesparse") for thread in threading.enumerate())


def test_each_kind_of_weight_once(backend: Backend) -> None:
    """Layers differ in N, of which the kernels are the same; in K, dtype and phase, of which they are not."""
    backend.may_go_on.set()
    fp8 = torch.float8_e4m3fn
    for _ in range(2):
        for weight in (OnGpu(4608, 3584), OnGpu(64, 3584), OnGpu(64, 1024), OnGpu(64, 1024, fp8)):
            begin(weight)
        begin(OnGpu(64, 1024), phase=2)
        ahead.finish()
    found = [(shape[1], dtype, layout.phase) for shape, dtype, layout, _ in backend.calls]
    assert found == [(3584, torch.int8, 0), (1024, torch.int8, 0), (1024, fp8, 0), (1024, torch.int8, 2)]


def test_what_goes_wrong_is_left_to_packing(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    """It would go wrong there again, if it matters, and be raised with the layer's name."""
    backend.error = RuntimeError("out of memory")
    backend.may_go_on.set()
    begin(OnGpu(64, 64))
    with caplog.at_level("DEBUG", "vllm.slidesparse"):
        ahead.finish()
    assert "getting ready to pack weights: out of memory" in caplog.text
    backend.error = None
    begin(OnGpu(64, 128))  # of the next model
    ahead.finish()
    assert len(backend.calls) == 2


def test_nothing_to_do_on_a_cpu(backend: Backend) -> None:
    begin(torch.zeros(64, 64, dtype=torch.int8))
    begin(OnGpu(0, 64))
    ahead.finish()
    assert not backend.calls
