"""Quantized experts on CPUs that vLLM has no kernel for: its own classes load them, torch multiplies.

Imported by an engine's process in vLLM's place of choosing (`engines.Request.registered`).  Activations are quantized
per token as vLLM's kernels for GPUs do, products summed in float64, and rounded where its Triton kernel rounds.
"""

from __future__ import annotations

from typing import Any

import torch
from slidesparse.vllm_patch import compat
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

ENTRY: dict[str, Any] = {}  # of our registry of backends: none
SELECT = compat.experts_router()  # None where vLLM chooses the experts itself


def _product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return x @ weight.T with x quantized per token, in float32."""
    largest = 127.0 if weight.dtype == torch.int8 else 448.0
    absmax = x.float().abs().amax(-1, keepdim=True)
    if weight.dtype == torch.int8:
        absmax = absmax.clamp(min=1e-10)
        scaled = (x.float() * (torch.full_like(absmax, largest) / absmax)).double()
        codes = (scaled.abs() + 0.5).floor().copysign(scaled)  # halves are rounded away from zero
        step = absmax / torch.full_like(absmax, largest)
    else:
        step = (absmax / torch.full_like(absmax, largest)).clamp(min=1 / (448 * 512))
        codes = (x.float() / step).clamp(-448, 448).to(weight.dtype)
    return (codes.double() @ weight.double().T).float() * step * scale.float().reshape(1, -1)


def _apply(self: Any, hidden_states: Tensor, w1: Tensor, w2: Tensor, **routing: Any) -> Tensor:
    """Take experts already chosen and write to ``output`` (vLLM 0.30 and later), or choose them from router logits."""
    if SELECT is None:
        weights, chosen = routing["topk_weights"], routing["topk_ids"]
    else:
        weights, chosen = SELECT(
            hidden_states,
            routing["router_logits"],
            self.moe_config.experts_per_token,
            use_grouped_topk=False,
            renormalize=self.moe_config.routing_method != cpu_moe.RoutingMethodType.Default,
        )
    here = routing.get("expert_map")
    if here is not None:  # of expert parallelism: -1 for those of other processes
        chosen = here[chosen.long()]
    slots = hidden_states.new_zeros(*chosen.shape, hidden_states.shape[1])
    for expert in range(w1.shape[0]):
        tokens, place = (chosen == expert).nonzero(as_tuple=True)
        product = _product(hidden_states[tokens], w1[expert], self.w1_scale[expert])
        gate, up = product.to(slots.dtype).chunk(2, -1)
        activated = functional.silu(gate) * up
        result = _product(activated, w2[expert], self.w2_scale[expert])
        slots[tokens, place] = (result * weights[tokens, place, None]).to(slots.dtype)
    out = slots.float().sum(1).to(slots.dtype)
    return routing["output"].copy_(out) if "output" in routing else out


for kernel in (cpu_moe.CPUExpertsInt8, cpu_moe.CPUExpertsFp8):
    kernel._supports_current_device = staticmethod(lambda: True)
    kernel._supports_quant_scheme = staticmethod(lambda *_: True)
    kernel.process_weights_after_loading = lambda *_: None
    kernel.supports_expert_map = lambda _: True
    kernel.apply = _apply
for of_type in ("fp8", "int8"):
    setattr(cpu_moe, f"prepare_{of_type}_moe_layer_for_cpu", lambda w13, w2: (w13, w2))
