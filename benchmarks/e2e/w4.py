"""A checkpoint of the shapes of a W8A8 one with random 4-bit weights in groups of 128, for comparison.

vLLM serves it by its own mixed-precision kernels: on Hopper by Machete with activations in 16 bits, and by CUTLASS with
activations in FP8.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

GROUP = 128  # in-features that share a scale
CODES = {torch.int8, torch.float8_e4m3fn}
WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": GROUP,
    "dynamic": False,
}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def quantization(fp8: bool) -> dict[str, Any]:
    """Return the ``quantization_config``, with activations in FP8 or 16 bits."""
    group = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": FP8 if fp8 else None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def write(source: Path, out: Path, fp8: bool = False) -> None:
    """Write OUT with the 4-bit twin of each quantized layer of SOURCE, an unpruned W8A8 folder of `slidesparse synth`.

    A weight [N, K] becomes ``weight_packed`` int32 [N, K / 8], ``weight_scale`` bfloat16 [N, K / 128] and
    ``weight_shape``; other tensors are copied.
    """
    out.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_dir():
            shutil.copytree(path, out / path.name)
        elif path.name != "config.json" and ".safetensors" not in path.name:
            shutil.copy(path, out / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantization(fp8)}, indent=1)
    )
    generator = torch.Generator().manual_seed(0)
    files: dict[str, str] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                tensor = file.get_tensor(name)
                if tensor.dtype in CODES:
                    layer, (n, k) = name.removesuffix("weight"), tensor.shape
                    words = torch.randint(
                        -(2**31), 2**31 - 1, (n, k // 8), generator=generator, dtype=torch.int32
                    )
                    scale = torch.rand(n, k // GROUP, generator=generator) * 0.002 + 0.003
                    tensors[f"{layer}weight_packed"] = words
                    tensors[f"{layer}weight_scale"] = scale.to(torch.bfloat16)
                    tensors[f"{layer}weight_shape"] = torch.tensor([n, k])
                elif not name.endswith("weight_scale"):
                    tensors[name] = tensor
        save_file(tensors, out / path.name, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, path.name)
    index = {"metadata": {}, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
