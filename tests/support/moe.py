"""Small mixture-of-experts models with random weights and the tensor names of Hugging Face checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PRUNED = [r"\.experts\.=6:8"]  # for --layer, without which routed experts are not pruned
HIDDEN, HEADS, HEAD, VOCABULARY, LAYERS, EXPERTS = 128, 4, 32, 512, 2, 4


@dataclass(frozen=True)
class Moe:
    """A model of two layers; the intermediate size of its experts is 64."""

    architecture: str
    config: Mapping[str, Any]  # entries beside those that all models have
    module: str  # name of the module that holds the router and the experts of a layer
    parts: tuple[str, str, str]  # gate, up and down of an expert
    router: str = "gate"
    others: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of a layer, never pruned
    shared: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # linear layers of a layer
    dense: tuple[int, ...] = ()  # layers with an MLP instead of experts

    def attention(self) -> dict[str, tuple[int, int]]:
        """Layer name -> (N, K) of the attention's linear layers."""
        shapes = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        return {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in shapes.items()}

    def linears(self) -> dict[str, tuple[int, int]]:
        """Layer name -> (N, K) of all linear layers, which are pruned."""
        layers = self.attention()
        for i in range(LAYERS):
            mlp = dict(zip(("gate_proj", "up_proj", "down_proj"), _mlp(160), strict=True))
            shapes = {f"mlp.{name}": shape for name, shape in mlp.items()} if i in self.dense else self.shared
            layers |= {f"model.layers.{i}.{name}": shape for name, shape in shapes.items()}
        return layers

    def experts(self) -> dict[str, tuple[int, int]]:
        """Layer name -> (N, K) of routed experts."""
        return {
            f"model.layers.{i}.{self.module}.experts.{expert}.{part}": shape
            for i in range(LAYERS)
            if i not in self.dense
            for expert in range(EXPERTS)
            for part, shape in zip(self.parts, _mlp(64), strict=True)
        }

    def routers(self) -> dict[str, tuple[int, int]]:
        """Layer name -> (N, K) of routers and other layers that are never quantized."""
        shapes = {f"{self.module}.{self.router}": (EXPERTS, HIDDEN), **self.others}
        sparse_layers = (i for i in range(LAYERS) if i not in self.dense)
        return {f"model.layers.{i}.{name}": shape for i in sparse_layers for name, shape in shapes.items()}

    def settings(self) -> dict[str, Any]:
        """The entries of config.json."""
        return {
            "architectures": [self.architecture],
            "hidden_size": HIDDEN,
            "intermediate_size": 160,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD,
            "num_hidden_layers": LAYERS,
            "num_experts_per_tok": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            **self.config,
        }

    def tensors(self, seed: int = 0) -> dict[str, Tensor]:
        """All tensors in BF16."""
        generator = torch.Generator().manual_seed(seed)

        def normal(n: int, k: int, std: float) -> Tensor:
            return (torch.randn(n, k, generator=generator) * std).bfloat16()

        tensors = {
            "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, 1.0),
            "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
            "lm_head.weight": normal(VOCABULARY, HIDDEN, 0.2),
        }
        for i in range(LAYERS):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{i}.{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
            if self.architecture == "Qwen3MoeForCausalLM":
                for norm in ("q_norm", "k_norm"):
                    tensors[f"model.layers.{i}.self_attn.{norm}.weight"] = torch.ones(HEAD).bfloat16()
            if self.architecture == "Qwen2MoeForCausalLM":
                for part in "qkv":
                    bias = torch.randn(HIDDEN, generator=generator) * 0.1
                    tensors[f"model.layers.{i}.self_attn.{part}_proj.bias"] = bias.bfloat16()
        for name, (n, k) in {**self.linears(), **self.experts(), **self.routers()}.items():
            tensors[f"{name}.weight"] = normal(n, k, 1.5 * k**-0.5)
        return tensors

    def joined(self) -> dict[str, Tensor]:
        """The same tensors with the experts of a layer joined as transformers 5 holds them."""
        tensors = self.tensors()
        for layer in {name.split(".experts.")[0] + ".experts" for name in self.experts()}:
            single = [
                [tensors.pop(f"{layer}.{e}.{part}.weight") for part in self.parts] for e in range(EXPERTS)
            ]
            tensors[f"{layer}.gate_up_proj"] = torch.stack([torch.cat(parts[:2]) for parts in single])
            tensors[f"{layer}.down_proj"] = torch.stack([parts[2] for parts in single])
        return tensors

    def write(self, folder: Path, joined: bool = False) -> Path:
        """Write a float checkpoint."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.settings()))
        save_file(
            self.joined() if joined else self.tensors(),
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        return folder


def _mlp(intermediate: int) -> list[tuple[int, int]]:
    return [(intermediate, HIDDEN), (intermediate, HIDDEN), (HIDDEN, intermediate)]


_QWEN_PARTS = ("gate_proj", "up_proj", "down_proj")
_QWEN = {
    "num_experts": EXPERTS,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
MIXTRAL = Moe(
    "MixtralForCausalLM",
    {"model_type": "mixtral", "num_local_experts": EXPERTS, "intermediate_size": 64},
    "block_sparse_moe",
    ("w1", "w3", "w2"),
)
QWEN3 = Moe("Qwen3MoeForCausalLM", {"model_type": "qwen3_moe", **_QWEN}, "mlp", _QWEN_PARTS)
QWEN2 = Moe(
    "Qwen2MoeForCausalLM",
    {"model_type": "qwen2_moe", **_QWEN, "shared_expert_intermediate_size": 96, "mlp_only_layers": [0]},
    "mlp",
    _QWEN_PARTS,
    others={"mlp.shared_expert_gate": (1, HIDDEN)},
    shared={f"mlp.shared_expert.{part}": shape for part, shape in zip(_QWEN_PARTS, _mlp(96), strict=True)},
    dense=(0,),
)
MODELS = {"mixtral": MIXTRAL, "qwen3": QWEN3, "qwen2": QWEN2}
