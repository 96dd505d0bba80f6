"""Quantized experts on CPUs that vLLM has no kernel for: its own classes load them, torch multiplies.

Imported by an engine's process in vLLM's place of choosing (`engines.Request.registered`).  Weights are dequantized and
activations left as they are, so that the result is that of float experts of the same values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

ENTRY: dict[str, Any] = {}  # of our registry of backends: none


def _apply(self: Any, hidden_states: Tensor, w1: Tensor, w2: Tensor, **routing: Any) -> Tensor:
    """Take experts already chosen and write to ``output`` (vLLM 0.30 and later), or choose them from router logits."""
    if "output" in routing:
        weights, chosen = routing["topk_weights"], routing["topk_ids"]
    else:
        weights, chosen = cpu_moe.select_experts(
            hidden_states,
            routing["router_logits"],
            self.moe_config.experts_per_token,
            use_grouped_topk=False,
            renormalize=self.moe_config.routing_method != cpu_moe.RoutingMethodType.Default,
        )
    out = torch.zeros_like(hidden_states)
    for expert in range(w1.shape[0]):
        tokens, place = (chosen == expert).nonzero(as_tuple=True)
        first, second = (
            weight[expert].float() * scale[expert].float().reshape(-1, 1)
            for weight, scale in ((w1, self.w1_scale), (w2, self.w2_scale))
        )
        gate, up = (hidden_states[tokens].float() @ first.T).chunk(2, -1)
        result = (functional.silu(gate) * up) @ second.T
        out[tokens] += (result * weights[tokens, place, None]).to(out.dtype)
    return routing["output"].copy_(out) if "output" in routing else out


for kernel in (cpu_moe.CPUExpertsInt8, cpu_moe.CPUExpertsFp8):
    kernel._supports_current_device = staticmethod(lambda: True)
    kernel._supports_quant_scheme = staticmethod(lambda *_: True)
    kernel.process_weights_after_loading = lambda *_: None
    kernel.apply = _apply
cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)
