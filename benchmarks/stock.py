"""vLLM's own quantization and GEMM kernels, the baseline of all comparisons; vLLM itself is not imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from slidesparse.errors import EnvironmentFault
from slidesparse.tune.inputs import Operands
from slidesparse.tune.measure import Launch

NEEDED = ("cutlass_scaled_mm", "dynamic_scaled_int8_quant", "dynamic_per_token_scaled_fp8_quant")
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
        """Run a whole layer as vLLM does: x [M, K] bfloat16, weight [N, K] of int8 or fp8 -> [M, N] bfloat16."""
        q = torch.empty_like(x, dtype=weight.dtype)
        scale_x = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
        if weight.dtype == torch.int8:
            torch.ops._C.dynamic_scaled_int8_quant(q, x, scale_x, None)
        else:
            torch.ops._C.dynamic_per_token_scaled_fp8_quant(q, x, scale_x, None)
        out = x.new_empty(x.shape[0], weight.shape[0])
        torch.ops._C.cutlass_scaled_mm(out, q, weight.t(), scale_x, scale_w, None)
        return out


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
