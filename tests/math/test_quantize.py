"""Row quantization against an independent numpy implementation of its formulas and vLLM's own kernels."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_same_bits, raw
from torch import Tensor

from slidesparse.quantize import FP8, INT8, LARGEST, dequantize_rows, is_finite, quantize_rows

ARITHMETICS = ("cuda", "cpu")
SOURCES = (torch.float32, torch.float16, torch.bfloat16)
MIN_FP8_SCALE = np.float32(1 / (448 * 512))

# Every non-negative E4M3 number, by its code 0..126: subnormals of 2^-9, then 1.mmm * 2^(e - 7).
E4M3 = np.array([(8 + m) * 2.0 ** (e - 10) if e else m * 2.0**-9 for e in range(16) for m in range(8)])[:127]


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Round float32 within +-448 to the nearest E4M3 codes, ties to the even code; NaN becomes 0x7f."""
    magnitude = np.abs(values.astype(np.float64))
    upper = np.clip(np.searchsorted(E4M3, magnitude), 1, 126)
    below, above = magnitude - E4M3[upper - 1], E4M3[upper] - magnitude
    to_lower = (below < above) | ((below == above) & (upper % 2 == 1))
    codes = np.where(to_lower, upper - 1, upper)
    codes = np.where(np.isnan(values), 0x7F, codes)
    return (codes | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def quantize_by_numpy(x: Tensor, dtype: torch.dtype, arithmetic: str) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales by the formulas of the module's table, row by row in numpy float32."""
    values = x.float().numpy()
    codes = np.zeros(values.shape, np.int8 if dtype == INT8 else np.uint8)
    scales = np.zeros((len(values), 1), np.float32)
    with np.errstate(all="ignore"):
        for m, row in enumerate(values):
            numbers = np.abs(row[~np.isnan(row)])
            absmax = numbers.max() if numbers.size else np.float32(0)
            if arithmetic == "cpu" and np.isnan(row).any():
                absmax = np.float32(np.nan)
            scale = absmax / np.float32(LARGEST[dtype])
            if dtype == INT8:
                inverse = (
                    np.float32(127) / absmax if arithmetic == "cuda" else np.float32(1 / np.float64(scale))
                )
                scaled = row * (inverse if absmax else np.float32(0))
                codes[m] = np.nan_to_num(np.clip(np.rint(scaled), -128, 127), nan=0).astype(np.int8)
            else:
                scale = np.maximum(scale, MIN_FP8_SCALE)
                scaled = row / scale if arithmetic == "cuda" else row * (np.float32(1) / scale)
                codes[m] = to_e4m3(np.clip(scaled, np.float32(-448), np.float32(448)))
            scales[m] = scale
    return codes, scales


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """[M, K] with rows of magnitudes from subnormal to huge, some zeros, ties, NaN or Inf."""
    source = draw(st.sampled_from(SOURCES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    m, k = draw(st.integers(0, 6)), draw(st.one_of(st.sampled_from([0, 1]), st.integers(1, 80)))
    x = torch.randn(m, k, generator=generator)
    if draw(st.booleans()):  # halves of integers, for exact ties
        x = torch.randint(-254, 255, (m, k), generator=generator) / 2
    x = x * 2.0 ** torch.randint(-135, 110, (m, 1), generator=generator)
    x = torch.where(torch.rand(m, k, generator=generator) < 0.1, torch.zeros(()), x).to(source)
    if draw(st.booleans()) and k:
        for special in draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf, -0.0]), max_size=3)):
            for row in range(0, m, 2):
                x[row, draw(st.integers(0, k - 1))] = special
    return x


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("dtype", [INT8, FP8])
@given(x=rows())
def test_quantize_rows_equals_numpy_formulas(x: Tensor, dtype: torch.dtype, arithmetic: str) -> None:
    original = x.clone()
    q, scale = quantize_rows(x, dtype, arithmetic)
    assert_same_bits(x, original)
    assert (q.dtype, q.shape) == (dtype, x.shape)
    assert (scale.dtype, scale.shape) == (torch.float32, (x.shape[0], 1))
    codes, scales = quantize_by_numpy(x, dtype, arithmetic)
    assert_same_bits(scale, torch.from_numpy(scales))
    actual, expected = raw(q), torch.from_numpy(codes.view(np.int8))
    if dtype == FP8:  # the sign of a NaN is arbitrary
        actual, expected = (torch.where((c & 0x7F) == 0x7F, 0x7F, c) for c in (actual, expected))
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_rows_with_inf_dequantize_to_nan(dtype: torch.dtype, arithmetic: str) -> None:
    x = torch.tensor([[torch.inf, 1.0, -1.0], [-torch.inf, torch.nan, 2.0], [1.0, 2.0, 3.0], [torch.nan] * 3])
    dequantized = dequantize_rows(*quantize_rows(x, dtype, arithmetic))
    of_nan = (dtype, arithmetic) != (INT8, "cuda")
    assert dequantized.isnan().all(-1).tolist() == [True, True, False, of_nan]


def test_fp8_codes_of_ties_depend_on_the_arithmetic() -> None:
    """Integers make x * 448 / absmax a tie, where x / scale and x * (1 / scale) round differently."""
    x = torch.arange(256.0).repeat(255, 1).minimum(torch.arange(1.0, 256)[:, None])
    codes = [raw(quantize_rows(x, FP8, arithmetic)[0]) for arithmetic in ARITHMETICS]
    assert 0 < int((codes[0] != codes[1]).sum()) < x.numel() // 100
    for actual, arithmetic in zip(codes, ARITHMETICS, strict=True):
        assert_same_bits(actual, torch.from_numpy(quantize_by_numpy(x, FP8, arithmetic)[0].view(np.int8)))


@pytest.mark.parametrize(
    ("dtype", "arithmetic"), [(torch.uint8, "cuda"), (torch.float8_e5m2, "cpu"), (INT8, "gpu")]
)
def test_quantize_rows_refuses_other_dtypes_and_arithmetics(dtype: torch.dtype, arithmetic: str) -> None:
    with pytest.raises(TypeError, match=f"{dtype} with '{arithmetic}'"):
        quantize_rows(torch.ones(1, 4), dtype, arithmetic)


def ordinary_rows(source: torch.dtype, columns: int) -> Tensor:
    """Return random rows of many magnitudes, none of them zero, subnormal or infinite."""
    generator = torch.Generator().manual_seed(columns)
    parts = [torch.randn(60, columns, generator=generator) * 2.0**e for e in (-30, -8, 0, 7, 20)]
    return torch.cat(parts).to(source)


@pytest.mark.vllm
@pytest.mark.parametrize("columns", [1, 3, 16, 17, 129, 1024])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_int8_codes_equal_vllms_cpu_kernel(source: torch.dtype, columns: int) -> None:
    ops = pytest.importorskip("vllm._custom_ops")
    if not hasattr(torch.ops._C, "dynamic_scaled_int8_quant") or not hasattr(ops, "onednn_scaled_int8_quant"):
        pytest.skip("this vLLM is not its CPU build")
    x = ordinary_rows(source, columns)
    vllm_codes, vllm_scale, _ = ops.onednn_scaled_int8_quant(x.contiguous(), None, None, True)
    q, scale = quantize_rows(x, INT8, "cpu")
    assert_same_bits(scale, vllm_scale)
    assert_same_bits(q, vllm_codes)
    # The kernel's result for a row with some NaN depends on their places
    _, scale, _ = ops.onednn_scaled_int8_quant(torch.full((1, 64), torch.nan))
    assert scale.isnan().all()


@pytest.mark.vllm
@pytest.mark.parametrize("columns", [1, 17, 1024])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_fp8_codes_equal_vllms_native_formula(source: torch.dtype, columns: int) -> None:
    module = pytest.importorskip("vllm.model_executor.layers.quantization.input_quant_fp8")
    per_token = module.GroupShape.PER_TOKEN
    layer = SimpleNamespace(is_group_quant=False, static=False, group_shape=per_token, num_token_padding=None)
    layer.use_per_token_if_dynamic = True
    x = torch.cat([ordinary_rows(source, columns), torch.zeros(1, columns, dtype=source)])
    vllm_codes, vllm_scale = module.QuantFP8.forward_native(layer, x)
    q, scale = quantize_rows(x, FP8, "cpu")
    assert_same_bits(scale, vllm_scale)
    assert_same_bits(q, vllm_codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8, torch.float8_e5m2])
@pytest.mark.parametrize("place", [0, 31, 32, 1000])
def test_values_that_are_not_finite_are_found_anywhere(dtype: torch.dtype, place: int) -> None:
    for value in (torch.nan, -torch.nan, *(() if dtype == FP8 else (torch.inf, -torch.inf))):
        x = torch.linspace(-3, 3, 1001).to(dtype)
        assert is_finite(x)
        x[place] = value
        assert not is_finite(x)
    assert is_finite(torch.ones(0, 4).to(dtype))


def test_codes_of_nan_are_found() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    assert [i for i, code in enumerate(codes) if not is_finite(code)] == [0x7F, 0xFF]
