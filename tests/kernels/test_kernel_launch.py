"""`slidesparse.kernels.launch`: a compiled kernel is reused only for arguments of the kinds it was compiled for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from slidesparse.kernels.launch import Launcher

GRID = (3, 1, 1)
CONSTANTS = {"K": 64, "BLOCK": 16}


class Compiled:
    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def __getitem__(self, grid: object) -> Any:
        return lambda *arguments: self._calls.append(("again", grid, arguments))


class Kernel:
    """A fake Triton kernel, which compiles at a launch and returns the compiled kernel."""

    def __init__(self, interpreted: bool = False) -> None:
        self.calls: list[Any] = []
        self._interpreted = interpreted

    def __getitem__(self, grid: object) -> Any:
        def run(*arguments: Any, **options: Any) -> Compiled | None:
            self.calls.append(("first", grid, arguments, options))
            return None if self._interpreted else Compiled(self.calls)

        return run


def flat(dtype: torch.dtype = torch.int8, offset: int = 0) -> torch.Tensor:
    """Return a tensor ``offset`` bytes after an address that is a multiple of 16."""
    memory = torch.zeros(96, dtype=torch.int8)
    start = -memory.data_ptr() % 16 + offset
    return memory[start : start + 64].view(dtype)


def test_second_launch_passes_all_arguments_in_order() -> None:
    kernel, x = Kernel(), flat()
    launch = Launcher(kernel)
    launch(GRID, (x, None), (32, 7), CONSTANTS, 4)
    launch((5, 1, 1), (x, None), (48, 9), CONSTANTS, 4)
    first, second = kernel.calls
    assert first == (
        "first",
        GRID,
        (x, None, 32, 7),
        {**CONSTANTS, "num_warps": 4, "enable_fp_fusion": False},
    )
    assert second == ("again", (5, 1, 1), (x, None, 48, 9, 64, 16))


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": (flat(dtype=torch.int16), None)},
        {"tensors": (flat(offset=8), None)},
        {"tensors": (flat(), flat())},
        {"numbers": (33, 7)},
        {"numbers": (32, 1)},
        {"numbers": (2**31, 7)},
        {"constants": {"K": 128, "BLOCK": 16}},
        {"warps": 8},
    ],
    ids=str,
)
def test_launcher_compiles_for_new_kinds_of_arguments(changes: dict[str, Any]) -> None:
    kernel = Kernel()
    launch = Launcher(kernel)
    usual: dict[str, Any] = {
        "tensors": (flat(), None),
        "numbers": (32, 7),
        "constants": CONSTANTS,
        "warps": 4,
    }
    for arguments in (usual, usual | changes, usual, usual | changes):
        launch(GRID, **arguments)
    assert [call[0] for call in kernel.calls] == ["first", "first", "again", "again"]


def test_launcher_caches_nothing_when_interpreted() -> None:
    kernel = Kernel(interpreted=True)
    launch = Launcher(kernel)
    for _ in range(2):
        launch(GRID, (flat(),), (1,), CONSTANTS, 1)
    assert [call[0] for call in kernel.calls] == ["first", "first"]


def test_launchers_pass_kernel_parameters_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled kernel takes parameters by position, with compile-time ones last."""
    pytest.importorskip("triton")
    from slidesparse.kernels import common, dequant_bias, quant_slide

    parameters: dict[str, list[Any]] = {}

    def note(name: str) -> Any:
        def launch(grid: Any, tensors: Any, numbers: Any, constants: dict[str, Any], warps: int) -> None:
            parameters[name] = [len(tensors) + len(numbers), list(constants)]

        return launch

    monkeypatch.setattr(common, "is_interpreted", lambda: True)
    for module in (quant_slide, dequant_bias):
        monkeypatch.setattr(module, "_launch", note(module.__name__.rpartition(".")[2]))
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    quant_slide.quant_slide(x, 8, 0, torch.int8)
    dequant_bias.dequant_bias(x, torch.ones(4), torch.ones(64), None, torch.bfloat16)
    kernels = {
        "quant_slide": quant_slide.quant_slide_kernel,
        "dequant_bias": dequant_bias.dequant_bias_kernel,
    }
    for name, kernel in kernels.items():
        names = list(inspect.signature(kernel.fn).parameters)
        ahead, constants = parameters[name]
        assert names[ahead:] == constants
        assert all(constant.isupper() for constant in constants)
