"""torch's operators in C++, csrc/hopper/operators.cpp, compiled for the CPU, on a library that stands for the kernels.

That library multiplies nothing: for a linear layer it writes the numbers it was called with to the output.  What
experts are called with is tested on a GPU.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slidesparse import ops
from slidesparse.build.compile import FLAGS, compile_with, sources_folder
from slidesparse.build.find import compiler
from slidesparse.gemm.hopper import native
from slidesparse.gemm.problem import Layer, LibraryError

SPACE = "slidesparse_native"
LAYER = Layer(n=16, k=150, length=8, phase=3, fp8=0, columns=256)
# The least of the kernels' library: one plan, of the layer that it was told, and a product that notes its arguments.
KERNELS = """
#include <cstring>
#include "interface.cuh"
using std::int32_t;
using std::int64_t;
static SlidesparseLayer planned;
static const char* error = nullptr;
static int64_t scratch = 128;
extern "C" {
SLIDESPARSE_EXPORT void plan(const SlidesparseLayer* layer) { planned = *layer; }
SLIDESPARSE_EXPORT void refuse(const char* words, int64_t bytes) { error = words, scratch = bytes; }
SLIDESPARSE_EXPORT int32_t slidesparse_hopper_device() { return -1; }
SLIDESPARSE_EXPORT SlidesparseHopperPlan* slidesparse_hopper_find(int32_t, const SlidesparseLayer* layer) {
  const bool same = std::memcmp(layer, &planned, sizeof(planned)) == 0;
  return same ? reinterpret_cast<SlidesparseHopperPlan*>(&planned) : nullptr;
}
SLIDESPARSE_EXPORT int64_t slidesparse_hopper_scratch_bytes(const SlidesparseHopperPlan*, int64_t) {
  return scratch;
}
SLIDESPARSE_EXPORT const char* slidesparse_hopper_linear(
    const SlidesparseHopperPlan*, int64_t m, const void* x, int32_t type, int64_t stride, int32_t prologue,
    double eps, const void* gain, const void* residual, int64_t residual_stride, void* total, const void*,
    int64_t weight_bytes, const void* scale_w, const void* bias, int32_t bias_type, void* out, int32_t out_type,
    void*, void*) {
  const auto first = [](const void* at) { return at ? *static_cast<const uint16_t*>(at) : 0; };
  const int values[16] = {int(m), type, int(stride), prologue, int(1000 * eps), first(gain), first(residual),
                          int(residual_stride), total != nullptr, int(weight_bytes),
                          int(*static_cast<const float*>(scale_w)), first(bias), bias_type, out_type, first(x), 7};
  for (int i = 0; i < 16; ++i) static_cast<uint16_t*>(out)[i] = uint16_t(values[i]);
  return error;
}
SLIDESPARSE_EXPORT const char* slidesparse_hopper_route(
    const void*, int32_t, int64_t, const void*, int32_t, int32_t, void*, void*, void*, void*) {
  return error;
}
SLIDESPARSE_EXPORT const char* slidesparse_hopper_grouped(
    const SlidesparseHopperPlan*, int64_t, const void*, int32_t, int64_t, int32_t, const void*, int32_t, const void*,
    int32_t, const void*, const void*, int64_t, const void*, void*, int32_t, const char*, void*, void*) {
  return error;
}
SLIDESPARSE_EXPORT const char* slidesparse_hopper_combine(
    const void*, int32_t, int64_t, int32_t, int32_t, const void*, void*, void*) {
  return error;
}
}
"""
ARGUMENTS = {
    "linear": "Tensor x",
    "rms_norm_linear": "Tensor x, Tensor norm, float eps",
    "add_rms_norm_linear": "Tensor x, Tensor residual, Tensor norm, float eps",
    "silu_mul_linear": "Tensor x",
}
EXPERTS = (
    "route(Tensor topk_ids, Tensor? expert_map, SymInt experts) -> (Tensor, Tensor, Tensor)",
    "grouped_linear(Tensor x, Tensor order, SymInt top_k, Tensor weight, Tensor scale_w, Tensor offsets, "
    "Tensor? slot_scale, bool silu_mul, SymInt[] layer, ScalarType out_dtype) -> Tensor",
    "combine(Tensor y, Tensor rows, SymInt top_k) -> Tensor",
)
_library = torch.library.Library(SPACE, "DEF")


class Operators:
    """The operators on the library, and the layers that Python was asked to plan."""

    def __init__(self, folder: Path) -> None:
        hopper, torch_folder = sources_folder() / "hopper", Path(torch.__file__).parent
        begin = [*compiler(), *FLAGS, "-Wall", "-Wextra", "-Werror", f"-I{hopper}"]
        (folder / "kernels.cpp").write_text(KERNELS)
        compile_with([*begin, "-Wno-unused-parameter", f"{folder}/kernels.cpp", "-o", f"{folder}/kernels.so"])
        command = [*begin, f"-DSLIDESPARSE_NAMESPACE={SPACE}", "-DSLIDESPARSE_KEY=CPU"]
        command += ["-isystem", str(torch_folder / "include"), str(hopper / "operators.cpp"), "-o"]
        self.path = folder / "operators.so"
        compile_with([*command, str(self.path), f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"])
        for name, arguments in ARGUMENTS.items():
            outputs = "(Tensor, Tensor)" if name.startswith("add") else "Tensor"
            _library.define(f"{name}({arguments}, {ops.LAYER}) -> {outputs}")
        for schema in EXPERTS:
            _library.define(schema)
        self.kernels = ctypes.CDLL(str(folder / "kernels.so"))
        self.kernels.refuse.argtypes = [ctypes.c_char_p, ctypes.c_int64]
        native.load_operators(self.path, folder / "kernels.so")

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(torch.ops, SPACE), name)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Operators:
    """Compile the operators once per module, as operators of C++ stay registered until the process ends."""
    return Operators(tmp_path_factory.mktemp("operators"))


@pytest.fixture
def operators(compiled: Operators, monkeypatch: pytest.MonkeyPatch) -> Operators:
    """Return the operators with a plan of LAYER; Python can plan any other, which is noted."""
    compiled.asked = []

    def plan(layer: Layer, device: int) -> None:
        compiled.asked.append((layer, device))
        compiled.kernels.plan(native.integers(layer))

    monkeypatch.setattr(native, "plan_layer", plan)
    compiled.kernels.plan(native.integers(LAYER))
    compiled.kernels.refuse(None, 128)
    return compiled


def tokens(m: int = 5, k: int = LAYER.k, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.arange(1.0, 1.0 + m * k).reshape(m, k).to(dtype)


PACKED, SCALES, BIAS = torch.zeros(700, dtype=torch.uint8), torch.full((16, 1), 3.0), torch.full((16,), 5.0)
OF_LAYER = (PACKED, SCALES, None, [*LAYER], torch.bfloat16)


def bits(x: Tensor) -> int:
    """The bits of a tensor's first 16-bit number."""
    return int(x.flatten()[:1].view(torch.int16).item())


def test_operators_pass_their_arguments_to_the_kernels(operators: Operators) -> None:
    x, gate_up, norm = tokens(), tokens(k=2 * LAYER.k), tokens(1, dtype=torch.float16)[0]
    wide = tokens(k=LAYER.k + 7)[:, 7:]
    half = x.half()
    # operator, arguments before the layer's -> stride of x, prologue, 1000 eps, gain, residual, its stride, has a sum
    cases: list[tuple[str, tuple[Any, ...], tuple[int, ...]]] = [
        ("linear", (x,), (150, 0, 0, 0, 0, 0, 0)),
        ("linear", (wide,), (157, 0, 0, 0, 0, 0, 0)),
        ("rms_norm_linear", (half, norm, 0.25), (150, 1, 250, bits(norm), 0, 0, 0)),
        (
            "add_rms_norm_linear",
            (half, tokens(k=160, dtype=torch.float16)[:, 2:152], norm, 0.5),
            (150, 2, 500, bits(norm), bits(torch.tensor([3.0]).half()), 160, 1),
        ),
        ("silu_mul_linear", (gate_up,), (300, 3, 0, 0, 0, 0, 0)),
    ]
    for name, before, expected in cases:
        for bias, bias_type in ((None, 0), (BIAS.bfloat16(), 1), (BIAS.half(), 2)):
            for out, out_type in ((torch.bfloat16, 1), (torch.float16, 2)):
                results = getattr(operators, name)(*before, PACKED, SCALES, bias, [*LAYER], out)
                y, *total = results if isinstance(results, tuple) else (results,)
                assert (y.shape, y.dtype, y.is_contiguous()) == ((5, 16), out, True)
                assert [(t.shape, t.dtype) for t in total] == [((5, 150), half.dtype)] * expected[-1]
                kind = native.TYPES[before[0].dtype]
                stride, *rest = expected
                assert y[0].view(torch.int16).tolist() == [
                    *(5, kind, stride, *rest, 700, 3),
                    *(0 if bias is None else bits(bias), bias_type, out_type, bits(before[0]), 7),
                ]
    assert operators.asked == []


def test_operators_of_no_tokens_and_of_strided_columns(operators: Operators) -> None:
    x = tokens()
    assert operators.linear(x[:0], *OF_LAYER).shape == (0, 16)
    y, total = operators.add_rms_norm_linear(x[:0], x[:0], x[0], 0.1, *OF_LAYER)
    assert (y.shape, total.shape) == ((0, 16), (0, 150))
    y = operators.linear(x.t().contiguous().t(), *OF_LAYER)
    assert y[0, 2].view(torch.int16).item() == 150  # a copy, whose rows are contiguous
    assert y[0, 14].view(torch.int16).item() == bits(x)


def test_python_plans_a_new_layer_once(operators: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    other = LAYER._replace(phase=4)
    for _ in range(2):
        operators.linear(tokens(), PACKED, SCALES, None, [*other], torch.bfloat16)
    assert operators.asked == [(other, -1)]

    def refuse(layer: Layer, device: int) -> None:
        raise LibraryError(f"no plan for {layer.n} " + "x" * 5000)

    monkeypatch.setattr(native, "plan_layer", refuse)
    with pytest.raises(RuntimeError, match="no plan for 16 xxx"):
        operators.linear(tokens(), *OF_LAYER)


X, NORM, ORDER = tokens(), tokens(1)[0], torch.arange(4, dtype=torch.int32)
OF_EXPERTS = (tokens(2), ORDER, 2, torch.ones(4, 64).byte(), torch.ones(4, 16), torch.arange(5).int())
# operator -> the changed arguments by their places, and the error
REFUSED: list[tuple[str, dict[int, Any], str]] = [
    ("linear", {0: X.double()}, r"x is float64 \[5, 150\] .* must be \[M, 150\] of bfloat16"),
    ("linear", {0: X.float()}, r"x is float32"),
    ("linear", {0: tokens(k=151)}, r"x is bfloat16 \[5, 151\]"),
    ("linear", {0: X[None]}, r"x is bfloat16 \[1, 5, 150\]"),
    ("linear", {1: PACKED.view(70, 10)}, r"the weight is uint8 \[70, 10\]"),
    ("linear", {2: SCALES.double()}, r"scale_w is float64 .* \[16\] of float32"),
    ("linear", {2: BIAS.repeat(2)[::2]}, r"scale_w .* strides \[2\]"),
    ("linear", {3: BIAS[:5]}, r"bias is float32 \[5\]"),
    ("linear", {3: BIAS.double()}, "bias is float64"),
    ("linear", {4: [*LAYER][:5]}, "a layer is six numbers"),
    ("linear", {4: [-1, *LAYER[1:]]}, "a layer is six numbers"),
    ("linear", {5: torch.float32}, "write bfloat16 or float16, asked for float32"),
    ("silu_mul_linear", {0: tokens(k=299)}, r"\[M, 300\].*gates before"),
    ("rms_norm_linear", {1: NORM.float()}, "a norm's weight is float32"),
    ("rms_norm_linear", {1: NORM[1:]}, r"weight is bfloat16 \[149\] .* \[150\] of x's type"),
    ("add_rms_norm_linear", {1: X.half()}, "residual is float16"),
    ("add_rms_norm_linear", {1: X[:4]}, r"residual is bfloat16 \[4, 150\]"),
    ("grouped_linear", {5: ORDER}, "offsets is int32"),
    ("grouped_linear", {0: tokens(3)}, "one of 2 for each of 4 slots"),
]
VALID = {
    "linear": (X, *OF_LAYER),
    "silu_mul_linear": (X, *OF_LAYER),
    "rms_norm_linear": (X, NORM, 0.1, *OF_LAYER),
    "add_rms_norm_linear": (X, X, NORM, 0.1, *OF_LAYER),
    "grouped_linear": (*OF_EXPERTS, None, False, [*LAYER], torch.float16),
}


@pytest.mark.parametrize(("name", "changed", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused_arguments(operators: Operators, name: str, changed: dict[int, Any], message: str) -> None:
    arguments = [changed.get(place, argument) for place, argument in enumerate(VALID[name])]
    with pytest.raises(RuntimeError, match=message):
        getattr(operators, name)(*arguments)


def test_errors_of_kernels_and_of_torch_are_raised(operators: Operators) -> None:
    operators.kernels.refuse(b"the kernels' words", 128)
    with pytest.raises(RuntimeError, match="the kernels' words"):
        operators.linear(X, *OF_LAYER)
    operators.kernels.refuse(None, 1 << 60)
    with pytest.raises(RuntimeError, match=rf"torch could not allocate \[1, {1 << 60}\] of uint8"):
        operators.linear(X, *OF_LAYER)
    operators.kernels.refuse(None, 128)
    assert operators.linear(X, *OF_LAYER).shape == (5, 16)


@pytest.mark.parametrize("error", [None, b"refused"])
def test_operators_leak_no_tensors(operators: Operators, error: bytes | None) -> None:
    operators.kernels.refuse(error, 128)
    tensors = [tokens(), tokens(), tokens(1)[0], PACKED.clone(), SCALES.clone(), BIAS.clone()]
    x, residual, norm, *of_layer = tensors
    try:
        tensors += operators.add_rms_norm_linear(x, residual, norm, 0.1, *of_layer, [*LAYER], torch.float16)
    except RuntimeError:
        assert error
    storages = [tensor.untyped_storage() for tensor in tensors]
    del x, residual, norm, of_layer, tensors
    assert [torch._C._storage_Use_Count(storage._cdata) for storage in storages] == [1] * len(storages)


def test_kernels_of_another_version_are_refused(compiled: Operators, tmp_path: Path) -> None:
    (tmp_path / "kernels.cpp").write_text("int nothing;")
    compile_with([*compiler(), *FLAGS, str(tmp_path / "kernels.cpp"), "-o", str(tmp_path / "kernels.so")])
    with pytest.raises(LibraryError, match="not of this version"):
        native.load_operators(compiled.path, tmp_path / "kernels.so")
