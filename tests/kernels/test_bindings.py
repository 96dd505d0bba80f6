"""The bindings of csrc/ on fake libraries that log calls: arguments, errors, lifetimes, loading."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from bindings import ADDRESSES, FAKES, LACKS, TYPES, WHAT, Call, Native, build_fake

pytest_plugins = ["binding_fixtures"]

ONE = struct.unpack("i", struct.pack("f", 1.0))[0]  # the bits of a float
FLAGS = [(weight, x, out) for weight in (True, False) for x in (True, False) for out in (True, False)]

# The libraries compute out.T [N, M] = A [N, K] @ B [K, M].  Each matrix is (rows, columns, leading dimension, order),
# and A and B are transposed or not, for a contiguous dimension: K of the weight and the activations, N of the output.
# cuSPARSELt gets everything row-major but the output whose N is contiguous; cuBLASLt everything column-major but the
# output whose M is.  Orders: cuSPARSELt's 1 is column-major and 2 row-major, cuBLASLt's 0 and 1.
MATRICES = {
    "cusparselt": (
        {True: ((64, 96, 96, 2), 0), False: ((96, 64, 64, 2), 1)},
        {True: ((32, 96, 96, 2), 1), False: ((96, 32, 32, 2), 0)},
        {True: (64, 32, 64, 1), False: (64, 32, 32, 2)},
    ),
    "cublaslt": (
        {True: ((96, 64, 96, 0), 1), False: ((64, 96, 64, 0), 0)},
        {True: ((96, 32, 96, 0), 0), False: ((32, 96, 32, 0), 1)},
        {True: (64, 32, 64, 0), False: (64, 32, 32, 1)},
    ),
}
# Attributes of cuBLASLt's descriptor, as the library numbers them.
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS, SCALE_A, SCALE_B, FAST, BIAS_TYPE, MODE_A, MODE_B = (
    *(3, 4, 7, 8, 17, 18, 25, 26, 31, 32),
)
ADDS_BIAS, OUTER_VECTOR = 4, 3
ASKED = dict.fromkeys(("cusparseLtInit", "cublasLtCreate"), "making a handle")
ASKED["cusparseLtGetProperty"] = "asking for the version"


def settings(calls: list[Call], name: str = "cublasLtMatmulDescSetAttribute") -> dict[int, int]:
    """Return the attributes set by calls of ``name``, in order."""
    return {call["attribute"]: call["value"] for call in calls if call["name"] == name}


def only_call(calls: list[Call], name: str) -> Call:
    (call,) = (c for c in calls if c["name"] == name)
    return call


def fields_of(call: Call, keys: str) -> list[int]:
    return [call[key] for key in keys.split()]


def call_every_function(native: Native) -> None:
    """Call each function that can fail at least once."""
    plan = native.ready(layout=(True, True, False))
    if native.name == "cusparselt":
        native.module.version()
        plan.compressed_size()
        plan.compress(1, 2, 3, 4)
    native.run(plan)


def test_failing_library_calls_raise_and_leak_nothing(native: Native) -> None:
    """The error names the call, the library's message and the problem. Earlier objects are destroyed, and a retry
    works.
    """
    call_every_function(native)
    names = [call["name"] for call in native.calls()]
    cases = [(name, names[:i].count(name)) for i, name in enumerate(names) if "Destroy" not in name]
    assert len(cases) > 15
    for name, skip in cases:
        native.forget()
        native.set(**{f"{name}_fails": skip})
        with pytest.raises(RuntimeError, match=f"^{name} failed: .*_NOT_SUPPORTED .fake words.; ") as error:
            call_every_function(native)
        assert str(error.value).endswith(ASKED.get(name, WHAT))
        del error
        # cuSPARSELt 0.8.0 crashes when a weight that no product has used is destroyed, so that one is kept.
        assert native.alive() == (name == "cusparseLtMatmulDescriptorInit"), name
        call_every_function(native)
    native.forget()


@pytest.mark.parametrize("handle_first", [True, False])
def test_plans_keep_their_handle_alive(native: Native, handle_first: bool) -> None:
    handle = native.module.Handle()
    plans = [native.ready(handle), native.ready(handle)]
    alive = native.alive()
    if handle_first:
        del handle
        assert native.alive() == alive
        native.run(plans[0])
    plans.clear()
    assert native.alive() == (not handle_first)
    with pytest.raises(TypeError, match="incompatible"):  # else a null pointer
        native.plan(None)


@pytest.mark.parametrize("layout", FLAGS, ids=str)
def test_matrix_layouts_of_a_product(native: Native, layout: tuple[bool, bool, bool]) -> None:
    native.run(native.ready(layout=layout))
    calls = native.calls()
    layouts: dict[int, list[int]] = {}
    for call in calls:
        if "rows" in call:
            layouts[call["made"]] = [*fields_of(call, "rows cols leading"), call.get("order", 0)]
        elif call["name"] == "cublasLtMatrixLayoutSetAttribute":
            assert call["attribute"] == 1  # the order
            layouts[call["matrix"]][3] = call["value"]
    if native.name == "cusparselt":
        product = only_call(calls, "cusparseLtMatmulDescriptorInit")
        operands, transposed = [fields_of(product, "a b c d")], fields_of(product, "op_a op_b")
        structured = only_call(calls, "cusparseLtStructuredDescriptorInit")
        assert fields_of(structured, "made sparsity") == [product["a"], 0]  # half of the elements
        assert {call["alignment"] for call in calls if "alignment" in call} == {16}
    else:
        names = ("cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulAlgoCheck", "cublasLtMatmul")
        operands = [
            fields_of(only_call(calls, name), "layout_a layout_b layout_c layout_d") for name in names
        ]
        transposed = [settings(calls)[key] for key in (TRANSPOSE_A, TRANSPOSE_B)]
    weight, x, out = (sides[flag] for sides, flag in zip(MATRICES[native.name], layout, strict=True))
    for matrices in operands:
        assert [tuple(layouts[matrix]) for matrix in matrices] == [weight[0], x[0], out, out]
    assert transposed == [weight[1], x[1]]


def test_sparse_product_gets_its_addresses(cusparselt: Native) -> None:
    """The weight is operand A, and alpha is 1.0 on the host."""
    cusparselt.set(compressed=5000, buffer=300, workspace=(1 << 32) + 5, algorithms=17)
    plan = cusparselt.plan()
    assert (plan.compressed_size(), plan.workspace, plan.algorithms) == ((5000, 300), (1 << 32) + 5, 17)
    plan.compress(dense=0x10, compressed=0x20, buffer=0x30, stream=0x40)
    cusparselt.run(plan)
    calls = cusparselt.calls()
    compress, product = only_call(calls, "cusparseLtSpMMACompress"), only_call(calls, "cusparseLtMatmul")
    assert fields_of(compress, "dense compressed buffer stream") == [0x10, 0x20, 0x30, 0x40]
    assert fields_of(product, "a b c d workspace streams") == [0x2000, 0x1000, 0x3000, 0x3000, 0x4000, 0x50]
    assert fields_of(product, "count alpha_bits beta_bits") == [1, ONE, 0]


@pytest.mark.parametrize(("scaled", "biased", "fast"), FLAGS)
def test_dense_product_gets_its_addresses_and_epilogue(
    cublaslt: Native, scaled: bool, biased: bool, fast: bool
) -> None:
    epilogue = cublaslt.module.Epilogue(scaled, TYPES["fp16"] if biased else -1, fast)
    plan = cublaslt.ready(epilogue=epilogue)
    actual = settings(cublaslt.calls())
    expected = {TRANSPOSE_A: 1, TRANSPOSE_B: 0} | ({FAST: 1} if fast else {})
    expected |= {MODE_A: OUTER_VECTOR, MODE_B: OUTER_VECTOR} if scaled else {}
    expected |= {EPILOGUE: ADDS_BIAS, BIAS_TYPE: TYPES["fp16"]} if biased else {}
    pointers = {SCALE_A: 0x6000, SCALE_B: 0x7000} if scaled else {}
    pointers |= {BIAS: 0x8000} if biased else {}
    assert all(actual.pop(key) for key in pointers)  # to heuristics, a null pointer means no scale or bias
    assert actual == expected
    for offset in (0, 0x100):  # a plan runs with new addresses each time
        keys = {"weight_scales": SCALE_A, "token_scales": SCALE_B, "bias": BIAS}
        at = {key: address + offset for key, address in pointers.items()}
        addresses = {key: address + offset for key, address in ADDRESSES.items()}
        cublaslt.run(plan, **addresses, **{word: at.get(key, 0) for word, key in keys.items()})
        calls = cublaslt.calls()
        run = [
            value - offset
            for value in fields_of(only_call(calls, "cublasLtMatmul"), "a b c d workspace stream")
        ]
        assert run == [0x2000, 0x1000, 0x3000, 0x3000, 0x4000, 0x50]
        assert settings(calls) == at


@pytest.mark.parametrize(("scale", "one_bits"), [("int32", 1), ("fp32", ONE)])
def test_scalars_have_the_scale_type(cublaslt: Native, scale: str, one_bits: int) -> None:
    """With INT32 output, the bits of a float 1.0 would be read as 1065353216."""
    epilogue = cublaslt.module.Epilogue(False, -1, False)
    plan = cublaslt.ready(scale_type=TYPES[scale], output_type=TYPES["int32"], epilogue=epilogue)
    cublaslt.run(plan, weight_scales=0, token_scales=0, bias=0)
    calls = cublaslt.calls()
    assert fields_of(only_call(calls, "cublasLtMatmul"), "alpha_bits beta_bits") == [one_bits, 0]
    assert only_call(calls, "cublasLtMatmulDescCreate")["scale_type"] == TYPES[scale]


@pytest.mark.parametrize("optional", [True, False])
def test_plan_refuses_scales_it_was_not_made_for(native: Native, optional: bool) -> None:
    dense, module = native.name == "cublaslt", native.module
    if dense:
        plan = native.ready(epilogue=module.Epilogue(optional, TYPES["bf16"] if optional else -1, False))
    else:
        plan = native.ready()
    for present in FLAGS:
        names = ("weight_scales", "token_scales", "bias")
        scales = {name: 0x100 * is_present for name, is_present in zip(names, present, strict=True)}
        native.calls()
        if present == (optional and dense,) * 3:
            native.run(plan, **scales)
            continue
        with pytest.raises(RuntimeError, match=f"not those of the plan; {re.escape(WHAT)}$"):
            native.run(plan, **scales)
        assert native.calls() == []


@pytest.mark.parametrize(
    ("numbers", "expected"), [((-1, 1, 0), {}), ((0, 1, 0), {0: 0}), ((3, 4, 2), {0: 3, 3: 4, 4: 2})]
)
def test_sparse_algorithm_sets_only_given_attributes(
    cusparselt: Native, numbers: tuple[int, ...], expected: dict[int, int]
) -> None:
    """Attribute 0 is the id, 3 the number of splits of K, and 4 the split mode; others keep the library's default."""
    cusparselt.plan(algorithm=cusparselt.module.Algorithm(*numbers))
    calls = cusparselt.calls()
    assert settings(calls, "cusparseLtMatmulAlgSetAttribute") == expected
    assert only_call(calls, "cusparseLtMatmulAlgGetAttribute")["attribute"] == 1  # number of algorithms


def test_dense_algorithms_are_proposed_and_run(cublaslt: Native) -> None:
    """The fake library's algorithm i needs i MiB of workspace and has i in its second word."""
    plan = cublaslt.plan()
    with pytest.raises(RuntimeError, match="no algorithm yet"):
        cublaslt.run(plan)
    cublaslt.set(algorithms=6, refused=1)
    proposed = plan.heuristics(5, 3 << 20)
    assert [int.from_bytes(proposal[8:16], "little") for proposal in proposed] == [0, 2, 3, 4]
    calls = cublaslt.calls()
    assert settings(calls, "cublasLtMatmulPreferenceSetAttribute") == {1: 3 << 20}
    assert only_call(calls, "cublasLtMatmulAlgoGetHeuristic")["most"] == 5
    for number, algorithm in ((3, proposed[2]), (0, proposed[0])):
        plan.choose(algorithm)
        for data, message in ((b"\1" * 63, "64 bytes, found 63"), (bytes(64), "AlgoCheck failed")):
            with pytest.raises(RuntimeError, match=f"{message}.*; {re.escape(WHAT)}$"):
                plan.choose(data)  # changes nothing
        assert plan.workspace == number << 20
        cublaslt.run(plan)
        run = only_call(cublaslt.calls(), "cublasLtMatmul")
        assert fields_of(run, "algorithm workspace_bytes") == [number, number << 20]


CHILD = """
import os, sys
from slidesparse.gemm import cuda
from slidesparse.gemm.problem import LibraryError
name, *paths = sys.argv[1:]
for path in paths:
    os.environ["SLIDESPARSE_" + name.upper()] = path
    try:
        module = cuda.extension(name)
    except LibraryError as error:
        print(error)
assert cuda.extension(name) is module
module.Handle()
module.load(paths[-1])
try:
    module.load(paths[0])
except RuntimeError as error:
    print(error)
print(module.__file__)
"""


def test_loading_tries_the_next_path_after_a_bad_library(native: Native, tmp_path: Path) -> None:
    """In a new process, a valid library loads after invalid ones, and no other library after it."""
    text, missing, old = (str(tmp_path / name) for name in ("text.so", "missing.so", "old.so"))
    Path(text).write_text("no library")
    build_fake(native.name, Path(old), f"-D{LACKS[native.name]}=another")
    cache = native.extension.parents[2]
    folders = {"SLIDESPARSE_CUDA_INCLUDE": str(FAKES / "include"), "SLIDESPARSE_CACHE": str(cache)}
    process = subprocess.run(
        [sys.executable, "-c", CHILD, native.name, missing, text, old, str(native.library)],
        capture_output=True,
        text=True,
        env=os.environ | folders,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    messages = process.stdout.splitlines()
    assert f"{missing} is not a file" in messages[0]
    assert messages[1].startswith(f"cannot load {text}: ")
    assert messages[2] == f"{old} has no function {LACKS[native.name]}: it is too old"
    assert f"already loaded from {native.library}, not from {missing}" in messages[3]
    assert messages[4:] == [str(native.extension)]


@pytest.mark.parametrize("name", ["cusparseLtMatmul", "cusparseLtSpMMACompress", "cublasLtMatmul"])
def test_library_calls_release_the_gil(name: str, loaded: dict[str, Native]) -> None:
    native = loaded["cublaslt" if "cublas" in name else "cusparselt"]
    native.forget()
    plan: Any = native.ready()
    native.set(**{f"{name}_sleeps": 200})
    count, stop = [0], threading.Event()

    def work() -> None:
        while not stop.wait(0.001):
            count[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    while count[0] == 0:
        time.sleep(0.001)
    start = count[0]
    plan.compress(1, 2, 3, 4) if "Compress" in name else native.run(plan)
    counted = count[0] - start
    stop.set()
    thread.join()
    assert counted >= 5  # 0 or 1 if the GIL is held
