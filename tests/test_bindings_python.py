"""The Python above the bindings, on fake libraries: extensions, versions, algorithms, plans, limits, errors."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from bindings import FAKES, Built, Native, fresh

from slidesparse.gemm import cublaslt as dense
from slidesparse.gemm import cusparselt as sparse
from slidesparse.gemm import plans
from slidesparse.gemm.library import DTYPES, TN, Layout, LibraryError, Problem

pytest_plugins = ["binding_fixtures"]

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
STREAM = 0x50
LIBRARIES = {"cusparselt": sparse.LIBRARY, "cublaslt": dense.LIBRARY}
MATMUL = {"cusparselt": "cusparseLtMatmul", "cublaslt": "cublasLtMatmul"}
TYPES = {"fp32": 0, "fp16": 2, "int8": 3, "int32": 10, "bf16": 14, "fp8": 28}
SPARSE, DENSE = Problem("int8", "bf16", 64, 96, 32), Problem("int8", "int32", 64, 96, 32)
PROBLEMS = {"cusparselt": SPARSE, "cublaslt": DENSE}
VARIABLES = {"cusparselt": "SLIDESPARSE_CUSPARSELT", "cublaslt": "SLIDESPARSE_CUBLASLT"}


class Properties:
    multi_processor_count = 1


@pytest.fixture(autouse=True)
def gpu(loaded: dict[str, Native], built: Built, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.Tensor]:
    """A device 0 whose libraries are the fake ones; the workspace of its stream."""
    workspace = torch.empty(1, dtype=torch.uint8)
    for name, native in loaded.items():
        native.fake.forget()
        native.fake.set(algorithms=8, minor=8, version=130100)
        monkeypatch.setenv(VARIABLES[name], str(built.libraries[name]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(plans, "stream_of", lambda index: STREAM)
    monkeypatch.setattr(plans, "_installed", lambda name: None)
    monkeypatch.setattr(plans, "_built", lambda name: loaded[name].module)
    monkeypatch.setattr(plans, "extension", functools.cache(plans.extension.__wrapped__))
    monkeypatch.setattr(plans, "_local", plans._Local())
    monkeypatch.setattr(plans, "_workspaces", {(0, STREAM): workspace})
    sparse._splits.cache_clear()
    yield workspace
    sparse._splits.cache_clear()
    monkeypatch.undo()  # the handles of this thread go with it
    for native in loaded.values():
        assert native.fake.alive() == []
        native.fake.calls()


CHILD = """
import json, sys
from slidesparse.gemm import plans
from slidesparse.gemm.library import LibraryError
plans._installed = lambda name: None
found = {}
for name in ("cusparselt", "cublaslt"):
    module = plans.extension(name)
    assert plans.extension(name) is module
    found[name] = [module.__file__, f"slidesparse.gemm._{name}_built" in sys.modules]
    module.Handle()
print(json.dumps(found))
"""


def test_an_extension_is_built_and_loaded(built: Built) -> None:
    """By `slidesparse.gemm.plans` as users get it, in a process of its own; the cache has the files already."""
    folders = {"SLIDESPARSE_CUDA_INCLUDE": str(FAKES / "include"), "SLIDESPARSE_CACHE": str(built.cache)}
    environment = os.environ | folders | {VARIABLES[name]: str(built.libraries[name]) for name in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: [str(path), True] for name, path in built.extensions.items()}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_cannot_be_loaded_is_asked_for_again(
    name: str, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is a LibraryError, and once it is gone the extension works."""
    module = fresh(built, name, tmp_path)
    monkeypatch.setattr(plans, "_built", lambda name: module)
    text = tmp_path / "text.so"
    text.write_text("no library")
    for path, words in (
        (tmp_path / "missing.so", f"{VARIABLES[name]}=.*missing.so is not a file; set it to the path of"),
        (text, "cannot load .*text.so: "),
        (built.lacking[name], "has no function .*: it is too old"),
    ):
        monkeypatch.setenv(VARIABLES[name], str(path))
        for call in (lambda: plans.extension(name), LIBRARIES[name].version):
            with pytest.raises(LibraryError, match=words):
                call()
    monkeypatch.setenv(VARIABLES[name], str(built.libraries[name]))
    assert plans.extension(name) is module
    assert LIBRARIES[name].version() == {"cusparselt": "0.8.0", "cublaslt": "13.1.0"}[name]


def test_versions(loaded: dict[str, Native]) -> None:
    for minor, patch, words in ((10, 1, None), (7, 1, "0.7.1 was found"), (11, 0, "0.11.0 was found")):
        loaded["cusparselt"].fake.set(minor=minor, patch=patch)
        if words:
            with pytest.raises(LibraryError, match=f"{words}, 0.8 to 0.10 is supported; pip install"):
                sparse.LIBRARY.version()
        else:
            assert sparse.LIBRARY.version() == f"0.{minor}.{patch}"
    loaded["cublaslt"].fake.set(version=120904)
    assert dense.LIBRARY.version() == "12.9.4"
    assert dense.LIBRARY.epilogue("fp8", "bf16") == "both"
    loaded["cublaslt"].fake.set(version=120899)
    assert dense.LIBRARY.epilogue("fp8", "bf16") == "none"
    loaded["cusparselt"].fake.plan("cusparseLtGetProperty", 10)
    with pytest.raises(LibraryError, match=r"^cusparseLtGetProperty failed: .*; asking for the version$"):
        sparse.LIBRARY.version()


def tensors(problem: Problem) -> dict[str, torch.Tensor]:
    """What `Plan.run` takes for the problem; the values are never read."""
    n, k, m = problem.n, problem.k, problem.m
    made = {
        "activations": torch.empty(m, k, dtype=DTYPES[problem.dtype]),
        "weight": torch.empty(n, k, dtype=DTYPES[problem.dtype]),
        "out": torch.empty(m, n, dtype=DTYPES[problem.out]),
    }
    if problem.scale != "none":
        made["scale_w"] = torch.empty(n)
    if problem.scale == "both":
        made["scale_x"] = torch.empty(m)
    if problem.bias:
        made["bias"] = torch.empty(n, dtype=DTYPES[problem.out])
    return made


CASES = [
    ("cusparselt", SPARSE),
    ("cusparselt", Problem("fp8", "fp32", 64, 96, 32, "channel")),
    ("cublaslt", DENSE),
    ("cublaslt", Problem("int8", "int8", 64, 96, 32)),
    ("cublaslt", Problem("fp8", "bf16", 64, 96, 32, "both")),
    ("cublaslt", Problem("fp8", "fp16", 64, 96, 32, "both", True)),
    ("cublaslt", Problem("bf16", "bf16", 64, 96, 32, "none", True)),
]


@pytest.mark.parametrize(("name", "problem"), CASES, ids=str)
@pytest.mark.parametrize("size", [0, 1 << 20])
def test_a_plan_hands_over_the_tensors(
    name: str, problem: Problem, size: int, loaded: dict[str, Native], gpu: torch.Tensor
) -> None:
    native, library = loaded[name], LIBRARIES[name]
    native.fake.set(workspace=size)
    chosen = library.algorithms(problem, CPU)[size >> 20]  # cuBLASLt's algorithm i wants i MiB
    plan = library.plan(problem, CPU, chosen)
    assert (plan.algorithm, plan.workspace) == (chosen, size)
    given = tensors(problem)
    plan.run(**given)
    calls = native.fake.calls()
    values = calls[-1].values
    assert calls[-1].name == MATMUL[name]
    at = {key: tensor.data_ptr() for key, tensor in given.items()}
    expected = {"a": at["weight"], "b": at["activations"], "d": at["out"], "stream": STREAM}
    expected["workspace"] = gpu.data_ptr() if size else 0
    scales = ("alphas", "", "") if name == "cusparselt" else ("at17", "at18", "at8")
    expected |= {
        key: at[tensor]
        for key, tensor in zip(scales, ("scale_w", "scale_x", "bias"), strict=True)
        if tensor in at
    }
    assert {key: int(values[key]) for key in expected} == expected
    one = "1" if (name, problem.out) == ("cublaslt", "int32") else "1.000000"
    assert values.get("alpha") == (None if "alphas" in expected else one)


@pytest.mark.parametrize(("name", "problem"), CASES, ids=str)
def test_a_plan_has_the_types_of_its_problem(name: str, problem: Problem, loaded: dict[str, Native]) -> None:
    plan = LIBRARIES[name].plan(problem, CPU)
    calls = loaded[name].fake.calls()
    types = [int(call.values["type"]) for call in calls if "type" in call.values]
    assert sorted(types) == sorted([TYPES[problem.dtype], TYPES[problem.dtype], TYPES[problem.out]])
    compute = {"cusparselt": (0, 2), "cublaslt": (72, 68)}[name][problem.dtype != "int8"]
    (made,) = (call for call in calls if "compute" in call.values)
    assert made.picked("compute") == (compute,)
    if name == "cublaslt":
        assert made.picked("scale_type") == (TYPES["int32"] if problem.out == "int32" else TYPES["fp32"],)
        found = dict(call.picked("attribute", "value") for call in calls if "attribute" in call.values)
        assert found.get(25) == (1 if problem.dtype == "fp8" else None)  # fast accumulation
        assert found.get(26) == (TYPES[problem.out] if problem.bias else None)  # the bias's type
    del plan


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_workspace_may_be_as_large_as_a_stream_has(
    name: str, loaded: dict[str, Native], gpu: torch.Tensor
) -> None:
    fake, library, problem = loaded[name].fake, LIBRARIES[name], PROBLEMS[name]
    fake.set(algorithms=66)
    for size, fits in ((plans.WORKSPACE, True), (plans.WORKSPACE + (1 << 20), False)):
        fake.set(workspace=size)
        algorithm = "3"
        if name == "cublaslt":  # one that heuristics do not propose, such as of a table of another version
            (asked,) = (bytes.fromhex("50a1" + "00" * 6) + (size >> 20).to_bytes(8, "little") + bytes(48),)
            algorithm = dense._text(asked)
        if fits:
            assert library.plan(problem, CPU, algorithm).workspace == size
            continue
        words = f"algorithm {algorithm} wants a workspace of {size} bytes, a stream has {plans.WORKSPACE}"
        with pytest.raises(LibraryError, match=f"^{re.escape(words)}$"):
            library.plan(problem, CPU, algorithm)


def test_the_algorithms_of_cublaslt(loaded: dict[str, Native]) -> None:
    """All within a stream's workspace, as text that makes the same plan again; the first is the heuristic's."""
    fake = loaded["cublaslt"].fake
    fake.set(algorithms=80, unsupported=2)
    found = dense.LIBRARY.algorithms(DENSE, CPU)
    calls = fake.calls()
    limit = next(call for call in calls if call.name == "cublasLtMatmulPreferenceSetAttribute")
    assert limit.picked("value") == (plans.WORKSPACE,)
    assert len(found) == len(set(found)) == 64  # 0 to 64 MiB, and one that is not supported
    for text, number in ((found[0], 0), (found[2], 3), (found[-1], 64)):
        dense.LIBRARY.plan(DENSE, CPU, text).run(**tensors(DENSE))
        assert fake.calls("cublasLtMatmul")[0].picked("algorithm") == (number,)
    dense.LIBRARY.plan(DENSE, CPU).run(**tensors(DENSE))
    assert fake.calls("cublasLtMatmul")[0].picked("algorithm") == (0,)
    fake.set(algorithms=0)
    assert dense.LIBRARY.algorithms(DENSE, CPU) == []
    words = f"cuBLASLt has no algorithm for {DENSE}, {TN}"
    with pytest.raises(LibraryError, match=f"^{re.escape(words)}$"):
        dense.LIBRARY.plan(DENSE, CPU)


def test_algorithms_that_crash_are_neither_offered_nor_run(loaded: dict[str, Native]) -> None:
    loaded["cusparselt"].fake.set(algorithms=52, major=0, minor=8, patch=0)
    problem = Problem("fp16", "fp16", 64, 96, 32)
    assert sparse.LIBRARY.algorithms(problem, CPU)[:37] == [*map(str, range(36)), "0/2x1"]
    for algorithm in ("36", "51"):
        with pytest.raises(
            LibraryError, match=rf"algorithm {algorithm} of cuSPARSELt 0.8.0 crashes for fp16"
        ):
            sparse.LIBRARY.plan(problem, CPU, algorithm)
    assert len({one for one in sparse.LIBRARY.algorithms(SPARSE, CPU) if "/" not in one}) == 52


def test_the_algorithms_of_cusparselt(loaded: dict[str, Native]) -> None:
    """Where tiles are few, with the ways of splitting K that the library takes."""
    fake = loaded["cusparselt"].fake
    fake.set(algorithms=2, refused_mode=1)
    ways = [f"{splits}x{mode}" for splits in (2, 3, 4, 8) for mode in (2, 5)] + ["1x4", "1x6"]
    expected = ["0", "1", *(f"{i}/{way}" for i in (0, 1) for way in ways)]
    assert sparse.LIBRARY.algorithms(SPARSE, CPU) == expected
    fake.calls()
    plan = sparse.LIBRARY.plan(SPARSE, CPU, "1/8x5")
    settings = fake.calls("cusparseLtMatmulAlgSetAttribute")
    assert [call.picked("attribute", "value") for call in settings] == [(0, 1), (3, 8), (4, 5)]
    del plan
    with pytest.raises(LibraryError, match="AlgSetAttribute failed: .*, by algorithm 1/2x1$"):
        sparse.LIBRARY.plan(SPARSE, CPU, "1/2x1")
    many = Problem("int8", "bf16", 256, 96, 128)  # two tiles, twice as many as multiprocessors
    assert sparse.LIBRARY.algorithms(many, CPU) == ["0", "1"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_the_library_refuses_is_a_library_error(name: str, loaded: dict[str, Native]) -> None:
    """With the call, the library's words, the problem and the layout; afterwards everything works."""
    native, library, problem = loaded[name], LIBRARIES[name], PROBLEMS[name]
    layout = Layout(output_n=False)
    words = f"failed: .*_STATUS_NOT_SUPPORTED .*; {re.escape(str(problem))}"
    made = {
        "cusparselt": ["cusparseLtMatmulPlanInit", "cusparseLtMatmulAlgGetAttribute"],
        "cublaslt": ["cublasLtMatmulDescCreate", "cublasLtMatmulAlgoGetHeuristic"],
    }[name]
    for function in made:
        for ask in (library.plan, library.algorithms):
            native.fake.plan(function, native.status)
            with pytest.raises(LibraryError, match=f"^{function} {words}, {layout}"):
                ask(problem, CPU, layout=layout)
    plan = library.plan(problem, CPU)
    native.fake.plan(MATMUL[name], native.status)
    with pytest.raises(LibraryError, match=f"^{MATMUL[name]} {words}, {TN}"):
        plan.run(**tensors(problem))
    with pytest.raises(LibraryError, match="the scales or the bias given are not those of the plan"):
        plan.run(**tensors(problem), bias=torch.empty(64))
    plan.run(**tensors(problem))


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_thread_has_one_handle(name: str, loaded: dict[str, Native]) -> None:
    """Made when it is first needed; one that cannot be made is tried again."""
    native, library, problem = loaded[name], LIBRARIES[name], PROBLEMS[name]
    create = {"cusparselt": "cusparseLtInit", "cublaslt": "cublasLtCreate"}[name]
    native.fake.plan(create, native.status)
    with pytest.raises(LibraryError, match=f"^{create} failed: .*; making a handle$"):
        library.plan(problem, CPU)
    native.fake.calls()

    def work() -> None:
        for _ in range(2):
            library.plan(problem, CPU).run(**tensors(problem))

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    calls = native.fake.calls(create, MATMUL[name])
    assert [call.name for call in calls] == [create, *[MATMUL[name]] * 2] * 2
    assert [call.values.get("with") for call in calls if call.name != create] == [
        *["handle1"] * 2,
        *["handle2"] * 2,
    ]
    assert native.fake.alive() == ["handle1"]  # the other went with its thread
