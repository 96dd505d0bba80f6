"""Tests of the GEMM libraries without a GPU: buckets, plan cache, padding, names of algorithms, refusals."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slidesparse.build.find import ToolchainError
from slidesparse.gemm import cublaslt, cusparselt, problem
from slidesparse.gemm import cuda as plans
from slidesparse.gemm.cuda import PlanCache, bucket
from slidesparse.gemm.problem import LibraryError
from slidesparse.quantize import FP8

TOKENS = st.integers(1, 2**40)


@given(TOKENS)
def test_bucket_bounds_padding(m: int) -> None:
    rows = bucket(m)
    assert rows >= m
    assert rows % plans.MIN_ROWS == 0
    waste = rows - m
    assert waste < plans.MIN_ROWS if m <= 256 else waste * 16 < m


@given(TOKENS)
def test_bucket_is_idempotent(m: int) -> None:
    assert bucket(bucket(m)) == bucket(m)


@given(TOKENS, TOKENS)
def test_bucket_is_monotonic(m: int, other: int) -> None:
    assert bucket(min(m, other)) <= bucket(max(m, other))


def test_number_of_buckets_is_small() -> None:
    """There are 16 buckets up to 256 tokens, and 16 per octave above."""
    assert bucket(0) == 0
    buckets = [bucket(m) for m in range(1, 2**16 + 1)]
    assert len(set(buckets)) == 16 + 16 * 8
    assert sorted(set(buckets))[:3] == [16, 32, 48]
    assert set(buckets[2**15 :]) == set(range(2**15 + 2**11, 2**16 + 1, 2**11))


@given(st.integers(1, 12), st.lists(st.integers(0, 20), max_size=80))
def test_plan_cache_evicts_least_recently_used(capacity: int, keys: list[int]) -> None:
    """A plan is created exactly when its key is not among the last ``capacity`` distinct keys."""
    cache: PlanCache[int] = PlanCache(capacity)
    created: list[int] = []
    recent: list[int] = []
    for key in keys:
        count = len(created)
        assert cache.get(key, _note, created, key) == key
        assert (len(created) > count) == (key not in recent)
        recent = [*(recent_key for recent_key in recent if recent_key != key), key][-capacity:]
        assert len(cache) == len(recent)


def _note(keys: list[int], key: int) -> int:
    keys.append(key)
    return key


def _never() -> str:
    raise AssertionError("a plan that should be there was made again")


def test_plan_cache_keeps_no_failed_plan() -> None:
    cache: PlanCache[str] = PlanCache()

    def fail() -> str:
        raise LibraryError("refused")

    with pytest.raises(LibraryError, match="refused"):
        cache.get("a", fail)
    assert len(cache) == 0
    assert cache.get("a", lambda: "plan") == "plan"


def test_plan_cache_makes_no_plan_during_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: PlanCache[str] = PlanCache()
    key: Hashable = (torch.int8, 64)
    cache.get("there", lambda: "plan")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cache.get("there", _never) == "plan"
    with pytest.raises(
        LibraryError,
        match=r"no plan for \(torch.int8, 64\) while .* run the same shape once before the capture",
    ):
        cache.get(key, _never)


def test_allocate_rows_returns_a_view_of_existing_memory() -> None:
    wide = torch.arange(40).reshape(10, 4)
    for x, rows in ((wide, 10), (wide[:3], 10), (wide[6:8], 4), (wide[:0], 10)):
        assert plans.allocate_rows(x, rows) is x


def test_allocate_rows_copies_if_memory_is_missing() -> None:
    wide = torch.arange(40).reshape(10, 4)
    for x, rows in ((wide, 11), (wide[6:8], 5), (wide[:, :3], 10), (wide.t(), 4), (wide[:0], 11)):
        padded = plans.allocate_rows(x, rows)
        assert padded.shape == (rows, x.shape[1])
        assert padded.is_contiguous()
        assert torch.equal(padded[: len(x)], x)


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
def test_pad_appends_zeros(dtype: torch.dtype) -> None:
    x = torch.arange(1, 16, dtype=torch.int8).reshape(3, 5).view(dtype)
    padded = plans.pad(x, 4, 8)
    assert (padded.shape, padded.dtype) == ((8, 8), dtype)
    assert torch.equal(padded[:3, :5].view(torch.int8), x.view(torch.int8))
    codes = padded.view(torch.int8).int()
    assert int(codes.sum()) == sum(range(1, 16))
    assert plans.pad(x, 5, 3) is x
    assert plans.pad(x, 5) is x


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (None, (-1, 1, 0)),
        ("", (-1, 1, 0)),
        ("0", (0, 1, 0)),
        ("17", (17, 1, 0)),
        ("3/2x1", (3, 2, 1)),
        ("3/8x2", (3, 8, 2)),
    ],
)
def test_cusparselt_parses_algorithm_text(text: str | None, numbers: tuple[int, ...]) -> None:
    assert cusparselt._parse_algorithm(text) == numbers


@pytest.mark.parametrize("text", ["fast", "3.5", "3/2", "3/x1", "3/2x", "3/2x1x1", "/2x1"])
def test_cusparselt_refuses_invalid_algorithm_text(text: str) -> None:
    with pytest.raises(LibraryError, match=f"'{text}' is no cuSPARSELt algorithm, such as '3' or '3/2x1'"):
        cusparselt._parse_algorithm(text)


@given(st.binary(min_size=64, max_size=64) | st.binary(max_size=63).map(lambda some: some.ljust(64, b"\0")))
def test_cublaslt_algorithm_text_round_trip(algorithm: bytes) -> None:
    """`CublasLt.algorithms` writes hexadecimal digits without trailing zeros, and a checksum."""
    assert cublaslt._decode_algorithm(cublaslt._encode_algorithm(algorithm)) == algorithm


@pytest.mark.parametrize("text", ["3/2x1", "", "00", "0a-", "0a-00000000", "0a" * 65 + "-00000000", "fast"])
def test_cublaslt_refuses_invalid_algorithm_text(text: str) -> None:
    """The library crashes on 64 bytes that it did not produce."""
    with pytest.raises(
        LibraryError, match=f"'{text}' is no cuBLASLt algorithm in hexadecimal with its checksum"
    ):
        cublaslt._decode_algorithm(text)


def test_require_operand_checks_dtypes() -> None:
    assert [problem.require_operand(dtype) for dtype in (torch.int8, FP8, torch.bfloat16)] == [
        "int8",
        "fp8",
        "bf16",
    ]
    for dtype in (torch.int32, torch.float32, torch.uint8):
        with pytest.raises(LibraryError, match=f"{dtype} cannot be multiplied, only int8, .*FP4"):
            problem.require_operand(dtype)


def test_accumulator_dtypes_are_outputs_of_both_libraries() -> None:
    for operand, out in plans.ACCUMULATOR_DTYPES.items():
        for outputs in (cusparselt.OUTPUTS, cublaslt.OUTPUTS):
            assert problem.NAMES[out] in outputs[problem.NAMES[operand]]


def test_missing_library_raises_library_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ToolchainError(f"no compiler for {name}", "install one")

    monkeypatch.setattr(plans, "build", fail)
    with pytest.raises(LibraryError, match="no compiler for cublaslt; install one"):
        plans.extension.__wrapped__("cublaslt")


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(torch.zeros(64, 128, dtype=torch.int8), id="dense"),
        pytest.param(torch.zeros(64 * 128 // 2 - 1, dtype=torch.uint8), id="packed from fewer columns"),
    ],
)
def test_cusparselt_refuses_weights_of_wrong_size(weight: torch.Tensor) -> None:
    """The library gets only pointers, and would read beyond the end of the weight."""
    q = torch.zeros(2, 128, dtype=torch.int8)
    with pytest.raises(
        LibraryError,
        match=r"for products \[2, 128\] @ \[64, 128\].T of torch.int8: pack the weight for .* cusparselt",
    ):
        cusparselt.CuSparseLt().accumulate(q, weight, 64, torch.int32)


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(torch.zeros(64, 112, dtype=torch.int8), id="fewer columns"),
        pytest.param(torch.zeros(64, 128).to(FP8), id="another type"),
        pytest.param(torch.zeros(6144, dtype=torch.uint8), id="packed for another backend"),
    ],
)
def test_cublaslt_refuses_mismatched_weights(weight: torch.Tensor) -> None:
    q, ones = torch.zeros(2, 128, dtype=torch.int8), torch.ones(64, 1)
    with pytest.raises(LibraryError, match="of torch.int8: pack the weight for the backend cublaslt"):
        cublaslt.CublasLt().accumulate(q, weight, 64, torch.int32, ones)


@pytest.mark.parametrize("together", [True, False])
def test_packing_does_not_use_torch_random_state(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """vLLM samples tokens by that state, which the check whether packed chunks concatenate must not change."""

    class Library(cusparselt.CuSparseLt):
        def operand(self, weight: torch.Tensor, layout: problem.Layout = problem.TN) -> torch.Tensor:
            codes = weight.view(torch.uint8)
            metadata = (codes[:, ::16] != 0) if together else codes[:, ::16].flip(0)
            return torch.cat(
                [
                    part.flatten()
                    for part in (codes[:, ::2], metadata, codes.new_zeros(cusparselt.SLACK_BYTES))
                ]
            )

    state = torch.get_rng_state()
    assert Library()._compresses_in_chunks(torch.device("cpu"), FP8) is together
    assert torch.equal(torch.get_rng_state(), state)
