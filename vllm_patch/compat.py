"""The differences between vLLM's versions, all in one place, and what a vLLM gets that the plugin does not fit."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

from slidesparse import versions
from slidesparse.errors import EnvironmentFault, warn_once
from slidesparse.flags import DISABLE

OF_DRAFTS = "draft_model."  # begins the names of a draft model's layers


class CompatibilityError(EnvironmentFault, RuntimeError):
    """The installed vLLM does not fit the plugin."""


def unsupported() -> str:
    """Return why the installed vLLM does not fit the plugin, or ""; warn once per process of an untested one."""
    found = versions.installed(*versions.DISTRIBUTIONS)
    supported, remark = versions.judge(*found) if found else (True, "")  # built from source without metadata
    if supported and remark:
        warn_once(
            f"SlideSparse runs in a vLLM that may not fit: {remark}. DISABLE_SLIDESPARSE=1 switches it off"
        )
    return "" if supported else remark


@cache  # vLLM may load a plugin several times
def stay_out(problem: str) -> None:
    """Warn that the plugin serves nothing, and refuse checkpoints and flags that need it.  Never raises."""
    remedy = f"install a tested vLLM ({versions.VLLM_TESTED_TEXT}), or set {DISABLE}=1"
    warn_once(f"SlideSparse stays out of this vLLM, which serves models by itself: {problem}; {remedy}")
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


def forget_input_quant_key(layer: object) -> None:
    """Let no other layer quantize the inputs of this one (vLLM's QuantizedActivation), as ours quantize their own."""
    for name in ("input_quant_key", "_input_quant_key"):  # since 0.25 and since 0.30
        if hasattr(layer, name):
            delattr(layer, name)


def current_config() -> Any:
    """Return the VllmConfig of the model under construction."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def pad_no_products() -> None:
    """Let Inductor pad no matrix products of the model under construction, unless its user chose.

    It pads those whose outputs are no multiple of eight wide where it measures a gain.  vLLM's kernels that choose
    experts read such router logits as if there were no padding (vLLM issue 56900), and so the rows of other tokens.
    """
    current_config().compilation_config.inductor_compile_config.setdefault("shape_padding", False)


def loads_dummy_weights() -> bool:
    """Return whether the model under construction gets random weights (``--load-format dummy``)."""
    return str(current_config().load_config.load_format).endswith("dummy")


def stages() -> int:
    """Return the pipeline-parallel size of the model under construction."""
    return int(current_config().parallel_config.pipeline_parallel_size)


def is_part() -> bool:
    """Return whether the model under construction is a stage of a pipeline, or may be a draft model or beside one."""
    return stages() > 1 or current_config().speculative_config is not None


def experts_router() -> Any:
    """Return vLLM's function that chooses experts where methods have to, on CPUs up to 0.29, otherwise None."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    if not cpu_moe.CPUExpertsInt8.is_monolithic():
        return None
    try:
        return cpu_moe.select_experts
    except AttributeError:  # up to 0.27
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

        return select_experts


def choose_experts(router: Any, layer: Any, x: Any, router_logits: Any) -> tuple[Any, Any]:
    """Return the weights and the numbers of the experts of each token, both [T, top_k], by an `experts_router`."""
    names = (
        *("use_grouped_topk", "renormalize", "topk_group", "num_expert_group", "custom_routing_function"),
        *("scoring_func", "routed_scaling_factor", "e_score_correction_bias", "top_k"),
    )
    chosen: tuple[Any, Any] = router(
        hidden_states=x, router_logits=router_logits, **{name: getattr(layer, name) for name in names}
    )
    return chosen


def checkpoint_name(layer: str) -> str:
    """Return a layer's name in the checkpoint; vLLM calls BERT's self-attention ``output``."""
    return layer.replace(".attention.output.qkv_proj", ".attention.self.qkv_proj")
