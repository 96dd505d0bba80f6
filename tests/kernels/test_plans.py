"""NVIDIA's GEMM libraries without a GPU: buckets, plans, padding, and the calls of a library that notes them."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slidesparse.build.compile import compile_with
from slidesparse.gemm import cublaslt, cuda, cusparselt, library
from slidesparse.gemm.cublaslt import CublasLt
from slidesparse.gemm.cusparselt import CuSparseLt
from slidesparse.gemm.library import PlanCache
from slidesparse.gemm.problem import (
    DTYPES,
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


class Noted:
    """A cuBLASLt whose functions succeed, but for one that fails, and note their arguments as integers.

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
            self.alive += name.endswith("Create") - name.endswith("Destroy")
            if name == "cublasLtMatmulAlgoGetHeuristic":
                arguments[9]._obj.value = 1
            return 0

        self.__dict__[name] = call
        return call

    def last(self, name: str) -> tuple[Any, ...]:
        return next(arguments for called, arguments in reversed(self.calls) if called == name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU with the current stream 77."""
    monkeypatch.setattr(library, "_thread_state", library._ThreadState())
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    for name, value in (("device_index", 0), ("current_stream", 77), ("on_device", nullcontext())):
        monkeypatch.setattr(cuda, name, lambda *_, value=value: value)


@pytest.fixture
def noted(gpu: None, monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Return the library of `CublasLt`, which notes its calls."""
    noted = Noted()
    loaded = cublaslt.Library.__new__(cublaslt.Library)
    loaded.path, loaded.functions = "lib", noted  # type: ignore[assignment]
    monkeypatch.setattr(CublasLt, "library", lambda self: loaded)
    return noted


@pytest.fixture(scope="module")
def fake_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fake")
    source = Path(__file__).parent.parent / "support" / "fake_cusparselt.c"
    compile_with(["cc", "-shared", "-fPIC", str(source), "-o", "libcusparseLt.so.0"], folder)
    return folder / "libcusparseLt.so.0"


@pytest.fixture
def fake(gpu: None, fake_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a fake library that the extension calls."""
    monkeypatch.setenv("SLIDESPARSE_CUSPARSELT", str(fake_path))
    extension = cusparselt.extension.__wrapped__()
    monkeypatch.setattr(cusparselt, "extension", lambda: extension)
    fake = ctypes.CDLL(str(fake_path))
    fake.fake_calls.restype = ctypes.c_char_p
    fake.fake_reset(b"")
    return fake


def calls_of(fake: Any) -> dict[str, list[list[str]]]:
    """Return the arguments of all calls by function."""
    calls: dict[str, list[list[str]]] = {}
    for line in fake.fake_calls().decode().splitlines():
        name, *values = line.split()
        calls.setdefault(name, []).append(values)
    return calls


def run(backend: Any, problem: Problem, algorithm: str | None = None) -> tuple[Any, Tensors]:
    """Make a plan of a problem and run it on tensors that nobody reads."""
    (n, k, m), operand, out = (problem.n, problem.k, problem.m), DTYPES[problem.dtype], DTYPES[problem.out]
    factors = [torch.empty(n), torch.empty(m)] if problem.scale == "both" else [None, None]
    weight, x = torch.empty(n, k, dtype=operand), torch.empty(m, k, dtype=operand)
    bias = torch.empty(n, dtype=out) if problem.bias else None
    tensors = Tensors(x, weight, torch.empty(m, n, dtype=out), *factors, bias)
    plan = backend.plan(problem, CPU, algorithm)
    plan.run(tensors)
    return plan, tensors


PROBLEM = Problem("int8", "int32", 64, 96, 32)


def test_cusparselt_gets_its_tensors(fake: Any) -> None:
    """out.T [N, M] = weight [N, K] @ activations.T [K, M]."""
    backend = CuSparseLt()
    plan, tensors = run(backend, PROBLEM, "3")
    calls = calls_of(fake)
    # rows, columns, leading dimension, alignment, type, order, sparsity
    assert calls["cusparseLtStructuredDescriptorInit"] == [["64", "96", "96", "16", "3", "2", "0"]]
    dense = [["32", "96", "96", "16", "3", "2"], ["64", "32", "64", "16", "10", "1"]]
    assert calls["cusparseLtDenseDescriptorInit"] == dense
    assert calls["cusparseLtMatmulDescriptorInit"] == [
        ["0", "1", "0"]
    ]  # only activations are transposed, INT32
    assert calls["cusparseLtMatmulAlgSetAttribute"] == [["0", "3", "4"]]
    x, weight, out = (str(tensor.data_ptr()) for tensor in tensors[:3])
    workspace = calls["cusparseLtMatmul"][0].pop(6)
    assert calls["cusparseLtMatmul"] == [["1", weight, x, "0", out, out, "77", "1"]]
    assert plan.workspace == 4096
    assert workspace not in ("0", weight, x, out)
    fake.fake_reset(b"")
    assert backend.algorithms(PROBLEM, CPU) == [*map(str, range(12))]
    assert "cusparseLtMatmulAlgSetAttribute" not in calls_of(fake)


def test_cusparselt_compresses(fake: Any) -> None:
    plan = CuSparseLt().plan(PROBLEM, CPU)
    weight = torch.zeros(64, 96, dtype=torch.int8)
    assert plan.compress(weight).shape == (1000 + cusparselt.SLACK_BYTES,)
    assert calls_of(fake)["cusparseLtSpMMACompress"] == [[str(weight.data_ptr()), "77"]]


def test_cublaslt_gets_its_tensors(noted: Noted) -> None:
    """out.T [N, M] = weight [N, K] @ activations.T [K, M]."""
    _, tensors = run(CublasLt(), PROBLEM)
    x, weight, out = (tensor.data_ptr() for tensor in tensors[:3])
    layouts = [arguments[1:] for name, arguments in noted.calls if name == "cublasLtMatrixLayoutCreate"]
    assert layouts == [(3, 96, 64, 96), (3, 96, 32, 96), (10, 64, 32, 64)]
    assert noted.last("cublasLtMatmulDescCreate")[1:] == (72, 10)
    launch = noted.last("cublasLtMatmul")
    assert (launch[3], launch[5], launch[8], launch[10], launch[-1]) == (weight, x, out, out, 77)
    assert (launch[2]._obj.value, launch[7]._obj.value) == (1, 0)


def test_cublaslt_sets_its_epilogue(noted: Noted) -> None:
    _, tensors = run(CublasLt(), Problem("fp8", "bf16", 64, 96, 32, "both", True))
    settings = [arguments[1:] for name, arguments in noted.calls if name == "cublasLtMatmulDescSetAttribute"]
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
        run(CublasLt(), Problem("int8", "int32", 64, 96, 32, "both"))


def fails(backend: Any, name: str) -> None:
    """Check the error of a call that fails: it names the call, the library's words and the problem."""
    library._thread_state.handles.clear()
    with pytest.raises(LibraryError, match=rf"^{name} failed: \w+ \(words\); ") as error:
        run(backend, PROBLEM, "3" if backend.name == "cusparselt" else None)
    assert str(PROBLEM) in str(error.value) or str(error.value).endswith("making a handle")
    del error
    library._thread_state.handles.clear()
    gc.collect()


def test_failing_calls_of_cublaslt_raise_and_leak_nothing(noted: Noted) -> None:
    run(CublasLt(), PROBLEM)
    names = list(dict.fromkeys(name for name, _ in noted.calls if not name.endswith("Destroy")))
    assert len(names) >= 8
    library._thread_state.handles.clear()
    gc.collect()
    for name in names:
        noted.alive, noted.fails = 0, name
        fails(CublasLt(), name)
        assert noted.alive == 0, name


def test_failing_calls_of_cusparselt_raise_and_leak_nothing(fake: Any) -> None:
    """A weight that no product uses is left, because 0.8.0 crashes on destroying it."""
    run(CuSparseLt(), PROBLEM, "3")
    names = [name for name in calls_of(fake) if not name.endswith("Destroy")]
    assert len(names) >= 8
    library._thread_state.handles.clear()
    gc.collect()
    assert fake.fake_alive() == 0
    for name in names:
        fake.fake_reset(name.encode())
        fails(CuSparseLt(), name)
        assert fake.fake_alive() == (name == "cusparseLtMatmulDescriptorInit"), name


def test_too_large_a_workspace_is_refused(fake: Any) -> None:
    needed = library.WORKSPACE_BYTES + 1
    bytes_of_workspace = ctypes.c_size_t.in_dll(fake, "fake_workspace")
    bytes_of_workspace.value = needed
    try:
        with pytest.raises(LibraryError, match=f"workspace of {needed} bytes, allowed are"):
            run(CuSparseLt(), PROBLEM)
    finally:
        bytes_of_workspace.value = 4096


def test_version_of_cublaslt(noted: Noted) -> None:
    noted.cublasLtGetVersion = lambda: 130100
    assert CublasLt().version() == "13.1.0"


def test_versions_of_cusparselt(fake: Any) -> None:
    minor = ctypes.c_int.in_dll(fake, "fake_minor")
    assert CuSparseLt().version() == "0.8.0"
    try:
        for minor.value in (7, 11):
            with pytest.raises(LibraryError, match=rf"0.{minor.value}.0 was found, but only 0.8 to 0.10"):
                CuSparseLt().version()
    finally:
        minor.value = 8


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
