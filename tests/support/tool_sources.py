"""Quantized sources in the formats of other tools; those of compressed-tensors are written by that package itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import LLAMA, write
from models import Decoder, codes, float_tensors
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from slidesparse.quantize import FP8

INPUT_SCALE = 0.02


def compressed(folder: Path, groups: dict[str, Any], ignore: list[str], decoder: Decoder = LLAMA) -> Path:
    """Write a small model that compressed-tensors quantizes by the schemes of ``groups`` and compresses.

    Scales follow from the largest weights; static scales of activations are INPUT_SCALE.
    """
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**decoder.config()), dtype=torch.bfloat16)
    model.load_state_dict(float_tensors(decoder))
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=ignore))
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        weight, arguments = module.weight.data.float(), scheme.weights
        n, k = weight.shape
        rows, columns = (1, k) if arguments.strategy == "channel" else arguments.block_structure or (n, k)
        blocks = nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
        blocks = blocks.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        scale, _ = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), arguments)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(INPUT_SCALE)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    write(folder, decoder.config(), tensors)
    compressor.update_config(folder)
    return folder


def fp8(
    folder: Path,
    block: tuple[int, int] | None = None,
    static: bool = False,
    scale_dtype: torch.dtype = torch.float32,
    tensors: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
    layers: Sequence[str] = (),
) -> Path:
    """Write a checkpoint of ``quant_method: fp8``, with ``weight_scale_inv`` by blocks, as DeepSeek and Qwen publish
    them, or one scale per tensor.

    The model is a tiny Llama, or that of ``tensors`` and ``config``, whose ``layers`` are quantized.
    """
    stored = dict(tensors or float_tensors(LLAMA))
    for name in layers or LLAMA.linears():
        weight = stored[f"{name}.weight"]
        stored[f"{name}.weight"], scale = codes(weight, FP8, *(block or weight.shape))
        of_scale = ("weight_scale_inv", scale) if block else ("weight_scale", scale[0, 0])
        stored[f"{name}.{of_scale[0]}"] = of_scale[1].to(scale_dtype)
        if static:
            stored[f"{name}.input_scale"] = torch.tensor(INPUT_SCALE)
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "static" if static else "dynamic",
        **({"fmt": "e4m3", "weight_block_size": list(block)} if block else {"ignored_layers": ["lm_head"]}),
    }
    return write(folder, {**(config or LLAMA.config()), "quantization_config": quantization}, stored)
