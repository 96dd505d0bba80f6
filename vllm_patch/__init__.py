"""The vLLM plugin, installed as ``slidesparse.vllm_patch``.

vLLM calls `register` in every process, perhaps more than once, through the entry point group
``vllm.general_plugins``.  An exception in it would stop every command of vLLM, for any model, so it raises none: it
reads no flags but DISABLE_SLIDESPARSE, and stays out of a vLLM that it does not fit.
"""

from __future__ import annotations

MODEL = "BitNetForCausalLM"  # which vLLM lacks


def register() -> None:
    """Register the quantization method ``slidesparse`` and the model that vLLM lacks, unless DISABLE_SLIDESPARSE=1.

    Idempotent; initializes no device; never raises.
    """
    from slidesparse import flags

    if flags.disabled():
        return
    from slidesparse.vllm_patch import compat

    try:
        problem = compat.unsupported()
        if not problem:
            from slidesparse.vllm_patch import config  # noqa: F401  registers the quantization method
            from vllm import ModelRegistry

            if MODEL not in ModelRegistry.get_supported_archs():
                ModelRegistry.register_model(MODEL, f"{__name__}.bitnet:{MODEL}")  # imported only to serve it
    except Exception as error:  # a release of vLLM that has renamed or changed something
        problem = f"it does not fit ({type(error).__name__}: {error})"
    if problem:
        compat.stay_out(problem)
