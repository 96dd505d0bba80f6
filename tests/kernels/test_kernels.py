"""The Triton kernels against the reference: bit for bit on a GPU, and once each in Triton's interpreter on a CPU.

The interpreter is chosen when Triton is imported, so that check is this file as a program of its own.  There a fused
multiply-add may round twice, and bfloat16 rounds ties up.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from strategies import assert_same_bits
from token_rows import GEOMETRIES, INF, LARGE, NAN, SOURCES, assert_same_codes, rows
from torch import Tensor

from slidesparse import reference
from slidesparse.gemm.problem import TWO_FOUR
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import FP8, INT8

ROOT = Path(__file__).parents[2]
CODES = (INT8, FP8)


def quantize(x: Tensor, pattern: SlidePattern, dtype: torch.dtype, phase: int = 0) -> tuple[Tensor, Tensor]:
    from slidesparse.kernels.quant_slide import quant_slide

    layout = pattern.layout(x.shape[1], phase)
    q, scale = quant_slide(x, layout, dtype, layout.slided + 12)
    assert not q[:, layout.slided :].view(torch.int8).any()
    return q[:, : layout.slided], scale


def scale(sums: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
    from slidesparse.kernels.dequant_bias import dequant_bias

    y = torch.empty(sums.shape, dtype=out, device=sums.device)
    dequant_bias(sums, scale_x, scale_w, bias, y)
    return y


def check_in_the_interpreter() -> None:
    """Quantize and lift rows of every size, and scale sums, by each kernel once."""
    for pattern, dtype in product((TWO_FOUR, SlidePattern(8)), CODES):
        x = rows(12, 80, torch.float32)
        assert_same_codes(quantize(x, pattern, dtype), reference.quant_slide(x, pattern.layout(80), dtype))
    sums = torch.randint(-(2**20), 2**20, (5, 40), dtype=torch.int32)[:, :37]
    factors = torch.rand(5, 1), torch.rand(37, 1) / 100, torch.randn(37)
    for bias in (None, factors[2]):
        expected = reference.dequant_bias(sums, *factors[:2], bias, torch.float32)
        actual = scale(sums, *factors[:2], bias, torch.float32)
        # one more rounding, of the product, which is at most |y| + |bias|
        bound = 2.0**-23 * (expected.abs() + (0 if bias is None else bias.abs()))
        assert bool(((actual - expected).abs() <= bound).all())


def test_triton_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", __file__]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert process.returncode == 0, process.stderr[-3000:]


def neighbours(values: Tensor, reach: int) -> Tensor:
    """Return the float32 numbers up to ``reach`` ulps to either side."""
    steps = torch.arange(-reach, reach + 1, dtype=torch.int32)
    return (values.float().view(torch.int32)[..., None] + steps).view(torch.float32)


def positive_codes(dtype: torch.dtype) -> Tensor:
    """Return all finite non-negative codes, ascending."""
    return torch.arange(127, dtype=torch.uint8).view(FP8).float() if dtype == FP8 else torch.arange(128.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("source", SOURCES)
def test_codes_equal_the_reference(source: torch.dtype, dtype: torch.dtype) -> None:
    """Rows have ties, zeros, -0.0, NaN, Inf and subnormals, and gaps between them."""
    for pattern, k, phase in (*GEOMETRIES, *LARGE):
        parsed = SlidePattern.parse(pattern)
        for m in (1, 12, 300 if k > 1000 else 12):
            x = rows(m, k, source)
            wide = torch.full((m, k + 6), NAN, dtype=source, device="cuda")
            wide[:, 2 : k + 2] = x.cuda()
            expected = reference.quant_slide(x, parsed.layout(k, phase), dtype)
            for tokens in (x.cuda(), wide[:, 2 : k + 2]):
                assert_same_codes(quantize(tokens, parsed, dtype, phase), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CODES)
def test_codes_of_ties_and_of_every_bfloat16(dtype: torch.dtype) -> None:
    """With a largest magnitude of 448 or 127 the scale is 1, so that the values of a row are its codes."""
    codes = positive_codes(dtype)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[~(every.abs() > codes[-1])]  # NaN is kept
    around = neighbours(torch.cat([(codes[1:] + codes[:-1]) / 2, codes[1:-1]]), 2).flatten()
    ties = torch.cat([codes[-1:], around, -around, torch.tensor([0.0, -0.0, 1e-40, -1e-40])])
    for x in (every.reshape(1, -1), ties.reshape(1, -1)):
        quantized = quantize(x.cuda(), TWO_FOUR, dtype)
        assert quantized[1].tolist() == [[1.0]]
        assert_same_codes(quantized, reference.quant_slide(x, TWO_FOUR.layout(x.shape[1]), dtype))
    # numbers next to scale * tie, where the quotient's last bit decides the code, for any size of scale
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-17, 118, (24, 1), generator=generator)
    largest = codes[-1] * (1 + torch.rand(24, 1, generator=generator)) * 2.0**exponents
    near = neighbours((largest / codes[-1]) * (codes[1:] + codes[:-1]) / 2, 3).flatten(1)
    x = torch.cat([largest, near.minimum(largest)], 1)
    expected = reference.quant_slide(x, TWO_FOUR.layout(x.shape[1]), dtype)
    assert_same_codes(quantize(x.cuda(), TWO_FOUR, dtype), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("out", SOURCES)
@pytest.mark.parametrize("source", [torch.int32, torch.float32, torch.bfloat16])
def test_scaled_sums_equal_the_reference(source: torch.dtype, out: torch.dtype) -> None:
    """Sums are contiguous or strided, with and without bias; one scale is infinite."""
    for m, n in ((5, 37), (1, 3584), (300, 18944), (4096, 37)):
        generator = torch.Generator().manual_seed(n)
        acc = torch.randint(-(2**31), 2**31 - 1, (m, n + 3), generator=generator)
        acc[:, ::2] >>= 16
        acc = (acc.int() if source == torch.int32 else acc.float() / 7).to(source).cuda()
        scale_x = torch.rand(m, 1, generator=generator).cuda() / 1000
        scale_w = torch.rand(n, 1, generator=generator).cuda() / 1000
        scale_x[m // 2] = INF
        bias = torch.randn(n, generator=generator).to(out).cuda() * 1000
        for sums, offset in product((acc[:, :n].contiguous(), acc[:, :n]), (None, bias)):
            actual = scale(sums, scale_x, scale_w, offset, out)
            expected = reference.dequant_bias(sums, scale_x, scale_w, offset, out)
            assert torch.equal(actual.isnan(), expected.isnan())
            assert_same_bits(actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.gpu
@pytest.mark.slow
def test_offsets_beyond_2_31_elements() -> None:
    m, n = 2**15 + 5, 2**16
    acc = torch.randint(-(2**20), 2**20, (m, n), dtype=torch.int32, device="cuda")
    scale_x, scale_w = torch.rand(m, 1, device="cuda"), torch.rand(n, 1, device="cuda")
    y = scale(acc, scale_x, scale_w, None, torch.bfloat16)
    for part in (slice(0, 64), slice(m - 64, m)):
        expected = reference.dequant_bias(acc[part], scale_x[part], scale_w, None, torch.bfloat16)
        assert_same_bits(y[part], expected)
    del acc, y
    x = torch.randn(m, n, dtype=torch.bfloat16, device="cuda")
    q, row_scale = quantize(x, SlidePattern(8), INT8)
    for part in (slice(0, 16), slice(m - 16, m)):
        expected_codes = reference.quant_slide(x[part].cpu(), SlidePattern(8).layout(n), INT8)
        assert_same_codes((q[part], row_scale[part]), expected_codes)


@pytest.mark.parametrize("target", [80, 89, 90, 100, 120])
def test_kernels_compile_for_every_gpu(target: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Launches only compile, for GPUs that are not here."""
    triton = pytest.importorskip("triton")
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    ptxas = getattr(knobs.nvidia, "ptxas" if target < 100 else "ptxas_blackwell", None) or knobs.nvidia.ptxas
    if not Path(ptxas.path).is_file():
        pytest.skip(f"{ptxas.path} is missing")
    kernels: list[Any] = []
    run: Callable[..., Any] = triton.runtime.JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append(run(kernel, *arguments, grid=grid, warmup=True, **options))

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", target, 32),
        get_current_device=lambda: str(tmp_path),  # ignores kernels compiled for other targets
        get_current_stream=lambda _: 0,
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(triton.runtime.JITFunction, "run", compile_only)
    x, vector = torch.zeros(4, 2048, dtype=torch.bfloat16), torch.ones(2048)
    from slidesparse.kernels.quant_slide import quant_slide

    for dtype, pattern in product(CODES, (TWO_FOUR, SlidePattern(8))):
        quant_slide(x, pattern.layout(2048), dtype, 3072)
    scale(x.int(), vector[:4], vector, vector.bfloat16(), torch.bfloat16)
    scale(x.float(), vector[:4], vector, None, torch.float16)
    assert len(kernels) == 6
    for kernel in kernels:
        assert f".target sm_{target}" in kernel.asm["ptx"]
        assert kernel.asm["cubin"].startswith(b"\x7fELF")


if __name__ == "__main__":
    sys.path += [str(ROOT), str(ROOT / "tests" / "support")]
    check_in_the_interpreter()
