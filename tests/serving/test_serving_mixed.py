"""Checkpoints whose layers have several patterns, or none: tokens equal those of stock vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import convert
from engines import Engines
from models import QWEN, Decoder, shrink_codes, write_w8a8
from safetensors.torch import load_file, save_file
from tool_sources import compressed

from slidesparse.checkpoint.metadata import KEY, LayerEntry, Metadata
from slidesparse.pattern import SlidePattern, parse_pattern
from slidesparse.prune import prune

pytestmark = pytest.mark.vllm

RULES = ["down_proj=8:10", r"layers\.1\.mlp\.(gate|up)_proj=4:6"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_w8a8(QWEN, tmp_path_factory.mktemp("mixed") / "source")


def test_mixed_patterns_tokens_equal_stock(engines: Engines, source: Path, tmp_path: Path) -> None:
    for layout in ("dense", "slided"):
        convert(source, tmp_path / layout, layer=[*RULES, r"1.*o_proj=dense"], layout=layout)
    answers = engines.as_stock(tmp_path / "dense"), engines.serve(tmp_path / "slided")
    assert answers[0].tokens == answers[1].tokens
    for answer in answers:
        assert answer.summary.startswith(
            "6:8 (2 of every 8 pruned): 7 layers sparse (1 at 4:6, 4 at 6:8, 2 at 8:10), "
            "1 not pruned (by the same backend), 1 dense (1 lm_head)"
        ), answer.summary


@pytest.mark.slow
def test_mixed_patterns_tp2_tokens_equal_stock(engines: Engines, source: Path, tmp_path: Path) -> None:
    """Shards have 64 and 160 columns: whole blocks of 10 and 8, cut blocks of 6."""
    convert(source, tmp_path / "out", "4:6", layer=["down_proj=8:10"])
    answer = engines.as_stock(tmp_path / "out", options={"tensor_parallel_size": 2})
    assert "8 layers sparse (6 at 4:6, 2 at 8:10)" in answer.summary


def test_quantization_groups_of_compressed_tensors(engines: Engines, tmp_path: Path) -> None:
    """Groups are given by class, regex and name, and one has static activations."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme

    groups = {
        "group_0": QuantizationScheme(
            targets=["Linear"],
            weights=QuantizationArgs(strategy="channel"),
            input_activations=QuantizationArgs(strategy="tensor"),
        ),
        "group_1": preset_name_to_scheme("W8A8", [r"re:.*mlp\..*_proj"]),
        "group_2": preset_name_to_scheme("W8A8", ["model.layers.1.self_attn.o_proj"]),
    }
    source = compressed(tmp_path / "source", groups, ["lm_head", "re:.*layers.0.*o_proj"], QWEN)
    convert(source, tmp_path / "out")
    answer = engines.as_stock(shrink_codes(tmp_path / "out"))
    assert "7 layers sparse, 2 dense (1 lm_head, 1 not quantized)" in answer.summary, answer.summary


@pytest.mark.parametrize(
    ("targets", "fragment"), [(["Linear"], "lm_head dequantized"), (["Linear", "lm_head"], "")]
)
def test_quantized_lm_head_tokens_equal_stock(
    engines: Engines, tmp_path: Path, targets: list[str], fragment: str
) -> None:
    """vLLM serves a quantized head, but cannot load the other source's head unless it is rewritten."""
    from compressed_tensors.quantization import preset_name_to_scheme

    source = compressed(tmp_path / "source", {"group_0": preset_name_to_scheme("W8A8", targets)}, [], QWEN)
    assert fragment in convert(source, tmp_path / "out").plan.rewritten
    answer = engines.as_stock(shrink_codes(tmp_path / "out"))
    assert "8 layers sparse, 1 dense (1 lm_head)" in answer.summary


WIDE = Decoder("Qwen2ForCausalLM", hidden=256, intermediate=512, head_dim=64)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_half_pruned_blocks_tokens_equal_stock(engines: Engines, tmp_path: Path, size: int) -> None:
    """Version 0.2 wrote 2:4@50%, here beside a layer of 6:8 and one that is not pruned."""
    folder = write_w8a8(WIDE, tmp_path / "out")
    patterns = dict.fromkeys(WIDE.linears(), parse_pattern("2:4@50%"))
    patterns["model.layers.1.mlp.down_proj"] = parse_pattern("6:8")
    del patterns["model.layers.1.self_attn.o_proj"]
    tensors = load_file(folder / "model.safetensors")
    for name, pattern in patterns.items():
        tensors[f"{name}.weight"] = prune(tensors[f"{name}.weight"], pattern)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    layers = {name: LayerEntry(pattern, WIDE.linears()[name][1]) for name, pattern in patterns.items()}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"][KEY] = Metadata(parse_pattern("2:4@50%"), "dense", layers).to_json()
    (folder / "config.json").write_text(json.dumps(config))
    answer = engines.as_stock(folder, options={"tensor_parallel_size": size})
    assert answer.summary.startswith(
        "2:4@50% (2 of every 4 pruned in 50% of the blocks): 7 layers sparse (6 at 2:4@50%, 1 at 6:8), "
        "1 not pruned (by the same backend), 1 dense (1 lm_head)"
    ), answer.summary


NO_PRUNED_LAYERS = "none of the checkpoint's pruned layers is in this part of the model"


def test_model_part_without_pruned_layers_is_served(engines: Engines, tmp_path: Path) -> None:
    """An example is a quantized draft in the checkpoint of a pruned model, with or without a flag for the
    sparse path.
    """
    folder = write_w8a8(QWEN, tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    layers = {"model.layers.7.mlp.down_proj": LayerEntry(SlidePattern(8), QWEN.intermediate)}
    config["quantization_config"][KEY] = Metadata(SlidePattern(8), "dense", layers).to_json()
    (folder / "config.json").write_text(json.dumps(config))
    for env in ({}, {"USE_CUSPARSELT": "1"}):
        answer = engines.as_stock(folder, env)
        assert "0 layers sparse, 8 not pruned (by the same backend), 1 dense (1 lm_head)" in answer.summary
        assert answer.summary.endswith(NO_PRUNED_LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dense", "slided"])
def test_pipeline_stage_without_pruned_layers_loads(
    engines: Engines, source: Path, tmp_path: Path, layout: str
) -> None:
    """It only loads, as vLLM's engine for CPUs computes nothing in pipelines."""
    convert(source, tmp_path / "out", layer=[r"layers\.1\.=dense"], layout=layout)
    answer = engines.serve(tmp_path / "out", options={"pipeline_parallel_size": 2}, work={"prompts": []})
    assert "4 layers sparse" in answer.log
    assert NO_PRUNED_LAYERS in answer.log
