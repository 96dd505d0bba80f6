"""The Triton kernels against the reference, bit for bit: in Triton's interpreter everywhere, and on the GPU.

Whether kernels are interpreted is decided when Triton is imported, so those cases run in a process of their own, this
file as a program: it prints one JSON line a case.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import interpreter
import pytest
import torch
from strategies import assert_same_bits
from token_rows import GEOMETRIES, INF, LARGE, NAN, SOURCES, assert_same_codes, rows
from torch import Tensor

from slidesparse import kernels, reference
from slidesparse.gemm.launches import launch_problem
from slidesparse.kernels import Config
from slidesparse.pattern import SlidePattern
from slidesparse.quantize import FP8, INT8
from slidesparse.tune.launches import candidates

ROOT = Path(__file__).parents[2]
SMALL = Config(16, 1, 1)  # several steps even for short rows


def check_quantization(
    pattern: str, k: int, phase: int, source: torch.dtype, dtype: torch.dtype, m: int, device: str
) -> None:
    """Compare contiguous rows in one block, and rows with a gap in several, with the reference on the CPU."""
    from slidesparse.kernels.quant_slide import quant_slide

    x = rows(m, k, source)
    layout = SlidePattern.parse(pattern).layout(k, phase)
    expected = reference.quant_slide(x, layout, dtype)
    wide = torch.full((m, k + 6), INF, dtype=source, device=device)
    wide[:, 2 : k + 2] = x.to(device)
    wide[:, :2] = NAN
    gapped = wide[:, 2 : k + 2]
    on_device = x.to(device)
    original = on_device.clone()
    launches = (None, SMALL) if k < 1000 else (None, Config(512, 1, 4), Config(8192, 1, 16))
    start = 7 if device == "cpu" else 0  # the interpreter is slow: only the special rows
    for launch, first, source_rows in zip(
        launches, (0, start, 0), (on_device, gapped, on_device), strict=False
    ):
        tokens, codes = source_rows[first:], (expected[0][first:], expected[1][first:])
        assert_same_codes(quant_slide(tokens, layout.length, phase, dtype, launch=launch), codes)
    assert_same_bits(on_device, original)


def check_launches(kind: str, source: torch.dtype, target: torch.dtype, device: str) -> None:
    """Check that every launch that tuning tries gives the bits of the reference."""
    from slidesparse.kernels.dequant_bias import dequant_bias
    from slidesparse.kernels.quant_slide import quant_slide

    m, k = 2, 1100
    layout = SlidePattern(8 if kind == "quant_slide" else 4).layout(k)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).mul(1000).to(source).to(device)
    scale_x, scale_w = torch.rand(m, 1, device=device), torch.rand(k, 1, device=device)
    tried = candidates(kind, launch_problem(source, target, layout.slided, k, m))
    assert len(tried) > 8
    for launch in tried:
        if kind == "dequant_bias":
            actual = dequant_bias(x, scale_x, scale_w, scale_w.view(-1), target, launch=launch)
            expected = reference.dequant_bias(x, scale_x, scale_w, scale_w.view(-1), target, "cuda")
            assert_same_bits(actual, expected)
        else:
            codes = quant_slide(x, layout.length, 0, target, launch=launch)
            assert_same_codes(codes, reference.quant_slide(x.cpu(), layout, target))


def neighbours(values: Tensor, reach: int) -> Tensor:
    """Return the float32 numbers up to ``reach`` ulps to either side."""
    steps = torch.arange(-reach, reach + 1, dtype=torch.int32)
    return (values.float().view(torch.int32)[..., None] + steps).view(torch.float32)


def positive_codes() -> Tensor:
    """Return all finite non-negative E4M3 numbers, ascending."""
    return torch.arange(127, dtype=torch.uint8).view(FP8).float()


def check_every_bfloat16(dtype: torch.dtype, device: str) -> None:
    """With a largest magnitude of 448 or 127 the scale is 1, so that the values of a row are its codes."""
    from slidesparse.kernels.quant_slide import quant_slide

    largest = 448.0 if dtype == FP8 else 127.0
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[~(every.abs() > largest)].reshape(1, -1)  # NaN is kept
    quantized = quant_slide(every.to(device), 4, 0, dtype)
    assert quantized[1].tolist() == [[1.0]]
    assert_same_codes(quantized, reference.quant_slide(every, SlidePattern(4).layout(every.shape[1]), dtype))


def check_ties(dtype: torch.dtype, device: str) -> None:
    """Check float32 numbers around every tie of the codes."""
    from slidesparse.kernels.quant_slide import quant_slide

    codes = positive_codes() if dtype == FP8 else torch.arange(128.0)
    around = neighbours(torch.cat([(codes[1:] + codes[:-1]) / 2, codes[1:-1]]), 2).flatten()
    x = torch.cat([codes[-1:], around, -around, torch.tensor([0.0, -0.0, 1e-40, -1e-40])]).reshape(1, -1)
    quantized = quant_slide(x.to(device), 4, 0, dtype)
    assert quantized[1].tolist() == [[1.0]]
    assert_same_codes(quantized, reference.quant_slide(x, SlidePattern(4).layout(x.shape[1]), dtype))


def check_fp8_quotients(device: str) -> None:
    """Check numbers next to scale * tie, where the quotient's last bit decides the code, for any size of scale."""
    from slidesparse.kernels.quant_slide import quant_slide

    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-17, 118, (24, 1), generator=generator)
    absmax = 448 * (1 + torch.rand(24, 1, generator=generator)) * 2.0**exponents
    codes = positive_codes()
    ties = (codes[1:] + codes[:-1]) / 2
    near = neighbours((absmax / 448) * ties, 3).flatten(1)
    x = torch.cat([absmax, near.minimum(absmax)], 1)
    expected = reference.quant_slide(x, SlidePattern(4).layout(x.shape[1]), FP8)
    assert_same_codes(quant_slide(x.to(device), 4, 0, FP8), expected)


def check_dequantization(source: torch.dtype, out_dtype: torch.dtype, m: int, n: int, device: str) -> None:
    """Compare with the reference on the device, with and without bias, for contiguous and strided accumulators."""
    from slidesparse.kernels.dequant_bias import dequant_bias

    generator = torch.Generator().manual_seed(n)
    acc = torch.randint(-(2**31), 2**31 - 1, (m, n + 3), generator=generator)
    acc[:, ::2] >>= 16
    acc = (acc.int() if source == torch.int32 else acc.float() / 7).to(source).to(device)
    scale_x = torch.rand(m, 1, generator=generator).to(device) / 1000
    scale_w = torch.rand(n, 1, generator=generator).to(device) / 1000
    scale_x[m // 2] = INF
    for sums in (acc[:, :n].contiguous(), acc[:, :n]):
        for bias in (None, torch.randn(n, generator=generator).to(out_dtype).to(device) * 1000):
            for launch in (None, Config(32, 2, 1)):
                actual = dequant_bias(sums, scale_x, scale_w, bias, out_dtype, launch)
                expected = reference.dequant_bias(sums, scale_x, scale_w, bias, out_dtype)
                assert torch.equal(actual.isnan(), expected.isnan())
                assert_same_bits(actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def check_rounding_of_results(out_dtype: torch.dtype, device: str) -> None:
    """Check ties, subnormals and overflow of the output's dtype; with scales of 1, accumulators are unchanged."""
    from slidesparse.kernels.dequant_bias import dequant_bias

    every = torch.arange(-(2**15), 2**15 - 1, dtype=torch.int32).to(torch.int16)
    values = every.view(torch.bfloat16 if out_dtype == torch.float32 else out_dtype).float()
    values = values[values.isfinite()].sort().values
    halves = (values[1:] + values[:-1]) / 2
    acc = torch.cat([neighbours(halves, 1).flatten(), values, torch.tensor([3.4e38, -3.4e38, 7e4, INF])])
    acc = acc[acc.isfinite() | acc.isinf()].reshape(1, -1).to(device)
    ones = torch.ones(acc.shape[1], 1, device=device)
    rounded = dequant_bias(acc, ones[:1], ones, None, out_dtype, Config(65536, 1, 32))
    assert_same_bits(rounded, acc.to(out_dtype))


def check_nothing(device: str) -> None:
    """Check shapes and scales of inputs without rows or columns."""
    from slidesparse.kernels.dequant_bias import dequant_bias
    from slidesparse.kernels.quant_slide import quant_slide

    for m, k in ((0, 64), (3, 0), (0, 0)):
        x = torch.ones(m, k, device=device)
        for dtype in (INT8, FP8):
            half = torch.ones(m, k + 8, dtype=torch.bfloat16, device=device)[:, :k]
            for source in (x, half):
                for length in (8, 4):
                    layout = SlidePattern(length).layout(k)
                    quantized = quant_slide(source, length, 0, dtype)
                    assert_same_codes(quantized, reference.quant_slide(x.cpu(), layout, dtype))
        y = dequant_bias(
            x, torch.ones(m, 1, device=device), torch.ones(k, 1, device=device), None, torch.float16
        )
        assert (y.shape, y.dtype) == ((m, k), torch.float16)


def check_refusals(device: str) -> None:
    """Check that the kernels refuse invalid arguments and name their values."""
    from slidesparse.kernels.dequant_bias import dequant_bias
    from slidesparse.kernels.quant_slide import quant_slide

    x = torch.ones(4, 8, device=device)
    ones = torch.ones(8, device=device)
    half = torch.bfloat16
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "x has dtype torch.float64", lambda: quant_slide(x.double(), 4, 0, INT8)),
        (TypeError, "cannot quantize to torch.uint8", lambda: quant_slide(x, 8, 0, torch.uint8)),
        (ValueError, "x has shape \\(8,\\)", lambda: quant_slide(ones, 4, 0, INT8)),
        (
            ValueError,
            "x has strides \\(1, 8\\)",
            lambda: quant_slide(ones.expand(8, 8).contiguous().t(), 8, 0, INT8),
        ),
        (ValueError, "block length 7 at phase 0", lambda: quant_slide(x, 7, 0, INT8)),
        (ValueError, "block length 8 at phase 8", lambda: quant_slide(x, 8, 8, INT8)),
        (TypeError, "acc has dtype torch.int64", lambda: dequant_bias(x.long(), ones[:4], ones, None, half)),
        (ValueError, "scale_w has shape \\(7,\\)", lambda: dequant_bias(x, ones[:4], ones[:7], None, half)),
        (ValueError, "bias has shape \\(4,\\)", lambda: dequant_bias(x, ones[:4], ones, ones[:4], half)),
        (TypeError, "the output cannot be torch.int8", lambda: dequant_bias(x, ones[:4], ones, None, INT8)),
    ]
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()


def cases(large: bool) -> Iterator[tuple[str, Callable[[str], None]]]:
    """Yield (name, check) pairs, where a check takes a device; ``large`` adds sizes for a GPU."""
    sizes = [(12, *geometry) for geometry in GEOMETRIES]
    if large:
        sizes += [(m, *geometry) for geometry in LARGE for m in (1, 300)]
    for dtype in (INT8, FP8):
        for m, pattern, k, phase in sizes:
            # interpretation and compilation are slow: every geometry in bfloat16, some in all dtypes
            all_dtypes = (pattern, k) in (("2:4", 33), ("4:6", 72), ("6:8", 18944))
            for source in SOURCES if all_dtypes else SOURCES[:1]:
                name = f"quantize {pattern} K={k} phase={phase} M={m} {source} {dtype}".replace("torch.", "")
                yield name, partial(check_quantization, pattern, k, phase, source, dtype, m)
        yield f"every bfloat16 {dtype}".replace("torch.", ""), partial(check_every_bfloat16, dtype)
        yield f"ties {dtype}".replace("torch.", ""), partial(check_ties, dtype)
    for kind in ("quant_only", "quant_slide"):
        for dtype in (INT8, FP8):
            name = f"launches of {kind} {dtype}".replace("torch.", "")
            yield name, partial(check_launches, kind, torch.bfloat16, dtype)
    for source in (torch.int32, torch.bfloat16):
        name = f"launches of dequant_bias {source}".replace("torch.", "")
        yield name, partial(check_launches, "dequant_bias", source, torch.bfloat16)
    yield "quotients", check_fp8_quotients
    shapes = [(5, 37)] + ([(1, 3584), (300, 18944), (4096, 37)] if large else [])
    for m, n in shapes:
        for source in (torch.int32, torch.float32, torch.bfloat16):
            for out_dtype in SOURCES:
                name = f"dequantize M={m} N={n} {source} {out_dtype}".replace("torch.", "")
                yield name, partial(check_dequantization, source, out_dtype, m, n)
    for out_dtype in SOURCES:
        yield f"round {out_dtype}".replace("torch.", ""), partial(check_rounding_of_results, out_dtype)
    yield "nothing", check_nothing
    yield "refusals", check_refusals


INTERPRETED = dict(cases(large=False))
ON_GPU = dict(cases(large=True))


@pytest.mark.parametrize("name", INTERPRETED)
def test_triton_kernels_interpreted(name: str) -> None:
    failure = interpreter.run(__file__)[name]
    assert failure is None, failure


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_triton_kernels_on_gpu(name: str) -> None:
    ON_GPU[name]("cuda")


@pytest.mark.gpu
@pytest.mark.slow
def test_dequant_beyond_2_31_elements() -> None:
    """Offsets need 64 bits: the last rows are beyond 2^31 elements."""
    from slidesparse.kernels.dequant_bias import dequant_bias
    from slidesparse.kernels.quant_slide import quant_slide

    m, n = 2**15 + 5, 2**16
    acc = torch.randint(-(2**20), 2**20, (m, n), dtype=torch.int32, device="cuda")
    scale_x, scale_w = torch.rand(m, 1, device="cuda"), torch.rand(n, 1, device="cuda")
    y = dequant_bias(acc, scale_x, scale_w, None, torch.bfloat16)
    for part in (slice(0, 64), slice(m - 64, m)):
        expected = reference.dequant_bias(acc[part], scale_x[part], scale_w, None, torch.bfloat16)
        assert_same_bits(y[part], expected)
    del acc, y
    x = torch.randn(m, n, dtype=torch.bfloat16, device="cuda")
    q, scale = quant_slide(x, 8, 0, INT8)
    for part in (slice(0, 16), slice(m - 16, m)):
        expected_codes = reference.quant_slide(x[part].cpu(), SlidePattern(8).layout(n), INT8)
        assert_same_codes((q[part], scale[part]), expected_codes)


@pytest.mark.parametrize("kind", kernels.KINDS)
def test_default_config_covers_any_size(kind: str) -> None:
    assert kernels.TABLE[kind][-1][:2] == (None, None)
    for size in (1, 1000, 3584, 18944, 10**6):
        for m in (1, 64, 65, 10**5):
            config = kernels.default_config(kind, size, m)
            for value in config:
                assert value > 0
                assert value & (value - 1) == 0
            assert kind == "dequant_bias" or config.rows == 1


def test_kernels_refuse_cpu_tensors() -> None:
    """Compiled kernels take only CUDA tensors, and the error names the alternative."""
    program = (
        "import torch\nfrom slidesparse.kernels.quant_slide import quant_slide\n"
        "try: quant_slide(torch.ones(2, 8), 4, 0, torch.int8)\nexcept ValueError as error: print(error)"
    )
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert process.stdout.startswith("x is on cpu; the kernel takes CUDA tensors"), process.stderr


if __name__ == "__main__":
    interpreter.report(INTERPRETED)
