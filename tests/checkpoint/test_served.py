"""Conversions where vLLM is installed follow what it says of the model's layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, HYBRIDS
from checkpoints import block_of, convert, tensors_of
from commands import Done
from moe import MODELS, PRUNED
from strategies import assert_same_bits
from tiny import tiny

from slidesparse.checkpoint.inspection import inspect
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.serving import Skeletons

pytestmark = pytest.mark.vllm

# Of Mamba 1, which vLLM builds without quantization
PROJECTIONS = ("in_proj", "x_proj", "dt_proj", "out_proj")
MIXER = [f"model.layers.0.mamba.{name}" for name in PROJECTIONS]


def jamba(folder: Path, experts: int = 1) -> Path:
    """A block of Mamba and one of attention; vLLM calls the first model.layers.0.mixer."""
    return tiny("jamba", folder, **{**HYBRIDS["jamba"], "num_experts": experts, "num_experts_per_tok": 1})


@pytest.mark.parametrize(("experts", "pruned"), [(1, 10), (4, 7)])
def test_layers_that_vllm_does_not_quantize_are_kept(
    tmp_path: Path, skeletons: Skeletons, monkeypatch: pytest.MonkeyPatch, experts: int, pruned: int
) -> None:
    """Also where vLLM has no kernel for experts, as for INT8 ones on CPUs, and whatever the flags of a server here."""
    flags = {"DISABLE_SLIDESPARSE": "1", "SLIDESPARSE_BACKEND": "hopper", "SPARSITY": "0.5"}
    for flag, value in flags.items():
        monkeypatch.setenv(flag, value)
    source = jamba(tmp_path / "source", experts)
    report = convert(source, tmp_path / "out", skeletons=skeletons)
    assert report.unserved == ""
    assert len(report.plan.patterns) == pruned
    assert {report.plan.kept[name] for name in MIXER} == {"vLLM does not quantize it"}
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    for name in MIXER:
        assert_same_bits(after[f"{name}.weight"], before[f"{name}.weight"])
    named_by_vllm = {f"model.layers.0.mixer.{name}" for name in PROJECTIONS}
    ignored = {*block_of(tmp_path / "out")["ignore"]} - {"model.layers.1.feed_forward.router"}
    assert ignored == {"lm_head", *MIXER, *named_by_vllm}


def test_output_that_vllm_would_not_serve_is_refused(tmp_path: Path, skeletons: Skeletons) -> None:
    """The mixer was quantized where vLLM is not installed; and vLLM's class takes the head in floats."""
    source = jamba(tmp_path / "source")
    with pytest.raises(CheckpointError, match=r"(?s)not serve .* takes lm_head in floats: leave --layer out"):
        convert(source, tmp_path / "out", layer=["lm_head=dense"], skeletons=skeletons)
    convert(source, tmp_path / "quantized")
    with pytest.raises(CheckpointError, match="vLLM, which is installed here, would not serve the converted"):
        convert(tmp_path / "quantized", tmp_path / "out", layout="slided", skeletons=skeletons)
    assert not (tmp_path / "out").exists()


def test_part_of_a_fused_layer_is_refused_by_vllm(
    tmp_path: Path, skeletons: Skeletons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is, of a model that transformers cannot run, and so not tell which layers share their inputs."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel for this machine")

    monkeypatch.setattr(transformers.models.qwen3.modeling_qwen3.Qwen3MLP, "forward", fail)
    source = tiny("qwen3", tmp_path / "source")
    with pytest.raises(
        CheckpointError, match=r"(?s)would not serve the converted .*\['gate_proj', 'up_proj'\]"
    ):
        convert(source, tmp_path / "out", ignore=["gate_proj"], skeletons=skeletons)


@pytest.mark.parametrize(
    ("name", "problem"), [("smollm3", ""), ("gemma2", "assert config.tie_word_embeddings"), ("qwen2", "")]
)
def test_lm_head_is_untied_if_served(tmp_path: Path, skeletons: Skeletons, name: str, problem: str) -> None:
    """All but Qwen2 tie it by default.  vLLM serves Gemma 2 tied alone; the window of this Qwen2 it does not serve."""
    source = tiny(name, tmp_path / "source", **{**ARCHITECTURES[name], "tie_word_embeddings": True})
    options: dict[str, Any] = {"layer": ["lm_head=dense"], "skeletons": skeletons}
    if problem:
        with pytest.raises(CheckpointError, match=rf"(?s){problem}.*leave --layer out"):
            convert(source, tmp_path / "out", **options)
        assert convert(source, tmp_path / "out", skeletons=skeletons).unserved == ""
    else:
        report = convert(source, tmp_path / "out", **options)
        assert (report.plan.head, bool(report.unserved)) == ("lm_head", name == "qwen2")


@pytest.mark.parametrize("options", [{"pattern": "dense"}, {"layer": PRUNED}])
def test_experts_alone_are_quantized(tmp_path: Path, skeletons: Skeletons, options: dict[str, Any]) -> None:
    """All other layers of Qwen3-MoE are ignored; vLLM says nothing of its experts' weights."""
    model = MODELS["qwen3"]
    model.write(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", ignore=["self_attn"], skeletons=skeletons, **options)
    assert not inspect(tmp_path / "out").violations
    stored = tensors_of(tmp_path / "out")
    codes = {name for name in stored if stored[name].dtype == torch.int8}
    assert codes == {f"{name}.weight" for name in model.experts()}


def test_experts_that_vllm_does_not_quantize_are_kept(tmp_path: Path, skeletons: Skeletons) -> None:
    """FlexOlmo's, of whose weights' scales vLLM says that there is no such parameter."""
    source = tiny("flex_olmo", tmp_path / "source", num_experts=4, num_experts_per_tok=2)
    report = convert(source, tmp_path / "out", skeletons=skeletons)
    reasons = {name: reason for name, reason in report.plan.kept.items() if ".experts." in name}
    (reason,) = {*reasons.values()}
    assert len(reasons) == 24
    assert re.match(r"vLLM does not quantize it: .*while vLLM loaded .*experts", reason)
    assert len(report.plan.patterns) == 8
    with pytest.raises(
        CheckpointError, match=r"stay unchanged, such as .*\(vLLM does not quantize it: .*\); leave"
    ):
        convert(source, tmp_path / "pruned", layer=PRUNED, skeletons=skeletons)


@pytest.mark.parametrize("name", ["mamba", "modernbert"])
def test_model_without_quantized_layers_is_refused(tmp_path: Path, skeletons: Skeletons, name: str) -> None:
    """ModernBERT's codes would be loaded into float weights without their scales, without an error."""
    source = tiny(name, tmp_path / "source")
    with pytest.raises(CheckpointError, match="quantizes no linear layer of this model"):
        convert(source, tmp_path / "out", skeletons=skeletons)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("warm")
def test_model_that_vllm_does_not_serve_is_converted_with_a_warning(tmp_path: Path) -> None:
    """vLLM asserts that embeddings of Gemma 2 are tied."""
    source = tiny("gemma2", tmp_path / "source")
    result = Done("convert", source, tmp_path / "out", "-s", "6:8")
    assert result.code == 0, result.err
    assert "does not serve this model, converted or not: vLLM does not serve it here" in result.err


@pytest.mark.usefixtures("warm")
def test_model_without_a_head_is_served_where_vllm_is_told_that_it_embeds(tmp_path: Path) -> None:
    """By itself vLLM takes a LlamaModel for one that predicts tokens, and ends while it loads the embedding."""
    source = tiny("llama", tmp_path / "source", architecture="LlamaModel")
    result = Done("convert", source, tmp_path / "out", "-s", "6:8")
    assert result.code == 0, result.err
    assert "does not serve" not in result.err
    assert result.out.endswith(f"vllm serve {tmp_path / 'out'} --runner pooling\n")
    result = Done("doctor", tmp_path / "out")
    assert result.code == 0, result.out
    assert result.out.endswith("; start vllm serve with --runner pooling\n")
