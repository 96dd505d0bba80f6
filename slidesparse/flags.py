"""The environment flags, read strictly: nonsense is an error, never a default, and so is a mistyped name.

Standard library only.

==========================  =========================================================================================
``USE_CUSPARSELT=1``        the sparse path: quant_slide -> 2:4 GEMM -> dequantize
``USE_CUBLASLT=1``          the dense path through the same steps, the papers' baseline
``DISABLE_SLIDESPARSE=1``   the plugin does nothing: vLLM's own kernels
``SPARSITY=2_8`` / ``6:8``  the pattern; needed only when the checkpoint does not carry it
``SLIDESPARSE_BACKEND``     of the sparse path: ``auto`` (default: the faster of the GPU), ``cusparselt``, ``hopper``
``SLIDESPARSE_KEEP_DENSE``  ``1``: layers keep their dense weight too, and use it where it is faster
``SLIDESPARSE_FUSE``        ``1`` or ``0``: norms and activations in one kernel with quantization, in compiled models
``SLIDESPARSE_PROFILE=1``   times of layers, printed when the process ends (`slidesparse.profiling`)
==========================  =========================================================================================
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from slidesparse.pattern import PatternError, SlidePattern

USE_CUSPARSELT = "USE_CUSPARSELT"
USE_CUBLASLT = "USE_CUBLASLT"
DISABLE = "DISABLE_SLIDESPARSE"
SPARSITY = "SPARSITY"
PROFILE = "SLIDESPARSE_PROFILE"
BACKEND = "SLIDESPARSE_BACKEND"
KEEP_DENSE = "SLIDESPARSE_KEEP_DENSE"
FUSE = "SLIDESPARSE_FUSE"

PREFIX = "SLIDESPARSE_"
# All that begins with PREFIX and is read: above, by nvcc.py, toolchain.py and bench/e2e_worker.py.
KNOWN = (
    *(BACKEND, FUSE, KEEP_DENSE, PROFILE),
    *("SLIDESPARSE_CACHE", "SLIDESPARSE_CUBLASLT", "SLIDESPARSE_CUDA_INCLUDE", "SLIDESPARSE_CUSPARSELT"),
    *("SLIDESPARSE_NVCC", "SLIDESPARSE_STEP_FILE"),
)
# What Kubernetes sets in every container beside a service whose name begins with slidesparse.
_OF_A_SERVICE = re.compile(
    r"SLIDESPARSE_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_[A-Z]+(_[A-Z]+)?)?)"
)
MISTYPED = 2  # edits between a name without PREFIX and the flag that it must have been meant for,
OTHERS = ("USE_CUBLAS", "USE_CUSPARSE")  # but for what other projects are built with

SPARSE, DENSE = "sparse", "dense"
AUTO, SPARSE_BACKENDS = "auto", ("cusparselt", "hopper")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class FlagError(ValueError):
    """An environment flag with a name or a value that means nothing, or flags that contradict each other."""


@dataclass(frozen=True)
class Flags:
    """What the environment asks for."""

    path: str | None = None  # "sparse", "dense", or None: let the checkpoint decide
    pattern: SlidePattern | None = None
    disabled: bool = False
    profile: bool = False
    backend: str | None = None  # of SPARSE_BACKENDS, or None: the best of the machine
    keep_dense: bool = False
    fuse: bool | None = None  # None: as the plugin does by default

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Flags:
        """Read the flags.  Raises FlagError naming the variable, what was found and what is allowed."""
        environ = os.environ if environ is None else environ
        for name in environ:
            _require_known(name)
        sparse, dense = _switch(environ, USE_CUSPARSELT), _switch(environ, USE_CUBLASLT)
        if sparse and dense:
            raise FlagError(
                f"{USE_CUSPARSELT} and {USE_CUBLASLT} are both set; they choose one path, so unset one"
            )
        pattern = None
        if environ.get(SPARSITY):
            try:
                pattern = SlidePattern.parse(environ[SPARSITY])
            except PatternError as error:
                raise FlagError(f"environment variable {SPARSITY}: {error}") from error
        path = SPARSE if sparse else DENSE if dense else None
        backend = _backend(environ)
        if backend and dense:
            raise FlagError(
                f"{USE_CUBLASLT} asks for the dense path, {BACKEND}={backend} for one of the sparse path; unset one"
            )
        keep_dense = _switch(environ, KEEP_DENSE)
        if keep_dense and dense:
            raise FlagError(
                f"{KEEP_DENSE} keeps the dense weight beside a sparse one, {USE_CUBLASLT} has no sparse one; unset one"
            )
        return cls(
            path,
            pattern,
            disabled=_switch(environ, DISABLE),
            profile=_switch(environ, PROFILE),
            backend=backend,
            keep_dense=keep_dense,
            fuse=_switch(environ, FUSE) if environ.get(FUSE, "").strip() else None,
        )


def _require_known(name: str) -> None:
    if name.startswith(PREFIX):
        known = name in KNOWN or _OF_A_SERVICE.fullmatch(name)
        near = [] if known else difflib.get_close_matches(name, KNOWN, n=1, cutoff=0)
    else:
        flags = () if name in OTHERS else (USE_CUSPARSELT, USE_CUBLASLT, DISABLE)
        near = [flag for flag in flags if 0 < _edits(name, flag) <= MISTYPED]
    if near:
        raise FlagError(
            f"environment variable {name} is not known; did you mean {near[0]}? Rename or unset it"
        )


def _edits(a: str, b: str) -> int:
    """Characters to insert, delete or replace to make one of the other; more than MISTYPED for what is far longer."""
    if abs(len(a) - len(b)) > MISTYPED:
        return MISTYPED + 1
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def _backend(environ: Mapping[str, str]) -> str | None:
    value = environ.get(BACKEND, "").strip().lower()
    if value in SPARSE_BACKENDS:
        return value
    if value in ("", AUTO):
        return None
    raise FlagError(
        f"environment variable {BACKEND}={environ[BACKEND]!r}: use {AUTO}, {' or '.join(SPARSE_BACKENDS)}"
    )


def _switch(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise FlagError(f"environment variable {name}={environ[name]!r}: use 1 or 0")
