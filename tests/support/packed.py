"""Weights stored without their zeros, as compressed-tensors up to 0.14 did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from strategies import raw
from torch import Tensor

from slidesparse.checkpoint.metadata import QUANT_METHOD, Metadata
from slidesparse.pattern import SlidePattern


def packed(w: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Split a weight into values, ``width`` of each row or its non-zeros in one vector, and their bitmask."""
    kept = raw(w) != 0
    if width is not None:
        first = kept.int().argsort(dim=-1, descending=True, stable=True)[:, :width]
        kept = torch.zeros_like(kept).scatter_(1, first, True)
    values = raw(w)[kept].view(w.dtype)
    bitmask = torch.from_numpy(np.packbits(kept.numpy(), axis=-1, bitorder="little"))
    return (values if width is None else values.view(len(w), width)), bitmask


def packed_layout(dense: Path, out: Path) -> Path:
    """Rewrite a converted checkpoint of one file in the packed layout, as ``convert`` wrote it up to version 0.2.

    ::

        X.weight [N, K]  ->  X.compressed [N, V], X.bitmask uint8 [N, ceil(K / 8)], X.shape int64 [2, 1]
    """
    shutil.copytree(dense, out)
    tensors = load_file(dense / "model.safetensors")
    config = json.loads((dense / "config.json").read_text())
    block = config["quantization_config"]
    metadata = Metadata.of_config(block)
    for layer, entry in metadata.layers.items():
        assert isinstance(entry.pattern, SlidePattern)
        weight = tensors.pop(f"{layer}.weight")
        length = entry.pattern.length or weight.shape[1]
        blocks, rest = divmod(weight.shape[1], length)
        values, bitmask = packed(weight, blocks * (length - 2) + min(rest, length - 2))
        tensors |= {f"{layer}.compressed": values, f"{layer}.bitmask": bitmask}
        tensors[f"{layer}.shape"] = torch.tensor(weight.shape)[:, None]
    block |= {"quant_method": QUANT_METHOD}
    block["slidesparse"]["layout"] = "packed"
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
