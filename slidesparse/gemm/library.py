"""The base class of NVIDIA's GEMM libraries, cuBLASLt and cuSPARSELt: a GEMM followed by a kernel that scales."""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

import torch
from torch import Tensor

from slidesparse import profiling
from slidesparse.gemm import cuda, launches
from slidesparse.gemm.backend import Tunable
from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.problem import NAMES, LibraryError, Plan, Problem
from slidesparse.pattern import round_up


class LibraryBackend(CudaBackend):
    """A backend on a GEMM library: a plan for each bucket of tokens, and a kernel that scales.

    For BF16 layers the GEMM writes BF16 if the library supports it, and otherwise INT32 or float32 sums.  Stock vLLM
    rounds once, at the end; rounding the sum to BF16 as well adds half an ulp of error, but halves the bytes between
    GEMM and scaling.
    """

    def scaled_matmul(
        self,
        q: Tensor,
        scale_x: Tensor,
        packed: Tensor,
        scale_w: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """See `Backend.scaled_matmul`."""
        n = scale_w.shape[0]
        if q.shape[0] == 0:
            return q.new_empty(0, n, dtype=out_dtype)
        rounds = out_dtype == torch.bfloat16 and "bf16" in self.products[NAMES[q.dtype]]
        with profiling.stage("product", q):
            acc = self.accumulate(q, packed, n, out_dtype if rounds else cuda.ACCUMULATOR_DTYPES[q.dtype])
        with profiling.stage("scale", q):
            return launches.dequant_bias(acc, scale_x, scale_w, bias, out_dtype)

    def accumulate(
        self,
        q: Tensor,
        weight: Tensor,
        n: int,
        dtype: torch.dtype,
        scale_w: Tensor | None = None,
        scale_x: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return q [M, K'] @ weight.T, with scales and bias if the library applies them.

        The weight is from `pack`.  The result is [M, N] of ``dtype`` with strided rows; without scales INT32 and
        float32 hold full sums.  Raises LibraryError.
        """
        if q.shape[1] % self.alignment:
            q = cuda.pad(q, self.alignment)
        (m, k), columns, index = q.shape, round_up(n, self.alignment), q.get_device()
        if not self.is_packed_for(weight, columns, k, q.dtype):
            raise LibraryError(
                f"a weight of {weight.dtype} {tuple(weight.shape)} for products [{m}, {k}] @ [{n}, {k}].T of "
                f"{q.dtype}: pack the weight for the backend {self.name}, from as many columns"
            )
        rows = cuda.bucket(m)
        key = (q.dtype, dtype, columns, k, rows, scale_w is not None, bias is not None)
        with cuda.on_device(index):
            plan = cuda.plan_cache(self.name, index).get(key, self._plan, *key, q.device)
            profiling.chose(plan.algorithm)
            out = q.new_empty(rows, columns, dtype=dtype)
            q = q if rows == m and q.is_contiguous() else cuda.allocate_rows(q, rows)
            scale_x = None if scale_x is None else cuda.allocate_rows(scale_x, rows)
            plan.run(q, weight, out, scale_w, scale_x, bias)
        return out if rows == m and columns == n else out[:m, :n]

    @abstractmethod
    def is_packed_for(self, weight: Tensor, n: int, k: int, dtype: torch.dtype) -> bool:
        """Return whether a weight is packed for products of [m, k] and [n, k].T of ``dtype``."""

    def _plan(
        self,
        operand: torch.dtype,
        out: torch.dtype,
        n: int,
        k: int,
        m: int,
        scaled: bool,
        bias: bool,
        device: torch.device,
    ) -> Plan:
        problem = Problem(NAMES[operand], NAMES[out], n, k, m, "both" if scaled else "none", bias)
        return cuda.make_tuned_plan(cast("Tunable", self), problem, device)
