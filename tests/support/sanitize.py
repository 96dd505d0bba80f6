"""Every Hopper kernel on small odd shapes, to be run under a tool that detects invalid accesses::

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/support/sanitize.py [WORD OF A CASE'S NAME ...]

Every tensor has its own memory, not a part of torch's pool, so that the tool knows where it ends.  Inputs lie between
NaN, Inf or large codes; outputs, where they can be passed in, lie between guards that must stay unchanged.  Results are
compared with the reference.  The exit code is 1 if one differs; the tool reports everything else.

Codes extend to the next bucket of tokens and are not written beyond the last token (`slidesparse.gemm.backend`): GEMMs
read them, and the results of these rows are never used.  The tool initcheck reports these reads and nothing else;
racecheck and synccheck are not affected.
"""

from __future__ import annotations

import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # before torch is imported
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from typing import cast

import torch
from gpu_layers import hopper_quantize, run_hopper
from torch import Tensor

from slidesparse import gemm, ops, reference
from slidesparse.blocks import BLOCK
from slidesparse.gemm.hopper import format as hopper_format
from slidesparse.gemm.hopper import native
from slidesparse.gemm.hopper.backend import Hopper, pack_by_kernel, plan_layer
from slidesparse.gemm.problem import ALL_2_4, BLOCKS, MIXED, Layer, Problem, Tensors
from slidesparse.kernels import RmsNorm, SiluMul
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8, quantize_rows
from slidesparse.slide import slide
from slidesparse.tune.inputs import with_sparse_blocks

GPU = torch.device("cuda", 0)
HOPPER = cast("Hopper", gemm.get("hopper"))
GUARD = 0x55  # bytes around outputs
MARGIN = 64  # columns or rows of poison, a multiple of every required alignment
TOKENS = (1, 5, 17)
GEOMETRIES = (("2:4", 37, 0), ("4:6", 75, 3), ("4:6", 1003, 0))  # those that the Hopper kernels lift
SOURCES, CODES = (torch.bfloat16, torch.float16), (INT8, FP8)

# Experts, top-k, hidden and intermediate sizes, tokens: odd ones, of Mixtral-8x7B, and of Qwen3-30B-A3B
EXPERTS = ((5, 2, 256, 192, 3), (7, 3, 200, 104, 40), (8, 2, 4096, 14336, 4), (128, 8, 2048, 768, 1024))
TILES = [f"stream:{s}x{t}/1/1" for t in (8, 16, 32, 64) for s in (1, 2, 3)]
TILES += ["stream:1x128/1/1", "stream:2x128/1/1", "stream:2x256/1/1"]

Case = tuple[str, Callable[[], bool]]


def normal(m: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)).to(dtype)


def tight(x: Tensor) -> Tensor:
    """Copy to the GPU without a margin: an access next to the tensor is out of bounds."""
    return x.contiguous().cuda()


def poisoned(x: Tensor) -> Tensor:
    """Copy to the GPU between columns that change results if they are read: NaN and Inf, or the largest codes."""
    value = torch.nan if x.dtype.is_floating_point and x.element_size() > 1 else 0x7F  # in FP8 a NaN
    bits = x.view(torch.int8) if x.element_size() == 1 else x
    wide = torch.full((x.shape[0], x.shape[1] + 2 * MARGIN), value, dtype=bits.dtype, device="cuda")
    wide[:, MARGIN : MARGIN + x.shape[1]] = bits.cuda()
    if x.element_size() > 1 and x.dtype.is_floating_point:
        wide[:, -MARGIN:] = torch.inf
    return wide[:, MARGIN : MARGIN + x.shape[1]].view(x.dtype)


class Guarded:
    """An output [rows, columns] between rows of guards that must not change."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, gap: int = 0) -> None:
        size = dtype.itemsize
        self._bytes = torch.full(
            (rows + 2 * MARGIN, (columns + gap) * size), GUARD, dtype=torch.uint8, device="cuda"
        )
        self.out = self._bytes[MARGIN : MARGIN + rows, : columns * size].view(dtype)

    def untouched(self) -> bool:
        """Whether all guards are unchanged; overwrites the output."""
        self.out.view(torch.uint8).fill_(GUARD)
        return bool((self._bytes == GUARD).all())


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[expected.element_size()]
    left, right = actual.cpu().contiguous(), expected.cpu().contiguous()
    return left.dtype == right.dtype and torch.equal(left.view(integers), right.view(integers))


def check_quantization(pattern: str, k: int, phase: int, source: torch.dtype, dtype: torch.dtype) -> bool:
    layer, passed = Layer.of(0, k, SlidePattern.parse(pattern), phase, dtype, HOPPER.alignment), True
    layout = layer.layout
    for m in TOKENS:
        x = normal(m, k, source)
        q, scale = reference.quant_slide(x, layout, dtype)
        for tokens in (tight(x), poisoned(x)):
            actual = hopper_quantize(tokens, layer)
            passed &= same(actual[0][:, : layout.slided], q) and same(actual[1], scale)
            passed &= not bool(actual[0][:, layout.slided :].view(INT8).any())
    return passed


def quantization() -> Iterator[Case]:
    for (pattern, k, phase), source, dtype in product(GEOMETRIES, SOURCES, CODES):
        case = f"hopper quantize {pattern} K={k} phase={phase} {source} {dtype}"
        yield case, partial(check_quantization, pattern, k, phase, source, dtype)


def check_packing(pattern: str, k: int, phase: int, dtype: torch.dtype) -> bool:
    """Sliding of weights with short and long blocks, and packing, by the Hopper kernels."""
    parsed, passed = SlidePattern.parse(pattern), True
    for n in TOKENS:
        w = prune(quantize_rows(normal(n, k), dtype)[0], parsed, phase=phase)
        w.view(INT8)[w == 0] = 0  # the kernels make +0.0 of -0.0
        coded = parsed.length in HOPPER.coded
        packed = (
            hopper_format.pack_coded(w.cpu(), parsed, phase)
            if coded
            else hopper_format.pack(slide(w, parsed, phase).cpu())
        )
        for weight in (tight(w), poisoned(w)):
            actual, broken_blocks = pack_by_kernel(weight, parsed, phase)
            passed &= same(actual, packed) and not broken_blocks
    return passed


def packing() -> Iterator[Case]:
    for pattern, k, phase in (*GEOMETRIES, ("6:8", 76, 3), ("8:10", 75, 0), ("8:10", 250, 9)):
        for dtype in CODES:
            case = f"hopper pack {pattern} K={k} phase={phase} {dtype}"
            yield case, partial(check_packing, pattern, k, phase, dtype)


def check_hopper_products(m: int, n: int, k: int, blocks: str) -> bool:
    """The Hopper kernels in every configuration, with operands without a margin and a guarded output.

    Products run alone, and as the second part of a layer.
    """
    floats = normal(n, k)
    w, scale_w = quantize_rows(prune(floats, SlidePattern(4)) if blocks == ALL_2_4 else floats, INT8)
    w = with_sparse_blocks(w, 0.5) if blocks == MIXED else w
    packed, x = HOPPER.operand(tight(w)), normal(m, k)
    q, scale_x = quantize_rows(x, INT8)
    sums = (q.double() @ w.double().t()).to(torch.int32)
    expected = reference.dequant_bias(sums, scale_x, scale_w, None, torch.bfloat16, "cuda")
    operands, tokens, layer = (tight(q), packed), poisoned(x), Layer.of(n, k, None, 0, INT8, k)
    scales, passed = (tight(scale_w), tight(scale_x)), True
    for config, _ in native.candidates(layer, m, 4096, blocks):
        plan = HOPPER.plan(Problem("int8", "bf16", n, k, m, "both", blocks=blocks), GPU, config)
        guarded = Guarded(m, n, torch.bfloat16)
        plan.run(Tensors(*operands, guarded.out, *scales))
        passed &= same(guarded.out, expected) and guarded.untouched()
        run_hopper(native.Plan(layer, config).handle, tokens, packed, scales[0], None, guarded.out)
        passed &= same(guarded.out, expected) and guarded.untouched()
    return passed


def hopper_products() -> Iterator[Case]:
    sizes = ((1, 8, 16), (5, 65, 144), (17, 136, 400), (100, 71, 1040), (300, 200, 272))
    for (m, n, k), blocks in product(sizes, BLOCKS):
        if blocks == MIXED and k <= BLOCK:
            continue  # a single block
        yield f"hopper {m} x {n} x {k}, blocks {blocks}", partial(check_hopper_products, m, n, k, blocks)


def check_hopper_producers(pattern: str, k: int, phase: int, source: torch.dtype) -> bool:
    """Hopper's norm of a sum, or SiLU, followed by quantization, with the geometries of `quantization`.

    A code may differ by one where the reference may round otherwise; the sum may not.  Margins of rows are not read.
    """
    windows = Layer.of(0, k, SlidePattern.parse(pattern), phase, INT8, HOPPER.alignment)
    layout, passed = windows.layout, True
    for m in TOKENS:
        x, residual, gate_up = normal(m, k, source), normal(m + 1, k, source)[1:], normal(m, 2 * k, source)
        gain = tight(normal(1, k, source)[0])
        normed, total = reference.rms_norm(x, gain.cpu(), 1e-6, residual)
        results = []
        for place in (tight, poisoned):
            guarded = Guarded(m, k, source)
            norm = RmsNorm(gain, 1e-6, place(residual), guarded.out)
            results.append(hopper_quantize(place(x), windows, norm))
            passed &= same(guarded.out, total) and guarded.untouched()
            results.append(hopper_quantize(place(gate_up), windows, SiluMul()))
        for tokens, actual in zip((normed, reference.silu_mul(gate_up)), results[2:], strict=True):
            q = reference.quant_slide(tokens, layout, INT8)[0]
            difference = (actual[0][:, : layout.slided].cpu().int() - q.int()).abs()
            # few lie next to a tie; one code of the smallest case, 33 columns, is 1.5%
            passed &= bool(difference.max() <= 1) and float((difference > 0).float().mean()) < 0.02
        passed &= all(same(a[0], b[0].cpu()) for a, b in zip(results[:2], results[2:], strict=True))
    return passed


def hopper_producers() -> Iterator[Case]:
    for pattern, k, phase in (*GEOMETRIES, ("4:6", 2048, 0)):
        for source in SOURCES:
            case = f"hopper producers {pattern} K={k} phase={phase} {source}"
            yield case, partial(check_hopper_producers, pattern, k, phase, source)


def check_experts(sizes: tuple[int, int, int, int, int], pattern: str | None, dtype: torch.dtype) -> bool:
    """Both products of a mixture by every tile, with tensors without a margin and a guarded output; and its sums."""
    count, top_k, hidden, intermediate, tokens = sizes
    native.library()  # installs the operators
    operators, uniform = getattr(torch.ops, ops.NAMESPACE), SlidePattern.parse(pattern) if pattern else None
    scores = torch.rand(tokens, count, generator=torch.Generator().manual_seed(tokens))
    ids = tight(scores.argsort(-1)[:, :top_k].int())
    order, rows, offsets = operators.route(ids, None, count)
    slots, routers, passed = ids.numel(), tight(scores[:, :top_k].reshape(-1)), True
    x = tight(normal(tokens, hidden, torch.bfloat16))
    for silu, (n, k) in enumerate(((2 * intermediate, hidden), (hidden, intermediate))):
        weight = normal(n, k) if uniform is None else prune(normal(n, k), uniform)
        codes, scale = quantize_rows(weight, dtype)
        packed = HOPPER.pack_experts(tight(codes)[None], uniform).repeat(count, 1)
        scale_w = tight(scale.view(1, n).repeat(count, 1))
        layer = Layer.of(n, k, uniform, 0, dtype, HOPPER.alignment, HOPPER.coded)
        weights = routers if silu else None
        y = operators.grouped_linear(
            *(x, order, 1 if silu else top_k, packed, scale_w, offsets, weights, bool(silu)),
            *([*layer], torch.bfloat16),
        )
        plan = plan_layer(layer, 0)
        for text in TILES:
            guarded = Guarded(slots, n, torch.bfloat16)
            size = native.library().slidesparse_hopper_scratch_bytes(plan, slots)
            scratch = torch.empty(size, dtype=torch.uint8, device="cuda")
            native.call(
                "grouped",
                *(plan, slots, x.data_ptr(), 1, x.stride(0), silu, order.data_ptr(), 0 if silu else top_k),
                *(routers.data_ptr() if silu else None, count, offsets.data_ptr(), packed.data_ptr()),
                *(packed.shape[1], scale_w.data_ptr(), guarded.out.data_ptr(), 1, text.encode()),
                *(scratch.data_ptr(), torch.cuda.current_stream().cuda_stream),
            )
            passed &= (dtype == FP8 or same(guarded.out, y.cpu())) and guarded.untouched()
        x = y
    return passed and operators.combine(x, rows, top_k).shape == (tokens, hidden)


def experts() -> Iterator[Case]:
    for sizes, pattern, dtype in product(EXPERTS, (None, "2:4", "6:8"), CODES):
        if dtype == INT8 or sizes == EXPERTS[0]:
            yield f"hopper experts {sizes} {pattern} {dtype}", partial(check_experts, sizes, pattern, dtype)


def main() -> int:
    """Run all selected cases, and return 1 if a result is wrong."""
    kinds = quantization(), packing(), hopper_producers(), hopper_products(), experts()
    wrong, words = 0, sys.argv[1:]  # a case runs if its name contains one of them, or if there are none
    for name, run in chain(*kinds):
        if words and not any(word in name for word in words):
            continue
        passed = run()
        torch.cuda.synchronize()
        wrong += not passed
        print("right" if passed else "WRONG", name.replace("torch.", ""), flush=True)
    print(f"{wrong} results are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
