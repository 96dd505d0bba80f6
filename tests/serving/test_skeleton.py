"""What `Skeletons` says of a checkpoint is what the server does, whatever vLLM calls the layers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import block_of, convert, rewrite
from edits import edited
from engines import STOCK, Engines, Request
from models import QWEN, shrink_codes, write_w8a8
from safetensors.torch import load_file
from tiny import build, fill, tiny

from slidesparse import doctor
from slidesparse.checkpoint.storage import Checkpoint, CheckpointError, TensorSpec
from slidesparse.evaluate.engine import summaries
from slidesparse.serving import NotServedError, Serving, Skeletons, stored

pytestmark = pytest.mark.vllm


COMMON = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
MAMBA |= {"mamba_chunk_size": 64}
MLA = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32}
MLA |= {"v_head_dim": 32, "head_dim": 32}
GATED_DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
GATED_DELTA |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "head_dim": 32}
GRANITE = {"mamba_expand": 2, "shared_intermediate_size": 256, "position_embedding_type": "nope"}
GRANITE |= {"num_local_experts": 0, "num_experts_per_tok": 0}
LFM2 = {"block_ff_dim": 256, "block_auto_adjust_ff_dim": False}
LFM2 |= {"conv_dim": 128, "block_dim": 128}  # in published configs, and read by vLLM alone
# Of four layers two have no values but keys, and the last two use those of earlier ones
GEMMA4 = {"head_dim": 32, "global_head_dim": 32, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
GEMMA4 |= {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "tie_word_embeddings": True}
GEMMA4 |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512}
# All that vLLM's gated delta rule takes on CPUs
IN_BFLOAT16 = {"dtype": "bfloat16", "mamba_ssm_dtype": "float32"}
# Small models with layers of other names in vLLM, large enough for its kernels: model_type -> settings
HYBRIDS: dict[str, dict[str, Any]] = {
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 256, "head_dim": 32},
    "granitemoehybrid": {**MAMBA, **GRANITE, "layer_types": ["mamba", "attention"]},
    "lfm2": {**LFM2, "layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {**GATED_DELTA, **IN_BFLOAT16, "layer_types": ["linear_attention", "full_attention"]},
    "gemma4_text": GEMMA4,
    "minicpm3": MLA,  # of whose layers vLLM gives q_a_proj no name
    "deepseek_v2": {**MLA, "first_k_dense_replace": 2, "n_routed_experts": 4, "moe_intermediate_size": 64},
}


def source_of(name: str, folder: Path) -> Path:
    """Write one of HYBRIDS as a checkpoint in float32, or its own dtype."""
    model = build(name, **COMMON, **HYBRIDS[name])
    fill(model)
    model.to(getattr(torch, HYBRIDS[name].get("dtype", "float32"))).save_pretrained(folder)
    return folder


def hybrid(name: str, folder: Path, skeletons: Skeletons) -> Path:
    """Convert one of HYBRIDS to 6:8, with codes that stock vLLM multiplies exactly on every CPU."""
    convert(source_of(name, folder / "source"), folder / "out", skeletons=skeletons)
    return shrink_codes(folder / "out")


@contextmanager
def unless_vllm_fails(engines: Engines, source: Path, **options: Any) -> Iterator[None]:
    """Skip a test that fails where vLLM does not serve the source either: an old release, or on some CPUs."""
    try:
        yield
    except AssertionError:
        if error := engines.ask(Request(str(source), env=STOCK, options=options)).error:
            pytest.skip(f"vLLM does not serve the source: {error.splitlines()[0]}")
        raise


def planned(skeletons: Skeletons, folder: Path) -> Serving:
    """How vLLM would serve a checkpoint on another machine."""
    checkpoint = Checkpoint.open(folder)
    return skeletons.layers(folder, stored(checkpoint), checkpoint.config)


needs_torchvision = pytest.mark.skipif(not find_spec("torchvision"), reason="Qwen3.5 needs torchvision")
SPARSE = [("falcon_h1", 12), ("granitemoehybrid", 8), ("lfm2", 8), ("minicpm3", 14)]


@pytest.mark.parametrize(
    ("name", "sparse"), [*SPARSE, pytest.param("qwen3_5_text", 9, marks=needs_torchvision)]
)
@pytest.mark.usefixtures("warm")
def test_layers_of_other_names_are_sparse(
    engines: Engines, skeletons: Skeletons, tmp_path: Path, name: str, sparse: int
) -> None:
    """Such as model.2.mixer.in_proj, or w1 fused with w3; doctor, the server and stock agree.  Slided ones, too."""
    model = hybrid(name, tmp_path, skeletons)
    floats = {*block_of(model)["ignore"]} - {"lm_head"}  # only LFM2's convolutions, in vLLM 0.25
    assert all("conv" in layer for layer in floats)
    options = {"dtype": HYBRIDS[name].get("dtype", "float32")}
    with unless_vllm_fails(engines, tmp_path / "source", **options):
        answer = engines.as_stock(model, {"USE_CUSPARSELT": "1"}, options=options)
    (served,) = summaries(answer.log)
    assert served["layers"] == {"6:8": sparse - len(floats)}
    convert(model, tmp_path / "slided", layout="slided")
    assert engines.serve(tmp_path / "slided", options=options).tokens == answer.tokens
    report = doctor.examine("model", model)
    assert (report.code, report.patterns) == (0, served["layers"])


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.usefixtures("warm")
def test_layers_without_keys_and_values_are_sparse(
    engines: Engines, skeletons: Skeletons, tmp_path: Path, published: bool
) -> None:
    """Gemma's published files still have those that transformers drops, and vLLM loads; files that it saves do not."""
    saved = source_of("gemma4_text", tmp_path / "source")
    weights = load_file(saved / "model.safetensors")
    for i in (2, 3):
        unread = {
            name.replace(f".{i - 2}.", f".{i}."): x + 1 for name, x in weights.items() if "attn" in name
        }
        weights = unread | weights
    full = Path(shutil.copytree(saved, tmp_path / "full"))  # vLLM does not serve the other one in floats
    rewrite(full, **weights)
    source = full if published else saved
    report = convert(source, tmp_path / "dense", skeletons=skeletons)
    of_others = ["2.self_attn.k_proj", "2.self_attn.v_proj", "3.self_attn.k_proj"]
    assert [f"model.layers.{name}" in report.plan.patterns for name in of_others] == [published] * 3
    with unless_vllm_fails(engines, full):
        answer = engines.as_stock(shrink_codes(tmp_path / "dense"))
    assert "24 layers sparse" in answer.summary
    assert engines.serve(tmp_path / "dense", task="reload").tokens == answer.tokens
    convert(tmp_path / "dense", tmp_path / "slided", layout="slided", skeletons=skeletons)
    assert engines.serve(tmp_path / "slided").tokens == answer.tokens
    assert doctor.examine("model", tmp_path / "dense").patterns == {"6:8": 24}
    convert(source, tmp_path / "mlp", ignore=["self_attn"], skeletons=skeletons)
    assert "16 layers sparse" in engines.as_stock(shrink_codes(tmp_path / "mlp")).summary
    convert(source, tmp_path / "unpruned", layer=["self_attn=dense"], skeletons=skeletons)
    assert "8 not pruned" in engines.as_stock(shrink_codes(tmp_path / "unpruned")).summary
    part = [r"[01]\.self_attn\.q_proj=dense"]
    with pytest.raises(CheckpointError, match="k_proj 6:8, .*q_proj unpruned, .*v_proj 6:8 into one layer"):
        convert(source, tmp_path / "part", layer=part, skeletons=skeletons)


@pytest.mark.parametrize("missing", ["2.self_attn.o_proj", "2.self_attn.q_proj", "0.self_attn.v_proj"])
def test_missing_layers_beside_shared_keys_are_named(
    engines: Engines, skeletons: Skeletons, tmp_path: Path, missing: str
) -> None:
    """Also where the metadata do not list them, as they list no keys and values that the checkpoint lacks."""
    source, layer = source_of("gemma4_text", tmp_path / "source"), f"model.layers.{missing}"
    convert(source, tmp_path / "out", skeletons=skeletons)
    metadata = block_of(tmp_path / "out")["slidesparse"]
    del metadata["layers"][layer]
    tensors = {f"{layer}.weight": None, f"{layer}.weight_scale": None}
    damaged = edited(tmp_path / "out", tmp_path / "damaged", tensors, {"slidesparse": metadata})
    assert "the checkpoint lacks its weight: " in engines.ask(Request(damaged)).error


def test_changed_weights_of_a_layer_of_another_name(
    engines: Engines, skeletons: Skeletons, tmp_path: Path
) -> None:
    """They are served as they are with a warning, and refused if a flag asks for the sparse path."""
    name = "model.layers.0.mamba.in_proj.weight"
    model = hybrid("granitemoehybrid", tmp_path, skeletons)
    weight = load_file(model / "model.safetensors")[name]
    changed = edited(model, tmp_path / "changed", {name: torch.ones_like(weight)}, {})
    with unless_vllm_fails(engines, tmp_path / "source"):
        answer = engines.serve(changed)
    assert "7 layers sparse, 1 not pruned" in answer.summary
    words = "1 layers, such as model.layers.0.mixer.in_proj, obey none of their patterns: they were changed"
    assert words in answer.log
    assert words in engines.ask(Request(changed, env={"USE_CUSPARSELT": "1"})).error


@pytest.mark.parametrize("name", ["falcon_h1", "granitemoehybrid"])
def test_mlps_alone_are_quantized_whatever_the_others_are_called(
    engines: Engines, skeletons: Skeletons, tmp_path: Path, name: str
) -> None:
    """`convert` asks vLLM for its names of the layers to ignore; without these, it would cast them to INT8."""
    ignore, source = [r"\.(mamba|self_attn)\."], source_of(name, tmp_path / "source")
    convert(source, tmp_path / "out", ignore=ignore, skeletons=skeletons)
    with unless_vllm_fails(engines, source):
        assert "4 layers sparse" in engines.as_stock(shrink_codes(tmp_path / "out")).summary
    convert(source, tmp_path / "unasked", ignore=ignore)
    refusal = "the checkpoint holds torch.float32 weights, its config.json says torch.int8"
    with pytest.raises(NotServedError, match=refusal):
        skeletons.layers(tmp_path / "unasked", stored(Checkpoint.open(tmp_path / "unasked")))
    # as another tool quantizes the MLPs
    edited(tmp_path / "unasked", tmp_path / "tool", {}, {"slidesparse": None})
    convert(tmp_path / "tool", tmp_path / "mended", skeletons=skeletons)
    assert {*block_of(tmp_path / "mended")["ignore"]} == {*block_of(tmp_path / "out")["ignore"]}


def test_fused_groups_are_known(skeletons: Skeletons, tmp_path: Path) -> None:
    """Also of MLA, whose attention does not run on CPUs."""
    source = source_of("deepseek_v2", tmp_path / "source")
    groups = {
        tuple(sorted(name.rpartition(".")[2] for name in layer.weights))
        for layer in planned(skeletons, source).layers
        if len(layer.weights) > 1
    }
    assert groups == {("kv_a_proj_with_mqa", "q_a_proj"), ("gate_proj", "up_proj")}
    convert(source, tmp_path / "out")
    ignore = [*block_of(tmp_path / "out")["ignore"], "model.layers.0.self_attn.kv_a_proj_with_mqa"]
    edited(tmp_path / "out", tmp_path / "part", {}, {"ignore": ignore})
    words = "fused_qkv_a_proj: vLLM fuses q_a_proj, kv_a_proj_with_mqa into one layer, but .* only some"
    with pytest.raises(NotServedError, match=words):
        planned(skeletons, tmp_path / "part")


def test_models_that_read_values_while_made_are_examined(skeletons: Skeletons, tmp_path: Path) -> None:
    """Such as those of Apertus' activation functions."""
    model = planned(skeletons, tiny("apertus", tmp_path / "apertus"))
    assert sum(bool(layer.weights) for layer in model.layers) == 8


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("weight_scale", None, "the checkpoint lacks its weight_scale"),
        ("weight_g_idx", {"dtype": "I32", "shape": (320,)}, "weight_g_idx"),
        ("weight", {"shape": (128, 4)}, "down_proj: the checkpoint holds a weight of shape"),
        ("weight", {"dtype": "F32"}, "holds torch.float32 weights, its config.json says"),
    ],
)
def test_tensors_that_vllm_cannot_load_are_refused(
    skeletons: Skeletons, tmp_path: Path, name: str, change: dict[str, Any] | None, words: str
) -> None:
    convert(write_w8a8(QWEN, tmp_path / "source"), tmp_path / "out")
    specs = {spec.name: spec for spec in stored(Checkpoint.open(tmp_path / "out"))}
    spec = specs.pop(f"{DOWN}.{name}", TensorSpec(f"{DOWN}.{name}", "", ()))
    if change:
        specs[spec.name] = spec._replace(**change)
    with pytest.raises(NotServedError, match=words):
        skeletons.layers(tmp_path / "out", specs.values())
