"""Small models whose layers vLLM calls otherwise than their checkpoints do, large enough for vLLM's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import build, fill

COMMON = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}
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
GATED_DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
GATED_DELTA |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
GRANITE = {"mamba_expand": 2, "shared_intermediate_size": 256, "position_embedding_type": "nope"}
GRANITE |= {"num_local_experts": 0, "num_experts_per_tok": 0}
LFM2 = {"block_ff_dim": 256, "block_auto_adjust_ff_dim": False}
LFM2 |= {"conv_dim": 128, "block_dim": 128}  # in published configs, and read by vLLM alone
IN_BFLOAT16 = {
    "dtype": "bfloat16",
    "mamba_ssm_dtype": "float32",
}  # all that its gated delta rule takes on CPUs
# model_type -> settings
MODELS: dict[str, dict[str, Any]] = {
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 256, "head_dim": 32},
    "granitemoehybrid": {**MAMBA, **GRANITE, "layer_types": ["mamba", "attention"]},
    "lfm2": {**LFM2, "layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {
        **GATED_DELTA,
        **IN_BFLOAT16,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 32,
    },
    "deepseek_v2": {
        **MLA,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 64,
        "head_dim": 32,
    },
}


def write(name: str, folder: Path) -> Path:
    """Write one of MODELS as a checkpoint in float32, or its own dtype."""
    model = build(name, **COMMON, **MODELS[name])
    fill(model)
    model.to(getattr(torch, MODELS[name].get("dtype", "float32"))).save_pretrained(folder)
    return folder
