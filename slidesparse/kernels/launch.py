"""Launch Triton kernels repeatedly without Triton's overhead per launch.

Triton's ``kernel[grid](...)`` inspects every argument and reads settings from the environment at each launch, and
outside CUDA graphs a model's step has hundreds of launches.  The compiled kernel that it returns can be launched
directly (``compiled[grid](...)``, in Triton 3.3 to 3.9), if the arguments have the same specialization.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

SPECIALIZED_ALIGNMENT = 16  # Triton specializes kernels for addresses and integers that are multiples of this


class Launcher:
    """A kernel with its compiled specializations.  Not for autotuned kernels."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor | None],
        numbers: Sequence[int],
        constants: dict[str, Any],
        warps: int,
    ) -> None:
        """Launch on the current stream of the current device.

        ``tensors``, ``numbers`` and ``constants`` are the kernel's parameters in order; ``constants`` are the
        compile-time ones by name.
        """
        key = (
            *(
                None if tensor is None else (tensor.dtype, tensor.data_ptr() % SPECIALIZED_ALIGNMENT == 0)
                for tensor in tensors
            ),
            *((number == 1, number % SPECIALIZED_ALIGNMENT == 0, number < 2**31) for number in numbers),
            *constants.values(),
            warps,
            torch.cuda.current_device() if tensors[0] is not None and tensors[0].is_cuda else None,
        )
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *numbers, *constants.values())
            return
        compiled = self._kernel[grid](
            *tensors, *numbers, **constants, num_warps=warps, enable_fp_fusion=False
        )
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled[key] = compiled
