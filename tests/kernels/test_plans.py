"""NVIDIA's GEMM libraries without a GPU: buckets, plans, padding, and the calls of a library that notes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slidesparse.build.compile import compile_with
from slidesparse.gemm import cublaslt, cuda, cusparselt
from slidesparse.gemm.cublaslt import CublasLt
from slidesparse.gemm.cusparselt import CuSparseLt
from slidesparse.gemm.problem import MIN_ROWS, NAMES, LibraryError, Problem, bucket, require_operand
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
        assert cuda.allocate_rows(x, rows) is x
    for x, rows in ((wide, 11), (wide[6:8], 5), (wide[:, :3], 10), (wide.t(), 4), (wide[:0], 11)):
        padded = cuda.allocate_rows(x, rows)
        assert padded.shape == (rows, x.shape[1])
        assert padded.is_contiguous()
        assert torch.equal(padded[: len(x)], x)


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
def test_pad_appends_zeros(dtype: torch.dtype) -> None:
    x = torch.arange(1, 16, dtype=torch.int8).reshape(3, 5).view(dtype)
    padded = cuda.pad(x, 4, 8)
    assert (padded.shape, padded.dtype) == ((8, 8), dtype)
    assert torch.equal(padded[:3, :5].view(torch.int8), x.view(torch.int8))
    assert int(padded.view(torch.int8).int().sum()) == sum(range(1, 16))
    assert cuda.pad(x, 5, 3) is x


INT32 = partial(Problem, "int8", "int32", 64, 64)
WEIGHT = "pack the weight for the backend cusparselt"
REFUSALS: list[tuple[Callable[[], object], str]] = [
    *(
        (partial(cusparselt._parse_algorithm, text), f"'{text}' is no cuSPARSELt algorithm, such as '3'")
        for text in ("fast", "3.5", "3/2x1", "-1")
    ),
    *(
        (partial(require_operand, dtype), f"{dtype} cannot be multiplied, only int8, ")
        for dtype in (torch.int32, torch.float32, torch.uint8)
    ),
    *(
        (partial(library.plan, problem, CPU), message)
        for library, problem, message in (
            (CuSparseLt(), Problem("fp4", "bf16", 64, 64, 16), "products are .* asked for fp4 .* -> bf16"),
            (CuSparseLt(), Problem("int8", "fp32", 64, 64, 16), "products are .* asked for int8 .* -> fp32"),
            (CuSparseLt(), INT32(16, "both"), r"asked for .* \* scale_w \* scale_x"),
            (CublasLt(), Problem("fp8", "int32", 64, 64, 32), "cublaslt .* asked for fp8 .* -> int32"),
            (CublasLt(), INT32(16), r"more than 16 rows of INT8, asked for int8 \[16, 64\]"),
            (CublasLt(), INT32(32, "both"), "scales FP8 to 16 bits only"),
        )
    ),
    (
        partial(CuSparseLt().pack, torch.zeros(64, 64, dtype=torch.int8), None),
        "packs weights on a GPU, but this one is on cpu",
    ),
    # a library gets only pointers, and would read beyond the end of the weight
    *(
        (
            partial(CuSparseLt().accumulate, torch.zeros(2, 128).char(), weight, 64, torch.int32),
            rf"for products \[2, 128\] @ \[64, 128\].T of torch.int8: {WEIGHT}",
        )
        for weight in (torch.zeros(64, 128).char(), torch.zeros(64 * 128 // 2 - 1).byte())
    ),
]


@pytest.mark.parametrize(("act", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals(act: Callable[[], object], message: str) -> None:
    with pytest.raises(LibraryError, match=message):
        act()


@pytest.mark.parametrize(
    ("capability", "version", "scales"),
    [((9, 0), "12.9", "both"), ((8, 9), "13.0", "none"), ((10, 0), "13.0", "none"), ((9, 0), "12.8", "none")],
)
def test_cublaslt_scales_by_vectors_on_hopper_with_cuda_12_9(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: str, scales: str
) -> None:
    """Its products, by torch, are tested on a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", version)
    assert CublasLt().epilogue("fp8", "bf16") == scales


def test_accumulator_dtypes_are_outputs_of_both_libraries() -> None:
    for operand, out in cuda.ACCUMULATOR_DTYPES.items():
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
