"""The bindings of csrc/: every call is checked, nothing leaks, loading, threads."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bindings import LACKS, NAMES, WHAT, Built, Call, Fake, Native, fresh

from slidesparse import toolchain

pytest_plugins = ["binding_fixtures"]

WORKSPACE = 1 << 30
DESTROYED_AT = {
    "cusparselt": {
        "cusparseLtMatmulPlanDestroy": "plan",
        "cusparseLtMatmulAlgSelectionDestroy": "selection",
        "cusparseLtMatDescriptorDestroy": "matrix",
        "cusparseLtDestroy": "handle",
    },
    "cublaslt": {
        "cublasLtMatmulDescDestroy": "descriptor",
        "cublasLtMatrixLayoutDestroy": "matrix",
        "cublasLtDestroy": "handle",
        "cublasLtMatmulPreferenceDestroy": "preference",
    },
}
CANNOT_FAIL = {
    "cusparselt": {"cusparseLtGetErrorName", "cusparseLtGetErrorString"},
    "cublaslt": {"cublasLtGetVersion", "cublasLtGetStatusName", "cublasLtGetStatusString"},
}


def compress(native: Native) -> None:
    native.ready().compress(1, 2, 3, 4)


# What calls each function that can fail, how many calls of one action it has, what the error says it was for, and the
# objects that were made before the first of these calls and are destroyed when it fails, in order.
Action = Callable[[Native], Any]
BEFORE = ["matrix", "matrix", "matrix", "handle"]
SELECTED = ["selection", *BEFORE]
PLANNED = ["plan", *SELECTED]
DESCRIBED = ["descriptor", *BEFORE]
FAILING: dict[str, tuple[str, Action, int, str, list[str]]] = {
    "cusparseLtInit": ("cusparselt", Native.plan, 1, "making a handle", []),
    "cusparseLtGetProperty": (
        *("cusparselt", lambda native: native.module.version(), 3, "asking for the version", []),
    ),
    "cusparseLtDenseDescriptorInit": ("cusparselt", Native.plan, 2, WHAT, ["handle"]),
    "cusparseLtStructuredDescriptorInit": ("cusparselt", Native.plan, 1, WHAT, BEFORE[1:]),
    "cusparseLtMatmulDescSetAttribute": ("cusparselt", Native.plan, 1, WHAT, BEFORE),
    "cusparseLtMatmulAlgSelectionInit": ("cusparselt", Native.plan, 1, WHAT, BEFORE),
    "cusparseLtMatmulAlgGetAttribute": ("cusparselt", Native.plan, 1, WHAT, SELECTED),
    "cusparseLtMatmulAlgSetAttribute": ("cusparselt", Native.plan, 4, WHAT, SELECTED),
    "cusparseLtMatmulPlanInit": ("cusparselt", Native.plan, 1, WHAT, SELECTED),
    "cusparseLtMatmulGetWorkspace": ("cusparselt", Native.plan, 1, WHAT, PLANNED),
    "cusparseLtSpMMACompressedSize": (
        *("cusparselt", lambda native: native.plan().compressed_size(), 1, WHAT, PLANNED),
    ),
    "cusparseLtSpMMACompress": ("cusparselt", compress, 1, WHAT, PLANNED),
    "cusparseLtMatmul": ("cusparselt", lambda native: native.run(native.ready()), 1, WHAT, PLANNED),
    "cublasLtCreate": ("cublaslt", Native.plan, 1, "making a handle", []),
    "cublasLtMatrixLayoutCreate": ("cublaslt", Native.plan, 3, WHAT, ["handle"]),
    "cublasLtMatrixLayoutSetAttribute": (
        *("cublaslt", lambda native: native.plan(layout=(True, True, False)), 1, WHAT, BEFORE),
    ),
    "cublasLtMatmulDescCreate": ("cublaslt", Native.plan, 1, WHAT, BEFORE),
    "cublasLtMatmulDescSetAttribute": ("cublaslt", Native.plan, 10, WHAT, DESCRIBED),
    "cublasLtMatmulPreferenceCreate": ("cublaslt", Native.ready, 1, WHAT, DESCRIBED),
    "cublasLtMatmulPreferenceSetAttribute": ("cublaslt", Native.ready, 1, WHAT, ["preference", *DESCRIBED]),
    "cublasLtMatmulAlgoGetHeuristic": ("cublaslt", Native.ready, 1, WHAT, ["preference", *DESCRIBED]),
    "cublasLtMatmulAlgoCheck": ("cublaslt", Native.ready, 1, WHAT, ["preference", *DESCRIBED]),
    "cublasLtMatmul": (
        *("cublaslt", lambda native: native.run(native.ready()), 1, WHAT, ["preference", *DESCRIBED]),
    ),
}
CASES = [(name, skip) for name, case in FAILING.items() for skip in range(case[2])]
LEAKED = "cusparseLtMatmulDescriptorInit"  # has a test of its own


def destroyed(native: Native, calls: list[Call]) -> list[str]:
    """The kinds of what was destroyed, in order."""
    kinds = DESTROYED_AT[native.name]
    return [kinds[call.name] for call in calls if call.name in kinds]


@pytest.mark.parametrize("name", NAMES)
def test_these_tests_know_every_function(name: str) -> None:
    source = (toolchain.sources() / f"{name}.cpp").read_text()
    functions = set(re.findall(r"^  X\((\w+)\)", source, flags=re.MULTILINE))
    failing = {function for function, case in FAILING.items() if case[0] == name}
    assert functions - {LEAKED} == failing | set(DESTROYED_AT[name]) | CANNOT_FAIL[name]


@pytest.mark.parametrize(("function", "skip"), CASES)
def test_a_call_that_fails_is_an_error(function: str, skip: int, loaded: dict[str, Native]) -> None:
    """With the call, the library's words and the problem; what was made before is destroyed, and a retry works."""
    name, action, times, what, made = FAILING[function]
    native = loaded[name]
    native.fake.forget()
    native.fake.set(algorithms=8)
    words = f"{function} failed: .*_STATUS_NOT_SUPPORTED .fake words of status {native.status}.; {re.escape(what)}$"
    native.fake.plan(function, native.status, skip)
    with pytest.raises(RuntimeError, match=words) as error:
        action(native)
    del error
    assert native.fake.alive() == []
    calls = native.fake.calls()
    before = ["matrix"] * skip if "LayoutCreate" in function or "DenseDescriptor" in function else []
    assert destroyed(native, calls) == before + made
    assert len([call for call in calls if call.name == function]) == skip + 1
    assert "failed" in next(call for call in reversed(calls) if call.name == function).values
    action(native)
    assert native.fake.alive() == []
    again = native.fake.calls()
    assert len([call for call in again if call.name == function]) == times


def test_a_weight_that_no_product_has_used_is_not_destroyed(loaded: dict[str, Native]) -> None:
    """cuSPARSELt 0.8.0 crashes at that, so its few bytes stay."""
    native = loaded["cusparselt"]
    native.fake.forget()
    native.fake.plan(LEAKED, native.status)
    with pytest.raises(
        RuntimeError, match=f"^{LEAKED} failed: CUSPARSE_STATUS_NOT_SUPPORTED .*; {re.escape(WHAT)}"
    ):
        native.plan()
    (weight,) = native.fake.alive()
    calls = native.fake.calls()
    (structured,) = (call for call in calls if call.name == "cusparseLtStructuredDescriptorInit")
    assert structured.values["matrix"] == weight
    assert destroyed(native, calls) == ["matrix", "matrix", "handle"]


def test_a_library_whose_destructors_fail_ends_no_process(native: Native) -> None:
    for function in DESTROYED_AT[native.name]:
        native.fake.plan(function, native.status)
    native.run(native.ready())
    assert native.fake.alive() == []
    failed = [call.name for call in native.fake.calls() if "failed" in call.values]
    assert sorted(failed) == sorted(DESTROYED_AT[native.name])


@pytest.mark.parametrize("handle_first", [True, False])
def test_a_handle_outlives_its_plans(native: Native, handle_first: bool) -> None:
    """Whichever Python forgets first."""
    handle = native.module.Handle()
    first, second = native.plan(handle), native.plan(handle)
    native.fake.calls()
    own = destroyed_of_a_plan(native)
    if handle_first:
        del handle
        assert native.fake.calls() == []
        del first
        assert destroyed(native, native.fake.calls()) == own
        del second
        assert destroyed(native, native.fake.calls()) == [*own, "handle"]
    else:
        del first, second
        assert destroyed(native, native.fake.calls()) == own * 2
        del handle
        assert destroyed(native, native.fake.calls()) == ["handle"]


def destroyed_of_a_plan(native: Native) -> list[str]:
    return (PLANNED if native.name == "cusparselt" else DESCRIBED)[:-1]


def test_many_plans_leave_nothing(native: Native) -> None:
    handle = native.module.Handle()
    for _ in range(50):
        native.run(native.ready(handle))
        with pytest.raises(RuntimeError, match="not those of the plan"):
            native.run(native.ready(handle), bias=1, weight_scales=0)
    assert native.fake.alive() == ["handle1"]


def test_a_plan_needs_a_handle(native: Native) -> None:
    """None would be a null pointer."""
    with pytest.raises(TypeError, match="incompatible"):
        native.module.Plan(None, **native.arguments())
    assert native.fake.calls() == []


@pytest.fixture
def module(native: Native, built: Built, tmp_path: Path) -> Any:
    """The extension with nothing loaded."""
    return fresh(built, native.name, tmp_path)


def test_without_a_library_there_is_nothing(native: Native, module: Any) -> None:
    for function in (module.version, module.Handle):
        with pytest.raises(RuntimeError, match=r"^cu(SPARSE|BLAS)Lt is not loaded$"):
            function()
    assert native.fake.calls() == []


def test_libraries_that_cannot_be_loaded(native: Native, module: Any, built: Built, tmp_path: Path) -> None:
    """Each error leaves the module as it was, so the right library can still be loaded, and then no other one."""
    missing, no_library = tmp_path / "missing.so", tmp_path / "text.so"
    no_library.write_text("no library")
    for path, words in (
        (missing, "cannot open shared object file"),
        (no_library, "(file too short|invalid ELF header)"),
        (built.lacking[native.name], f"has no function {LACKS[native.name]}: it is too old$"),
    ):
        with pytest.raises(RuntimeError, match=f"{re.escape(str(path))}.* {words}"):
            module.load(str(path))
        with pytest.raises(RuntimeError, match="is not loaded$"):
            module.Handle()
    path = str(built.libraries[native.name])
    module.load(path)
    module.load(path)
    with pytest.raises(RuntimeError, match=r"Lt is already loaded from .*, not from .*missing\.so$"):
        module.load(str(missing))
    handle = module.Handle()
    assert native.fake.alive() == ["handle1"]
    del handle


def test_the_sources_are_those_of_this_tree(native: Native) -> None:
    assert toolchain.sources_digest() == native.module.SOURCES


@contextmanager
def counting() -> Iterator[list[int]]:
    """A thread that counts for as long as it gets to run."""
    count, stop = [0], threading.Event()

    def work() -> None:
        while not stop.is_set():
            count[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield count
    finally:
        stop.set()
        thread.join()


def matmul(native: Native) -> str:
    return {"cusparselt": "cusparseLtMatmul", "cublaslt": "cublasLtMatmul"}[native.name]


def require_others_run(fake: Fake, function: str, action: Callable[[], None]) -> None:
    fake.plan(function, milliseconds=200)
    with counting() as count:
        while count[0] == 0:
            time.sleep(0.001)
        before = count[0]
        action()
        assert count[0] - before >= 5  # while the GIL is held it is 0, or 1


def test_other_threads_run_during_a_product(native: Native) -> None:
    plan = native.ready()
    require_others_run(native.fake, matmul(native), lambda: native.run(plan))


def test_other_threads_run_while_a_weight_is_compressed(cusparselt: Native) -> None:
    plan = cusparselt.ready()
    require_others_run(cusparselt.fake, "cusparseLtSpMMACompress", lambda: plan.compress(1, 2, 3, 4))


def test_an_error_of_a_product_has_the_gil_again(native: Native) -> None:
    """It is raised where Python objects may be made, and other threads go on."""
    plan = native.ready()
    native.fake.plan(matmul(native), native.status, milliseconds=50)
    with counting() as count:
        with pytest.raises(RuntimeError, match="fake words"):
            native.run(plan)
        before, deadline = count[0], time.monotonic() + 30
        while count[0] == before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert count[0] > before


def test_threads_with_handles_of_their_own(native: Native) -> None:
    """Each thread's products go through the handle that it made; the library says when they do not."""
    barrier, errors = threading.Barrier(2), []

    def work(stream: int) -> None:
        try:
            handle = native.module.Handle()
            barrier.wait(timeout=30)
            for _ in range(40):
                native.run(native.ready(handle), stream=stream)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    calls = native.fake.calls(matmul(native), "cusparseLtInit", "cublasLtCreate")
    owner = {call.values["handle"]: call.values["thread"] for call in calls if call.name != matmul(native)}
    products = [call.values for call in calls if call.name == matmul(native)]
    assert sorted(owner) == ["handle1", "handle2"]
    assert len(set(owner.values())) == 2
    assert len(products) == 80
    assert {(owner[values["with"]], values["stream"]) for values in products} == {
        (values["thread"], values["stream"]) for values in products
    }
    assert len({(values["with"], values["stream"]) for values in products}) == 2
