"""The environment flags.  Invalid values are errors; an unknown name of ours is a warning where flags are read.

They are read only for a checkpoint that the plugin may serve, because other programs and other models may use
variables with these names.  Standard library only.

==========================  =========================================================================================
``SLIDESPARSE=auto``        the default: converted checkpoints, and other W8A8 ones where that is faster
``SLIDESPARSE=require``     the sparse path, quant_slide -> 2:4 GEMM -> dequantize, or an error: ``USE_CUSPARSELT=1``
``SLIDESPARSE=off``         the plugin does nothing: vLLM's own kernels: ``DISABLE_SLIDESPARSE=1``
``USE_CUBLASLT=1``          the dense path through the same steps, the papers' baseline
``SPARSITY=2_8`` / ``6:8``  with require: the pattern that the checkpoint does not carry; by default ``dense``
``SLIDESPARSE_BACKEND``     of the sparse path: ``auto`` (default: the preferred one of the machine) or a name
``SLIDESPARSE_FUSE``        ``1`` or ``0``: norms and activations in one kernel with quantization, in compiled models
``SLIDESPARSE_PROFILE=1``   times of layers, printed when the process ends (`slidesparse.profiling`)
==========================  =========================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from slidesparse import gemm
from slidesparse.errors import SlideSparseError
from slidesparse.gemm import DENSE, SPARSE
from slidesparse.pattern import Pattern, PatternError, parse_pattern

MODE = "SLIDESPARSE"
USE_CUSPARSELT = "USE_CUSPARSELT"
USE_CUBLASLT = "USE_CUBLASLT"
DISABLE = "DISABLE_SLIDESPARSE"
SPARSITY = "SPARSITY"
PROFILE = "SLIDESPARSE_PROFILE"
BACKEND = "SLIDESPARSE_BACKEND"
FUSE = "SLIDESPARSE_FUSE"

REQUESTS = (USE_CUSPARSELT, USE_CUBLASLT, SPARSITY, BACKEND, FUSE, PROFILE)  # of a server
PREFIX = "SLIDESPARSE_"
# All variables with PREFIX that are read, here and in build/
KNOWN = (BACKEND, FUSE, PROFILE, "SLIDESPARSE_CACHE", "SLIDESPARSE_CUSPARSELT", "SLIDESPARSE_NVCC")

OFF, AUTO, REQUIRE = "off", "auto", "require"
REQUIRED = f"{MODE}={REQUIRE}"
_TRUE, _FALSE = ("1", "true", "yes"), ("", "0", "false", "no", "off")  # not ON, a build option of torch


class FlagError(SlideSparseError, ValueError):
    """An environment flag has an invalid value, or flags contradict each other."""


@dataclass(frozen=True)
class Flags:
    """The choices made by environment variables."""

    path: str | None = None  # "sparse", "dense", or None: let the checkpoint decide
    pattern: Pattern | None = None
    profile: bool = False
    backend: str | None = None  # backend of the sparse path; None: the preferred one of the machine
    fuse: bool | None = None  # None: as the plugin does by default

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Flags:
        """Read the flags.  Raises FlagError naming the variable, what was found and what is allowed."""
        _switch(environ, DISABLE)  # `disabled` treats an unknown value as no
        if _word(environ, MODE) not in ("", OFF, AUTO, REQUIRE):
            raise FlagError(f"environment variable {MODE}={environ[MODE]!r}: use {OFF}, {AUTO} or {REQUIRE}")
        sparse = _switch(environ, USE_CUSPARSELT) or _word(environ, MODE) == REQUIRE
        dense = _switch(environ, USE_CUBLASLT)
        if sparse and dense:
            raise FlagError(
                f"{path_flag(environ)} and {USE_CUBLASLT} are both set, but they select different paths; unset one"
            )
        pattern = None
        if environ.get(SPARSITY, "").strip():
            try:
                pattern = parse_pattern(environ[SPARSITY])
            except PatternError as error:
                raise FlagError(f"environment variable {SPARSITY}: {error}") from error
        path = SPARSE if sparse else DENSE if dense else None
        backend, names = _word(environ, BACKEND) or AUTO, gemm.names(SPARSE)
        if backend not in (AUTO, *names):
            raise FlagError(
                f"environment variable {BACKEND}={environ[BACKEND]!r}: use {AUTO}, {' or '.join(names)}"
            )
        if backend != AUTO and dense:
            raise FlagError(
                f"{USE_CUBLASLT} selects the dense path, but {BACKEND}={backend} is a sparse backend; unset one of them"
            )
        return cls(
            path,
            pattern,
            profile=_switch(environ, PROFILE),
            backend=None if backend == AUTO else backend,
            fuse=_switch(environ, FUSE) if environ.get(FUSE, "").strip() else None,
        )


def disabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether SLIDESPARSE=off or DISABLE_SLIDESPARSE is set; never raises."""
    return _is_true(environ, DISABLE) or _word(environ, MODE) == OFF


def path_flag(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the flag that requests a SlideSparse path, such as ``USE_CUSPARSELT``, or None; never raises."""
    if _word(environ, MODE) == REQUIRE:
        return REQUIRED
    return next((name for name in (USE_CUSPARSELT, USE_CUBLASLT) if _is_true(environ, name)), None)


def active_names(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the flags that are set; never raises."""
    return [name for name in REQUESTS if _word(environ, name) not in _FALSE]


def is_flag(name: str) -> bool:
    """Return whether an environment variable is a flag of SlideSparse, or is named like one."""
    return name in (MODE, DISABLE, *REQUESTS) or name.startswith(PREFIX)


def unknown_names(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables that are named like ours but not read, mistyped ones or those of another program."""
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in KNOWN)


def _word(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip().lower()


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    return _word(environ, name) in _TRUE


def _switch(environ: Mapping[str, str], name: str) -> bool:
    if _is_true(environ, name):
        return True
    if _word(environ, name) in _FALSE:
        return False
    raise FlagError(f"environment variable {name}={environ[name]!r}: use 1 or 0")
