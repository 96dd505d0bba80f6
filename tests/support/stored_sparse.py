"""Make the checkpoints in tests/checkpoint/stored_sparse with compressed-tensors 0.14.0, the last release that can.

    pip install compressed-tensors==0.14.0 --no-deps --target OLD
    PYTHONPATH=OLD python tests/support/stored_sparse.py tests/checkpoint/stored_sparse

Each has one random Llama layer at 2:4, in one of the two formats of ``sparsity_config``; up_proj is stored dense.
``weights.json`` holds the SHA-256 of each weight [N, K] as that release's own decompressors restore it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

CASES = [(q, form) for q in ("int8", "fp8", "bf16") for form in ("sparse-24-bitmask", "sparse-bitmask")]
TYPES = {"int8": ("int", 127), "fp8": ("float", 448)}


def make(folder: Path, quant: str, form: str) -> None:
    """Quantize and compress one model, as llm-compressor did."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.config import SparsityCompressionConfig
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 20,
        "vocab_size": 8,
        "head_dim": 8,
    }  # 20: half a byte of bits
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, dtype="bfloat16")).to(torch.bfloat16)
    if quant in TYPES:
        kind = {"num_bits": 8, "type": TYPES[quant][0], "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**kind, "strategy": "channel"},
            "input_activations": {**kind, "strategy": "token", "dynamic": True},
        }
        quantization = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
        apply_quantization_config(model, quantization)
    for layer in model.model.modules():
        if isinstance(layer, torch.nn.Linear):
            fours = layer.weight.data.view(-1, 4)
            fours.scatter_(-1, fours.abs().argsort(-1)[:, :2], 0)
            fours[torch.rand(len(fours)) < 0.2, 0] = 0  # so that rows differ in their non-zeros
            if quant in TYPES:
                layer.weight_scale.data.copy_(layer.weight.abs().amax(-1, keepdim=True) / TYPES[quant][1])
    structure = {"sparsity_structure": "2:4"} if "24" in form else {}
    sparsity = SparsityCompressionConfig.load_from_registry(
        form, targets=["Linear"], ignore=["lm_head", "re:.*up_proj"], global_sparsity=0.5, **structure
    )
    compressor = ModelCompressor.from_pretrained_model(model, sparsity_config_or_format=sparsity)
    stored = compressor.compress(model)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    compressor.update_config(str(folder))
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors")
    dense = dict(compressor.sparsity_compressor.decompress_from_state_dict(dict(stored)))
    digests = {
        name: hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in dense.items()
        if name.endswith("_proj.weight")
    }
    (folder / "weights.json").write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    for quant, form in CASES:
        make(Path(sys.argv[1]) / f"{quant}-{form}", quant, form)
