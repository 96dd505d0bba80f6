"""Decide, once and in the front-end process, what a model is served with, and stamp it into its config.

vLLM hashes the model's ``quantization_config`` into the key of its compile cache, and hands it to worker processes
that may not see our environment.  So everything that changes the graph is written there, and read from there.  What the
key lacks for models in a model, and what only the weights decide: `slidesparse.vllm_patch.fusion.depends_on`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from slidesparse.vllm_patch import compat

from slidesparse import __version__, gemm
from slidesparse.checkpoint.metadata import KEY, QUANT_METHOD, STAMP, Metadata, sparsity_of
from slidesparse.errors import SlideSparseError
from slidesparse.flags import (
    BACKEND,
    DENSE,
    FUSE,
    SPARSE,
    SPARSITY,
    USE_CUBLASLT,
    USE_CUSPARSELT,
    Flags,
)
from slidesparse.pattern import MixedPattern, SlidePattern, parse_pattern


class ResolveError(SlideSparseError, ValueError):
    """Flags and checkpoint that do not go together."""


@dataclass(frozen=True)
class Resolution:
    """How the layers of one model are served."""

    pattern: str  # "6:8", or "dense": blocks as they are
    path: str  # "sparse" or "dense"
    asked: bool  # whether a flag asks for the path
    backend: str  # a name of slidesparse.gemm.REGISTRY
    reason: str  # why that backend, in words
    layout: str  # of the checkpoint: "dense", "slided" or "packed"
    abi: int
    plugin: str  # version
    profile: bool  # whether to time layers
    fuse: bool  # whether to compute norms and activations together with quantization, in compiled models

    @property
    def parsed_pattern(self) -> SlidePattern | MixedPattern:
        """The pattern, parsed."""
        return parse_pattern(self.pattern)

    @classmethod
    def of_stamp(cls, stamp: Any) -> Resolution:
        """Read what `resolve` stamped.  Raises ResolveError for anything else."""
        known = {field.name: _TYPES[str(field.type)] for field in fields(cls)}
        if not isinstance(stamp, dict) or {name: type(value) for name, value in stamp.items()} != known:
            raise ResolveError(
                f"quantization_config.{STAMP} is no resolution of this slidesparse ({__version__}): remove it from "
                "config.json, and install the same slidesparse for all processes"
            )
        return cls(**stamp)


_TYPES = {"str": str, "bool": bool, "int": int}


def resolve(quantization_config: Mapping[str, Any], flags: Flags, on_cuda: bool) -> Resolution:
    """Decide how the layers of a checkpoint are served, whatever its config claims was decided before.

    Raises ResolveError when the flags contradict the checkpoint or leave the pattern open.
    """
    metadata = Metadata.of_config(quantization_config)
    if metadata is None and quantization_config.get("quant_method") == QUANT_METHOD:
        raise ResolveError(
            f"quantization_config names {QUANT_METHOD} as its method but lacks the block {KEY!r}, which says how "
            "weights are stored; fetch the checkpoint again, or convert the original model again"
        )
    path = flags.path or SPARSE
    stored = sparsity_of(quantization_config)
    pattern = _pattern(metadata, flags, path, stored[1] if stored else "")
    layout = metadata.layout if metadata else "packed" if stored else "dense"
    if path == DENSE and layout == "slided":
        raise ResolveError(
            f"{USE_CUBLASLT}=1 runs dense weights, but this checkpoint holds slided ones; "
            f"use {USE_CUSPARSELT}=1, or convert with --layout dense"
        )
    if flags.fuse and compat.batch_invariant():
        raise ResolveError(
            f"{FUSE}=1 computes norms in an order that depends on the number of tokens, but VLLM_BATCH_INVARIANT is "
            "set; unset one of them"
        )
    from slidesparse.ops import ABI  # late: brings torch in

    backend, reason = _backend(path, on_cuda, flags.backend)
    if isinstance(pattern, MixedPattern) and not gemm.get(backend).takes_dense:
        raise ResolveError(
            f"{SPARSITY}={pattern.flag} needs a backend that multiplies dense blocks, hopper (compute capability 9.0); "
            f"here {backend} is chosen: {reason}. Unset {USE_CUSPARSELT} for vLLM's own kernels"
        )
    fuses = gemm.get(backend).fuses and on_cuda and not compat.batch_invariant()
    return Resolution(
        pattern=pattern.ratio,
        path=path,
        asked=flags.path is not None,
        backend=backend,
        reason=reason,
        layout=layout,
        abi=ABI,
        plugin=__version__,
        profile=flags.profile,
        fuse=fuses if flags.fuse is None else flags.fuse,
    )


def stamp(resolution: Resolution, configs: Iterable[MutableMapping[str, Any]]) -> None:
    """Write the resolution into the forms that a model's quantization_config has in this process."""
    for config in configs:
        config[STAMP] = asdict(resolution)


def _pattern(
    metadata: Metadata | None, flags: Flags, path: str, structure: str
) -> SlidePattern | MixedPattern:
    """The pattern of the checkpoint's metadata, or of the flag, or of the ``structure`` that its format is for."""
    if metadata and flags.pattern and metadata.pattern != flags.pattern:
        raise ResolveError(
            f"environment variable {SPARSITY} asks for {flags.pattern}, but the checkpoint was pruned to "
            f"{metadata.pattern}; unset {SPARSITY} or set {SPARSITY}={metadata.pattern.flag}"
        )
    pattern = flags.pattern or (metadata.pattern if metadata else None)
    if pattern:
        return pattern
    if structure == "2:4":
        return SlidePattern(4)
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
        f"{SPARSITY} (2_8 for 6:8; dense for a model that is not pruned), or convert it: slidesparse convert SRC OUT "
        f"--sparsity 6:8{draft}"
    )


def _backend(path: str, on_cuda: bool, wanted: str | None) -> tuple[str, str]:
    """The backend, and why, in words.  What it needs is compiled now: once for all workers, before weights are read."""
    import torch  # late: the rest of this file needs no torch

    device = torch.device("cuda" if on_cuda else "cpu")
    capability = _capability() if on_cuda else None
    if wanted is None:
        return gemm.choose(path, device, capability)
    reason = gemm.get(wanted).unusable(device, capability)
    if reason:
        raise ResolveError(
            f"environment variable {BACKEND}={wanted}: backend {wanted} cannot run here: {reason}"
        )
    return wanted, f"{BACKEND}={wanted}"


def _capability() -> tuple[int, int] | None:
    """The GPU's compute capability, without initializing CUDA; None where vLLM does not know it."""
    from vllm.platforms import current_platform  # late: the rest of this file needs no vLLM

    found = current_platform.get_device_capability()
    return None if found is None else (found.major, found.minor)
