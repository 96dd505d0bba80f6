"""The routed experts of a layer: vLLM's W8A8 method creates the parameters, ours packs them and multiplies.

Routing, shared experts, and sums over tensor- and expert-parallel processes remain with vLLM's runner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from slidesparse.vllm_patch import compat
from slidesparse.vllm_patch.loading import AGAIN, require_numbers
from slidesparse.vllm_patch.scheme import PACKED, conclude, release_unused, slid
from slidesparse.vllm_patch.summary import Found
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as of_fp8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_int8 as of_int8,
)

from slidesparse import gemm, ops
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.gemm.problem import DTYPES, Layer
from slidesparse.pattern import Pattern, PatternError, SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import is_finite
from slidesparse.resolve import BREAKS, ResolveError, batch_invariant, left_to_vllm
from slidesparse.slide import obeys

if TYPE_CHECKING:
    from slidesparse.vllm_patch.config import SlideSparseConfig


def method(config: SlideSparseConfig, layer: Any, name: str) -> Any:
    """Return our method for routed experts, or why vLLM's serves them, as text for the log ("" for another type)."""
    config._add_fused_moe_to_target_scheme_map()  # as vLLM does before it looks
    parts = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
    gate, *others = (config.get_scheme_dict(layer, f"{name}.0.{part}") for part in parts)
    weights, inputs = ((gate or {}).get(kind) for kind in ("weights", "input_activations"))
    if not weights or not inputs or others != [gate, gate]:
        return ""
    types = (weights.num_bits, weights.strategy, inputs.num_bits, inputs.strategy)
    if types != (8, "channel", 8, "token") or not inputs.dynamic or not inputs.symmetric:
        return ""
    ours = CompressedTensorsExpertsInt8 if weights.type == "int" else CompressedTensorsExpertsFp8
    backend = gemm.get(config.resolution.backend)
    moe, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
    limits = (getattr(moe, limit, None) for limit in ("swiglu_limit", "swiglu_alpha", "swiglu_beta"))
    reasons = {
        f"with activation {moe.activation.value}": moe.activation != MoEActivation.SILU,
        "with a limited activation": any(limit is not None for limit in limits),
        "with biases": moe.has_bias,
        "with LoRA": moe.is_lora_enabled,
        "balanced between processes": parallel.enable_eplb,
        "of data-parallel processes": parallel.dp_size > 1 or parallel.pcp_size > 1,
        f"in {str(moe.in_dtype).removeprefix('torch.')}": moe.in_dtype not in backend.outputs,
        "whose results must not depend on the batch": batch_invariant() and ours.quant == "fp8",
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        return reason
    made = ours(config, name, weights, inputs, moe)
    left = [made.left(pattern) for pattern in config.patterns(of_experts=True)]
    return left[0] if all(left) else made


def missing_kernel(name: str, problem: object) -> ResolveError:
    """Return the error for quantized experts that vLLM has no kernel for."""
    return ResolveError(
        f"{name}: vLLM cannot serve quantized experts here: {str(problem).rstrip('.')}. Convert the original model "
        "with --ignore '\\.experts\\.', which leaves them as they are"
    )


class Experts:
    """Runs experts by our operators if their loaded weights allow it, else as the method that it is mixed into.

    The weights decide which of the possible patterns the first and the second layer have: the sparsest that all experts
    obey.
    """

    quant: str

    def __init__(self, config: SlideSparseConfig, name: str, weights: Any, inputs: Any, moe: Any) -> None:
        self.config, self.name = config, name
        self.patterns = [config.patterns(of_experts=True)] * 2  # that each of the two weights may have
        self.backend = gemm.get(config.resolution.backend)
        self.layers: tuple[Layer, Layer] | None = None  # what our operators run, once the weights are loaded
        self.kernel_missing, self._router = "", compat.experts_router()
        try:
            super().__init__(weights, inputs, moe)
        except NotImplementedError as error:  # raised last: vLLM has no kernel, which may not be needed
            self.kernel_missing = str(error)
        if "NONE" in str(getattr(self, "fp8_backend", "")):
            self.kernel_missing = "no FP8 kernel for experts supports this platform"

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Let vLLM's method create the parameters; scales that are not loaded will be NaN."""
        self.dummy = compat.loads_dummy_weights()
        self.config.summary.expect(self.name, layer)
        super().create_weights(layer, *args, **kwargs)
        for scale in (layer.w13_weight_scale, layer.w2_weight_scale):
            scale.data.fill_(torch.nan)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weights, or hand the layer to vLLM's method.  May run again, for example after a reload.

        A layer stays as it was first loaded, with PatternError for later weights that break its pattern.
        """
        if getattr(layer.w13_weight, PACKED, False):
            return
        weights = [layer.w13_weight.data, layer.w2_weight.data]
        for weight, scale in zip(weights, (layer.w13_weight_scale, layer.w2_weight_scale), strict=True):
            require_numbers(self.name, weight)
            if not is_finite(scale):
                raise CheckpointError(
                    f"{self.name}: the checkpoint lacks experts, or their scales hold NaN; {AGAIN}"
                )
        columns = [0, self.moe.moe_parallel_config.tp_rank * weights[1].shape[2]]  # the first of this process
        if self.dummy:
            slides = [slid(self.config, self.patterns[0][0], first) for first in columns]
            weights = [
                prune(weight.flatten(0, 1), pattern, phase).view(weight.shape) if pattern else weight
                for weight, (pattern, phase) in zip(weights, slides, strict=True)
            ]
        found = [
            next((p for p in patterns if obeys(weight.flatten(0, 1), *slid(self.config, p, first))), None)
            for weight, patterns, first in zip(weights, self.patterns, columns, strict=True)
        ]
        obeyed = [pattern for pattern in found if pattern]
        left = [self.left(pattern) for pattern in obeyed]
        reason = next(filter(None, left), None) if len(obeyed) == len(weights) else BREAKS
        if reason is None:
            self._serve(layer, weights, obeyed, columns)
        elif self.layers:
            raise PatternError(
                f"{self.name}: the weights break the pattern at which the experts have been served since the server "
                "started; restart it to serve these weights"
            )
        elif self.kernel_missing:
            raise missing_kernel(self.name, self.kernel_missing)
        else:
            super().process_weights_after_loading(layer)
        self.patterns = [[pattern] if pattern else [] for pattern in found]
        self.dummy = False  # weights loaded from now on are not random
        ratio = BREAKS if reason else " and ".join(dict.fromkeys(pattern.ratio for pattern in obeyed))
        summary = self.config.summary
        summary.by_weights[self.name] = Found(ratio, 0, 0)
        if summary.count(self.name, reason and f"MoE experts {reason}", ratio):
            conclude(self.config)

    def left(self, pattern: Pattern) -> str | None:
        """Return why vLLM's method serves experts that obey a pattern, or None."""
        slides = pattern if isinstance(pattern, SlidePattern) else None
        resolution = self.config.resolution
        refused = self.backend.refuses_experts(
            self.moe.num_local_experts, slides, DTYPES[self.quant], resolution.asked
        )
        return left_to_vllm(resolution, pattern) or refused

    def _serve(self, layer: Any, weights: list[Tensor], patterns: list[Pattern], columns: list[int]) -> None:
        """Replace the loaded weights by packed ones."""
        gemm.require(self.backend.name, weights[0].device)
        layers = []
        for name, weight, pattern, first_column in zip(
            ("w13", "w2"), weights, patterns, columns, strict=True
        ):
            slides, phase = slid(self.config, pattern, first_column)
            release_unused(weight)
            packed = torch.nn.Parameter(self.backend.pack_experts(weight, slides, phase), requires_grad=False)
            setattr(packed, PACKED, True)
            setattr(layer, f"{name}_weight", packed)
            scale = getattr(layer, f"{name}_weight_scale").data.float().flatten(1)
            setattr(layer, f"{name}_weight_scale", torch.nn.Parameter(scale, requires_grad=False))
            layers.append(self.backend.layer(*weight.shape[1:], slides, phase, weight.dtype))
        self.layers = layers[0], layers[1]

    # What vLLM's runner asks

    @property
    def is_monolithic(self) -> bool:
        """Whether the method routes by itself."""
        return self._router is not None if self.layers else super().is_monolithic

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Return the scales for vLLM's kernel, if it runs."""
        return None if self.layers else super().get_fused_moe_quant_config(layer)

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """Return no other kernel; vLLM up to 0.27 asks methods that have none."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Return the sum of the experts of each token, x [T, K] -> [T, K], as far as they are in this process."""
        if self.layers is None:
            return super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        weights: Tensor | None = topk_weights.float()
        if layer.apply_router_weight_on_input:
            x, weights = x * topk_weights.to(x.dtype), None
        experts = ops.Experts(
            (layer.w13_weight, layer.w2_weight), (layer.w13_weight_scale, layer.w2_weight_scale), self.layers
        )
        return ops.experts(x, experts, topk_ids, weights, layer.expert_map)

    def apply_monolithic(
        self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        """Choose the experts, and `apply` them."""
        if self.layers is None:
            return super().apply_monolithic(layer, x, router_logits, input_ids)
        return self.apply(layer, x, *compat.choose_experts(self._router, layer, x, router_logits), None, None)


# The weights' loader looks for "CompressedTensors" in the name of the method


class CompressedTensorsExpertsInt8(Experts, of_int8.CompressedTensorsW8A8Int8MoEMethod):
    """INT8 experts.  Their inputs are quantized, on GPUs too, where vLLM 0.25.1 leaves them in 16 bits."""

    quant = "int8"


class CompressedTensorsExpertsFp8(Experts, of_fp8.CompressedTensorsW8A8Fp8MoEMethod):
    """FP8 experts with scales per channel."""

    quant = "fp8"
