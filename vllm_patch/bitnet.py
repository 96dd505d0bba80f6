"""BitNet b1.58, which vLLM lacks: Llama with squared ReLU and two more norms in each block.

::

    norm -> [q k v] -> attention -> attn_sub_norm -> [o] + x
    norm -> [gate up] -> relu(gate)^2 * up -> ffn_sub_norm -> [down] + x

Source: the architecture as transformers publishes it (``models/bitnet``); a test compares logits.

A tensor-parallel rank holds a part of the row that a sub-norm reads.  The ranks all-reduce their sums of squares, one
number per token, so that all use the mean of the whole row.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM

ACTIVATION = "relu2"


class ShardedRMSNorm(nn.Module):
    """RMSNorm over rows [M, K] of which each tensor-parallel rank holds K / ranks consecutive columns."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.weight = nn.Parameter(torch.ones(hidden_size // get_tensor_model_parallel_world_size()))
        self.weight.weight_loader = sharded_weight_loader(0)  # type: ignore[attr-defined]  # where vLLM looks

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = tensor_model_parallel_all_reduce(wide.square().sum(-1, keepdim=True))
        normed = wide * torch.rsqrt(squares / self.hidden_size + self.eps)
        return self.weight * normed.to(x.dtype)


def sub_norm(hidden_size: int, eps: float) -> nn.Module:
    """Return a norm over rows that are sharded by columns: with one rank vLLM's own, which the plugin can fuse."""
    kind = RMSNorm if get_tensor_model_parallel_world_size() == 1 else ShardedRMSNorm
    return kind(hidden_size, eps=eps)


class BitNetAttention(LlamaAttention):
    """Llama's attention with a norm before o_proj."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.attn_sub_norm = sub_norm(self.total_num_heads * self.head_dim, config.rms_norm_eps)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn_sub_norm(self.attn(q, k, v)))
        return output


class BitNetMLP(nn.Module):
    """The linear layers of Llama's MLP with relu(gate)^2 and a norm before down_proj."""

    def __init__(self, config: Any, llamas: nn.Module) -> None:
        if config.hidden_act != ACTIVATION:
            raise ValueError(
                f"config.json: hidden_act is {config.hidden_act!r}; the activation of BitNet is {ACTIVATION!r}"
            )
        super().__init__()
        self.gate_up_proj, self.down_proj = llamas.gate_up_proj, llamas.down_proj
        self.ffn_sub_norm = sub_norm(config.intermediate_size, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, dim=-1)
        output, _ = self.down_proj(self.ffn_sub_norm(F.relu(gate).square() * up))
        return output


class BitNetDecoderLayer(LlamaDecoderLayer):
    """Llama's decoder layer with `BitNetAttention` and `BitNetMLP`."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        config = config or vllm_config.model_config.hf_config
        llamas = copy(config)
        llamas.hidden_act = "silu"  # the only one that LlamaMLP accepts, which is not used here
        super().__init__(vllm_config, prefix, llamas, BitNetAttention)
        self.mlp = BitNetMLP(config, self.mlp)


class BitNetForCausalLM(LlamaForCausalLM):
    """BitNet b1.58.  Its linear layers have ternary weights, which the quantization config handles, not the model."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=BitNetDecoderLayer)
