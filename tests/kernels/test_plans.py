"""NVIDIA's GEMM libraries without a GPU: buckets, plans, padding, and the calls of a library that notes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slidesparse import reference
from slidesparse.build.compile import compile_with
from slidesparse.gemm import cublaslt, cuda, cusparselt, library
from slidesparse.gemm.cublaslt import CublasLt
from slidesparse.gemm.cusparselt import CuSparseLt
from slidesparse.gemm.problem import (
    MIN_ROWS,
    NAMES,
    TWO_FOUR,
    LibraryError,
    Problem,
    Tensors,
    bucket,
    require_operand,
)
from slidesparse.quantize import FP8

CPU = torch.device("cpu")
TOKENS = st.integers(1, 2**40)


@given(TOKENS, TOKENS)
def test_buckets_hold_their_tokens_with_little_padding(m: int, other: int) -> None:
    rows = bucket(m)
    assert rows % MIN_ROWS == 0
    assert 0 <= rows - m < max(MIN_ROWS, m / 16)
    assert bucket(rows) == rows
    assert bucket(min(m, other)) <= bucket(max(m, other))


def test_no_plan_is_made_during_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was made before is used."""
    made: list[int] = []

    def plan(m: int) -> Any:
        return cusparselt._thread.plan(make, Problem("int8", "int32", 64, 64, m), CPU)

    def make(problem: Problem, device: torch.device) -> Any:
        made.append(problem.m)
        return problem.m

    assert plan(16) == 16
    monkeypatch.setattr(cuda, "is_capturing", lambda: True)
    assert plan(16) == 16
    with pytest.raises(LibraryError, match="no plan for .*32, .* run the same shape once before the capture"):
        plan(32)
    assert made == [16]


def test_allocate_rows_copies_only_if_memory_is_missing() -> None:
    wide = torch.arange(40).reshape(10, 4)
    for x, rows in ((wide, 10), (wide[:3], 10), (wide[6:8], 4), (wide[:0], 10)):
        assert library.allocate_rows(x, rows) is x
    for x, rows in ((wide, 11), (wide[6:8], 5), (wide[:, :3], 10), (wide.t(), 4), (wide[:0], 11)):
        padded = library.allocate_rows(x, rows)
        assert padded.shape == (rows, x.shape[1])
        assert padded.is_contiguous()
        assert torch.equal(padded[: len(x)], x)


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
def test_pad_appends_zeros(dtype: torch.dtype) -> None:
    x = torch.arange(1, 16, dtype=torch.int8).reshape(3, 5).view(dtype)
    padded = library.pad(x, 4, 8)
    assert (padded.shape, padded.dtype) == ((8, 8), dtype)
    assert torch.equal(padded[:3, :5].view(torch.int8), x.view(torch.int8))
    assert int(padded.view(torch.int8).int().sum()) == sum(range(1, 16))
    assert library.pad(x, 5, 3) is x


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    **{
        f"cuSPARSELt algorithm {text!r}": (
            lambda text=text: cusparselt._parse_algorithm(text),
            f"'{text}' is no cuSPARSELt algorithm, such as '3'",
        )
        for text in ("fast", "3.5", "3/2x1", "-1")
    },
    **{
        f"operand {dtype}": (
            lambda dtype=dtype: require_operand(dtype),
            f"{dtype} cannot be multiplied, only int8, ",
        )
        for dtype in (torch.int32, torch.float32, torch.uint8)
    },
    **{
        f"a product {dtype} -> {out}": (
            lambda dtype=dtype, out=out: CuSparseLt().plan(Problem(dtype, out, 64, 64, 16), CPU),
            f"products are .* asked for {dtype} .* -> {out}",
        )
        for dtype, out in (("fp4", "bf16"), ("int8", "fp32"))
    },
    "scales by cuSPARSELt": (
        lambda: CuSparseLt().plan(Problem("int8", "int32", 64, 64, 16, "both"), CPU),
        r"asked for .* \* scale_w \* scale_x",
    ),
    **{
        f"cuBLASLt {problem}": (lambda problem=problem: CublasLt().plan(problem, CPU), message)
        for problem, message in (
            (Problem("fp8", "int32", 64, 64, 32), "cublaslt products are .* asked for fp8 .* -> int32"),
            (Problem("int8", "int32", 64, 64, 16), r"more than 16 rows of INT8, asked for int8 \[16, 64\]"),
            (Problem("int8", "int32", 64, 64, 32, "both"), "scales FP8 to 16 bits only"),
        )
    },
    "a weight on the CPU": (
        lambda: CuSparseLt().pack(torch.zeros(64, 64, dtype=torch.int8), TWO_FOUR),
        "packs weights on a GPU, but this one is on cpu",
    ),
    # a library gets only pointers, and would read beyond the end of the weight
    **{
        f"weight {dtype} {shape}": (
            lambda shape=shape, dtype=dtype: CuSparseLt().accumulate(
                torch.zeros(2, 128, dtype=torch.int8), torch.zeros(shape).to(dtype), 64, torch.int32
            ),
            r"for products \[2, 128\] @ \[64, 128\].T of torch.int8: pack the weight for the backend cusparselt",
        )
        for shape, dtype in (((64, 128), torch.int8), ((64 * 128 // 2 - 1,), torch.uint8))
    },
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    act, message = REFUSALS[case]
    with pytest.raises(LibraryError, match=message):
        act()


@pytest.fixture
def gpu_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's products on the CPU take only what they take on a Hopper GPU."""
    int_mm, scaled_mm = torch._int_mm, torch._scaled_mm

    def limited_int_mm(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        assert a.shape[0] > 16
        assert a.shape[1] % 8 == b.shape[1] % 8 == 0
        assert b.t().is_contiguous()
        return int_mm(a, b, out=out)

    def limited_scaled_mm(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, **options: Any
    ) -> Tensor:
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0
        assert b.t().is_contiguous()
        shapes = scale_a.shape, scale_b.shape
        assert shapes in (((1, 1), (1, 1)), ((len(a), 1), (1, b.shape[1])))
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert bias is None or bias.dtype == options["out_dtype"] != torch.float32
        return scaled_mm(a, b, scale_a, scale_b, bias, **options)

    monkeypatch.setattr(torch, "_int_mm", limited_int_mm)
    monkeypatch.setattr(torch, "_scaled_mm", limited_scaled_mm)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")


def integers(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Small ones: oneDNN saturates sums of pairs without VNNI, and float32 sums of them are exact."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(-8, 9, (rows, columns), generator=generator).float().to(dtype)


@pytest.mark.usefixtures("gpu_limits")
@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=str)
@pytest.mark.parametrize("m", [1, 16, 17, 300])
def test_products_by_torch_equal_the_reference(m: int, dtype: torch.dtype) -> None:
    """Sides are odd, and what is in memory behind the last row does not matter."""
    rows, weight = integers(400, 45, dtype), integers(33, 45, dtype)
    packed, expected = CublasLt().pack(weight, None), reference.matmul(rows[:m], weight)
    for q in (rows[:m], rows[:m].clone()):
        assert torch.equal(CublasLt().accumulate(q, packed, 33, expected.dtype), expected)


@pytest.mark.usefixtures("gpu_limits")
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_fp8_is_scaled_in_the_epilogue(out: torch.dtype, has_bias: bool) -> None:
    """As K is odd, activations are padded.  On a CPU torch rounds scaled operands and results to the output's type."""
    m, n = cublaslt.MAX_UNSCALED_TOKENS + 1, 32
    q, weight, y = integers(m, 45, FP8), integers(n, 45, FP8), torch.empty(m, n, dtype=out)
    scale_x, scale_w = torch.linspace(0.1, 0.2, m).view(-1, 1), torch.linspace(0.3, 0.5, n).view(-1, 1)
    bias = torch.linspace(-3, 3, n).to(out).float() if has_bias else None
    CublasLt().scaled_matmul(Tensors(q, CublasLt().pack(weight, None), y, scale_w, scale_x, bias))
    x, w = q.double() * scale_x, weight.double() * scale_w
    expected = x @ w.t() + (0 if bias is None else bias)
    bound = torch.finfo(out).eps * (x.abs() @ w.abs().t() + expected.abs())
    assert bool(((y.double() - expected).abs() <= bound).all())


@pytest.mark.usefixtures("gpu_limits")
def test_cublaslt_scales_by_vectors_on_hopper_with_cuda_12_9(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CublasLt().epilogue("fp8", "bf16") == "both"
    for capability, version in (((8, 9), "13.0"), ((10, 0), "13.0"), ((9, 0), "12.8")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(torch.version, "cuda", version)
        assert CublasLt().epilogue("fp8", "bf16") == "none", (capability, version)


def test_accumulator_dtypes_are_outputs_of_both_libraries() -> None:
    for operand, out in library.ACCUMULATOR_DTYPES.items():
        for outputs in (cusparselt.OUTPUTS, cublaslt.OUTPUTS):
            assert NAMES[out] in outputs[NAMES[operand]]


def test_libraries_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, text = tmp_path / "empty.so", tmp_path / "text.so"
    (tmp_path / "empty.c").write_text("")
    compile_with(["cc", "-shared", "-fPIC", "empty.c", "-o", "empty.so"], tmp_path)
    text.write_text("text")
    for path, message in ((empty, "has no function cu.*: it is too old"), (text, f"cannot load {text}")):
        monkeypatch.setenv("SLIDESPARSE_CUSPARSELT", str(path))
        with pytest.raises(LibraryError, match=message):
            cusparselt.extension.__wrapped__()
