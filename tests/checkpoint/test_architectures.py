"""Models of all kinds are converted by what transformers' modules are, whatever their layers are called."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, HEAD, MROPE, QWEN_VISION, multimodal
from checkpoints import assert_same_tensors, config_of, convert, refused, tensors_of, write
from tiny import build, fill, tiny
from torch import nn

from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import dequantize_rows
from slidesparse.slide import violations

QWEN3_VISION = {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
MODELS = {**ARCHITECTURES, "qwen3_vl": multimodal(QWEN3_VISION, **HEAD, **MROPE)}
del MODELS["bitnet"]  # of another quantization, in test_bitnet.py
IN_BLOCKS = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.\d+\.")
OTHERS = re.compile(
    r"vision|visual|\.(?:router|gate|router\.layer|gate\.wg|shared_expert_gate)\Z"
)  # and routers
SPLIT = {"nomic_bert": re.compile(r"self_attn\.[qkv]_proj\Z")}  # stored as one matrix, Wqkv


def is_pruned(name: str, path: str, module: nn.Module) -> bool:
    """Return whether a module of a model is a linear layer of a transformer block of its text model."""
    if not isinstance(module, nn.Linear) or not IN_BLOCKS.search(path) or OTHERS.search(path):
        return False
    return not (name in SPLIT and SPLIT[name].search(path))


@pytest.mark.parametrize("name", MODELS)
def test_linear_layers_of_blocks_are_pruned_and_all_else_is_unchanged(name: str, tmp_path: Path) -> None:
    """The output, dequantized, is loaded into transformers' model again."""
    model = build(name.split()[0], **MODELS[name])
    fill(model)
    model.bfloat16().save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out")
    before, floats = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "out")
    for layer in (*report.pruned, *report.skipped):
        codes, scale = floats.pop(f"{layer}.weight"), floats.pop(f"{layer}.weight_scale")
        before.pop(f"{layer}.weight")
        floats[f"{layer}.weight"] = dequantize_rows(codes, scale)
    assert_same_tensors({name: tensor for name, tensor in floats.items() if name in before}, before)
    write(tmp_path / "floats", config_of(tmp_path / "source"), floats)
    options = {"dtype": torch.float32, "output_loading_info": True, "experts_implementation": "eager"}
    loaded, information = type(model).from_pretrained(tmp_path / "floats", **options)
    assert not any(information.values()), information
    originals = dict(model.float().named_parameters())
    pruned = {path: m.weight.data for path, m in loaded.named_modules() if is_pruned(name, path, m)}
    assert len(pruned) == len(report.pruned)
    for path, weight in pruned.items():
        original = originals[f"{path}.weight"].data
        assert violations(weight, SlidePattern(8)) is None, path
        error = (weight - prune(original, SlidePattern(8))).abs().amax(1)
        assert bool((error <= original.abs().amax(1) / 254 + 1e-6).all()), path  # half a step of 127


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "deepseek_v3",
            {"ignore": ["q_a_proj"]},
            "q_a_proj but not model.layers.0.self_attn.kv_a_proj_with_mqa",
        ),
        (
            "deepseek_v2",
            {"layer": ["kv_a_proj=2:4"]},
            "kv_a_proj_with_mqa but not model.layers.0.self_attn.q_a_proj",
        ),
        ("lfm2", {"layer": [r"\.w1$=dense"]}, "feed_forward.w1 but not model.layers.0.feed_forward.w3"),
        (
            "qwen3_5_text",
            {"ignore": ["in_proj_qkv"]},
            "linear_attn.in_proj_qkv but not model.layers.0.linear_attn.in_proj",
        ),
        ("llama", {"ignore": ["k_proj"]}, "k_proj but not model.layers.0.self_attn.q_proj"),
    ],
)
def test_part_of_what_vllm_fuses_cannot_be_treated_apart(
    tmp_path: Path, name: str, options: dict[str, Any], words: str
) -> None:
    refused(tiny(name, tmp_path / "source", **MODELS[name]), words, **options)
