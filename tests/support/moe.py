"""Small mixtures of experts, which transformers makes and writes, and what their checkpoints call the layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from checkpoints import MODEL, config_of, tensors_of
from safetensors.torch import save_file
from tiny import build, fill
from torch import Tensor

PRUNED = [r"\.experts\.=6:8"]  # for --layer, without which routed experts are not pruned
LAYERS, EXPERTS = 2, 4
SIZES = {"hidden_size": 128, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 512}
SIZES |= {"max_position_embeddings": 512, "num_experts_per_tok": 2, "pad_token_id": None}
QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": 64, "intermediate_size": 160, "norm_topk_prob": True}
QWEN |= {"output_router_logits": True}  # as models are left by training
ROUTERS = (".gate.weight", "_gate.weight")


@dataclass(frozen=True)
class Moe:
    """A model of two layers; the intermediate size of its experts is 64."""

    kind: str  # its model_type
    config: Mapping[str, Any]
    module: str = "mlp"  # name of the module that holds the router and the experts of a layer
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert
    dense: tuple[int, ...] = ()  # layers with an MLP instead of experts

    def write(self, folder: Path, joined: bool = False) -> Path:
        """Write a checkpoint in BF16, whose embedding outweighs the blocks, so that few tokens are near ties."""
        model: Any = build(self.kind, **{**SIZES, **self.config})
        fill(model)
        model.get_input_embeddings().weight.data *= 8
        model.get_output_embeddings().weight.data *= 2
        model.bfloat16().save_pretrained(folder)
        if joined:
            save_file(self.joined(), folder / MODEL, metadata={"format": "pt"})
        return folder

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config.json and all tensors."""
        with TemporaryDirectory() as folder:
            return config_of(self.write(Path(folder))), tensors_of(Path(folder))

    def joined(self) -> dict[str, Tensor]:
        """Return all tensors, with the experts of a layer joined as transformers 5 holds them."""
        tensors = self.read()[1]
        for layer in {name.split(".experts.")[0] + ".experts" for name in self.experts()}:
            single = [[tensors.pop(f"{layer}.{e}.{p}.weight") for p in self.parts] for e in range(EXPERTS)]
            tensors[f"{layer}.gate_up_proj"] = torch.stack([torch.cat(parts[:2]) for parts in single])
            tensors[f"{layer}.down_proj"] = torch.stack([parts[2] for parts in single])
        return tensors

    def linears(self) -> dict[str, tuple[int, int]]:
        """Layer name -> (N, K) of the linear layers outside of routed experts, which are pruned."""
        return {name: shape for name, shape in _shapes(self.kind).items() if name not in self.experts()}

    def experts(self) -> dict[str, tuple[int, int]]:
        """Layer name -> (N, K) of routed experts."""
        return {name: shape for name, shape in _shapes(self.kind).items() if ".experts." in name}


@cache
def _shapes(kind: str) -> dict[str, tuple[int, int]]:
    """Map the linear layers of blocks to their shapes, but not routers."""
    model = next(model for model in MODELS.values() if model.kind == kind)
    return {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in model.read()[1].items()
        if tensor.dim() == 2 and ".layers." in name and not name.endswith(ROUTERS)
    }


MODELS = {
    "mixtral": Moe(
        *("mixtral", {"num_local_experts": EXPERTS, "intermediate_size": 64}),
        *("block_sparse_moe", ("w1", "w3", "w2")),
    ),
    "qwen3": Moe("qwen3_moe", QWEN),
    "qwen2": Moe(
        "qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 96, "mlp_only_layers": [0]}, dense=(0,)
    ),
}
