"""Tiny checkpoints as other tools write them: the ``quantization_config`` and the tensors of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import codes
from torch import Tensor

from slidesparse.quantize import FP8, INT8

GROUP = 16  # columns that share a scale in the formats of few bits
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
KEPT = ["lm_head"]


def scaled(dtype: torch.dtype, rows: int = 1, columns: int = 0, **more: Tensor) -> Callable[[Tensor], Any]:
    """Codes with ``weight_scale`` by channel, blocks, or (rows 0) the tensor."""

    def make(w: Tensor) -> dict[str, Tensor]:
        q, scale = codes(w, dtype, rows or len(w), columns)
        return {"weight": q, "weight_scale": scale if rows else scale.reshape(()), **more}

    return make


def renamed(make: Callable[[Tensor], dict[str, Tensor]], **names: str) -> Callable[[Tensor], Any]:
    return lambda w: {names.get(name, name): tensor for name, tensor in make(w).items()}


def unread(**tensors: Callable[[int, int], Tensor]) -> Callable[[Tensor], dict[str, Tensor]]:
    """Tensors of a format of few bits: their shapes alone matter, as nothing may read them."""
    return lambda w: {name.replace("__", "."): make(*w.shape) for name, make in tensors.items()}


def preset(form: str, *schemes: tuple[str, list[str]], **more: Any) -> dict[str, Any]:
    """Return a block as compressed-tensors writes it, of its own presets for some targets."""
    from compressed_tensors.quantization import preset_name_to_scheme

    groups = {f"group_{i}": preset_name_to_scheme(*s).model_dump(mode="json") for i, s in enumerate(schemes)}
    for (name, _), group in zip(schemes, groups.values(), strict=True):
        group["format"] = "int-quantized" if name == "W8A8" else form
    block = {"config_groups": groups, "format": form, "global_compression_ratio": None, "ignore": KEPT}
    block |= {"kv_cache_scheme": None, "quant_method": "compressed-tensors", "transform_config": {}}
    return {**block, "quantization_status": "compressed", "sparsity_config": {}, "version": "0.15.0", **more}


INPUT = {"input_scale": torch.tensor(0.02)}
PACKED = unread(
    weight_packed=lambda n, k: torch.zeros(n, k // 8).int(),
    weight_scale=lambda n, k: torch.zeros(n, k // GROUP).bfloat16(),
    weight_shape=lambda n, k: torch.tensor([n, k]),
)
FP4 = unread(
    weight_packed=lambda n, k: torch.zeros(n, k // 2).byte(),
    weight_scale=lambda n, k: torch.zeros(n, k // GROUP).to(FP8),
    weight_global_scale=lambda *_: torch.zeros(1),
)
QWEIGHT = unread(
    qweight=lambda n, k: torch.zeros(k // 8, n).int(),
    qzeros=lambda n, k: torch.zeros(k // GROUP, n // 8).int(),
    scales=lambda n, k: torch.zeros(k // GROUP, n).half(),
    g_idx=lambda _, k: torch.zeros(k).int(),
)


def tools() -> dict[str, tuple[dict[str, Any], Callable[[Tensor], dict[str, Tensor]]]]:
    """Map a tool's format to its configuration and a function that stores a weight [N, K]."""
    linear, mlp, rest = ["Linear"], ["re:.*mlp.*"], ["re:.*self_attn.*"]
    fine = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    inverse = renamed(scaled(FP8, 32, 32), weight_scale="weight_scale_inv")
    attention = {**preset("", ("FP8", ["LlamaAttention"]))["config_groups"]["group_0"], "weights": None}
    w8a8 = preset("int-quantized", ("W8A8", linear))
    block32 = preset("float-quantized", ("FP8_BLOCK", linear))
    block32["config_groups"]["group_0"]["weights"]["block_structure"] = [32, 32]
    return {
        # what convert takes
        "ct int8": (w8a8, scaled(INT8)),
        "ct int8 kv": ({**w8a8, "kv_cache_scheme": FLOAT8}, scaled(INT8)),
        "ct int8 heads": ({**w8a8, "kv_cache_scheme": {**FLOAT8, "strategy": "attn_head"}}, scaled(INT8)),
        "ct fp8": (preset("float-quantized", ("FP8_DYNAMIC", linear)), scaled(FP8)),
        "ct fp8 static": (preset("float-quantized", ("FP8", linear)), scaled(FP8, 0, **INPUT)),
        "ct fp8 blocks": (block32, scaled(FP8, 32, 32)),
        "ct names": (preset("int-quantized", ("W8A8", rest), ("W8A8", mlp)), scaled(INT8)),
        "ct attention": (
            {**w8a8, "config_groups": {**w8a8["config_groups"], "group_1": attention}},
            scaled(INT8),
        ),
        "fp8 blocks": ({**fine, "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}, inverse),
        "fp8 tensor": (
            {**fine, "activation_scheme": "static", "ignored_layers": KEPT},
            scaled(FP8, 0, **INPUT),
        ),
        "fp8 kv": ({**fine, "kv_cache_scheme": "static", "ignored_layers": KEPT}, scaled(FP8, 0)),
        # what it refuses, by the layers or by the name of the method
        "ct int8 kv4": ({**w8a8, "kv_cache_scheme": {**FLOAT8, "num_bits": 4}}, scaled(INT8)),
        "ct w4a16": (preset("pack-quantized", ("W4A16_ASYM", linear)), PACKED),
        "ct w4a8": (preset("int-quantized", ("W4A8", linear)), scaled(INT8, 1, GROUP)),
        "ct nvfp4": (preset("nvfp4-pack-quantized", ("NVFP4", linear)), FP4),
        "ct mxfp8": (preset("mxfp8-quantized", ("MXFP8", linear)), scaled(FP8, 1, 32)),
        "ct both": (preset("mixed-precision", ("NVFP4", mlp), ("W8A8", rest)), FP4),
        "fp8 e5m2": ({**fine, "fmt": "e5m2"}, scaled(torch.float8_e4m3fn)),
        "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}, QWEIGHT),
        "bnb 4": (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            unread(
                weight=lambda n, k: torch.zeros(n * k // 2, 1).byte(),
                weight__absmax=lambda n, k: torch.zeros(n * k // GROUP),
                weight__quant_map=lambda *_: torch.zeros(16),
                weight__quant_state__bitsandbytes__nf4=lambda *_: torch.zeros(9).byte(),
            ),
        ),
    }
