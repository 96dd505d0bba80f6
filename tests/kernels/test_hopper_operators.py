"""Operators in C++ without Python: csrc/hopper/operators.cpp, compiled for the CPU, on a stand-in library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hopper_stand_in import StandIn
from torch import Tensor

from slidesparse import ops, profiling
from slidesparse.build import find
from slidesparse.build.compile import FLAGS, compile_with, sources_folder
from slidesparse.build.find import ToolchainError, compiler
from slidesparse.gemm.backend import LayerSpec
from slidesparse.gemm.hopper import native, operators
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.problem import LibraryError
from slidesparse.kernels import Producer, RmsNorm, SiluMul
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8

pytest_plugins = ("hopper_fixtures",)

SPACE = "slidesparse_native"
N, K, PATTERN = 70, 150, SlidePattern(8)
BACKEND = Hopper()
# The kernel library, whose functions call back into Python.
KERNELS = """
#include "interface.cuh"
using Linear = decltype(&slidesparse_hopper_linear);
using Find = decltype(&slidesparse_hopper_find);
using ScratchBytes = decltype(&slidesparse_hopper_scratch_bytes);
static Find find;
static ScratchBytes scratch_bytes;
static Linear linear;
using std::int32_t;
using std::int64_t;
extern "C" {
SLIDESPARSE_EXPORT void stand_in(Find a, ScratchBytes b, Linear c) {
  find = a, scratch_bytes = b, linear = c;
}
int32_t slidesparse_hopper_device() { return -1; }
SlidesparseHopperPlan* slidesparse_hopper_find(int32_t device, int32_t n, int32_t k, int32_t length,
                                               int32_t phase, int32_t fp8, int32_t columns) {
  return find(device, n, k, length, phase, fp8, columns);
}
int64_t slidesparse_hopper_scratch_bytes(const SlidesparseHopperPlan* p, int64_t m) {
  return scratch_bytes(p, m);
}
const char* slidesparse_hopper_linear(const SlidesparseHopperPlan* plan, int64_t m, const void* x,
                                      int32_t type, int64_t stride, int32_t prologue, double eps,
                                      const void* gain, const void* residual,
                                      int64_t residual_stride, void* total, const void* weight,
                                      int64_t weight_bytes, const void* scale_w,
                                      const void* bias, int32_t bias_type, void* out, int32_t out_type,
                                      void* scratch, void* stream) {
  return linear(plan, m, x, type, stride, prologue, eps, gain, residual, residual_stride, total,
                weight, weight_bytes, scale_w, bias, bias_type, out, out_type, scratch, stream);
}
}
"""
ARGUMENTS = {
    "linear": "Tensor x",
    "rms_norm_linear": "Tensor x, Tensor norm, float eps",
    "add_rms_norm_linear": "Tensor x, Tensor residual, Tensor norm, float eps",
    "silu_mul_linear": "Tensor x",
}


def callback(name: str, function: Callable[..., Any]) -> Any:
    """Return ``function`` as a C function with the types of ``name``."""
    result, *arguments = native.FUNCTIONS[name]
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p if result is ctypes.c_char_p else result, *arguments)
    return kind(function)


class Operators:
    """C++ operators of a namespace on a stand-in library, with a count of the calls that reached Python."""

    def __init__(self, folder: Path) -> None:
        self.standing_in, self.in_python = StandIn(), 0
        self._error = ctypes.create_string_buffer(b"the kernels refused")
        self._library = torch.library.Library(SPACE, "DEF")
        for name, arguments in ARGUMENTS.items():
            outputs = "(Tensor, Tensor)" if name.startswith("add") else "Tensor"
            for variant in (name, name + operators.PYTHON_SUFFIX):
                self._library.define(f"{variant}({arguments}, {ops.LAYER}) -> {outputs}")
            python = operators.record_errors(self._by_python(name))
            self._library.impl(name + operators.PYTHON_SUFFIX, python, "CPU")
        kernels = folder / "kernels.so"
        self._kernels = ctypes.CDLL(str(kernels))
        self._callbacks = [
            callback("find", lambda *layer: self.standing_in.slidesparse_hopper_find(*layer)),
            callback(
                "scratch_bytes", lambda *sizes: self.standing_in.slidesparse_hopper_scratch_bytes(*sizes)
            ),
            callback("linear", self._linear),
        ]
        self._kernels.stand_in(*self._callbacks)
        self.native = operators.load(folder / "operators.so", kernels)

    def _linear(self, *arguments: Any) -> int | None:
        error = self.standing_in.slidesparse_hopper_linear(*arguments)
        return ctypes.addressof(self._error) if error else None

    def _by_python(self, name: str) -> Callable[..., Any]:
        def run(x: Tensor, *rest: Any) -> Any:
            self.in_python += 1
            before, (packed, scale_w, bias, *windows, out, backend) = rest[:-9], rest[-9:]
            if backend != "hopper":
                raise LibraryError(f"backend {backend} is not here")
            producer: Producer = None
            total = torch.empty_like(x, memory_format=torch.contiguous_format)
            if name == "silu_mul_linear":
                producer = SiluMul()
            elif name == "rms_norm_linear":
                producer = RmsNorm(*before)
            elif name == "add_rms_norm_linear":
                residual, norm, eps = before
                producer = RmsNorm(norm, eps, residual, total)
            length, phase, dtype, _ = windows
            k = x.shape[1] // 2 if name == "silu_mul_linear" else x.shape[1]
            spec = LayerSpec(scale_w.shape[0], k, SlidePattern(length), phase, dtype, out)
            y = BACKEND.linear(spec, x, packed, scale_w, bias, producer)
            return (y, total) if name.startswith("add") else y

        return run

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(torch.ops, SPACE), name)


@pytest.fixture(scope="module")
def native_operators(tmp_path_factory: pytest.TempPathFactory) -> Operators:
    """Compile the operators once per module, as operators of C++ stay registered until the process ends."""
    folder, hopper = tmp_path_factory.mktemp("operators"), sources_folder() / "hopper"
    begin = [*compiler(), *FLAGS, "-Wall", "-Wextra", "-Werror", f"-I{hopper}"]
    (folder / "kernels.cpp").write_text(KERNELS)
    compile_with([*begin, str(folder / "kernels.cpp"), "-o", str(folder / "kernels.so")])
    root = Path(torch.__file__).parent
    command = [*begin, f"-DSLIDESPARSE_NAMESPACE={SPACE}", "-DSLIDESPARSE_KEY=CPU"]
    command += ["-isystem", str(root / "include"), str(hopper / "operators.cpp"), "-o"]
    compile_with([*command, str(folder / "operators.so"), f"-L{root / 'lib'}", "-ltorch_cpu"])
    return Operators(folder)


@pytest.fixture
def layers(
    native_operators: Operators, standing_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Operators]:
    """Return the operators on a stand-in library of this test, which Python uses as well."""
    monkeypatch.setattr(operators, "_native", native_operators.native)
    native_operators.standing_in, native_operators.in_python = standing_in, 0
    return native_operators


class PackedLayer:
    """A packed layer and its arguments of an operator."""

    def __init__(self, dtype: torch.dtype = INT8, out: torch.dtype = torch.bfloat16, phase: int = 0) -> None:
        generator = torch.Generator().manual_seed(1)
        weight = prune(torch.randint(-8, 9, (N, K), generator=generator).float(), PATTERN, phase=phase)
        spec = LayerSpec(N, K, PATTERN, phase, dtype, out)
        self.packed = BACKEND.pack(spec, weight.to(dtype))
        self.scale_w = torch.rand(N, 1, generator=generator)
        self.after = (PATTERN.length, phase, dtype, spec.columns(BACKEND.alignment), out, "hopper")

    def of(self, bias: Tensor | None = None) -> tuple[Any, ...]:
        return (self.packed, self.scale_w, bias, *self.after)


def tokens(m: int, k: int = K, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m + k)).to(dtype)


def cases(m: int, dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, tuple[Any, ...]]]:
    """Return names of operators and their arguments before those of the layer; some have gaps between rows."""
    x, gate_up, norm = tokens(m, K, dtype), tokens(m, 2 * K, dtype), tokens(1, K, dtype)[0]
    return [
        ("linear", (x,)),
        ("linear", (gate_up[:, 7 : 7 + K],)),
        ("rms_norm_linear", (x, norm, 1e-5)),
        ("rms_norm_linear", (x, norm, 1e-3)),
        ("add_rms_norm_linear", (x, gate_up[:, :K], norm, 1e-5)),
        ("silu_mul_linear", (gate_up,)),
    ]


def outputs_of(result: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_planned_layers_run_without_python(layers: Operators, dtype: torch.dtype) -> None:
    """Every operator is covered, with and without bias, with all types of layers and any number of tokens."""
    for source, out in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float16),
    ):
        layer = PackedLayer(dtype, out, phase=3)
        layers.linear(tokens(2), *layer.of())  # Python makes the plan
        for m in (1, 3, 40, 130):
            for bias in (None, torch.randn(N).to(out), torch.randn(N)):
                for name, before in cases(m, source):
                    layers.in_python = 0
                    actual = outputs_of(getattr(layers, name)(*before, *layer.of(bias)))
                    assert layers.in_python == 0
                    expected = outputs_of(getattr(layers, name + "_by_python")(*before, *layer.of(bias)))
                    for output, reference in zip(actual, expected, strict=True):
                        assert bool(output.any())
                        assert torch.equal(output, reference)
                        assert (output.dtype, output.shape, output.stride()) == (
                            reference.dtype,
                            reference.shape,
                            reference.stride(),
                        )


def test_python_plans_each_distinct_layer_once(layers: Operators) -> None:
    for layer in (PackedLayer(), PackedLayer(phase=1), PackedLayer(FP8)):
        for expected in (1, 0):
            layers.in_python = 0
            layers.linear(tokens(40), *layer.of())
            assert layers.in_python == expected
    layers.in_python = 0
    # types of outputs and biases need no other plan
    layers.linear(tokens(40), *PackedLayer(out=torch.float16).of(torch.randn(N)))
    assert layers.in_python == 0


def test_unsupported_arguments_go_to_python(layers: Operators) -> None:
    """Python computes products of no tokens or strided columns, and raises the errors of invalid arguments."""
    layer, x, norm = PackedLayer(), tokens(5), tokens(1)[0]
    layers.linear(x, *layer.of())
    expected = layers.linear(x, *layer.of())
    layers.in_python = 0
    assert torch.equal(layers.linear(x.t().contiguous().t(), *layer.of()), expected)
    assert layers.linear(x[:0], *layer.of()).shape == (0, N)
    assert layers.in_python == 2
    after, wide = layer.after, torch.rand(2 * N)
    invalid: list[tuple[str, tuple[Any, ...], str]] = [
        ("linear", (x, layer.packed[:-5120], layer.scale_w, None, *after), "packed weight"),
        ("linear", (x, layer.packed, wide[::2, None], None, *after), "scale_w .* strides"),
        ("linear", (x, layer.packed, layer.scale_w.double(), None, *after), "scale_w is torch.float64"),
        ("linear", (x, layer.packed, layer.scale_w, wide[::2], *after), "bias .* strides"),
        ("linear", (x, layer.packed, layer.scale_w, wide[:N].double(), *after), "bias is torch.float64"),
        ("linear", (x.double(), *layer.of()), "x is torch.float64"),
        ("linear", (x, layer.packed, layer.scale_w, None, *after[:-1], "another"), "another is not here"),
        ("linear", (x, layer.packed, layer.scale_w, None, *after[:-2], torch.float32, "hopper"), "float32"),
        ("rms_norm_linear", (x, norm[1:], 1e-5, *layer.of()), "norm's weight"),
        ("rms_norm_linear", (x, norm.float(), 1e-5, *layer.of()), "norm's weight is torch.float32"),
        ("add_rms_norm_linear", (x, x.half(), norm, 1e-5, *layer.of()), "residual is torch.float16"),
        ("add_rms_norm_linear", (x, x[:4], norm, 1e-5, *layer.of()), "residual is torch.bfloat16"),
        ("silu_mul_linear", (tokens(5, 2 * K - 1), *layer.of()), "299"),
    ]
    for name, arguments, message in invalid:
        with pytest.raises(RuntimeError, match=message):
            getattr(layers, name)(*arguments)
    layers.standing_in.error = b"the kernels refused"
    with pytest.raises(RuntimeError, match="the kernels refused"):
        layers.linear(x, *layer.of())
    layers.standing_in.error = None
    assert torch.equal(layers.linear(x, *layer.of()), expected)


def test_torch_errors_keep_their_messages(layers: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python repeats a call that failed in torch, such as out of memory, as C++ gets no message."""
    layer, x = PackedLayer(), tokens(5)
    expected = [layers.linear(x, *layer.of()) for _ in range(2)][1]
    with monkeypatch.context() as patch:
        patch.setattr(layers.standing_in, "slidesparse_hopper_scratch_bytes", lambda plan, m: 1 << 60)
        with pytest.raises(RuntimeError, match=f"{1 << 60}"):
            layers.linear(x, *layer.of())
        patch.setattr(Hopper, "linear", lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match="division by zero"):
            layers.linear(x, *layer.of())
    layers.in_python = 0
    assert torch.equal(layers.linear(x, *layer.of()), expected)
    assert layers.in_python == 0


def test_profiling_runs_every_layer_in_python(layers: Operators) -> None:
    """Layers run in C++ again when profiling ends."""
    layer, x = PackedLayer(), tokens(5)
    layers.linear(x, *layer.of())
    profiling.enable()
    try:
        layers.in_python = 0
        for _ in range(3):
            layers.linear(x, *layer.of())
        assert layers.in_python == 3
    finally:
        profiling.disable()
    layers.linear(x, *layer.of())
    assert layers.in_python == 3


def test_operators_leak_no_tensors(layers: Operators) -> None:
    """Arguments and outputs are freed, both of calls in C++ and of calls that go on to Python."""
    layer = PackedLayer()
    for _ in range(2):
        for number in range(len(cases(40))):
            name, before = cases(40)[number]
            bias = torch.randn(N)
            outputs = outputs_of(getattr(layers, name)(*before, *layer.of(bias)))
            tensors = [argument for argument in (*before, bias, *outputs) if isinstance(argument, Tensor)]
            storages = [tensor.untyped_storage() for tensor in tensors]
            del outputs, before, bias, tensors
            assert [torch._C._storage_Use_Count(storage._cdata) for storage in storages] == [1] * len(
                storages
            )
        profiling.disable()
        layers.native.slidesparse_operators_enable(0)  # the second time all calls go on
    layers.native.slidesparse_operators_enable(1)


@pytest.mark.parametrize("lacks", ["torch", "compiler"])
def test_python_operators_stay_without_new_torch_or_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, lacks: str
) -> None:
    def missing() -> list[str]:
        raise ToolchainError("no C++ compiler was found", "install one")

    monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path))
    monkeypatch.setattr(operators, "_native", None)
    if lacks == "torch":
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1+cu128'\n")
        spec = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
        monkeypatch.setattr(find.importlib.util, "find_spec", lambda name: spec)
    else:
        monkeypatch.setattr(find, "compiler", missing)
    operators.install(Path("kernels.so"))
    assert operators._native is None
    assert {"torch": "torch 2.10 or later", "compiler": "no C++ compiler"}[lacks] in caplog.text


def test_kernels_of_another_version_are_refused(native_operators: Operators, tmp_path: Path) -> None:
    (tmp_path / "kernels.cpp").write_text("int nothing;")
    command = [*compiler(), *FLAGS, str(tmp_path / "kernels.cpp"), "-o"]
    compile_with([*command, str(tmp_path / "kernels.so")])
    with pytest.raises(LibraryError, match="not of this version"):
        operators.load(Path(native_operators.native._name), tmp_path / "kernels.so")
