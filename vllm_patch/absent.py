"""Stay out of a vLLM that the plugin does not fit: with a warning, and an error for what needs the plugin."""

from __future__ import annotations

import contextlib
import logging
from functools import cache
from typing import Any

from slidesparse.errors import EnvironmentFault
from slidesparse.flags import DISABLE
from slidesparse.versions import VLLM_TESTED_TEXT

logger = logging.getLogger("vllm.slidesparse")


class CompatibilityError(EnvironmentFault, RuntimeError):
    """The installed vLLM does not fit the plugin."""


@cache  # vLLM may load a plugin several times
def stay_out(problem: str) -> None:
    """Warn that the plugin serves nothing, and refuse checkpoints and flags that need it.  Never raises."""
    remedy = f"install a tested vLLM ({VLLM_TESTED_TEXT}), or set {DISABLE}=1"
    logger.warning(
        "SlideSparse stays out of this vLLM, which serves models by itself: %s; %s", problem, remedy
    )
    with contextlib.suppress(Exception):
        _register_refusal(f"SlideSparse does not run in this vLLM: {problem}; {remedy}")


def _register_refusal(message: str) -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    from slidesparse.checkpoint.metadata import QUANT_METHOD
    from slidesparse.resolve import needs_plugin

    class Refusal(QuantizationConfig):  # type: ignore[misc]
        """Answers vLLM's question whose checkpoint this is; it is never instantiated."""

        @classmethod
        def override_quantization_method(
            cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None, hf_config: Any = None
        ) -> None:
            if needs_plugin(hf_quant_cfg or {}, user_quant):
                raise CompatibilityError(message)

    register_quantization_config(QUANT_METHOD)(Refusal)
