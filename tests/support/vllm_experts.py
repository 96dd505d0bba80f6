"""Routed experts by vLLM's kernel for GPUs, in an engine whose other layers are ours.

Imported by an engine's process (`engines.Request.registered`).  INT8 experts are run by `fused_experts` with inputs
quantized per token.  vLLM 0.25.1's own method quantizes none: it takes a missing static scale for 16-bit inputs
(vLLM pull request 50833), and the class that it runs refuses INT8 ones (51411).

Inductor is told to pad all products that it may, by which vLLM would choose the wrong experts (issue 56900); otherwise
it does so only where a product seems faster when it compiles.
"""

from __future__ import annotations

from typing import Any

import torch._inductor.config
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import int8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_int8 as of_int8,
)

from slidesparse.gemm.hopper.backend import Hopper

ENTRY: dict[str, Any] = {}  # of our registry of backends: none


def _apply(self: Any, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **_: Any) -> Tensor:
    """Run the experts alone; vLLM's runner calls the shared ones, as this kernel cannot overlap them."""
    scales = layer.w13_weight_scale, layer.w2_weight_scale
    summed: Tensor = fused_experts(
        *(x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids),
        global_num_experts=layer.global_num_experts,
        expert_map=layer.expert_map,
        quant_config=int8_w8a8_moe_quant_config(*scales, None, None, per_act_token_quant=True),
    )
    return summed


of_int8.CompressedTensorsW8A8Int8MoEMethod.apply = _apply
Hopper.refuses_experts = lambda *_: "that a test leaves to vLLM"  # type: ignore[method-assign]
torch._inductor.config.force_shape_pad = True
