"""Backends of the bindings on fake libraries that log calls: versions, algorithms, plans, limits, errors."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from bindings import NAMES, TYPES, Native

from slidesparse.gemm import cuda
from slidesparse.gemm.cublaslt import CublasLt
from slidesparse.gemm.cusparselt import CuSparseLt
from slidesparse.gemm.problem import DTYPES, TN, Layout, LibraryError, Problem

pytest_plugins = ["binding_fixtures"]

CPU = torch.device("cpu")
STREAM = 0x50
PROBLEM = Problem("int8", "int32", 64, 96, 32)


class FakedLibrary(Native):
    """A binding and its backend, whose class is local to the test so that nothing is cached across tests."""

    def __init__(self, native: Native) -> None:
        self.__dict__ |= vars(native)
        self.backend = {"cusparselt": CuSparseLt, "cublaslt": CublasLt}[native.name]()


@pytest.fixture
def libraries(
    loaded: dict[str, Native], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, FakedLibrary]]:
    """Return the backends on device 0 with fake libraries."""
    for native in loaded.values():
        native.forget()
        native.set(version1=8, version=130100)
    properties = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(cuda, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(cuda, "extension", lambda name: loaded[name].module)
    monkeypatch.setattr(cuda, "_thread_state", cuda._ThreadState())
    monkeypatch.setattr(cuda, "_workspaces", {(0, STREAM): torch.empty(1, dtype=torch.uint8)})
    yield {name: FakedLibrary(native) for name, native in loaded.items()}
    monkeypatch.undo()  # frees the handles of this thread
    for native in loaded.values():
        assert native.alive() == 0
        native.calls()


@pytest.fixture(params=NAMES)
def library(libraries: dict[str, FakedLibrary], request: pytest.FixtureRequest) -> FakedLibrary:
    return libraries[request.param]


def test_library_versions_are_checked(libraries: dict[str, FakedLibrary]) -> None:
    sparse, dense = libraries.values()
    for minor in (7, 11):
        sparse.set(version1=minor)
        with pytest.raises(LibraryError, match=f"0.{minor}.0 was found, but only 0.8 to 0.10 is supported"):
            sparse.backend.version()
    sparse.set(version1=10)
    assert sparse.backend.version() == "0.10.0"
    for number, version, scales in ((120904, "12.9.4", "both"), (120899, "12.8.99", "none")):
        dense.set(version=number)
        assert (dense.backend.version(), dense.backend.epilogue("fp8", "bf16")) == (version, scales)


def tensors(problem: Problem) -> dict[str, torch.Tensor]:
    """Return arguments of `Plan.run` for the problem; their values are never read."""
    n, k, m = problem.n, problem.k, problem.m
    operand, out = DTYPES[problem.dtype], DTYPES[problem.out]
    arguments = {"activations": torch.empty(m, k, dtype=operand), "weight": torch.empty(n, k, dtype=operand)}
    arguments["out"] = torch.empty(m, n, dtype=out)
    arguments |= {} if problem.scale == "none" else {"scale_w": torch.empty(n), "scale_x": torch.empty(m)}
    return arguments | ({"bias": torch.empty(n, dtype=out)} if problem.bias else {})


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("cusparselt", Problem("int8", "bf16", 64, 96, 32)),
        ("cusparselt", Problem("fp8", "fp32", 64, 96, 32)),
        ("cublaslt", PROBLEM),
        ("cublaslt", Problem("int8", "int8", 64, 96, 32)),
        ("cublaslt", Problem("fp8", "fp16", 64, 96, 32, "both", True)),
        ("cublaslt", Problem("bf16", "bf16", 64, 96, 32, "none", True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [0, 1 << 20])
def test_plan_passes_types_and_tensors(
    name: str, problem: Problem, size: int, libraries: dict[str, FakedLibrary]
) -> None:
    library = libraries[name]
    library.set(workspace=size)
    chosen = library.backend.algorithms(problem, CPU)[size >> 20]  # cuBLASLt's algorithm i needs i MiB
    library.calls()
    plan, arguments = library.backend.plan(problem, CPU, chosen), tensors(problem)
    assert (plan.algorithm, plan.workspace) == (chosen, size)
    plan.run(**arguments)
    calls = library.calls()
    types = [call["type"] for call in calls if "type" in call]
    assert sorted(types) == sorted([TYPES[problem.dtype]] * 2 + [TYPES[problem.out]])
    (descriptor,) = (call for call in calls if "compute" in call)
    assert (
        descriptor["compute"] == {"cusparselt": (0, 2), "cublaslt": (72, 68)}[name][problem.dtype != "int8"]
    )
    run, at = calls[-1], {key: tensor.data_ptr() for key, tensor in arguments.items()}
    assert run["name"] == library.matmul
    assert (run["a"], run["b"], run["d"]) == (at["weight"], at["activations"], at["out"])
    assert run["workspace"] == (cuda.workspace(0, STREAM) if size else 0)
    if name == "cusparselt":
        assert run["streams"] == STREAM
        assert run["alpha_bits"] == torch.tensor(1.0).view(torch.int32)
        return
    attributes = {call["attribute"]: call["value"] for call in calls if "DescSetAttribute" in call["name"]}
    assert run["stream"] == STREAM
    assert descriptor["scale_type"] == TYPES["int32" if problem.out == "int32" else "fp32"]
    assert attributes.get(25) == (1 if problem.dtype == "fp8" else None)  # fast accumulation
    assert attributes.get(26) == (TYPES[problem.out] if problem.bias else None)  # data type of the bias
    assert [attributes.get(key) for key in (17, 18, 8)] == [
        at.get(key) for key in ("scale_w", "scale_x", "bias")
    ]


def test_workspace_may_not_exceed_that_of_a_stream(library: FakedLibrary) -> None:
    library.set(algorithms=66, workspace=cuda.WORKSPACE_BYTES)
    algorithms = library.backend.algorithms(PROBLEM, CPU)
    assert library.backend.plan(PROBLEM, CPU, algorithms[64]).workspace == cuda.WORKSPACE_BYTES
    library.set(workspace=cuda.WORKSPACE_BYTES + (1 << 20))
    with pytest.raises(
        LibraryError, match=f"workspace of {65 << 20} bytes, but a stream has {cuda.WORKSPACE_BYTES}"
    ):
        library.backend.plan(PROBLEM, CPU, algorithms[65])


def test_cublaslt_algorithms_as_text(libraries: dict[str, FakedLibrary]) -> None:
    """The text gives the same plan within a stream's workspace, and the first algorithm is the heuristic's."""
    library, backend = libraries["cublaslt"], libraries["cublaslt"].backend
    library.set(refused=2)
    algorithms = backend.algorithms(PROBLEM, CPU)
    assert library.calls("cublasLtMatmulPreferenceSetAttribute")[0]["value"] == cuda.WORKSPACE_BYTES
    assert len(set(algorithms)) == 7
    for text, number in ((algorithms[0], 0), (algorithms[2], 3), (None, 0)):
        backend.plan(PROBLEM, CPU, text).run(**tensors(PROBLEM))
        assert library.calls("cublasLtMatmul")[0]["algorithm"] == number
    library.set(algorithms=0)
    assert backend.algorithms(PROBLEM, CPU) == []
    with pytest.raises(LibraryError, match=re.escape(f"{PROBLEM}, {TN}")):
        backend.plan(PROBLEM, CPU)


def test_cusparselt_algorithms_as_text(libraries: dict[str, FakedLibrary]) -> None:
    """Where tiles are few, algorithms include the supported split modes of K, and none that crashes."""
    library, backend = libraries["cusparselt"], libraries["cusparselt"].backend
    library.set(algorithms=2, cusparseLtMatmulAlgSetAttribute_fails=2)  # mode of the first split
    ways = [f"{splits}x{mode}" for splits in (2, 3, 4, 8) for mode in (1, 2, 5)][1:]
    expected = ["0", "1", *(f"{i}/{way}" for i in (0, 1) for way in (*ways, "1x4", "1x6"))]
    assert backend.algorithms(PROBLEM, CPU) == expected
    library.calls()
    backend.plan(PROBLEM, CPU, "1/8x5")
    settings = library.calls("cusparseLtMatmulAlgSetAttribute")
    assert [(call["attribute"], call["value"]) for call in settings] == [(0, 1), (3, 8), (4, 5)]
    many = Problem("fp16", "fp16", 256, 96, 128)  # two tiles, twice the number of multiprocessors
    assert backend.algorithms(many, CPU) == ["0", "1"]
    library.set(algorithms=52)
    assert backend.algorithms(many, CPU) == [*map(str, range(36))]
    with pytest.raises(LibraryError, match="algorithm 36 of cuSPARSELt 0.8.0 crashes for fp16"):
        backend.plan(many, CPU, "36")


def test_library_refusals_raise_library_error(library: FakedLibrary) -> None:
    """The error names the call, the problem and the layout; later calls work."""
    layout, backend = Layout(output_n=False), library.backend
    function = {"cusparselt": "cusparseLtMatmulAlgGetAttribute", "cublaslt": "cublasLtMatmulDescCreate"}
    for ask in (backend.plan, backend.algorithms):
        library.set(**{f"{function[library.name]}_fails": 0})
        with pytest.raises(LibraryError, match=f"failed.*{re.escape(f'{PROBLEM}, {layout}')}"):
            ask(PROBLEM, CPU, layout=layout)
    plan = backend.plan(PROBLEM, CPU)
    library.set(**{f"{library.matmul}_fails": 0})
    with pytest.raises(LibraryError, match=f"^{library.matmul} failed.*{re.escape(f'{PROBLEM}, {TN}')}"):
        plan.run(**tensors(PROBLEM))
    plan.run(**tensors(PROBLEM))


def test_each_thread_makes_one_handle(library: FakedLibrary) -> None:
    """A handle is created at its first use, and a failed creation is retried."""
    create = {"cusparselt": "cusparseLtInit", "cublaslt": "cublasLtCreate"}[library.name]
    library.set(**{f"{create}_fails": 0})
    with pytest.raises(LibraryError, match=f"^{create} failed"):
        library.backend.plan(PROBLEM, CPU)
    library.calls()

    def work() -> None:
        for _ in range(2):
            library.backend.plan(PROBLEM, CPU).run(**tensors(PROBLEM))

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    calls = library.calls(create, library.matmul)
    first, second = (call["made"] for call in calls if call["name"] == create)
    assert [call.get("handle", call.get("made")) for call in calls] == [*[first] * 3, *[second] * 3]
    assert library.alive() == 1  # the other was freed with its thread
