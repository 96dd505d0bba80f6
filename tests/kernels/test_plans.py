"""NVIDIA's GEMM libraries without a GPU: buckets, plans, padding, and the calls of a library that notes them."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slidesparse.gemm import cublaslt, cuda, cusparselt, library
from slidesparse.gemm.cublaslt import CublasLt
from slidesparse.gemm.cusparselt import CuSparseLt
from slidesparse.gemm.library import PlanCache
from slidesparse.gemm.problem import (
    DTYPES,
    MIN_ROWS,
    NAMES,
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


def test_number_of_buckets_is_small() -> None:
    """There are 16 buckets up to 256 tokens, and 16 per octave above."""
    assert bucket(0) == 0
    assert len({bucket(m) for m in range(1, 2**16 + 1)}) == 16 + 16 * 8


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


@given(st.binary(min_size=64, max_size=64) | st.binary(max_size=63).map(lambda some: some.ljust(64, b"\0")))
def test_cublaslt_algorithm_text_round_trip(algorithm: bytes) -> None:
    assert cublaslt._decode_algorithm(cublaslt._encode_algorithm(algorithm)) == algorithm


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


class Noted:
    """A library whose functions succeed, but for one that fails, and note their arguments as integers.

    ``alive`` counts what was made and not destroyed.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.fails, self.alive = "", 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name.endswith(("Name", "String")):
                return b"words"
            values = tuple(
                value.value if isinstance(value, ctypes._SimpleCData) else value for value in arguments
            )
            self.calls.append((name, values))
            if name == self.fails:
                return 7
            self.alive += name.endswith(("Create", "Init")) - name.endswith("Destroy")
            for value, fill in zip(arguments, self.results.get(name, ()), strict=False):
                if fill is not None:
                    value._obj.value = fill
            return 0

        self.__dict__[name] = call
        return call

    results: dict[str, tuple[Any, ...]] = {  # noqa: RUF012  of the functions with outputs other than descriptors
        "cusparseLtMatmulAlgGetAttribute": (None, None, None, 12),
        "cusparseLtMatmulGetWorkspace": (None, None, 1 << 20),
        "cublasLtMatmulAlgoGetHeuristic": (*(None,) * 9, 1),
    }

    def last(self, name: str) -> tuple[Any, ...]:
        return next(arguments for called, arguments in reversed(self.calls) if called == name)


@pytest.fixture(params=[CuSparseLt, CublasLt])
def noted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Noted]:
    """Return a backend on a library that notes its calls, on a simulated GPU."""
    backend, noted = request.param(), Noted()
    loaded = library.Library.__new__(library.Library)
    loaded.path, loaded.functions, loaded._describe = "lib", noted, ("Name", "String")  # type: ignore[assignment]
    monkeypatch.setattr(type(backend), "library", lambda self: loaded)
    monkeypatch.setattr(library, "_thread_state", library._ThreadState())
    monkeypatch.setattr(library, "workspace", lambda index, stream: 4096)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    for name, value in (("device_index", 0), ("current_stream", 77), ("on_device", nullcontext())):
        monkeypatch.setattr(cuda, name, lambda *_, value=value: value)
    return backend, noted


def run(backend: Any, problem: Problem) -> tuple[Any, Tensors]:
    """Make a plan of a problem and run it on tensors that nobody reads."""
    (n, k, m), operand, out = (problem.n, problem.k, problem.m), DTYPES[problem.dtype], DTYPES[problem.out]
    factors = [torch.empty(n), torch.empty(m)] if problem.scale == "both" else [None, None]
    weight, x = torch.empty(n, k, dtype=operand), torch.empty(m, k, dtype=operand)
    bias = torch.empty(n, dtype=out) if problem.bias else None
    tensors = Tensors(x, weight, torch.empty(m, n, dtype=out), *factors, bias)
    plan = backend.plan(problem, CPU)
    plan.run(tensors)
    return plan, tensors


def test_products_get_their_tensors(noted: tuple[Any, Noted]) -> None:
    """out.T [N, M] = weight [N, K] @ activations.T [K, M]."""
    backend, calls = noted
    plan, tensors = run(backend, Problem("int8", "int32", 64, 96, 32))
    x, weight, out = (tensor.data_ptr() for tensor in tensors[:3])
    if backend.name == "cusparselt":
        # rows, columns, leading dimension, alignment, type, order, sparsity
        assert calls.last("cusparseLtStructuredDescriptorInit")[2:] == (64, 96, 96, 16, 3, 2, 0)
        assert [
            arguments[2:] for name, arguments in calls.calls if name == "cusparseLtDenseDescriptorInit"
        ] == [
            (32, 96, 96, 16, 3, 2),
            (64, 32, 64, 16, 10, 1),
        ]
        product = calls.last("cusparseLtMatmulDescriptorInit")
        assert (product[2:4], product[8]) == ((0, 1), 0)
        launch = calls.last("cusparseLtMatmul")
        assert launch[3:5] + launch[6:9] == (weight, x, out, out, 4096)
        assert launch[9]._obj.value == 77
        assert plan.workspace == 1 << 20
        assert backend.algorithms(Problem("int8", "int32", 64, 96, 32), CPU) == [*map(str, range(12))]
    else:
        layouts = [arguments[1:] for name, arguments in calls.calls if name == "cublasLtMatrixLayoutCreate"]
        assert layouts == [(3, 96, 64, 96), (3, 96, 32, 96), (10, 64, 32, 64)]
        assert calls.last("cublasLtMatmulDescCreate")[1:] == (72, 10)
        launch = calls.last("cublasLtMatmul")
        assert (launch[3], launch[5], launch[8], launch[10], launch[-1]) == (weight, x, out, out, 77)
        assert (launch[2]._obj.value, launch[7]._obj.value) == (1, 0)


def test_cublaslt_sets_its_epilogue(monkeypatch: pytest.MonkeyPatch, noted: tuple[Any, Noted]) -> None:
    backend, calls = noted
    if backend.name != "cublaslt":
        pytest.skip("cuSPARSELt has none")
    _, tensors = run(backend, Problem("fp8", "bf16", 64, 96, 32, "both", True))
    settings = [arguments[1:] for name, arguments in calls.calls if name == "cublasLtMatmulDescSetAttribute"]
    found = {attribute: (value._obj.value, size) for attribute, value, size in settings}
    # transposed, fast, by vectors, adds a bias of BF16
    options = {3: (1, 4), 25: (1, 1), 31: (3, 4), 32: (3, 4), 7: (4, 4), 26: (14, 4)}
    factors = (tensors.scale_w, tensors.scale_x, tensors.bias)
    pointers = {
        at: (factor.data_ptr(), 8)
        for at, factor in zip((17, 18, 8), factors, strict=True)
        if factor is not None
    }
    assert found == options | pointers
    with pytest.raises(LibraryError, match="cuBLASLt scales FP8 only"):
        run(backend, Problem("int8", "int32", 64, 96, 32, "both"))


def test_failing_calls_raise_and_leak_nothing(noted: tuple[Any, Noted]) -> None:
    """The error names the call, the library's words and the problem; what was made before is destroyed, once."""
    backend, calls = noted
    problem = Problem("int8", "int32", 64, 96, 32)
    run(backend, problem)
    names = list(dict.fromkeys(name for name, _ in calls.calls if not name.endswith("Destroy")))
    assert len(names) >= 8
    for name in names:
        library._thread_state.handles.clear()
        gc.collect()
        calls.alive, calls.fails = 0, name
        with pytest.raises(LibraryError, match=rf"^{name} failed: words \(words\); ") as error:
            run(backend, problem)
        assert str(problem) in str(error.value) or str(error.value).endswith("making a handle")
        calls.fails = ""
        del error
        library._thread_state.handles.clear()
        gc.collect()
        # the product's descriptor is never destroyed, and a weight's only after a product has used it
        products = backend.name == "cusparselt" and any(
            n == "cusparseLtMatmulDescriptorInit" for n, _ in calls.calls
        )
        assert 0 <= calls.alive <= products, name
        calls.calls.clear()


def test_workspace_may_not_exceed_that_of_a_stream(
    monkeypatch: pytest.MonkeyPatch, noted: tuple[Any, Noted]
) -> None:
    backend, _ = noted
    if backend.name != "cusparselt":
        pytest.skip("cuBLASLt is asked for algorithms that need no more")
    needed = library.WORKSPACE_BYTES + 1
    monkeypatch.setitem(Noted.results, "cusparseLtMatmulGetWorkspace", (None, None, needed))
    with pytest.raises(LibraryError, match=f"workspace of {needed} bytes, but a stream has"):
        run(backend, Problem("int8", "int32", 64, 96, 32))


def test_versions(noted: tuple[Any, Noted], monkeypatch: pytest.MonkeyPatch) -> None:
    backend, calls = noted
    if backend.name == "cublaslt":
        calls.cublasLtGetVersion = lambda: 130100
        assert backend.version() == "13.1.0"
        return
    for minor in (7, 8, 11):
        monkeypatch.setitem(Noted.results, "cusparseLtGetProperty", (None, minor))
        with pytest.raises(
            LibraryError, match=f"{minor}.{minor}.{minor} was found, but only 0.8 to 0.10 is supported"
        ):
            backend.version()


def test_libraries_that_lack_a_function_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_library", lambda name, major: SimpleNamespace(path=None))
    with pytest.raises(LibraryError, match="has no function cusparseLtInit: it is too old"):
        CuSparseLt.library.__wrapped__(CuSparseLt())
    monkeypatch.setattr(library, "find_library", lambda name, major: SimpleNamespace(path="/none.so"))
    with pytest.raises(LibraryError, match="cannot load /none.so"):
        CublasLt.library.__wrapped__(CublasLt())
