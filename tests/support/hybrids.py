"""Small models whose layers vLLM calls otherwise than their checkpoints do, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}
MLA = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
GATED_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,  # vLLM's kernel for CPUs takes no less
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
# name -> the class of its config, its settings
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "FalconH1": (
        "FalconH1Config",
        {**MAMBA, "mamba_d_ssm": 256, "head_dim": 32},
    ),
    "GraniteMoeHybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            "mamba_expand": 2,
            "shared_intermediate_size": 256,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["mamba", "attention"],
            "position_embedding_type": "nope",
        },
    ),
    "Lfm2": (
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention"],
            "block_ff_dim": 256,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 128,  # this and the next are in published configs, and read by vLLM alone
            "block_dim": 128,
        },
    ),
    "Qwen3_5": (
        "Qwen3_5TextConfig",
        {
            **GATED_DELTA,
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 32,
            "dtype": "bfloat16",  # this and the next: all that vLLM's gated delta rule takes on CPUs
            "mamba_ssm_dtype": "float32",
        },
    ),
    "DeepseekV2": (
        "DeepseekV2Config",
        {
            **MLA,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "moe_intermediate_size": 64,
            "head_dim": 32,
        },
    ),
}


def write(name: str, folder: Path) -> Path:
    """Write one of MODELS as a checkpoint in float32, or its own dtype."""
    import transformers

    config, settings = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**COMMON, **settings))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.06)
    model.to(getattr(torch, settings.get("dtype", "float32"))).save_pretrained(folder)
    return folder
