"""A fake GEMM library and clock for machines without a GPU: exact products, and times from a table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slidesparse.gemm.problem import ALL_2_4, DTYPES, TWO_FOUR, Layer, LibraryError, Problem, Tensors
from slidesparse.slide import obeys
from slidesparse.tune.inputs import Inputs
from slidesparse.tune.machine import Gpu
from slidesparse.tune.measure import Launch, Replay
from slidesparse.tune.session import Session

CPU = torch.device("cpu")
GPU = Gpu(CPU, "NVIDIA Test 100", (9, 0), l2_bytes=1 << 10)
TIMES = {"slow": 30.0, "good": 10.0, "middle": 20.0, "slowest": 25.0}


@dataclass
class FakePlan:
    library: FakeLibrary
    problem: Problem
    algorithm: str

    def __call__(self, tensors: Tensors) -> None:
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
    fuses: bool = False
    alignment: int = 32
    coded: bool = False
    times: dict[str, float] = field(default_factory=lambda: dict(TIMES))
    outs: tuple[str, ...] = ("bf16", "int32")
    scale: str = "none"
    ran: list[str] = field(default_factory=list)
    searched: list[Problem] = field(default_factory=list)
    packed: list[tuple[int, ...]] = field(default_factory=list)
    served: dict[Layer, str] = field(default_factory=dict)  # the algorithms of layers that operators run
    block_us: Callable[[list[str]], float] | None = None  # what a block takes with them

    @property
    def takes_dense(self) -> bool:
        """Whether it serves weights without a pattern, as the dense library does."""
        return not self.sparse

    def version(self) -> str:
        return "1.2.3"

    @property
    def products(self) -> dict[str, tuple[str, ...]]:
        return {"int8": self.outs, "fp8": ("bf16", "fp32") if "fp32" in self.outs else ("bf16",)}

    def epilogue(self, dtype: str, out: str) -> str:
        return "none" if out == "int32" else self.scale

    def operand(self, weight: Tensor, blocks: str = ALL_2_4) -> Tensor:
        assert not self.sparse or obeys(weight, TWO_FOUR)
        self.packed.append(tuple(weight.shape))
        return weight

    def layer(self, *layer: Any) -> Layer:
        return Layer.of(*layer, self.alignment)

    def layer_plan(self, layer: Layer, algorithm: str) -> tuple[Layer, str]:
        if algorithm.startswith("refused"):
            raise LibraryError(f"{algorithm} is refused")
        return layer, algorithm

    def serve(self, plan: tuple[Layer, str]) -> None:
        self.served[plan[0]] = plan[1]

    def forget(self) -> None:
        self.served.clear()

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
    """A clock that runs launches and reads their times from the table of the library."""

    def __init__(self, library: FakeLibrary, host_us: dict[str, float] | None = None) -> None:
        self._library = library
        self._host_us = host_us or {}  # what launching an algorithm takes

    def _run(self, launch: Launch) -> float:
        self._library.ran.clear()
        launch(0)
        if self._library.block_us:
            return self._library.block_us(list(self._library.served.values()))
        return self._library.times[self._library.ran[0]]

    def time_once(self, launch: Launch) -> float:
        us = self._run(launch)
        return us + self._host_us.get(self._library.ran[0] if self._library.ran else "", 4.0)

    def prepare(self, launch: Launch, copies: int, about_us: float, target_us: float) -> Replay:
        us = self._run(launch)
        for i in range(copies):
            launch(i)
        return _FakeReplay(us)


class _FakeReplay(Replay):
    def __init__(self, us: float) -> None:
        super().__init__(lambda: None, launches=1, graphed=True)
        self._us = us

    def samples(self, count: int) -> list[float]:
        return [self._us + 0.01 * i for i in range(count)]


def session(library: FakeLibrary, deadline: float = math.inf) -> Session:
    return Session(GPU, FakeClock(library), Inputs(CPU, GPU.l2_bytes), deadline)
