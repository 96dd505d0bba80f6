"""vLLM's own kernels, the baseline of all comparisons; vLLM itself is not imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from slidesparse import ops
from slidesparse.errors import EnvironmentFault
from slidesparse.gemm.cuda import CudaBackend
from slidesparse.gemm.problem import DTYPES, Problem
from slidesparse.gemm.problem import Layer as Called
from slidesparse.pattern import Pattern, SlidePattern
from slidesparse.tune.block import EPS, FLOAT, NORM, SILU, prologues
from slidesparse.tune.inputs import Inputs, Operands, clones
from slidesparse.tune.measure import Launch
from slidesparse.tune.shapes import Layer

NEEDED = (
    "cutlass_scaled_mm",
    "dynamic_scaled_int8_quant",
    "fused_add_rms_norm",
    "silu_and_mul",
)
LIBRARIES = "_C*.so"  # in vLLM's folder: _C.abi3.so, from 0.2x on _C_stable_libtorch.abi3.so as well


class Stock:
    """The kernels, with the interface of benchmarks."""

    def gemm(self, operands: Operands) -> Launch:
        """Launch out = (activations @ weight.T) * scale_x * scale_w, scales in the epilogue; weights dense [n, k].

        The operands have both scales.
        """
        assert operands.scale_x is not None
        assert operands.scale_w is not None
        scale_x, scale_w = operands.scale_x.view(-1, 1), operands.scale_w.view(-1, 1)
        columns = [weight.t() for weight in operands.weights]
        multiply = torch.ops._C.cutlass_scaled_mm
        return lambda i: multiply(
            operands.outs[i], operands.activations[i], columns[i], scale_x, scale_w, None
        )

    def linear(self, x: Tensor, weight: Tensor, scale_w: Tensor) -> Tensor:
        """Run a whole INT8 layer as vLLM does: x [M, K] bfloat16, weight [N, K] -> [M, N] bfloat16."""
        q, out = torch.empty_like(x, dtype=weight.dtype), x.new_empty(x.shape[0], weight.shape[0])
        scale_x = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
        torch.ops._C.dynamic_scaled_int8_quant(q, x, scale_x, None)
        torch.ops._C.cutlass_scaled_mm(out, q, weight.t(), scale_x, scale_w, None)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
        """Add x [M, K] to the residual in place, and return RMSNorm of the sum, in the memory of x."""
        torch.ops._C.fused_add_rms_norm(x, residual, norm, EPS)
        return x

    def silu_mul(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up [M, K] of x [M, 2 K], which holds gate before up."""
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        torch.ops._C.silu_and_mul(out, x)
        return out


_Linear = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [M, K], weight, scale_w [N, 1] -> [M, N]


@dataclass(frozen=True)
class _Step:
    layer: Layer
    weights: list[Tensor]  # a copy for each copy of the block
    scale_w: Tensor  # [n, 1] float32
    norm: Tensor  # [k]
    prologue: str
    linear: _Linear


class StockBlock:
    """The block of `slidesparse.tune.block.Block` by vLLM's kernels, or with a backend's in the place of its layers.

    Args:
        library, problems, pattern: of a backend that does not fuse, as `Block` takes them; None: vLLM's INT8 layers.
    """

    def __init__(
        self,
        stock: Stock,
        layers: Sequence[Layer],
        dtype: str,
        inputs: Inputs,
        library: CudaBackend | None = None,
        problems: Sequence[Problem] = (),
        pattern: Pattern | None = None,
    ) -> None:
        self._stock, self._inputs = stock, inputs
        self.copies = inputs.copies_exceeding_l2(sum(layer.n * layer.k for layer in layers))
        slid = pattern if isinstance(pattern, SlidePattern) else None
        self._steps = []
        for i, (layer, prologue) in enumerate(zip(layers, prologues(layers), strict=True)):
            linear: _Linear = stock.linear
            if library is None:
                weights = clones(inputs.weight(dtype, layer.n, layer.k, sparse=False), self.copies)
            else:
                weights = inputs.packed(library, problems[i], self.copies)
                called = library.layer(layer.n, layer.k, slid, 0, DTYPES[dtype])
                linear = partial(_linear_by, called, library.name)
            scale_w, norm = inputs.scale(layer.n).view(-1, 1), inputs.floats((layer.k,), FLOAT)
            self._steps.append(_Step(layer, weights, scale_w, norm, prologue, linear))

    def launch(self, m: int) -> Launch:
        """Return what runs copy i of the block on m tokens."""
        stock, steps = self._stock, self._steps
        first = self._inputs.floats((m, steps[-1].layer.n), FLOAT)
        residual = self._inputs.floats((m, steps[0].layer.k), FLOAT)
        floats = {k: self._inputs.floats((m, k), FLOAT) for k in {step.layer.k for step in steps}}

        def run(i: int) -> object:
            y = first
            for step in steps:
                weight = step.weights[i], step.scale_w
                if step.prologue == NORM:
                    y = step.linear(stock.add_rms_norm(y, residual, step.norm), *weight)
                elif step.prologue == SILU:
                    y = step.linear(stock.silu_mul(y), *weight)
                else:
                    y = step.linear(floats[step.layer.k].clone(), *weight)
            return y

        return run


def _linear_by(called: Called, name: str, x: Tensor, weight: Tensor, scale_w: Tensor) -> Tensor:
    return ops.linear(x, weight, scale_w, None, called, name)


def find() -> Stock | None:
    """Load the installed vLLM's kernels; None if it is not installed.  Raises EnvironmentFault if it lacks them."""
    spec = importlib.util.find_spec("vllm")
    folders = (spec.submodule_search_locations if spec else None) or []
    libraries = [path for folder in folders for path in sorted(Path(folder).glob(LIBRARIES))]
    if not libraries:
        return None
    refusals = []
    for library in libraries:
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            refusals.append(f"; {library} cannot be loaded: {error}")
    missing = [name for name in NEEDED if not hasattr(torch.ops._C, name)]
    if missing:
        raise EnvironmentFault(
            f"vLLM's kernels {', '.join(missing)} are not in {', '.join(map(str, libraries))}{''.join(refusals)}; "
            "install a CUDA build of vLLM for this torch, or leave stock out of --provider"
        )
    return Stock()
