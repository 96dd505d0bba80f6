"""Small BitNet models with random weights in every checkpoint format, and their outputs in transformers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import models
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BitNetConfig, BitNetForCausalLM
from transformers.integrations.bitnet import AutoBitLinear, pack_weights

ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
OFFLINE = {**ONLINE, "quantization_mode": "offline"}
INVERSE = {**OFFLINE, "linear_class": "bitlinear"}

SMALL = {
    **models.Decoder("BitNetForCausalLM").config(),
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "tie_word_embeddings": True,
}


def linear_layers(tensors: Iterable[str]) -> list[str]:
    """Return the names of ternary layers among those of tensors."""
    return [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]


def transformers_model(block: dict[str, Any] | None = None, **shape: int) -> nn.Module:
    """Return transformers' BitNet in float32, SMALL but for ``shape``; with ``block`` its layers are AutoBitLinear."""
    torch.compiler.set_stance("force_eager")  # transformers decorates functions with torch.compile
    model = BitNetForCausalLM(BitNetConfig(**{**SMALL, **shape})).eval()
    if block:
        for name in linear_layers(model.state_dict()):
            old = model.get_submodule(name)
            new = AutoBitLinear(old.in_features, old.out_features, bias=False, online_quant=True)
            model.set_submodule(name, new)
    return model  # type: ignore[no-any-return]


def write_master(folder: Path, block: dict[str, Any] | None = None, blocks: float = 3, **shape: int) -> Path:
    """Write BF16 master weights.

    ``blocks`` scales the weights of transformer blocks.  It outweighs the embedding, so that the next token depends on
    the context; the larger it is, the more rounding errors grow from block to block.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in transformers_model(**shape).state_dict().items():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            noise = 1 + 0.2 * noise
        else:
            noise *= 0.3 if "embed" in name else blocks * parameter.shape[1] ** -0.5
        tensors[name] = noise.to(torch.bfloat16)
    del tensors["lm_head.weight"]
    return write(folder, tensors, block, **shape)


def write(folder: Path, tensors: dict[str, Tensor], block: dict[str, Any] | None, **shape: int) -> Path:
    config = {**SMALL, **shape, **({"quantization_config": block} if block else {})}
    return models.write(folder, config, tensors)


def write_offline(master: Path, folder: Path, block: dict[str, Any], packed: bool) -> Path:
    """Write the ternary form of a master checkpoint with transformers' own functions."""
    tensors = load_file(master / "model.safetensors")
    for name in linear_layers(list(tensors)):
        w = tensors[f"{name}.weight"].float()
        scale = w.abs().mean().clamp(min=1e-5).bfloat16()
        codes = (w / scale.float()).round().clamp(-1, 1)
        tensors[f"{name}.weight"] = pack_weights(codes.clone()) if packed else codes.bfloat16()
        inverse = block["linear_class"] == "bitlinear"
        tensors[f"{name}.weight_scale"] = (1 / scale if inverse else scale).reshape(1)
    return write(folder, tensors, block)


@torch.inference_mode()
def best(model: nn.Module, prompts: list[list[int]]) -> list[list[float]]:
    """Return the largest log-probability at each position but the last, as the task ``logprobs`` does."""
    logprobs = []
    for prompt in prompts:
        logits = model(input_ids=torch.tensor([prompt])).logits[0].float()
        logprobs.append(logits.log_softmax(-1).amax(-1)[:-1].tolist())
    return logprobs


def greedy(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Generate ``count`` tokens after each prompt."""
    options = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count}
    return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts]


def load(model: nn.Module, folder: Path) -> nn.Module:
    """Load the weights of a master checkpoint into ``model``."""
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()  # type: ignore[operator]
    return model
