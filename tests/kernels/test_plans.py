"""NVIDIA's GEMM libraries without a GPU: buckets, plans, padding, and the calls of a library that notes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slidesparse.build.compile import compile_with
from slidesparse.gemm import cublaslt, cuda, cusparselt, library
from slidesparse.gemm.cublaslt import CublasLt
from slidesparse.gemm.cusparselt import CuSparseLt
from slidesparse.gemm.library import PlanCache
from slidesparse.gemm.problem import MIN_ROWS, NAMES, TWO_FOUR, LibraryError, Problem, bucket, require_operand
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


@given(st.integers(1, 12), st.lists(st.integers(0, 20), max_size=80))
def test_plan_cache_evicts_least_recently_used(capacity: int, keys: list[int]) -> None:
    """A plan is created exactly when its key is not among the last ``capacity`` distinct keys."""
    cache, recent = PlanCache(capacity), list[int]()
    for key in keys:
        made: list[int] = []

        def make(key: int = key, made: list[int] = made) -> int:
            made.append(key)
            return key

        assert cache.get(key, make) == key
        assert bool(made) == (key not in recent)
        recent = [*(recent_key for recent_key in recent if recent_key != key), key][-capacity:]
        assert len(cache) == len(recent)


def test_plan_cache_makes_no_plan_during_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PlanCache()
    cache.get("there", lambda: "plan")
    monkeypatch.setattr(cuda, "is_capturing", lambda: True)
    assert cache.get("there", pytest.fail) == "plan"
    with pytest.raises(
        LibraryError, match="no plan for another while .* run the same shape once before the capture"
    ):
        cache.get("another", pytest.fail)


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
        f"cuBLASLt algorithm {text!r}": (
            lambda text=text: cublaslt._decode_algorithm(text),
            f"'{text}' is no cuBLASLt algorithm in hexadecimal with its checksum",
        )
        for text in ("3/2x1", "", "00", "0a-", "0a-00000000", "0a" * 65 + "-00000000", "fast")
    },
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
    "a weight on the CPU": (
        lambda: CuSparseLt().pack(torch.zeros(64, 64, dtype=torch.int8), TWO_FOUR),
        "packs weights on a GPU, but this one is on cpu",
    ),
    # a library gets only pointers, and would read beyond the end of the weight
    **{
        f"{backend.name} weight {dtype} {shape}": (
            lambda backend=backend, shape=shape, dtype=dtype: backend.accumulate(
                torch.zeros(2, 128, dtype=torch.int8), torch.zeros(shape).to(dtype), 64, torch.int32
            ),
            rf"for products \[2, 128\] @ \[64, 128\].T of torch.int8: pack the weight for the backend {backend.name}",
        )
        for backend, shape, dtype in (
            (CuSparseLt(), (64, 128), torch.int8),
            (CuSparseLt(), (64 * 128 // 2 - 1,), torch.uint8),
            (CublasLt(), (64, 112), torch.int8),
            (CublasLt(), (64, 128), FP8),
            (CublasLt(), (6144,), torch.uint8),
        )
    },
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    act, message = REFUSALS[case]
    with pytest.raises(LibraryError, match=message):
        act()


def test_accumulator_dtypes_are_outputs_of_both_libraries() -> None:
    for operand, out in library.ACCUMULATOR_DTYPES.items():
        for outputs in (cusparselt.OUTPUTS, cublaslt.OUTPUTS):
            assert NAMES[out] in outputs[NAMES[operand]]


@pytest.mark.parametrize("name", ["cublaslt", "cusparselt"])
def test_libraries_that_are_none_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = {"cublaslt": cublaslt.Library, "cusparselt": cusparselt.extension.__wrapped__}[name]
    empty, text = tmp_path / "empty.so", tmp_path / "text.so"
    (tmp_path / "empty.c").write_text("")
    compile_with(["cc", "-shared", "-fPIC", "empty.c", "-o", "empty.so"], tmp_path)
    text.write_text("text")
    for path, message in ((empty, "has no function cu.*: it is too old"), (text, f"cannot load {text}")):
        monkeypatch.setenv(f"SLIDESPARSE_{name.upper()}", str(path))
        with pytest.raises(LibraryError, match=message):
            load()
