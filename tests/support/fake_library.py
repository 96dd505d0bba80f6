"""A fake GEMM library and clock for machines without a GPU: exact products, and times from a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.measure import Window
from slidesparse import gemm
from slidesparse.gemm.problem import ALL_2_4, DTYPES, TWO_FOUR, LibraryError, Problem, Tensors
from slidesparse.pattern import SlidePattern
from slidesparse.slide import obeys
from slidesparse.tune.inputs import Inputs
from slidesparse.tune.machine import Gpu
from slidesparse.tune.measure import Deadline, Launch, Replay
from slidesparse.tune.session import Session

CPU = torch.device("cpu")
GPU = Gpu(CPU, "NVIDIA Test 100", (9, 0), l2_bytes=1 << 10)
TIMES = {"slow": 30.0, "good": 10.0, "middle": 20.0, "slowest": 25.0}


@dataclass
class FakePlan:
    library: FakeLibrary
    problem: Problem
    algorithm: str

    def run(self, tensors: Tensors) -> None:
        activations, weight, out, scale_w, scale_x, _ = tensors
        self.library.ran.append(self.algorithm)
        if self.algorithm.startswith("fails"):
            raise LibraryError(f"{self.algorithm} failed")
        if self.algorithm.startswith("unwritten"):
            return
        product = activations.double() @ weight.double().T
        if scale_w is not None:
            product *= scale_w
        if scale_x is not None:
            product *= scale_x[:, None]
        if self.algorithm.startswith("wrong"):
            product[-1, -1] += 1 if out.dtype == torch.int32 else product.norm()
        out.copy_(product)


@dataclass
class FakeLibrary:
    """A library whose algorithms take ``times`` (name -> microseconds).

    An algorithm whose name begins with "refused", "fails", "wrong" or "unwritten" behaves that way.
    """

    name: str = "cusparselt"
    sparse: bool = True
    alignment: int = 32
    coded: dict[int, int] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=lambda: dict(TIMES))
    outs: tuple[str, ...] = ("bf16", "int32")
    scale: str = "none"
    ran: list[str] = field(default_factory=list)
    searched: list[Problem] = field(default_factory=list)
    packed: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def takes_dense(self) -> bool:
        """Whether it serves weights without a pattern, as the dense library does."""
        return not self.sparse

    def version(self) -> str:
        return "1.2.3"

    def unusable(self, device: torch.device) -> str | None:
        return None

    def output_types(self, dtype: str) -> tuple[str, ...]:
        fp8 = ("bf16", "fp32") if "fp32" in self.outs else ("bf16",)
        return {"int8": self.outs, "fp8": fp8}.get(dtype, ())

    def epilogue(self, dtype: str, out: str) -> str:
        return "none" if out == "int32" else self.scale

    def operand(self, weight: Tensor, blocks: str = ALL_2_4) -> Tensor:
        assert not self.sparse or obeys(weight, TWO_FOUR)
        self.packed.append(tuple(weight.shape))
        return weight

    def pack(self, weight: Tensor, pattern: SlidePattern | None, phase: int = 0) -> Tensor:
        return gemm.get("reference").pack(weight, pattern, phase)

    def algorithms(self, problem: Problem, device: torch.device) -> list[str]:
        self.searched.append(problem)
        return list(self.times)

    def plan(self, problem: Problem, device: torch.device, algorithm: str | None = None) -> FakePlan:
        name = algorithm or "heuristic"
        if name.startswith("refused"):
            raise LibraryError(f"{name} is refused")
        assert algorithm is None or algorithm in self.times
        assert problem.out in DTYPES
        return FakePlan(self, problem, name)


class FakeClock:
    """A clock that runs launches and reads their times from the tables of the libraries."""

    def __init__(self, *libraries: FakeLibrary) -> None:
        self._libraries = libraries
        self.prepared: list[tuple[str, int, float]] = []  # algorithm, copies, target
        self.sampled: Counter[str] = Counter()
        self.turns: list[str] = []

    def _run(self, launch: Launch) -> tuple[str, float]:
        for library in self._libraries:
            library.ran.clear()
        launch(0)
        for library in self._libraries:
            for name in library.ran:
                return name, library.times[name]
        return "other", 5.0

    def time_once(self, launch: Launch) -> float:
        return self._run(launch)[1] + 4.0  # the host's overhead

    def prepare(self, launch: Launch, copies: int, about_us: float, target_us: float) -> Replay:
        name, us = self._run(launch)
        for i in range(copies):
            launch(i)
        self.prepared.append((name, copies, target_us))
        return _FakeReplay(self, name, us)


class _FakeReplay(Replay):
    def __init__(self, clock: FakeClock, name: str, us: float) -> None:
        super().__init__(lambda: None, launches=1, graphed=True)
        self._clock, self._name, self._us = clock, name, us

    def samples(self, count: int) -> list[float]:
        self._clock.sampled[self._name] += count
        self._clock.turns.append(self._name)
        return [self._us + 0.01 * i for i in range(count)]


def session(
    *libraries: FakeLibrary, limit: float | None = None, now: Callable[[], float] | None = None
) -> Session:
    deadline = Deadline(limit, now) if now else Deadline(limit)
    return Session(GPU, FakeClock(*libraries), Inputs(CPU, GPU.l2_bytes), deadline)


class Ticks:
    """A clock of seconds that advances by one each time it is read."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def times_of(rows: Sequence[dict[str, str]], **columns: object) -> list[float]:
    """Return the p50 times of the rows that have these values in ``columns``."""
    return [
        float(row["p50_us"])
        for row in rows
        if all(row[name] == str(value) for name, value in columns.items())
    ]


class FakeGauge:
    """A gauge whose launches have the times of `FakeClock` and draw 100 W; it records whose turn it was."""

    def __init__(self, *libraries: FakeLibrary) -> None:
        self._clock = FakeClock(*libraries)
        self.turns: list[Replay] = []

    def prepare(self, launch: Launch, copies: int) -> Replay:
        return self._clock.prepare(launch, copies, 1.0, 1.0)

    def window(self, replay: Replay, seconds: float) -> Window:
        self.turns.append(replay)
        return Window(replay.samples(3), 100.0)
