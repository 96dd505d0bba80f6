"""GEMM backends, one per file or folder, behind one interface: `slidesparse.gemm.backend.Backend`.

This file is the registry, which needs the standard library only.  To add a backend, write its module and add it to
`REGISTRY`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from slidesparse.errors import EnvironmentFault

if TYPE_CHECKING:
    import torch

    from slidesparse.gemm.backend import Backend

SPARSE, DENSE = "sparse", "dense"  # the paths of serving

# name -> (the path that it serves, or None for both; its class), in order of preference
REGISTRY: dict[str, tuple[str | None, str]] = {
    "hopper": (SPARSE, "slidesparse.gemm.hopper.backend:Hopper"),
    "cusparselt": (SPARSE, "slidesparse.gemm.cusparselt:CuSparseLt"),
    "cublaslt": (DENSE, "slidesparse.gemm.cublaslt:CublasLt"),
    "reference": (None, "slidesparse.gemm.reference:Reference"),
}


class BackendError(EnvironmentFault, RuntimeError):
    """The requested backend cannot run here; the message says what is missing and how to fix it."""


def names(path: str) -> tuple[str, ...]:
    """Return the names of the backends that serve ``path``, the preferred one first."""
    return tuple(name for name, (serves, _) in REGISTRY.items() if serves in (path, None))


@cache
def get(name: str) -> Backend:
    """Return the backend called ``name``.  Raises BackendError for a name that is not registered."""
    if name not in REGISTRY:
        raise BackendError(f"backend {name!r} is not known; the backends are {', '.join(REGISTRY)}")
    module, attribute = REGISTRY[name][1].split(":")
    backend: Backend = getattr(import_module(module), attribute)()
    return backend


def require(name: str, device: torch.device) -> Backend:
    """Return the backend called ``name``.  Raises BackendError with the reason when it cannot run on ``device``."""
    backend = get(name)
    reason = backend.unusable(device)
    if reason:
        raise BackendError(f"backend {name} cannot run on {device}: {reason}")
    return backend


def require_output(name: str, dtype: torch.dtype) -> None:
    """Raise BackendError when backend ``name`` cannot write outputs of the model's ``dtype``."""
    outputs = get(name).outputs
    if dtype not in outputs:
        raise BackendError(
            f"backend {name} writes {', '.join(map(str, outputs))}, this model computes in {dtype}; "
            "serve it with --dtype bfloat16 or float16"
        )


def choose(path: str, device: torch.device, capability: tuple[int, int] | None = None) -> tuple[str, str]:
    """Return the preferred backend for ``path`` on ``device``, and the reason, as text for the log.

    Args:
        path: SPARSE or DENSE.
        device: where layers will run.
        capability: the GPU's compute capability, if CUDA must not be initialized to query it.

    Raises BackendError with all reasons when none can run.
    """
    missed: list[str] = []
    for name in names(path):
        backend = get(name)
        if backend.device_type != device.type:
            continue
        reason = backend.unusable(device, capability)
        if reason is None:
            where = "this machine has no CUDA device"
            if device.type == "cuda":
                number = f" of compute capability {capability[0]}.{capability[1]}" if capability else ""
                where = f"CUDA device{number}"
            return name, "; ".join([where, *missed])
        missed.append(f"{name} cannot run: {' '.join(reason.split())}")
    raise BackendError(f"no backend serves the {path} path on {device}: {'; '.join(missed)}")
