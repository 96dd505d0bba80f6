"""Decide, once and in the front-end process, what a model is served with, and stamp it into its config.

vLLM hashes the model's ``quantization_config`` into the key of its compile cache, and hands it to worker processes
that may not see our environment.  So everything that changes the graph is written there, and read from there.  What the
key lacks for models in a model, and what only the weights decide: `slidesparse.vllm_patch.fusion.depends_on`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

from slidesparse.vllm_patch import compat

from slidesparse import __version__, nvcc
from slidesparse.backends import HOPPER_CAPABILITY
from slidesparse.flags import (
    BACKEND,
    DENSE,
    FUSE,
    KEEP_DENSE,
    SPARSE,
    SPARSITY,
    USE_CUBLASLT,
    USE_CUSPARSELT,
    Flags,
)
from slidesparse.metadata import KEY, Metadata
from slidesparse.pattern import SlidePattern

STAMP = "slidesparse_serving"  # in quantization_config, in memory only
FUSING = ("hopper",)  # backends that fuse when no flag chooses: where it was measured to be faster


class ResolveError(ValueError):
    """Flags and checkpoint that do not go together."""


@dataclass(frozen=True)
class Resolution:
    """What the layers of one model are served with."""

    pattern: str  # "6:8"
    path: str  # "sparse" or "dense"
    asked: bool  # whether a flag asks for the path
    backend: str  # a name of slidesparse.gemm.PROVIDERS
    reason: str  # why that backend, in words
    layout: str  # of the checkpoint: "dense" or "slided"
    abi: int
    plugin: str  # version
    profile: bool  # whether to time layers
    keep_dense: bool  # whether layers hold their dense weight, too
    fuse: bool  # whether to compute norms and activations together with quantization, in compiled models

    @property
    def slide_pattern(self) -> SlidePattern:
        """The pattern, parsed."""
        return SlidePattern.parse(self.pattern)


def wanted(quantization_config: MutableMapping[str, Any], flags: Flags) -> bool:
    """Whether the plugin takes this checkpoint: its metadata says so, or a flag does."""
    return KEY in quantization_config or flags.path is not None


def resolve(quantization_config: MutableMapping[str, Any], flags: Flags, on_cuda: bool) -> Resolution:
    """The resolution stamped into ``quantization_config``, made and stamped first when there is none.

    Raises ResolveError when the flags contradict the checkpoint or leave the pattern open.
    """
    if STAMP in quantization_config:
        return Resolution(**quantization_config[STAMP])
    metadata = Metadata.of_config(quantization_config)
    path = flags.path or SPARSE
    pattern = _pattern(metadata, flags, path)
    layout = metadata.layout if metadata else "dense"
    if path == DENSE and layout == "slided":
        raise ResolveError(
            f"{USE_CUBLASLT}=1 runs dense weights, but this checkpoint holds slided ones; "
            f"use {USE_CUSPARSELT}=1, or convert with --layout dense"
        )
    if flags.keep_dense and layout == "slided":
        raise ResolveError(
            f"{KEEP_DENSE}=1 keeps dense weights, but this checkpoint holds slided ones; "
            "unset it, or convert with --layout dense"
        )
    if flags.fuse and compat.batch_invariant():
        raise ResolveError(
            f"{FUSE}=1 computes norms in an order that depends on the number of tokens, but VLLM_BATCH_INVARIANT is "
            "set; unset one of them"
        )
    backend, reason = _backend(path, on_cuda, flags.backend)
    from slidesparse.ops import ABI  # late: brings torch in

    made = Resolution(
        pattern=pattern.ratio,
        path=path,
        asked=flags.path is not None,
        backend=backend,
        reason=reason,
        layout=layout,
        abi=ABI,
        plugin=__version__,
        profile=flags.profile,
        keep_dense=flags.keep_dense and path == SPARSE,
        fuse=backend in FUSING and not compat.batch_invariant() if flags.fuse is None else flags.fuse,
    )
    quantization_config[STAMP] = asdict(made)
    return made


def _pattern(metadata: Metadata | None, flags: Flags, path: str) -> SlidePattern:
    if metadata and flags.pattern and metadata.pattern != flags.pattern:
        raise ResolveError(
            f"environment variable {SPARSITY} asks for {flags.pattern}, but the checkpoint was pruned to "
            f"{metadata.pattern}; unset {SPARSITY} or set {SPARSITY}={metadata.pattern.flag}"
        )
    pattern = flags.pattern or (metadata.pattern if metadata else None)
    if pattern:
        return pattern
    if path == DENSE:
        return SlidePattern(4)  # nothing is slid; recorded only so that the stamp is whole
    asks, draft = "--quantization slidesparse", ""
    if flags.path:
        asks = f"{USE_CUSPARSELT}=1"
        draft = (
            f". If this is a draft model beside a converted one, unset {USE_CUSPARSELT}: that needs no flag"
        )
    raise ResolveError(
        f"{asks} needs to know the sparsity pattern: this checkpoint does not carry one, so set "
        f"{SPARSITY} (2_8 for 6:8), or convert it: slidesparse convert SRC OUT --sparsity 6:8{draft}"
    )


def _backend(path: str, on_cuda: bool, wanted: str | None) -> tuple[str, str]:
    if not on_cuda:
        if wanted:
            raise ResolveError(
                f"{BACKEND}={wanted} needs an NVIDIA GPU, vLLM finds none here; unset it: the reference backend runs"
            )
        return "reference", "no CUDA device here, so exact arithmetic in torch"
    if path == DENSE:
        return "cublaslt", f"CUDA device, {USE_CUBLASLT}=1"
    return (wanted, f"CUDA device, {BACKEND}={wanted}") if wanted else _preferred(_capability())


def _preferred(capability: tuple[int, int] | None) -> tuple[str, str]:
    """The sparse backend of a GPU.

    Our kernels are compiled now if they were not: once for all workers, before weights are read.  Where they cannot be,
    the reason says why.
    """
    if capability != HOPPER_CAPABILITY:
        return "cusparselt", "CUDA device"
    try:
        nvcc.library()
    except nvcc.ToolchainError as error:
        return "cusparselt", f"CUDA device; hopper would be faster, but {' '.join(str(error).split())}"
    return "hopper", "CUDA device of compute capability 9.0"


def _capability() -> tuple[int, int] | None:
    """Of the GPU, None where vLLM does not know; without initializing CUDA."""
    from vllm.platforms import current_platform  # late: the rest of this file needs no vLLM

    found = current_platform.get_device_capability()
    return None if found is None else (found.major, found.minor)
