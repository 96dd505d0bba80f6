"""The vLLM plugin, installed as ``slidesparse.vllm_patch``.

vLLM calls `register` in every process, perhaps more than once, through the entry point group
``vllm.general_plugins``.  An exception in it would stop every command of vLLM, for any model, so it does not read
flags, which may be meant for other programs; `config.py` reads them with a checkpoint of ours.
"""

from __future__ import annotations

MODELS = {"BitNetForCausalLM": f"{__name__}.bitnet:BitNetForCausalLM"}  # imported only when one is served


def register() -> None:
    """Register the quantization method ``slidesparse`` and our models with vLLM, unless DISABLE_SLIDESPARSE=1.

    Idempotent; initializes no device.  Raises CompatibilityError if a flag is set and vLLM is too old.
    """
    from slidesparse import flags

    if flags.disabled():
        return
    from slidesparse.vllm_patch import compat

    if not compat.works():
        return
    from slidesparse.vllm_patch import config  # noqa: F401  registers the quantization method

    register_models()


def register_models() -> None:
    """Register the models that vLLM lacks."""
    from vllm import ModelRegistry

    for architecture, path in MODELS.items():
        if architecture not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(architecture, path)
