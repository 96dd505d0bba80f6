"""What the bindings of csrc/ hand to the libraries: shapes, orders, types, transposes, scalars, addresses, choices."""

from __future__ import annotations

import re
from typing import Any

import pytest
from bindings import WHAT, Call, Native

pytest_plugins = ["binding_fixtures"]

N, K, M = 64, 96, 32  # of the plans that `Native.plan` makes
TYPES = {"fp32": 0, "fp16": 2, "int8": 3, "int32": 10, "bf16": 14, "fp8": 28}
COMPUTE = {
    "cusparselt": {"int8": 0, "fp8": 2, "fp16": 2, "bf16": 2},
    "cublaslt": {"int8": 72, "fp8": 68, "fp16": 68, "bf16": 68},
}

# The libraries compute out.T [N, M] = A [N, K] @ B [K, M].  Each matrix is (rows, columns, leading dimension, order),
# and A and B are transposed or not, for a contiguous dimension: K of the weight and the activations, N of the output.
# cuSPARSELt gets everything row-major but the output whose N is contiguous; cuBLASLt everything column-major but the
# output whose M is.  Orders: cuSPARSELt's 1 is column-major and 2 row-major, cuBLASLt's 0 and 1.
SPARSE_WEIGHT = {True: ((64, 96, 96, 2), 0), False: ((96, 64, 64, 2), 1)}
SPARSE_ACTIVATIONS = {True: ((32, 96, 96, 2), 1), False: ((96, 32, 32, 2), 0)}
SPARSE_OUT = {True: (64, 32, 64, 1), False: (64, 32, 32, 2)}
DENSE_WEIGHT = {True: ((96, 64, 96, 0), 1), False: ((64, 96, 64, 0), 0)}
DENSE_ACTIVATIONS = {True: ((96, 32, 96, 0), 0), False: ((32, 96, 32, 0), 1)}
DENSE_OUT = {True: (64, 32, 64, 0), False: (64, 32, 32, 1)}
LAYOUTS = [
    (weight, activations, out)
    for weight in (True, False)
    for activations in (True, False)
    for out in (True, False)
]

# Attributes of cuBLASLt's descriptor, as the library numbers them.
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS, SCALE_A, SCALE_B, FAST, BIAS_TYPE, MODE_A, MODE_B = (
    *(3, 4, 7, 8, 17, 18, 25, 26, 31, 32),
)
ADDS_BIAS, OUTER_VECTOR = 4, 3


def matrices(calls: list[Call]) -> dict[str, tuple[int, ...]]:
    """The matrices made, by name: rows, columns, leading dimension, order."""
    found = {}
    for call in calls:
        if "rows" in call.values:
            order = int(call.values.get("order", 0))
            found[call.values["matrix"]] = (*call.picked("rows", "cols", "ld"), order)
        elif call.name == "cublasLtMatrixLayoutSetAttribute":
            assert call.picked("attribute") == (1,)  # the order
            found[call.values["of"]] = (*found[call.values["of"]][:3], *call.picked("value"))
    return found


def attributes(calls: list[Call]) -> dict[int, int]:
    set_calls = [call for call in calls if call.name == "cublasLtMatmulDescSetAttribute"]
    return {call.picked("attribute")[0]: call.picked("value")[0] for call in set_calls}


def only(calls: list[Call], name: str) -> Call:
    (found,) = (call for call in calls if call.name == name)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_matrices_of_a_sparse_product(cusparselt: Native, layout: tuple[bool, bool, bool]) -> None:
    plan = cusparselt.plan(layout=layout)
    calls = cusparselt.fake.calls()
    made, product = matrices(calls), only(calls, "cusparseLtMatmulDescriptorInit")
    (weight, weight_op), (activations, op) = SPARSE_WEIGHT[layout[0]], SPARSE_ACTIVATIONS[layout[1]]
    assert made[product.values["a"]] == weight
    assert made[product.values["b"]] == activations
    assert product.picked("op_a", "op_b") == (weight_op, op)
    assert made[product.values["d"]] == SPARSE_OUT[layout[2]]
    assert product.values["c"] == product.values["d"]
    structured = only(calls, "cusparseLtStructuredDescriptorInit")
    assert structured.values["matrix"] == product.values["a"]
    assert structured.picked("sparsity") == (0,)  # half of the elements
    assert {call.picked("alignment") for call in calls if "alignment" in call.values} == {(16,)}
    del plan


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_matrices_of_a_dense_product(cublaslt: Native, layout: tuple[bool, bool, bool]) -> None:
    plan = cublaslt.ready(layout=layout)
    cublaslt.run(plan)
    calls = cublaslt.fake.calls()
    made, found = matrices(calls), attributes(calls)
    (weight, weight_op), (activations, op) = DENSE_WEIGHT[layout[0]], DENSE_ACTIVATIONS[layout[1]]
    for name in ("cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulAlgoCheck", "cublasLtMatmul"):
        values = only(calls, name).values
        assert made[values["layout_a"]] == weight
        assert made[values["layout_b"]] == activations
        assert made[values["layout_d"]] == DENSE_OUT[layout[2]]
        assert values["layout_c"] == values["layout_d"]
    assert (found[TRANSPOSE_A], found[TRANSPOSE_B]) == (weight_op, op)


@pytest.mark.parametrize("operand", ["int8", "fp8", "fp16", "bf16"])
@pytest.mark.parametrize("out", ["int32", "int8", "fp32", "fp16", "bf16"])
def test_types(native: Native, operand: str, out: str) -> None:
    module = native.module
    assert (TYPES, COMPUTE[native.name]) == (module.TYPES, module.COMPUTE)
    types = {"operand_type": module.TYPES[operand], "output_type": module.TYPES[out]}
    plan = native.plan(compute_type=module.COMPUTE[operand], **types)
    calls = native.fake.calls()
    typed = [
        (call.picked("rows", "cols"), int(call.values["type"])) for call in calls if "type" in call.values
    ]
    assert sorted(typed) == sorted(
        [
            ((N, K) if native.name == "cusparselt" else (K, N), TYPES[operand]),
            ((M, K) if native.name == "cusparselt" else (K, M), TYPES[operand]),
            ((N, M), TYPES[out]),
        ]
    )
    names = {"cusparselt": "cusparseLtMatmulDescriptorInit", "cublaslt": "cublasLtMatmulDescCreate"}
    assert only(calls, names[native.name]).picked("compute") == (COMPUTE[native.name][operand],)
    del plan


def test_the_addresses_of_a_sparse_product(cusparselt: Native) -> None:
    """The weight is A; alpha is the address of its scales, or 1.0."""
    for scaled in (True, False):
        plan = cusparselt.plan(scale_rows=scaled)
        set_up = cusparselt.fake.calls("cusparseLtMatmulDescSetAttribute")
        assert [call.picked("attribute", "value") for call in set_up] == [(5, 1)] * scaled
        plan.run(0x1000, 0x2000, 0x3000, 0x4000, 0x50, 0x6000 * scaled, 0, 0)
        values = only(cusparselt.fake.calls(), "cusparseLtMatmul").values
        expected = {"a": 0x2000, "b": 0x1000, "c": 0x3000, "d": 0x3000, "workspace": 0x4000, "stream": 0x50}
        assert {key: int(values[key]) for key in expected} == expected
        assert (values.get("alphas"), values.get("alpha")) == (
            (str(0x6000), None) if scaled else (None, "1.000000")
        )
        assert (values["beta"], values["streams"]) == ("0.000000", "1")
        del plan


def test_the_addresses_of_compression(cusparselt: Native) -> None:
    cusparselt.fake.set(compressed=5000, buffer=300)
    plan = cusparselt.plan()
    assert plan.compressed_size() == (5000, 300)
    plan.compress(dense=0x10, compressed=0x20, buffer=0x30, stream=0x40)
    call = only(cusparselt.fake.calls(), "cusparseLtSpMMACompress")
    assert call.picked("dense", "compressed", "buffer", "stream") == (0x10, 0x20, 0x30, 0x40)
    del plan


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_the_addresses_of_a_dense_product(cublaslt: Native, scaled: bool, biased: bool) -> None:
    bias_type = TYPES["fp16"] if biased else -1
    plan = cublaslt.ready(epilogue=cublaslt.module.Epilogue(scaled, bias_type, False))
    found = attributes(cublaslt.fake.calls())
    optional = {BIAS, SCALE_A, SCALE_B, EPILOGUE, BIAS_TYPE, MODE_A, MODE_B}
    wanted = {SCALE_A, SCALE_B, MODE_A, MODE_B} if scaled else set()
    wanted |= {BIAS, EPILOGUE, BIAS_TYPE} if biased else set()
    assert set(found) & optional == wanted
    assert FAST not in found
    if scaled:
        assert (found[MODE_A], found[MODE_B]) == (OUTER_VECTOR, OUTER_VECTOR)
        assert found[SCALE_A] != 0  # else heuristics take it for a product without scales
        assert found[SCALE_B] != 0
    if biased:
        assert (found[EPILOGUE], found[BIAS_TYPE]) == (ADDS_BIAS, TYPES["fp16"])
        assert found[BIAS] != 0
    for offset in (0, 1 << 20):  # a plan is run with other addresses each time
        addresses = [0x1000, 0x2000, 0x3000, 0x4000, 0x50, 0x6000 * scaled, 0x7000 * scaled, 0x8000 * biased]
        plan.run(*(address + offset if address else 0 for address in addresses))
        values = only(cublaslt.fake.calls("cublasLtMatmul"), "cublasLtMatmul").values
        expected = {"a": 0x2000, "b": 0x1000, "c": 0x3000, "d": 0x3000, "workspace": 0x4000, "stream": 0x50}
        expected |= {f"at{SCALE_A}": 0x6000, f"at{SCALE_B}": 0x7000} if scaled else {}
        expected |= {f"at{BIAS}": 0x8000} if biased else {}
        assert {key: int(value) for key, value in values.items() if key in expected or key[:2] == "at"} == {
            key: address + offset for key, address in expected.items()
        }


def test_fast_accumulation(cublaslt: Native) -> None:
    for fast in (True, False):
        plan = cublaslt.plan(epilogue=cublaslt.module.Epilogue(False, -1, fast))
        assert attributes(cublaslt.fake.calls()).get(FAST) == (1 if fast else None)
        del plan


@pytest.mark.parametrize(("scale", "one", "zero"), [("int32", "1", "0"), ("fp32", "1.000000", "0.000000")])
def test_scalars_have_the_scale_type(cublaslt: Native, scale: str, one: str, zero: str) -> None:
    """INT32 output: the bits of a float 1.0 would be read as 1065353216."""
    plain = cublaslt.module.Epilogue(False, -1, False)
    plan = cublaslt.ready(scale_type=TYPES[scale], output_type=TYPES["int32"], epilogue=plain)
    cublaslt.run(plan, weight_scales=0, token_scales=0, bias=0)
    calls = cublaslt.fake.calls()
    values = only(calls, "cublasLtMatmul").values
    assert (values["alpha"], values["beta"]) == (one, zero)
    assert only(calls, "cublasLtMatmulDescCreate").picked("scale_type") == (TYPES[scale],)


SPARSE_EPILOGUES = {True: {"weight_scales"}, False: set()}
DENSE_EPILOGUES = {(True, True): {"weight_scales", "token_scales", "bias"}, (False, False): set()}
DENSE_EPILOGUES |= {(True, False): {"weight_scales", "token_scales"}, (False, True): {"bias"}}
GIVEN = [
    {name for name, there in zip(("weight_scales", "token_scales", "bias"), flags, strict=True) if there}
    for flags in LAYOUTS
]


def require_only(native: Native, plan: Any, wanted: set[str]) -> None:
    """A plan runs with the scales and the bias that it has, and with no others or fewer."""
    for given in GIVEN:
        some = {name: 0x100 * (name in given) for name in ("weight_scales", "token_scales", "bias")}
        native.fake.calls()
        if given == wanted:
            native.run(plan, **some)
            assert native.fake.names()[-1].endswith("LtMatmul")
            continue
        words = f"^the scales or the bias given are not those of the plan; {re.escape(WHAT)}$"
        with pytest.raises(RuntimeError, match=words):
            native.run(plan, **some)
        assert native.fake.names() == []


@pytest.mark.parametrize("scaled", SPARSE_EPILOGUES)
def test_scales_that_a_sparse_plan_does_not_have(cusparselt: Native, scaled: bool) -> None:
    require_only(cusparselt, cusparselt.plan(scale_rows=scaled), SPARSE_EPILOGUES[scaled])


@pytest.mark.parametrize("epilogue", DENSE_EPILOGUES, ids=str)
def test_scales_that_a_dense_plan_does_not_have(cublaslt: Native, epilogue: tuple[bool, bool]) -> None:
    scaled, biased = epilogue
    made = cublaslt.module.Epilogue(scaled, TYPES["bf16"] if biased else -1, True)
    require_only(cublaslt, cublaslt.ready(epilogue=made), DENSE_EPILOGUES[epilogue])


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((-1, 1, 0, 0), []),
        ((0, 1, 0, 0), [(0, 0)]),
        ((7, 1, 0, 0), [(0, 7)]),
        ((3, 4, 2, 8), [(0, 3), (3, 4), (4, 2), (5, 8)]),
        ((3, 1, 6, 0), [(0, 3), (4, 6)]),
    ],
)
def test_a_sparse_algorithm_sets_what_it_names(
    cusparselt: Native, numbers: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    """Attributes 0: the id, 3: the number of splits of K, 4: how, 5: buffers; else the library's choice stays."""
    plan = cusparselt.plan(algorithm=cusparselt.module.Algorithm(*numbers))
    calls = cusparselt.fake.calls()
    settings = [call for call in calls if call.name == "cusparseLtMatmulAlgSetAttribute"]
    assert [call.picked("attribute", "value") for call in settings] == expected
    assert only(calls, "cusparseLtMatmulAlgGetAttribute").picked("attribute") == (1,)  # how many there are
    del plan


def test_a_sparse_plan_says_what_it_needs(cusparselt: Native) -> None:
    cusparselt.fake.set(algorithms=17, workspace=(1 << 32) + 5)
    plan = cusparselt.plan()
    assert (plan.algorithms, plan.workspace) == (17, (1 << 32) + 5)


def test_heuristics_within_the_workspace_best_first(cublaslt: Native) -> None:
    """Algorithm i of the fake wants i MiB and says so in its second word; the library may propose one it refuses."""
    plan = cublaslt.plan()
    cublaslt.fake.set(algorithms=6, unsupported=1)
    for most, limit, expected in ((10, 3 << 20, [0, 2, 3]), (3, 99 << 20, [0, 2]), (10, 0, [0]), (0, 0, [])):
        found = plan.heuristics(most, limit)
        assert [int.from_bytes(one[8:16], "little") for one in found] == expected
        assert {len(one) for one in found} <= {64}
        calls = cublaslt.fake.calls()
        asked = only(calls, "cublasLtMatmulPreferenceSetAttribute")
        assert asked.picked("attribute", "value") == (1, limit)
        assert only(calls, "cublasLtMatmulAlgoGetHeuristic").picked("most") == (most,)
    with pytest.raises(ValueError, match="vector"):
        plan.heuristics(-1, 0)
    assert not any(name.startswith("preference") for name in cublaslt.fake.alive())


def test_a_chosen_algorithm_is_what_runs(cublaslt: Native) -> None:
    plan = cublaslt.plan()
    assert plan.workspace == 0
    with pytest.raises(RuntimeError, match=f"^this plan has no algorithm yet; {re.escape(WHAT)}$"):
        cublaslt.run(plan)
    proposed = plan.heuristics(8, 1 << 30)
    for i in (5, 0, 3):
        plan.choose(proposed[i])
        assert plan.workspace == i << 20
        cublaslt.run(plan)
        (values,) = (call.values for call in cublaslt.fake.calls("cublasLtMatmul"))
        assert (values["algorithm"], values["bytes"]) == (str(i), str(i << 20))


def test_bytes_that_are_no_algorithm_change_nothing(cublaslt: Native) -> None:
    plan = cublaslt.plan()
    for wrong in (b"", b"\1", bytes(63), bytes(65)):
        words = f"^a cuBLASLt algorithm has 64 bytes, found {len(wrong)}; {re.escape(WHAT)}$"
        with pytest.raises(RuntimeError, match=words):
            plan.choose(wrong)
    assert cublaslt.fake.calls("cublasLtMatmulAlgoCheck") == []
    refused = f"^cublasLtMatmulAlgoCheck failed: .*; {re.escape(WHAT)}$"
    with pytest.raises(RuntimeError, match=refused):
        plan.choose(bytes(64))
    with pytest.raises(RuntimeError, match="no algorithm yet"):
        cublaslt.run(plan)
    plan.choose(plan.heuristics(3, 1 << 30)[2])
    with pytest.raises(RuntimeError, match=refused):
        plan.choose(bytes(64))
    assert plan.workspace == 2 << 20
    cublaslt.run(plan)
    assert only(cublaslt.fake.calls(), "cublasLtMatmul").values["algorithm"] == "2"


def test_versions(cusparselt: Native, cublaslt: Native) -> None:
    cusparselt.fake.set(major=1, minor=23, patch=4)
    cublaslt.fake.set(version=130100)
    assert cusparselt.module.version() == (1, 23, 4)
    assert cublaslt.module.version() == 130100
    assert cusparselt.module.BUILT_WITH == (0, 8, 0)  # what the headers in fake_cuda/ say
