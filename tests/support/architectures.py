"""Settings of tiny models of many architectures, for `tiny.build`; sequences are longer than attention windows."""

from __future__ import annotations

from typing import Any

HEAD: dict[str, Any] = {"head_dim": 16}
WINDOW = {"sliding_window": 8}
GEMMA = {**HEAD, **WINDOW, "query_pre_attn_scalar": 16}
MOE = {**HEAD, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {**HEAD, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
MLA |= {**ROUTED, "num_key_value_heads": 4, "head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
GRANITE = {"num_local_experts": 0, "shared_intermediate_size": 96}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
JAMBA |= {"num_experts": 4, "mamba_dt_rank": 8, "use_mamba_kernels": False}
NEMOTRON = {**HEAD, "hybrid_override_pattern": "M*-M", "num_hidden_layers": 4, "mamba_num_heads": 8}
NEMOTRON |= {"mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 8}
GATED = {**HEAD, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
# The norm of a head is as wide as the model
GATED |= {"linear_key_head_dim": 16, "linear_value_head_dim": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0}
LONGROPE |= {"short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
# Of multimodal models
TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 128, **HEAD}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}


def multimodal(vision: dict[str, Any], **text: Any) -> dict[str, Any]:
    return {"text_config": {**TEXT, **text}, "vision_config": vision}


# name -> settings; the name is the model_type, up to a space
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama biased": {"attention_bias": True, "mlp_bias": True},
    "llama tied": {"tie_word_embeddings": True},
    "llama llama3": {"rope_parameters": LLAMA3},
    "mistral": WINDOW,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "qwen3": HEAD,
    "gemma": HEAD,
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**GEMMA, "sliding_window_pattern": 2},
    "vaultgemma": GEMMA,
    "phi": {},
    "phi3": WINDOW,
    "phi3 longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "bitnet": {"hidden_act": "relu2"},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "cohere": {},
    "cohere2": WINDOW,
    "exaone4": HEAD,
    "ministral3": HEAD,
    "seed_oss": HEAD,
    "smollm3": {},
    "stablelm": {},
    "glm": HEAD,
    "glm4": HEAD,
    "helium": HEAD,
    "hunyuan_v1_dense": HEAD,
    "ernie4_5": HEAD,
    "starcoder2": {},
    "gpt_neox": {},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "nemotron": {},
    "apertus": {},
    "arcee": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"n_layers": 2, "n_heads": 4, "d_model": 64, "expansion_ratio": 2},
    "gpt_bigcode": {"n_layer": 2, "n_head": 4, "n_embd": 64},
    "persimmon": {},
    "biogpt": {},
    "doge": {},
    "diffllama": {},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 32},
    "qwen3_moe": MOE,
    # of as many experts as keys and shared experts have features, like Qwen3-Next-80B
    "qwen2_moe alike": {**MOE, "num_experts": 32, "shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 4},
    "glm4_moe": ROUTED,
    "dots1": {**ROUTED, "n_shared_experts": 1, "routed_scaling_factor": 2.0},
    "ernie4_5_moe": {**HEAD, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "hunyuan_v1_moe": {**HEAD, "num_experts": 4, "moe_topk": 2},
    "gpt_oss": {**HEAD, **WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {**HEAD, "num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 16},
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "minimax": {**HEAD, "num_local_experts": 2, "block_size": 8},
    "jetmoe": {"kv_channels": 16, "num_local_experts": 4},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 96},
    "falcon_h1": {**HEAD, **MAMBA, "mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_n_groups": 1},
    "granitemoehybrid": {**MAMBA, **GRANITE, "layer_types": ["mamba", "attention"]},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "jamba": JAMBA,
    "mamba": {},
    "mamba2": {**HEAD, "num_heads": 8, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    "nemotron_h": NEMOTRON,
    "recurrent_gemma": {**HEAD, "attention_window_size": 8, "lru_width": 64, "num_hidden_layers": 3},
    "qwen3_next": {**MOE, **GATED, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": GATED,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "xlm-roberta": {},
    "distilbert": {"dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 96},
    "modernbert": {},
    "nomic_bert": {},
    "electra": {"architecture": "ElectraModel", "embedding_size": 64},
}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": multimodal(VISION, **GEMMA),
    "llava": multimodal({**VISION, "model_type": "siglip_vision_model"}, model_type="llama"),
    "mistral3": multimodal({**VISION, "model_type": "pixtral"}, model_type="mistral"),
    "idefics3": multimodal(VISION, model_type="llama", pad_token_id=0),
    "internvl": multimodal({**VISION, "image_size": [28, 28], "patch_size": [14, 14]}, model_type="qwen3"),
    "qwen2_5_vl": multimodal(QWEN_VISION, **MROPE),
    "qwen3_vl_moe": multimodal(
        {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}, **MOE, **MROPE
    ),
    "qwen3_5": multimodal({**QWEN_VISION, "num_position_embeddings": 16}, **GATED),
}
ARCHITECTURES = DECODERS | MIXTURES | HYBRIDS | ENCODERS | MULTIMODAL
