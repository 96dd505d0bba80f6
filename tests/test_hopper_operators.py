"""Whole layers by C++ without Python: csrc/hopper/operators.cu, compiled for the CPU with a stand-in for kernels."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hopper_stand_in import StandIn
from torch import Tensor

from slidesparse import gemm, ops, profiling, toolchain
from slidesparse.gemm import hopper_configs, hopper_operators, hopper_plans, plans
from slidesparse.gemm.hopper import PROVIDER, planned_rows
from slidesparse.gemm.library import LibraryError
from slidesparse.kernels import Producer, RmsNorm, SiluMul
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8

pytest_plugins = ("hopper_fixtures",)

SPACE = "slidesparse_native"
WORKSPACE = 1 << 20
N, K, PATTERN = 70, 150, SlidePattern(8)
AROUND = """
#include "interface.cuh"
static const char* (*kernels)(const SlidesparseHopperLinear*);
extern "C" {
const char* slidesparse_hopper_linear(const SlidesparseHopperLinear* call) { return kernels(call); }
std::int32_t slidesparse_hopper_device() { return -1; }
__attribute__((visibility("default"))) void stand_in(
    const char* (*function)(const SlidesparseHopperLinear*)) {
  kernels = function;
}
}
"""
ALLOCATE = "aoti_torch_empty_strided"
EMPTY = ctypes.CFUNCTYPE(
    *(ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p),
    *(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p),
)
ARGUMENTS = {
    "linear": "Tensor x",
    "rms_norm_linear": "Tensor x, Tensor norm, float eps",
    "add_rms_norm_linear": "Tensor x, Tensor residual, Tensor norm, float eps",
    "silu_mul_linear": "Tensor x",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("operators")
    (folder / "around.cpp").write_text(AROUND)
    sources = toolchain.sources() / "hopper"
    words = [*toolchain.compiler(), *toolchain.FLAGS, "-Wall", "-Wextra", "-Werror", f"-I{sources}"]
    words += ["-x", "c++", str(sources / "operators.cu"), str(folder / "around.cpp")]
    subprocess.run([*words, "-o", str(folder / "operators.so")], check=True)
    return ctypes.CDLL(str(folder / "operators.so"))


class Operators:
    """Of a namespace: by C++, around the stand-in, with a count of the calls that reached Python."""

    def __init__(self, compiled: ctypes.CDLL, standing_in: StandIn) -> None:
        self.standing_in, self.in_python = standing_in, 0
        self._error = ctypes.create_string_buffer(b"the kernels refused")
        self._callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(self._run)
        compiled.stand_in(self._callback)
        self.memory = True  # whether C++ gets any
        self._functions = hopper_operators._functions()
        self._empty = EMPTY(self._functions[ALLOCATE])
        self._allocate = EMPTY(self._of_memory)
        self._functions[ALLOCATE] = ctypes.cast(self._allocate, ctypes.c_void_p).value or 0
        self._library = torch.library.Library(SPACE, "DEF")
        for name, arguments in ARGUMENTS.items():
            outputs = "(Tensor, Tensor)" if name.startswith("add") else "Tensor"
            for one in (name, name + hopper_operators.BY_PYTHON):
                self._library.define(f"{one}({arguments}, {ops.LAYER}) -> {outputs}")
            python = hopper_operators.told(self._by_python(name))
            self._library.impl(name + hopper_operators.BY_PYTHON, python, "CPU")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hopper_operators, "_functions", lambda: self._functions)
            hopper_operators.install(compiled, SPACE, "CPU")
        hopper_operators.workspace(-1, 0, WORKSPACE)

    def _of_memory(self, *arguments: Any) -> int:
        error: int = self._empty(*arguments) if self.memory else 1
        return error

    def _run(self, address: int) -> int | None:
        error = self.standing_in.slidesparse_hopper_linear(address)
        return ctypes.addressof(self._error) if error else None

    def _by_python(self, name: str) -> Callable[..., Any]:
        def run(x: Tensor, *rest: Any) -> Any:
            self.in_python += 1
            *before, layer = rest[:-9], rest[-9:-1]
            producer: Producer = None
            total = torch.empty_like(x, memory_format=torch.contiguous_format)
            if name == "silu_mul_linear":
                producer = SiluMul()
            elif name == "rms_norm_linear":
                producer = RmsNorm(*before[0])
            elif name == "add_rms_norm_linear":
                residual, norm, eps = before[0]
                producer = RmsNorm(norm, eps, residual, total)
            y = PROVIDER.linear(x, *layer, producer)
            return (y, total) if name.startswith("add") else y

        return run

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(torch.ops, SPACE), name)


@pytest.fixture
def operators(
    compiled: ctypes.CDLL, standing_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Operators]:
    monkeypatch.setattr(hopper_operators, "_native", None)
    monkeypatch.setattr(profiling, "_when_enabled", [])
    monkeypatch.setattr(plans, "index_of", lambda device: -1)  # what torch says of a CPU's tensors
    found = Operators(compiled, standing_in)
    yield found
    compiled.slidesparse_hopper_operators_forget()
    found._library._destroy()  # type: ignore[no-untyped-call]


class Made:
    """A packed layer and what an operator wants of it."""

    def __init__(self, dtype: torch.dtype = INT8, out: torch.dtype = torch.bfloat16, phase: int = 0) -> None:
        generator = torch.Generator().manual_seed(1)
        weight = prune(torch.randint(-8, 9, (N, K), generator=generator).float(), PATTERN, phase=phase)
        self.packed = gemm.slide_and_pack("hopper", weight.to(dtype), PATTERN, phase, "layer")
        self.scale_w, layout = torch.rand(N, 1, generator=generator), PATTERN.layout(K, phase)
        windows = (layout.length, layout.phase, dtype, gemm.columns("hopper", layout.slided))
        self.after = (*windows, out, "hopper")

    def of(self, bias: Tensor | None = None) -> tuple[Any, ...]:
        return (self.packed, self.scale_w, bias, *self.after)


def tokens(m: int, k: int = K, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m + k)).to(dtype)


def cases(m: int, dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, tuple[Any, ...]]]:
    """Operators and what comes before the layer's arguments; rows with gaps among them."""
    x, both, norm = tokens(m, K, dtype), tokens(m, 2 * K, dtype), tokens(1, K, dtype)[0]
    return [
        ("linear", (x,)),
        ("linear", (both[:, 7 : 7 + K],)),
        ("rms_norm_linear", (x, norm, 1e-5)),
        ("rms_norm_linear", (x, norm, 1e-3)),
        ("add_rms_norm_linear", (x, both[:, :K], norm, 1e-5)),
        ("silu_mul_linear", (both,)),
    ]


def outputs_of(found: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_the_second_call_does_without_python(operators: Operators, dtype: torch.dtype) -> None:
    """Every operator, with a bias and without, in the types that layers have; the same bits, and so for other m."""
    for source, out in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float16),
    ):
        made = Made(dtype, out, phase=3)
        for m in (1, 3, 40, 130):
            for bias in (None, torch.randn(N).to(out), torch.randn(N)):
                seen: set[tuple[Any, ...]] = set()
                for name, before in cases(m, source):
                    kind = name, before[2:] if name == "rms_norm_linear" else ()
                    operators.in_python = 0
                    found = outputs_of(getattr(operators, name)(*before, *made.of(bias)))
                    again = outputs_of(getattr(operators, name)(*before, *made.of(bias)))
                    assert operators.in_python == (kind not in seen)
                    seen.add(kind)
                    wanted = outputs_of(getattr(operators, name + "_by_python")(*before, *made.of(bias)))
                    for one, two, three in zip(found, again, wanted, strict=True):
                        assert bool(three.any())
                        assert torch.equal(one, three)
                        assert torch.equal(two, three)
                        assert (two.dtype, two.shape, two.stride()) == (
                            three.dtype,
                            three.shape,
                            three.stride(),
                        )


def test_what_a_layer_is_looked_up_by(operators: Operators) -> None:
    """A kind of layer that differs in anything goes through Python once; numbers of tokens of one bucket share it."""
    made = Made()
    operators.linear(tokens(40), *made.of())
    for m in range(1, 300):
        operators.in_python = 0
        operators.linear(tokens(m), *made.of())
        new = all(planned_rows(other) != planned_rows(m) for other in (40, *range(1, m)))
        assert operators.in_python == new, m
    others = (Made(phase=1), Made(FP8), Made(out=torch.float16))
    for other in others:
        for expected in (1, 0):
            operators.in_python = 0
            operators.linear(tokens(40), *other.of())
            assert operators.in_python == expected
    for bias in (torch.randn(N), torch.randn(N).bfloat16()):
        for expected in (1, 0):
            operators.in_python = 0
            operators.linear(tokens(40), *made.of(bias))
            assert operators.in_python == expected


def test_what_only_python_takes(operators: Operators) -> None:
    """No tokens, columns that are not next to each other, a norm of another type; and errors in its words."""
    made, x = Made(), tokens(5)
    norm = tokens(1)[0]
    for _ in range(2):
        operators.linear(x, *made.of())
        operators.rms_norm_linear(x, norm, 1e-5, *made.of())
        operators.add_rms_norm_linear(x, x, norm, 1e-5, *made.of())
    expected = operators.linear(x, *made.of())
    operators.in_python = 0
    assert torch.equal(operators.linear(x.t().contiguous().t(), *made.of()), expected)
    assert operators.linear(x[:0], *made.of()).shape == (0, N)
    assert operators.in_python == 2
    wrong: list[tuple[str, tuple[Any, ...], str]] = [
        ("linear", (x, made.packed[:-5120], made.scale_w, None, *made.after), "weight"),
        ("rms_norm_linear", (x, norm[1:], 1e-5, *made.of()), "norm's weight has shape"),
        ("add_rms_norm_linear", (x, x.half(), norm, 1e-5, *made.of()), "the residual is torch.float16"),
        ("add_rms_norm_linear", (x, x[:4], norm, 1e-5, *made.of()), "the residual is torch.bfloat16"),
        ("silu_mul_linear", (tokens(5, 2 * K - 1), *made.of()), "of gates and values there must be as many"),
    ]
    for name, arguments, words in wrong:
        with pytest.raises(RuntimeError, match=words) as error:
            getattr(operators, name)(*arguments)
        assert not isinstance(error.value, LibraryError)
        with pytest.raises(LibraryError, match=words), hopper_operators.own_errors():
            getattr(operators, name)(*arguments)
    with pytest.raises(RuntimeError, match="another") as error, hopper_operators.own_errors():
        raise RuntimeError("another, not an operator's")
    assert type(error.value) is RuntimeError
    operators.standing_in.error = b"the kernels refused"
    with pytest.raises(RuntimeError, match="the kernels refused, by configuration"):
        operators.linear(x, *made.of())
    operators.standing_in.error = None
    assert torch.equal(operators.linear(x, *made.of()), expected)


def test_where_torch_fails_python_tells(operators: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as of memory: in C++ torch gives a number and no words.  Python may also find what C++ did not."""
    made, x = Made(), tokens(5)
    expected = [operators.linear(x, *made.of()) for _ in range(2)][1]
    assert bool(expected.any())
    operators.memory, operators.in_python = False, 0
    assert torch.equal(operators.linear(x, *made.of()), expected)
    assert operators.in_python == 1

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.62 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(PROVIDER, "linear", out_of_memory)
        with pytest.raises(RuntimeError, match=r"Tried to allocate 4\.62 GiB"):
            operators.linear(x, *made.of())
        with pytest.raises(torch.OutOfMemoryError), hopper_operators.own_errors():
            operators.linear(x, *made.of())
    operators.memory, operators.in_python = True, 0
    assert torch.equal(operators.linear(x, *made.of()), expected)
    assert operators.in_python == 0


def test_streamed_layers_get_the_workspace_of_their_stream(
    operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call, in Python, asks for one; C++ uses that which it was told of."""
    config = hopper_configs.parse("stream:2x64/1/1")
    monkeypatch.setattr(hopper_configs, "candidates", lambda *_: [config])
    made, x = Made(), tokens(64)
    monkeypatch.setattr(hopper_plans, "workspace", lambda index, stream: 1 << 21)
    for expected in (1, 0):
        operators.in_python = 0
        operators.linear(x, *made.of())
        assert operators.in_python == expected
    assert operators.standing_in.workspaces == [1 << 21, WORKSPACE]


def test_a_profiled_process_times_every_layer(operators: Operators) -> None:
    """So C++ forgets what it knew, and learns nothing."""
    made, x = Made(), tokens(5)
    operators.linear(x, *made.of())
    profiling.enable()
    try:
        operators.in_python = 0
        for _ in range(3):
            operators.linear(x, *made.of())
        assert operators.in_python == 3
    finally:
        profiling.disable()


def test_tensors_go_when_nobody_holds_them(operators: Operators) -> None:
    """Arguments and outputs, of calls that C++ runs and of those that go on to Python."""
    made = Made()
    for _ in range(2):
        for number in range(len(cases(40))):
            name, before = cases(40)[number]
            bias = torch.randn(N)
            found = outputs_of(getattr(operators, name)(*before, *made.of(bias)))
            tensors = [argument for argument in (*before, bias, *found) if isinstance(argument, Tensor)]
            storages = [tensor.untyped_storage() for tensor in tensors]
            del found, before, bias, tensors
            assert [torch._C._storage_Use_Count(storage._cdata) for storage in storages] == [1] * len(
                storages
            )


def test_an_older_torch_keeps_pythons_operators(
    compiled: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = hopper_operators._functions()
    monkeypatch.setattr(hopper_operators, "_native", None)
    monkeypatch.setattr(hopper_operators, "_functions", lambda: {**found, "torch_call_dispatcher": 0})
    with caplog.at_level("INFO", "slidesparse"):
        hopper_operators.install(compiled, SPACE, "CPU")
    assert hopper_operators._native is None
    assert "has no torch_call_dispatcher: whole layers are called through Python" in caplog.text


def test_kernels_that_want_other_functions_are_refused(
    compiled: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = hopper_operators._functions()
    found.pop("aoti_torch_dtype_uint8")
    monkeypatch.setattr(hopper_operators, "_native", None)
    monkeypatch.setattr(hopper_operators, "_functions", lambda: found)
    with pytest.raises(LibraryError, match="14 functions of torch, 15 are wanted; reinstall slidesparse"):
        hopper_operators.install(compiled, SPACE, "CPU")
    assert hopper_operators._native is None
