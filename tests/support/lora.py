"""A LoRA adapter in PEFT's format, and kernel configurations that make vLLM's LoRA kernels deterministic."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 8, 16
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(model: Path, folder: Path, seed: int = 0) -> Path:
    """Write a random adapter with a visible effect for all linear layers of the float checkpoint ``model``."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.removesuffix(".weight").rsplit(".", 1)[-1] not in PROJECTIONS:
            continue
        n, k = weight.shape
        head = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{head}.lora_A.weight"] = torch.randn(RANK, k, generator=generator) * k**-0.5
        tensors[f"{head}.lora_B.weight"] = torch.randn(n, RANK, generator=generator) * 0.1
    folder.mkdir(parents=True)
    save_file({name: tensor.half() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": RANK, "lora_alpha": ALPHA}
    config |= {"target_modules": list(PROJECTIONS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_kernel_configs(folder: Path, gpu: str) -> Path:
    """Write a folder for VLLM_TUNED_CONFIG_FOLDER with vLLM's own configurations for the GPU, but without split-K.

    By default up to 64 parts of K are added atomically, in any order, so that even stock vLLM differs from itself.  The
    keys are numbers of adapters, slices, tokens, K and N; vLLM takes the nearest key, except for slices.
    """
    shared = {"num_warps": 4, "num_ctas": 1, "num_stages": 2, "max_nreg": None}
    shrink = {**shared, "block_m": 32, "block_n": 16, "block_k": 32, "split_k": 1, "group_size_m": 8}
    expand = {**shared, "block_m": 64, "block_n": 64, "block_k": 32}
    folder.mkdir(parents=True)
    name = gpu.replace(" ", "_").replace("-", "_")
    for suffix, config in (("SHRINK", shrink), ("EXPAND_TRUE", expand), ("EXPAND_FALSE", expand)):
        nested = {"1": {str(slices): {"1": {"1": {"1": config}}} for slices in (1, 2, 3)}}
        (folder / f"{name}_{suffix}.json").write_text(json.dumps(nested))
    return folder
