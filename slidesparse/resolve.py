"""Choose a model's backend and pattern once, in the front-end process, and stamp them into its config.

vLLM hashes the model's ``quantization_config`` into the key of its compile cache, and passes it to worker processes
that may not see our environment.  So everything that changes the graph is written there, and read from there.  For what
the key lacks (nested models, and decisions that depend on the weights) see
`slidesparse.vllm_patch.fusion.add_cache_key`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, get_type_hints

from slidesparse import __version__, flags, gemm
from slidesparse.checkpoint.metadata import (
    COMPRESSED_TENSORS,
    KEY,
    QUANT_METHOD,
    STAMP,
    Metadata,
    sparsity_of,
)
from slidesparse.errors import SlideSparseError, warn_once
from slidesparse.flags import BACKEND, FUSE, SPARSITY, Flags
from slidesparse.gemm import DENSE, SPARSE
from slidesparse.pattern import DENSE_WEIGHT, MixedPattern, Pattern, SlidePattern, parse_pattern

WHAT_IT_TAKES = (
    "the plugin takes compressed-tensors W8A8 with dynamic per-token activations. Convert the original model: "
    "slidesparse convert SRC OUT --sparsity 6:8"
)
CONVERT_STORED = "convert it: slidesparse convert SRC OUT --sparsity 2:4"

NO_FP8_ACTIVATIONS = "vLLM does not quantize activations to FP8 on GPUs of compute capability below 8.9"

SUMMARY = "SlideSparse summary: "  # begins the log line that holds the numbers of the next one in JSON
BREAKS = "whose weights break the pattern"  # reason for a dense layer in the log

NOT_PRUNED = MixedPattern(Fraction(0))
# Of GPUs where unpruned models are faster by our kernels: INT8 in all 22 measured cells of 7B and 14B models, by 1.01
# to 1.25; FP8 in 19 of 22, by up to 1.35, and at 0.97 to 0.98 in the others (docs/benchmarks)
FASTER_UNPRUNED = (9, 0)

Capability = tuple[int, int] | None  # compute capability of a GPU


class ResolveError(SlideSparseError, ValueError):
    """The flags and the checkpoint contradict each other."""


@dataclass(frozen=True)
class Resolution:
    """The decisions on how the layers of one model are served."""

    pattern: str  # "6:8", or "dense": blocks as they are
    path: str  # "sparse" or "dense"
    asked: bool  # whether a flag asks for the path
    backend: str  # a name of slidesparse.gemm.REGISTRY
    reason: str  # why this backend was chosen, as text
    layout: str  # layout of the checkpoint: "dense", "slided" or "packed"
    abi: int
    plugin: str  # version
    profile: bool  # whether to time layers
    fuse: bool  # whether to compute norms and activations together with quantization, in compiled models

    @property
    def parsed_pattern(self) -> Pattern:
        """The parsed pattern."""
        return parse_pattern(self.pattern)

    @classmethod
    def of_stamp(cls, stamp: Any) -> Resolution:
        """Read what `resolve` stamped.  Raises ResolveError for anything else."""
        types = get_type_hints(cls)
        if not isinstance(stamp, dict) or {name: type(value) for name, value in stamp.items()} != types:
            raise ResolveError(
                f"quantization_config.{STAMP} was not written by this release of slidesparse ({__version__}): remove "
                "it from config.json, and install the same slidesparse for all processes"
            )
        return cls(**stamp)


def needs_plugin(quantization_config: Mapping[str, Any], user_quant: str | None) -> bool:
    """Return whether a checkpoint, a flag or ``--quantization`` asks for the plugin."""
    methods = (quantization_config.get("quant_method"), user_quant)
    return bool(flags.path_flag()) or KEY in quantization_config or QUANT_METHOD in methods


def claim(
    quantization_config: Mapping[str, Any],
    user_quant: str | None,
    machine: Callable[[], tuple[str, Capability]],
) -> Resolution | None:
    """Decide whether and how the plugin serves a checkpoint; None for one that only vLLM serves.

    The plugin serves checkpoints with SlideSparse metadata, and other compressed-tensors ones when a flag asks for it
    or as `_unasked` decides.

    Args:
        user_quant: the value of ``--quantization``.
        machine: returns the platform, "cuda", "cpu" or the name of another one, and the GPU's compute capability.

    Raises ResolveError for what cannot be served as requested, FlagError for invalid flags.
    """
    flag, method = flags.path_flag(), quantization_config.get("quant_method")
    if not needs_plugin(quantization_config, user_quant):
        if method != COMPRESSED_TENSORS or user_quant:
            return None  # before flags are read: USE_CUSPARSELT=ON may be meant for the build of torch
        return _unasked(quantization_config, *machine())
    platform, capability = machine()
    if platform not in ("cuda", "cpu"):
        if flag or method == QUANT_METHOD:
            raise ResolveError(
                f"SlideSparse runs on NVIDIA GPUs and CPUs, but vLLM's platform here is {platform}; for vLLM's own "
                "kernels unset the flags and convert to the dense layout"
            )
        return None
    if method not in (COMPRESSED_TENSORS, QUANT_METHOD):
        reason = f"{flag} is set" if flag else "config.json holds SlideSparse metadata"
        raise ResolveError(
            f"{reason}, but this checkpoint is quantized by {method!r}; {WHAT_IT_TAKES}{or_unset()}"
        )
    if user_quant not in (None, QUANT_METHOD):
        if flag:
            raise ResolveError(
                f"--quantization {user_quant} selects vLLM's own kernels, but {flag} is set; remove one of the two"
            )
        return None
    return resolve(quantization_config, Flags.from_environment(), platform == "cuda", capability)


def _unasked(
    quantization_config: Mapping[str, Any], platform: str, capability: Capability
) -> Resolution | None:
    """Decide on a compressed-tensors checkpoint that nothing names ours; see `claim`.

    The plugin serves W8A8 ones that vLLM refuses for how their zeros are stored, and unpruned ones where they are
    faster, or where SLIDESPARSE_BACKEND names a backend for them.  SPARSITY may be meant for another program.
    """
    if platform not in ("cuda", "cpu") or not is_w8a8(quantization_config):
        return None
    requested, on_cuda = Flags.from_environment({**os.environ, SPARSITY: ""}), platform == "cuda"
    if not unread_storage(quantization_config):
        if not requested.backend and capability != FASTER_UNPRUNED:
            return None
        backend = gemm.get(requested.backend or gemm.names(SPARSE)[0])
        if not backend.takes_dense:
            return None
        try:
            reason = backend.unusable(_device(on_cuda), capability)
        except Exception as error:  # nobody asked for it
            reason = f"{type(error).__name__}: {error}"
        if reason:
            warn_left(f"{backend.name} cannot run: {reason}")
            return None
    return resolve(quantization_config, requested, on_cuda, capability)


def warn_left(reason: str) -> None:
    """Log in one line, once, why vLLM serves a model that the plugin would serve unasked."""
    warn_once(f"vLLM's own kernels serve this model: {' '.join(reason.split())}")


def is_w8a8(quantization_config: Mapping[str, Any]) -> bool:
    """Return whether any group of layers has 8-bit weights per row or tensor, and dynamic symmetric activations."""
    groups = quantization_config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        with suppress(TypeError, KeyError, AttributeError):  # it, or a part of it, is no object
            weights, inputs = parts = group["weights"], group["input_activations"]
            strategies = (
                weights.get("strategy") in ("channel", "tensor") and inputs.get("strategy") == "token"
            )
            # compressed-tensors' defaults
            exact = all(part.get("num_bits", 8) == 8 and part.get("symmetric", True) for part in parts)
            exact &= weights.get("type", "int") == inputs.get("type", "int")
            if strategies and exact and inputs.get("dynamic") is True:
                return True
    return False


def or_unset() -> str:
    """Return the remedy of unsetting the flag that asks for our path, or "" if only the checkpoint does."""
    if not flags.path_flag():
        return ""
    return (
        f"; or unset {flags.path_flag()}, which acts on draft models as well: converted checkpoints are served sparse "
        "without"
    )


def unread_storage(quantization_config: Mapping[str, Any]) -> str:
    """Explain that vLLM does not load weights stored without their zeros, or marked as pruned; "" for others."""
    if stored := sparsity_of(quantization_config):
        return f"Its weights are stored as {stored[0]}, which vLLM since 0.19 does not read"
    sparsity = quantization_config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("targets"):
        return "It has a sparsity_config with targets, which vLLM since 0.19 refuses"
    return ""


def left_to_vllm(resolution: Resolution, pattern: Pattern) -> str | None:
    """Return why vLLM's own kernel serves a layer, as text for the log; None if the backend can run it."""
    blocks = resolution.path == SPARSE and isinstance(pattern, MixedPattern)
    if not blocks or gemm.get(resolution.backend).takes_dense:
        return None
    if pattern == NOT_PRUNED:
        return "not pruned"
    return f"{pattern.ratio}, which backend {resolution.backend} does not support"


def batch_invariant() -> bool:
    """Return whether results must not depend on the rest of the batch (``VLLM_BATCH_INVARIANT``)."""
    try:
        return bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))
    except ValueError:
        return False  # vLLM reports it itself, or treats it as 0


def require_invariance(backend: str, quant: str) -> None:
    """Raise BackendError for an FP8 layer when results must not depend on the rest of the batch."""
    if batch_invariant() and quant != "int8":
        raise gemm.BackendError(
            f"backend {backend} sums FP8 products in an order that depends on the number of tokens, but "
            "VLLM_BATCH_INVARIANT is set: convert with --quant int8, or set DISABLE_SLIDESPARSE=1"
        )


def resolve(
    quantization_config: Mapping[str, Any], requested: Flags, on_cuda: bool, capability: Capability = None
) -> Resolution:
    """Decide how the layers of a checkpoint are served.  A stamp that is already in its config is ignored.

    Args:
        capability: the GPU's compute capability, where CUDA must not be initialized to ask for it.

    Chooses the backend, whose kernels are compiled once, here, for all workers.  Raises ResolveError when the flags
    contradict the checkpoint or leave the pattern open.
    """
    metadata = Metadata.of_config(quantization_config)
    if metadata is None and quantization_config.get("quant_method") == QUANT_METHOD:
        raise ResolveError(
            f"quantization_config names {QUANT_METHOD} as its method but lacks the block {KEY!r}, which says how "
            "weights are stored; fetch the checkpoint again, or convert the original model again"
        )
    path = requested.path or SPARSE
    stored = sparsity_of(quantization_config)
    pattern = _pattern(metadata, requested, path, stored[1] if stored else "")
    layout = metadata.layout if metadata else "packed" if stored else "dense"
    if requested.fuse and batch_invariant():
        raise ResolveError(
            f"{FUSE}=1 computes norms in an order that depends on the number of tokens, but VLLM_BATCH_INVARIANT is "
            "set; unset one of them"
        )
    from slidesparse.ops import ABI  # imported late, as it imports torch

    device, backend = _device(on_cuda), requested.backend
    if backend is None:
        backend, reason = gemm.choose(path, device, capability)
    elif why_not := gemm.get(backend).unusable(device, capability):
        raise ResolveError(
            f"environment variable {BACKEND}={backend}: backend {backend} cannot run here: {why_not}"
        )
    else:
        reason = f"{BACKEND}={backend}"
    blocks = path == SPARSE and isinstance(pattern, MixedPattern)
    if blocks and requested.path and not gemm.get(backend).takes_dense:
        raise ResolveError(
            f"{SPARSITY}={pattern.flag} needs the backend hopper (compute capability 9.0), which supports dense "
            f"blocks; here {backend} was selected: {reason}. Set {SPARSITY} to the pattern of a pruned checkpoint, "
            f"such as 2_8, or unset {flags.path_flag()} to use vLLM's own kernels"
        )
    fuses = gemm.get(backend).fuses and on_cuda and not batch_invariant()
    return Resolution(
        pattern=pattern.ratio,
        path=path,
        asked=requested.path is not None,
        backend=backend,
        reason=reason,
        layout=layout,
        abi=ABI,
        plugin=__version__,
        profile=requested.profile,
        fuse=fuses if requested.fuse is None else requested.fuse,
    )


def stamp(resolution: Resolution, configs: Iterable[MutableMapping[str, Any]]) -> None:
    """Write the resolution into every copy of the model's quantization_config in this process."""
    for config in configs:
        config[STAMP] = asdict(resolution)


def _pattern(metadata: Metadata | None, requested: Flags, path: str, structure: str) -> Pattern:
    """Return the pattern of the checkpoint's metadata, of the flag, of its storage format, or that of no pruning.

    Args:
        structure: the pattern that the format of storage implies, or another text.
    """
    if metadata and requested.pattern and metadata.pattern != requested.pattern:
        raise ResolveError(
            f"environment variable {SPARSITY} asks for {requested.pattern}, but the checkpoint was pruned to "
            f"{metadata.pattern}; unset {SPARSITY} or set {SPARSITY}={metadata.pattern.flag}"
        )
    pattern = requested.pattern or (metadata.pattern if metadata else None)
    if isinstance(pattern, MixedPattern) and pattern.share and not metadata:
        raise ResolveError(
            f"environment variable {SPARSITY}: {pattern.ratio} cannot be requested: blocks are 2:4 where "
            f"their zeros allow it; set {SPARSITY}={DENSE_WEIGHT}"
        )
    # nothing is slid on the dense path
    return pattern or (SlidePattern(4) if structure == "2:4" or path == DENSE else NOT_PRUNED)


def _device(on_cuda: bool) -> Any:
    import torch  # late: the rest of this file needs no torch

    return torch.device("cuda" if on_cuda else "cpu")
