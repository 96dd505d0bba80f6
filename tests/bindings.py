"""The two extensions, built as users' machines build them but against headers of our own, and libraries that log calls.

What tests of csrc/ share; the fixtures are in binding_fixtures.py.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import importlib.util
import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from slidesparse import toolchain

FAKES = Path(__file__).parent / "fake_cuda"
NAMES = ("cusparselt", "cublaslt")
NOT_SUPPORTED = {"cusparselt": 10, "cublaslt": 15}
N, K, M = 64, 96, 32
LACKS = {"cusparselt": "cusparseLtMatmulPlanDestroy", "cublaslt": "cublasLtMatmulAlgoCheck"}
WHAT = "int8 [32, 96] @ [64, 96].T"


@dataclass(frozen=True)
class Call:
    """A line of the log: ``name key=value ...``."""

    name: str
    values: dict[str, str]

    def picked(self, *keys: str) -> tuple[int, ...]:
        return tuple(int(self.values[key]) for key in keys)


class Fake:
    """A fake library, as its functions ``fake_*`` control it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.fake_log.restype = self._library.fake_alive.restype = ctypes.c_char_p

    def calls(self, *names: str) -> list[Call]:
        """The calls since the last question, of these functions only if any are named; none may be a wrong one."""
        lines = self._library.fake_log().decode().splitlines()
        wrong = [line for line in lines if line.startswith("COMPLAINT")]
        assert not wrong, wrong
        split = (line.split() for line in lines)
        calls = [Call(name, dict(word.split("=", 1) for word in words)) for name, *words in split]
        return [call for call in calls if not names or call.name in names]

    def names(self) -> list[str]:
        return [call.name for call in self.calls()]

    def complaints(self) -> list[str]:
        lines = self._library.fake_log().decode().splitlines()
        return [line for line in lines if line.startswith("COMPLAINT")]

    def alive(self) -> list[str]:
        """Such as ["handle1", "matrix2"]."""
        if self._library.fake_alive():
            gc.collect()  # errors hold their frames
        return sorted(self._library.fake_alive().decode().split())

    def plan(self, name: str, status: int = 0, skip: int = 0, milliseconds: int = 0) -> None:
        """Let the call of ``name`` after ``skip`` others take so long, and fail unless the status is 0."""
        self._library.fake_plan(name.encode(), skip, status, milliseconds)

    def planned(self) -> int:
        return int(self._library.fake_planned())

    def set(self, **settings: int) -> None:
        for name, value in settings.items():
            self._library.fake_set(name.encode(), ctypes.c_int64(value))

    def forget(self) -> None:
        self._library.fake_forget()


@dataclass(frozen=True)
class Built:
    """Where the session's files are."""

    extensions: dict[str, Path]
    libraries: dict[str, Path]
    lacking: dict[str, Path]  # libraries without one function, LACKS
    cache: Path


def build_fake(name: str, target: Path, *options: str) -> None:
    target.parent.mkdir(exist_ok=True)
    source = [str(FAKES / f"{name}.cpp"), "-I", str(FAKES / "include"), "-o", str(target)]
    words = [*toolchain.compiler(), "-std=c++17", "-O0", "-fPIC", "-shared", "-pthread", *options, *source]
    toolchain.compile_with(words)


_copies = itertools.count()


def fresh(built: Built, name: str, folder: Path) -> ModuleType:
    """The extension with nothing loaded: a copy of the file under a name of its own.

    The loader would take the same file for one it has, pybind11 another file for a module that it has of that name.
    """
    copy = f"copy{next(_copies)}"
    path = folder / copy / built.extensions[name].name
    path.parent.mkdir()
    shutil.copy(built.extensions[name], path)
    loader = importlib.machinery.ExtensionFileLoader(f"{copy}._{name}", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, str(path), loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Native:
    """A binding with its fake library loaded, and what a test asks of both bindings alike."""

    def __init__(self, name: str, module: ModuleType, fake: Fake) -> None:
        self.name, self.module, self.fake = name, module, fake
        self.status = NOT_SUPPORTED[name]

    def arguments(self, layout: tuple[bool, ...] = (True, True, True), **other: Any) -> dict[str, Any]:
        """Of a plan of an int8 product, with every attribute set that is optional unless ``other`` says otherwise."""
        module = self.module
        values: dict[str, Any] = {"n": N, "k": K, "m": M, "what": WHAT}
        values |= {"operand_type": module.TYPES["int8"], "compute_type": module.COMPUTE["int8"]}
        if self.name == "cusparselt":
            values |= {"output_type": module.TYPES["bf16"], "scale_rows": True}
            values["algorithm"] = module.Algorithm(3, 2, 1, 4)
        else:
            values |= {"output_type": module.TYPES["bf16"], "scale_type": module.TYPES["fp32"]}
            values["epilogue"] = module.Epilogue(True, module.TYPES["bf16"], True)
        return values | {"layout": module.Layout(*layout)} | other

    def plan(self, handle: Any = None, **other: Any) -> Any:
        """A plan by `arguments`, with a handle of its own unless one is given."""
        return self.module.Plan(handle or self.module.Handle(), **self.arguments(**other))

    def ready(self, *arguments: Any, **other: Any) -> Any:
        """A plan with an algorithm."""
        plan = self.plan(*arguments, **other)
        if self.name == "cublaslt":
            plan.choose(plan.heuristics(1, 1 << 30)[0])
        return plan

    def addresses(self) -> dict[str, int]:
        """What `ready` plans are run with."""
        found = {"activations": 0x1000, "weight": 0x2000, "out": 0x3000, "workspace": 0x4000, "stream": 0x50}
        dense = self.name == "cublaslt"
        return found | {
            "weight_scales": 0x6000,
            "token_scales": 0x7000 * dense,
            "bias": 0x8000 * dense,
        }

    def run(self, plan: Any, **other: int) -> None:
        plan.run(**self.addresses() | other)
