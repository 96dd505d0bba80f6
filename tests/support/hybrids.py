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
    """Write one of MODELS as a checkpoint in float32."""
    import transformers

    config, settings = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**COMMON, **settings))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.06)
    model.save_pretrained(folder)
    return folder
