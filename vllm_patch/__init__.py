"""The vLLM plugin, installed as ``slidesparse.vllm_patch``.

vLLM calls `register` in every process, perhaps more than once, through the entry point group
``vllm.general_plugins``.  The top level here imports only the standard library: vLLM swallows an ImportError of an
entry-point module, whereas an exception inside `register` stops the start-up, which is what a wrong flag deserves.
"""

from __future__ import annotations

import logging
import multiprocessing


def register() -> None:
    """Make quantization method ``slidesparse`` known to vLLM.  Idempotent; initializes no device.

    Raises FlagError for an environment flag that means nothing, CompatibilityError for a vLLM that cannot work.
    """
    from slidesparse.flags import Flags

    flags = Flags.from_environment()
    if flags.disabled:
        return
    from slidesparse.vllm_patch import compat

    compat.check()
    from slidesparse.vllm_patch import config  # noqa: F401  (registers itself on import)

    _log_as_vllm_does()
    if (flags.path or flags.pattern) and multiprocessing.parent_process() is None:
        logging.getLogger("vllm.slidesparse").info(
            "SlideSparse flags are set; they act on compressed-tensors W8A8 checkpoints; a line will count their layers"
        )


def _log_as_vllm_does() -> None:
    """Send the lines of the whole package where vLLM's go, once; handlers that the user chose for them stay alone."""
    ours, theirs = logging.getLogger("slidesparse"), logging.getLogger("vllm")
    if ours.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.propagate = theirs.propagate
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level)
