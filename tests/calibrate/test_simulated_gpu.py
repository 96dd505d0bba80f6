"""Calibration on a GPU simulated on the CPU: no operation mixes tensors of the GPU and of the CPU.

A tensor on the simulated GPU is a tensor on the CPU with a mark.  Within `simulated_gpu`, ``device`` reads the mark,
moves between devices set or clear it, and operations on marked and unmarked tensors raise the error that they would
raise on a GPU.  Threads are simulated if they are those of a ThreadPoolExecutor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from calibration import calibrated, save, write_ids
from torch import Tensor
from torch.overrides import TorchFunctionMode

from slidesparse.calibrate import graphs
from slidesparse.checkpoint.inspection import inspect
from slidesparse.convert.budget import Budget
from slidesparse.kernels import quant_slide
from slidesparse.pattern import HARDWARE_LENGTH, SlideLayout
from slidesparse.quantize import quantize_rows

GPU = torch.device("cuda", 0)
MARK = "_on_simulated_gpu"
# Operations that accept tensors of two devices on a real GPU, too
ACROSS_DEVICES = {"copy_", "to", "cpu", "type_as", "__getitem__", "__setitem__", "__set__", "backward"}
ADAM = torch.optim.Adam
SUBMIT, NEW_PARAMETER = ThreadPoolExecutor.submit, torch.nn.Parameter.__new__
CUDA_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "is_bf16_supported": lambda: True,
    "current_device": lambda: 0,
    "get_device_name": lambda *_: "simulated",
    "get_device_capability": lambda *_: (7, 0),
    "mem_get_info": lambda *_: (8 << 30, 16 << 30),
    "memory_reserved": lambda *_: 0,
    "memory_allocated": lambda *_: 0,
    "empty_cache": lambda: None,
    "synchronize": lambda *_: None,
}


@contextmanager
def simulated_gpu() -> Iterator[None]:
    """Simulate a GPU; torch.compile compiles nothing."""
    with ExitStack() as stack:
        for name, function in CUDA_FUNCTIONS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(mock.patch.object(torch, "compile", lambda function, **_: function))
        # no CUDA graphs, nor an optimizer that could be recorded
        stack.enter_context(mock.patch.object(graphs, "can_record", return_value=False))
        stack.enter_context(mock.patch.object(torch.optim, "Adam", _adam))
        stack.enter_context(mock.patch.object(quant_slide, "quant_slide", _quant_slide))
        for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):
            stack.enter_context(mock.patch.object(torch, name, partial(_for_cpu, getattr(torch, name))))
        stack.enter_context(mock.patch.object(ThreadPoolExecutor, "submit", _submit))
        stack.enter_context(mock.patch.object(torch.nn.Parameter, "__new__", _new_parameter))
        stack.enter_context(_Placement())
        yield


def _adam(*arguments: Any, capturable: bool = False, **options: Any) -> torch.optim.Optimizer:
    return ADAM(*arguments, **options)


def _quant_slide(x: Tensor, layout: SlideLayout, dtype: torch.dtype, _: int) -> tuple[Tensor, Tensor]:
    assert layout.length == HARDWARE_LENGTH
    return quantize_rows(x, dtype)


def _for_cpu(function: Callable[..., Any], _: str, *args: Any, **kwargs: Any) -> Any:
    return function("cpu", *args, **kwargs)


def _new_parameter(kind: Any, data: Any = None, requires_grad: bool = True) -> Any:
    parameter = NEW_PARAMETER(kind, data, requires_grad)
    if data is not None and on_gpu(data):
        setattr(parameter, MARK, True)
    return parameter


def on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is marked as being on the simulated GPU."""
    return bool(tensor.__dict__.get(MARK))


class _Placement(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.device:
            return function(*args, **kwargs)
        name, attribute = function.__name__, getattr(function, "__self__", None)
        if attribute is Tensor.device:
            return GPU if on_gpu(args[0]) else torch.device("cpu")
        if attribute is Tensor.is_cuda:
            return on_gpu(args[0])
        if name in ("numpy", "__array__") and on_gpu(args[0]):
            raise TypeError("cannot convert a tensor on cuda:0 to NumPy; call .cpu() first")
        # Whether the result is on the GPU; None: as the operands
        destination = False if name == "cpu" else None
        replaced = []
        for value in args:
            if _is_device(value):
                destination, value = _is_gpu(value), "cpu"
            replaced.append(value)
        if _is_device(kwargs.get("device")):
            destination, kwargs["device"] = _is_gpu(kwargs["device"]), "cpu"
        # __deepcopy__ also takes all that was copied before
        operands = list(_tensors([args[:1] if name == "__deepcopy__" else args, kwargs]))
        if name not in ACROSS_DEVICES and len({on_gpu(tensor) for tensor in operands if tensor.dim()}) > 1:
            raise RuntimeError(f"{name}: expected all tensors on the same device, but found cuda:0 and cpu")
        result = function(*replaced, **kwargs)
        if name in ("copy_", "__setitem__"):
            return result
        marked = any(map(on_gpu, operands)) if destination is None else destination
        if destination is not None and isinstance(result, Tensor) and on_gpu(result) != destination:
            result = torch.ops.aten.alias(result)  # the operand itself, if its dtype does not change
        for tensor in _tensors(result):
            if on_gpu(tensor) != marked:
                setattr(tensor, MARK, marked)
        return result


def _submit(pool: ThreadPoolExecutor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def run() -> Any:
        with _Placement():
            return function(*args, **kwargs)

    return SUBMIT(pool, run)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _is_device(value: Any) -> bool:
    named = isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda")
    return named or isinstance(value, torch.device)


def _is_gpu(device: Any) -> bool:
    return torch.device(device).type == "cuda"


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama biased", {}),
    ("llama biased", {"pattern": "4:6", "quant": "fp8", "epochs": 0, "layer": ["o_proj=dense"]}),
    ("llama biased", {"budget": Budget(0.5, tokens=(16,))}),
    ("llama biased", {"distill": True, "minutes": 0.01}),
    ("qwen3_5_text", {}),
    ("granitemoehybrid", {}),
    ("bert", {}),
]


def test_operations_on_two_devices_fail() -> None:
    with simulated_gpu():
        x, y = torch.ones(3, device="cuda"), torch.ones(3)
        assert (x.device.type, y.device.type, (x + x).device.type) == ("cuda", "cpu", "cuda")
        assert (y.to("cuda") * x).cpu().device.type == "cpu"
        assert y.device.type == "cpu"
        for operation in (lambda: x * y, lambda: torch.cat((x, y)), lambda: y.add_(x)):
            with pytest.raises(RuntimeError, match="expected all tensors on the same device"):
                operation()
        with pytest.raises(TypeError, match="NumPy"):
            x.numpy()


@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_calibration_keeps_devices_apart(tmp_path: Path, name: str, case: dict[str, Any]) -> None:
    save(name, tmp_path / "source")
    options = {"rotate": "auto", "epochs": 1, **case}
    if options.pop("distill", False):
        np.save(tmp_path / "text.npy", np.random.default_rng(1).integers(0, 100, (40, 24)))
        options["distill"] = (str(tmp_path / "text.npy"),)
    with simulated_gpu():
        ids = write_ids(tmp_path / "ids.npy", 24)
        report = calibrated(tmp_path / "source", tmp_path / "out", ids, device="cuda", **options)
    assert inspect(tmp_path / "out").violations == 0
    assert report.layers
    assert all(0 < row["error_quantized"] < 0.9 for row in report.layers)  # 1 if all weights were zero
