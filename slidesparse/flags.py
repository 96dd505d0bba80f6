"""The environment flags, read strictly: nonsense is an error, never a default.  Standard library only.

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

import os
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

SPARSE, DENSE = "sparse", "dense"
AUTO, SPARSE_BACKENDS = "auto", ("cusparselt", "hopper")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class FlagError(ValueError):
    """An environment flag with a value that means nothing, or flags that contradict each other."""


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
        """Read the flags.  Raises FlagError naming the variable, its value and the values allowed."""
        environ = os.environ if environ is None else environ
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
