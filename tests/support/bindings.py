"""The two extensions, compiled as on users' machines but with fake CUDA headers, and fake libraries that log calls.

The fixtures are in binding_fixtures.py.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from slidesparse.build import compile, find

FAKES = Path(__file__).parent / "fake_cuda"
NAMES = ("cusparselt", "cublaslt")
LACKS = {"cusparselt": "cusparseLtMatmulPlanDestroy", "cublaslt": "cublasLtMatmulAlgoCheck"}
TYPES = {"fp32": 0, "fp16": 2, "int8": 3, "int32": 10, "bf16": 14, "fp8": 28}
WHAT = "int8 [32, 96] @ [64, 96].T"
ADDRESSES = {"activations": 0x1000, "weight": 0x2000, "out": 0x3000, "workspace": 0x4000, "stream": 0x50}
Call = dict[str, Any]  # "name" is the function's name; the other keys are its arguments


class Native:
    """A binding with its fake library loaded; both bindings have this interface."""

    def __init__(self, name: str, extension: Path, library: Path) -> None:
        loader = importlib.machinery.ExtensionFileLoader(f"_{name}", str(extension))
        spec = importlib.util.spec_from_file_location(loader.name, loader.path, loader=loader)
        assert spec is not None
        self.module: ModuleType = importlib.util.module_from_spec(spec)
        loader.exec_module(self.module)
        self.module.load(str(library))
        self.name, self.extension, self.library = name, extension, library
        self.matmul = {"cusparselt": "cusparseLtMatmul", "cublaslt": "cublasLtMatmul"}[name]
        self._fake = ctypes.CDLL(str(library))
        self._fake.fake_log.restype = ctypes.c_char_p

    def calls(self, *names: str) -> list[Call]:
        """Return the calls since the last query, all valid; with ``names``, only the calls of these functions."""
        calls = []
        for line in self._fake.fake_log().decode().splitlines():
            assert "WRONG" not in line
            name, *fields = line.split()
            pairs = (field.split("=") for field in fields)
            calls.append({"name": name, **{key: int(value) for key, value in pairs}})
        return [call for call in calls if not names or call["name"] in names]

    def alive(self) -> int:
        """Number of the library's objects that are alive."""
        gc.collect()  # exceptions keep their frames alive
        return int(self._fake.fake_alive())

    def set(self, **settings: int) -> None:
        """Set the library's behavior, for example algorithms=8.

        ``X_fails=n`` makes call n of X, counted from 0, fail; ``X_sleeps`` is in milliseconds.
        """
        for key, value in settings.items():
            self._fake.fake_set(key.replace("_", " ").encode(), ctypes.c_int64(value))

    def forget(self) -> None:
        self._fake.fake_forget()
        self.set(algorithms=8)

    def plan(self, handle: Any = ..., layout: tuple[bool, ...] = (True, True, True), **overrides: Any) -> Any:
        """A plan of an int8 product with every optional part; ``overrides`` replace its arguments."""
        module = self.module
        values: dict[str, Any] = {"n": 64, "k": 96, "m": 32, "what": WHAT, "layout": module.Layout(*layout)}
        values |= {"operand_type": TYPES["int8"], "compute_type": module.COMPUTE["int8"]}
        values["output_type"] = TYPES["bf16"]
        if self.name == "cusparselt":
            values |= {"algorithm": module.Algorithm(3, 2, 1)}
        else:
            values["scale_type"] = TYPES["fp32"]
            values["epilogue"] = module.Epilogue(True, TYPES["bf16"], True)
        return module.Plan(module.Handle() if handle is ... else handle, **values | overrides)

    def ready(self, handle: Any = ..., **overrides: Any) -> Any:
        """A plan whose algorithm is chosen."""
        plan = self.plan(handle, **overrides)
        if self.name == "cublaslt":
            plan.choose(plan.heuristics(1, 1 << 30)[0])
        return plan

    def run(self, plan: Any, **overrides: int) -> None:
        dense = self.name == "cublaslt"
        scales = {"weight_scales": 0x6000 * dense, "token_scales": 0x7000 * dense, "bias": 0x8000 * dense}
        plan.run(**ADDRESSES | scales | overrides)


def build_fake(name: str, library: Path, *options: str) -> Path:
    """Compile a fake library."""
    command = [*find.compiler(), "-std=c++17", "-fPIC", "-shared", "-pthread", f"-I{FAKES / 'include'}"]
    compile.compile_with([*command, *options, str(FAKES / f"{name}.cpp"), "-o", str(library)])
    return library
