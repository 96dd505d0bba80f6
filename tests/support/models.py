"""Small decoder models with random weights, written as the W8A8 checkpoints that tests convert and serve."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slidesparse.quantize import FP8, INT8, quantize_rows

MODEL = "model.safetensors"
# oneDNN's INT8 kernels for x86 CPUs without VNNI add pairs of products in 16 bits and saturate.  Stock vLLM uses
# them, so comparisons with it need codes small enough that 2 * 255 * code never leaves 16 bits.
LARGEST_EXACT_CODE = 63


@dataclass(frozen=True)
class Decoder:
    """The shape of a small model; K of o_proj is heads * head_dim, of down_proj intermediate."""

    architecture: str
    hidden: int = 128
    intermediate: int = 320
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    layers: int = 2
    vocabulary: int = 512

    @property
    def model_type(self) -> str:
        return self.architecture.removesuffix("ForCausalLM").lower()

    @property
    def biased(self) -> tuple[str, ...]:
        """Projections with a bias: Qwen2 has it on q, k, v; the Llama here on all, as attention_bias and mlp_bias."""
        qkv = ("q_proj", "k_proj", "v_proj")
        return qkv if self.model_type == "qwen2" else (*qkv, "o_proj", "gate_proj", "up_proj", "down_proj")

    def linears(self) -> dict[str, tuple[int, int]]:
        """Layer name -> (N, K)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "self_attn.q_proj": (q, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        return {f"model.layers.{i}.{name}": size for i in range(self.layers) for name, size in shapes.items()}

    def config(self) -> dict[str, object]:
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "attention_bias": True,
            "mlp_bias": self.model_type == "llama",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


QWEN = Decoder("Qwen2ForCausalLM")
LLAMA = Decoder("LlamaForCausalLM")


def float_tensors(model: Decoder) -> dict[str, Tensor]:
    """All tensors of the model in BF16."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": normal(model.vocabulary, model.hidden, std=1.0),
        "model.norm.weight": torch.ones(model.hidden, dtype=torch.bfloat16),
        "lm_head.weight": normal(model.vocabulary, model.hidden, std=0.2),
    }
    for i in range(model.layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = torch.ones(model.hidden, dtype=torch.bfloat16)
    for name, (n, k) in model.linears().items():
        tensors[f"{name}.weight"] = normal(n, k, std=1.5 * k**-0.5)
        if name.rsplit(".", 1)[1] in model.biased:
            tensors[f"{name}.bias"] = normal(n, std=0.1)
    return tensors


def quantization_config(quant: str, strategy: str = "channel") -> dict[str, object]:
    """Return a compressed-tensors W8A8 config with dynamic per-token activations."""
    kind = {"int8": "int", "fp8": "float"}[quant]
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "strategy": strategy, "dynamic": False},
                "input_activations": {**common, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    }


def codes(w: Tensor, dtype: torch.dtype, rows: int = 1, columns: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize w [N, K] by blocks; ``columns`` 0 is a whole row.  Returns codes and scales [blocks, blocks].

    INT8 codes stay within LARGEST_EXACT_CODE.
    """
    n, k = w.shape
    columns = columns or k
    padded = nn.functional.pad(w.float(), (0, -k % columns, 0, -n % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2)
    q, scale = quantize_rows(blocks.flatten(2).flatten(0, 1), dtype)
    if dtype == INT8:
        q, scale = shrunk(q), scale * (127 / LARGEST_EXACT_CODE)
    q = q.unflatten(0, blocks.shape[:2]).unflatten(2, (rows, columns)).transpose(1, 2)
    return q.flatten(2).flatten(0, 1)[:n, :k].contiguous(), scale.reshape(blocks.shape[:2])


def shrunk(q: Tensor) -> Tensor:
    """Scale INT8 codes into LARGEST_EXACT_CODE; zeros stay zero."""
    return (q.float() * (LARGEST_EXACT_CODE / 127)).round().to(INT8)


def write_float(model: Decoder, folder: Path) -> Path:
    """Write a BF16 Hugging Face checkpoint of one file."""
    return write(folder, model.config(), float_tensors(model))


def write_w8a8(
    model: Decoder, folder: Path, quant: str = "int8", strategy: str = "channel", floats: tuple[str, ...] = ()
) -> Path:
    """Write an unpruned compressed-tensors W8A8 checkpoint, whose layers ``floats`` are ignored and stay float."""
    tensors, dtype = float_tensors(model), {"int8": INT8, "fp8": FP8}[quant]
    for name in sorted(model.linears().keys() - floats):
        weight = tensors[f"{name}.weight"]
        q, scale = codes(weight, dtype, 1 if strategy == "channel" else len(weight))
        tensors[f"{name}.weight"] = q
        tensors[f"{name}.weight_scale"] = scale.bfloat16() if strategy == "channel" else scale.reshape(1)
    block = {**quantization_config(quant, strategy), "ignore": ["re:.*lm_head", *floats]}
    return write(folder, {**model.config(), "quantization_config": block}, tensors)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / MODEL, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def shrink_codes(folder: Path) -> Path:
    """Scale the INT8 codes of a checkpoint of one file into LARGEST_EXACT_CODE, but those that are; zeros stay zero."""
    path = folder / MODEL
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8 and tensor.int().abs().max() > LARGEST_EXACT_CODE:
            tensors[name] = shrunk(tensor)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
