"""Conversions write complete outputs, leave nothing after a kill, and refuse what they cannot convert.

A refusal is one line, before anything is written, and the source stays as it was.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from architectures import ARCHITECTURES
from checkpoints import (
    DOWN,
    INDEX,
    LLAMA,
    MODEL,
    Q,
    assert_same_tensors,
    bert,
    block_of,
    config_of,
    convert,
    edit_json,
    killed,
    llama,
    refused,
    rewrite,
    snapshot,
    tensors_of,
    write,
)
from safetensors import safe_open
from strategies import assert_same_bits
from tiny import tiny
from torch import Tensor

from slidesparse.calibrate.task import Calibration
from slidesparse.checkpoint import names
from slidesparse.checkpoint.metadata import Metadata
from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.convert import stream
from slidesparse.convert.budget import Budget
from slidesparse.errors import CalibrationError, EnvironmentFault, SlideSparseError
from slidesparse.pattern import PatternError, SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8, NAMES, quantize_rows
from slidesparse.slide import slide, violations

LINEARS = sorted(LLAMA.linears())


# What is written


@pytest.mark.parametrize(
    ("ratio", "layout", "quant", "dtype"),
    [
        ("2:4", "dense", "int8", torch.bfloat16),
        ("4:6", "slided", "int8", torch.float16),  # K = 64 and 88 leave tails
        ("6:8", "dense", "fp8", torch.float32),
        ("6:8", "slided", "fp8", torch.bfloat16),
        ("14:16", "slided", "int8", torch.float32),
        ("2_inf", "dense", "int8", torch.float16),
        ("2_inf", "slided", "fp8", torch.bfloat16),
    ],
)
def test_chunks_equal_pruning_quantizing_and_sliding_whole_tensors(
    tmp_path: Path, ratio: str, layout: str, quant: str, dtype: torch.dtype
) -> None:
    source, pattern = llama(tmp_path / "source", dtype=dtype), SlidePattern.parse(ratio)
    report = convert(source, tmp_path / "out", pattern, quant=quant, layout=layout)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert sorted(report.plan.patterns) == LINEARS
    for name in LINEARS:
        weight, scale = quantize_rows(prune(before.pop(f"{name}.weight"), pattern), NAMES[quant])
        assert violations(weight, pattern) is None
        expected = slide(weight, pattern) if layout == "slided" else weight
        assert_same_bits(after.pop(f"{name}.weight"), expected)
        assert_same_bits(after.pop(f"{name}.weight_scale"), scale)
    assert_same_tensors(after, before)
    metadata = Metadata.of_config(config_of(tmp_path / "out")["quantization_config"])
    assert (metadata.pattern, metadata.layout) == (pattern, layout)
    widths = {name: entry.in_features for name, entry in metadata.layers.items()}
    assert widths == {name: k for name, (_, k) in LLAMA.linears().items()}


def test_layer_option_sets_the_pattern_of_the_last_match(tmp_path: Path) -> None:
    layers = ["down_proj=8:10", "0.mlp.down_proj=4:6", "o_proj=dense"]
    report = convert(llama(tmp_path / "source"), tmp_path / "out", layer=layers)
    ratios = {name: pattern.ratio for name, pattern in report.plan.patterns.items()}
    assert (ratios[DOWN], ratios[DOWN.replace("0", "1")]) == ("4:6", "8:10")
    assert set(report.plan.skipped) == {name for name in LINEARS if "o_proj" in name}
    stored = tensors_of(tmp_path / "out")[f"{next(iter(report.plan.skipped))}.weight"]
    assert stored.dtype == torch.int8
    assert (stored == 0).float().mean() < 0.1


def test_layer_options_may_cover_a_fused_layer_together(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    several = convert(source, tmp_path / "several", layer=["gate_proj=dense", "up_proj=4:6", "gate_proj=4:6"])
    assert several.plan.patterns == convert(source, tmp_path / "one", layer=["gate|up=4:6"]).plan.patterns
    assert len({*several.plan.patterns.values()}) == 2


def test_lm_head_may_be_ignored_as_other_tools_are_told_to(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    convert(source, tmp_path / "plain")
    convert(source, tmp_path / "ignored", ignore=["lm_head"])
    assert snapshot(tmp_path / "ignored") == snapshot(tmp_path / "plain")
    refused(source, "--ignore 'lm_head' and --layer both name", ignore=["lm_head"], layer=["lm_head=dense"])


def test_source_pruned_in_some_layers_is_not_said_to_be_pruned_to_dense(tmp_path: Path) -> None:
    convert(llama(tmp_path / "source"), tmp_path / "mixed", "dense", layer=["down_proj=2:4"])
    words = ["--sparsity 2:4 cannot be used", "already pruned in some layers", "with --sparsity dense"]
    refused(tmp_path / "mixed", *words, pattern="2:4")


def test_processors_chunks_and_shards_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for count, elements, shards in ((1, 640, 1), (7, 640, 3), (2, 2**20, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=count: set(range(count)))
        monkeypatch.setattr("slidesparse.slide.CHUNK_ELEMENTS", elements)
        source = llama(tmp_path / f"source{count}", shards=shards)
        convert(source, tmp_path / f"out{count}")
    first = tensors_of(tmp_path / "out1")
    assert_same_tensors(tensors_of(tmp_path / "out7"), first)
    assert snapshot(tmp_path / "out2") == snapshot(tmp_path / "out1")


def test_shards_keep_their_names_and_are_indexed(tmp_path: Path) -> None:
    source = llama(tmp_path / "source", shards=3)
    convert(source, tmp_path / "out")
    assert snapshot(tmp_path / "out").keys() == snapshot(source).keys()
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    weight_map, total = {}, 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                weight_map[name], total = path.name, total + file.get_tensor(name).nbytes
    assert index["weight_map"] == weight_map
    assert index["metadata"] == {"total_size": total, "note": "kept"}


# Files beside the weights


def test_encoder_with_files_beside_the_weights_but_no_code_or_links_out(tmp_path: Path) -> None:
    source = bert(tmp_path / "source")
    (tmp_path / "secret.json").write_text("of somebody else")
    beside = ("vocab.txt", "LICENSE", "chat_template.jinja", "2_Dense/config.json", f"2_Dense/{MODEL}")
    beside += ("checkpoint-500/config.json",)
    left_out = ("modeling_bert.py", "LICENSE.py", "tokenizer.pkl", "pytorch_model.bin", "onnx/model.onnx")
    left_out += (f"checkpoint-500/{MODEL}", "checkpoint-500/optimizer.pt")
    left_out += ("adapter_config.json",)  # of an adapter that was merged: transformers would load its base
    for name in (*beside, *left_out, ".gitattributes"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("beside")
    (source / "added_tokens.json").symlink_to(tmp_path / "secret.json")
    (source / "notes.json").symlink_to("vocab.txt")
    edit_json(source / "config.json", auto_map={"AutoConfig": "modeling_bert.Config"})  # names code
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense")]
    (source / "modules.json").write_text(json.dumps(modules))
    report = convert(source, tmp_path / "out", "4:6", ignore=["1.intermediate", "0.attention.self"])
    names = {*beside, "1_Pooling/config.json", "modules.json", "notes.json"}
    assert set(snapshot(tmp_path / "out")) == names | {"config.json", "tokenizer.json", MODEL}
    assert set(report.left_out) == {*left_out, "added_tokens.json"}
    ignore = set(block_of(tmp_path / "out")["ignore"])
    # vLLM puts "model." before the names of a bare encoder, and calls its attention by another name
    assert {"model.encoder.layer.1.intermediate.dense", "pooler.dense", "model.pooler.dense"} <= ignore
    for attention in ("attention.self", "attention.output"):
        assert {f"model.encoder.layer.0.{attention}.{last}" for last in ("query", "key", "value")} <= ignore


def test_output_may_be_an_empty_folder_a_link_or_below_new_parents(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty")
    convert(source, tmp_path / "new" / "below" / "out")
    (tmp_path / "target").mkdir()
    for name in ("target", "dangling"):  # a link to a folder on another disk, say
        (tmp_path / f"to {name}").symlink_to(name)
        convert(source, tmp_path / f"to {name}")
        assert snapshot(tmp_path / name) == snapshot(tmp_path / "empty")
    assert snapshot(tmp_path / "empty") == snapshot(tmp_path / "new" / "below" / "out")


# The output layer

HEAD = "lm_head.weight"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_lm_head_is_quantized_if_an_option_names_it(tmp_path: Path, tied: bool, quant: str) -> None:
    """A tied one becomes a tensor of its own.  A regex that matches layers of blocks, too, is for those alone."""
    source = llama(tmp_path / "source")
    if tied:
        rewrite(source, **{HEAD: None})
        edit_json(source / "config.json", tie_word_embeddings=True)
    before = tensors_of(source)
    head = before["model.embed_tokens.weight" if tied else HEAD]
    report = convert(source, tmp_path / "out", quant=quant, layer=["lm_head=dense", ".=6:8"])
    after, block = tensors_of(tmp_path / "out"), block_of(tmp_path / "out")
    for actual, expected in zip(
        (after[HEAD], after["lm_head.weight_scale"]), quantize_rows(head.float(), NAMES[quant]), strict=True
    ):
        assert_same_bits(actual, expected)
    assert_same_bits(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
    assert (block["config_groups"]["lm_head"]["targets"], block["ignore"]) == (["re:.*lm_head$"], [])
    assert (report.plan.skipped, report.plan.unpruned) == ({"lm_head": "--layer"}, [])
    convert(source, tmp_path / "without", quant=quant, layer=[".=6:8"])
    assert tensors_of(tmp_path / "without").get(HEAD, head).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["embed_out", "language_model.lm_head"])
def test_lm_head_has_the_name_of_its_tensor(tmp_path: Path, head: str, tied: bool) -> None:
    """Which is not that of the module in transformers.  Options may call it by either, also where it has none yet."""
    name = "gpt_neox" if head == "embed_out" else "internvl"
    settings = {**ARCHITECTURES[name], "tie_word_embeddings": tied}
    if text := settings.get("text_config"):
        settings["text_config"] = {**text, "tie_word_embeddings": tied}
    source = tiny(name, tmp_path / "source", **settings)
    assert (f"{head}.weight" in tensors_of(source)) != tied
    for asked in (head, "lm_head"):
        plan = convert(source, tmp_path / asked, layer=[f"^{asked}=dense"]).plan
        assert (plan.head, tensors_of(tmp_path / asked)[f"{head}.weight"].dtype) == (head, INT8)


def test_lm_head_that_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    convert(source, tmp_path / "last", layer=["lm_head=6:8", "lm_head=dense"])
    for pattern in ("6:8", "2:4"):
        refused(source, "lm_head, which predicts tokens, can be quantized, but", layer=[f"head={pattern}"])
    convert(source, tmp_path / "quantized", "dense", layer=["lm_head=dense"])
    refused(tmp_path / "quantized", "lm_head cannot be quantized: it is quantized", layer=["lm_head=dense"])
    refused(bert(tmp_path / "bert"), "--layer 'lm_head' matches none of the", layer=["lm_head=dense"])


# Kills and interrupts


def test_killed_conversion_leaves_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama(tmp_path / "source")
    out = tmp_path / "out"
    killed(source, out, 40)
    (partial,) = (path for path in tmp_path.iterdir() if path != source)
    assert re.fullmatch(r"\.out\.partial-\w+", partial.name)
    assert (partial / MODEL).exists()
    assert not (partial / "config.json").exists()
    usage = shutil.disk_usage(tmp_path)  # the leftover folder does not count as used space
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0) if partial.exists() else usage)
    convert(source, out)  # a second run succeeds and removes the leftover folder
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    convert(source, tmp_path / "other")
    assert snapshot(out) == snapshot(tmp_path / "other")


def test_concurrent_conversion_is_refused(tmp_path: Path) -> None:
    source, out = llama(tmp_path / "source"), tmp_path / "out"
    phases: list[str] = []

    def interfere(phase: str, done: int, total: int) -> None:
        if phase == "writing" and phase not in phases:
            with pytest.raises(CheckpointError, match="another conversion is writing"):
                convert(source, out)
        phases.append(phase)

    convert(source, out, progress=interfere)
    assert (phases[-1], (out / "config.json").exists()) == ("writing", True)


def test_file_systems_without_locks_are_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS; what may be another process's conversion is left there."""
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.EBADF, "Bad file descriptor")))
    (tmp_path / ".out.partial-1").mkdir()
    convert(llama(tmp_path / "source"), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out", ".out.partial-1"}


def test_errors_remove_partial_output_and_restore_torch_threads(tmp_path: Path) -> None:
    """Interrupts are tested in tests/commands/test_cli.py."""

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "writing":
            raise ZeroDivisionError

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)  # threads of the pool have 1, which may be the number before
        with pytest.raises(ZeroDivisionError):
            convert(llama(tmp_path / "source"), tmp_path / "out", progress=stop)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_all_is_synced_and_config_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    rename = os.rename

    def renamed(partial: Path, out: Path) -> None:
        newest = max(partial.rglob("*"), key=lambda path: path.stat().st_mtime_ns)
        assert newest.name == "config.json"
        calls.append("rename")
        rename(partial, out)

    monkeypatch.setattr(os, "rename", renamed)
    convert(llama(tmp_path / "source"), tmp_path / "out")
    names = [Path(name).name for name in calls]
    assert {MODEL, "config.json", "tokenizer.json"} <= set(names[: names.index("rename")])
    assert calls[-1] == str(tmp_path)


# Refusals

NAN = float("nan")


def tensor(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    """Replace one tensor, or remove it with None."""
    return lambda source: rewrite(source, **{name: change(tensors_of(source)[name])})


def q(change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    return tensor(f"{Q}.weight", change)


def at(place: list[int], number: float) -> Callable[[Tensor], Tensor]:
    return lambda t: t.index_put([torch.tensor(i) for i in place], torch.tensor(number).to(t.dtype))


def config(**values: Any) -> Callable[[Path], None]:
    return lambda source: edit_json(source / "config.json", **values)


def model(kind: str, architecture: str) -> Callable[[Path], None]:
    return config(model_type=kind, architectures=[architecture])


# A change of a float Llama of two blocks, and words of the message
SOURCES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "NaN": (q(at([41, 7], NAN)), [f"{Q}.weight in {MODEL} is not finite at row 41, column 7 (nan)"]),
    "NaN in a norm": (tensor("model.norm.weight", at([5], NAN)), ["model.norm.weight", "element 5 (nan)"]),
    "no part of a fused layer": (q(lambda t: None), [f"{Q}.weight is missing", "fetch it again"]),
    "I32": (q(lambda t: t.to(torch.int32)), [f"{Q}.weight is I32", "F32, F16, BF16"]),
    "a vector": (q(lambda t: t[0].clone()), [f"{Q}.weight has shape [64]"]),
    "transposed": (
        tensor("model.layers.0.mlp.up_proj.weight", lambda t: t.T.contiguous()),
        ["up_proj.weight has shape [64, 88], but config.json describes [88, 64]"],
    ),
    "a scale": (
        lambda source: rewrite(source, **{f"{Q}.weight_scale": torch.ones(64, 1)}),
        [f"has {Q}.weight_scale, but by its config.json no weights are quantized"],
    ),
    "a block too few": (config(num_hidden_layers=3), ["model.layers.2.", "is missing (16 such)"]),
    "no final norm": (tensor("model.norm.weight", lambda t: None), ["model.norm.weight is missing (1 such)"]),
    "no head": (tensor("lm_head.weight", lambda t: None), ["lm_head.weight is missing (1 such)"]),
    "a bias too many": (config(attention_bias=False), ["_proj.bias belongs to a layer that has no bias"]),
    "a head in codes": (
        tensor("lm_head.weight", lambda t: t.to(FP8)),
        ["tensor lm_head.weight is ", "neither config.json nor vLLM takes for quantized"],
    ),
    "a bias in codes": (tensor(f"{Q}.bias", lambda t: t.to(torch.int8)), [f"tensor {Q}.bias is I8"]),
    "a block too many": (config(num_hidden_layers=1), ["model.layers.1.", "none of the 1 blocks"]),
    "no heads": (config(num_attention_heads=0), ["describes no model that transformers can build"]),
    "endless blocks": (config(num_hidden_layers=10**12), ["num_hidden_layers is 1000000000000"]),
    "unknown model_type": (config(model_type="llama7"), ["model_type 'llama7' is not known to transformers"]),
    "encoder and decoder": (model("t5", "T5ForConditionalGeneration"), ["is not a stack of"]),
    "no decoder": (model("perceiver", "PerceiverModel"), ["PerceiverModel is not a stack of"]),
    "a draft model": (
        lambda source: (
            edit_json(source / "config.json", architectures=["LlamaForCausalLMEagle3"]),
            write(source, config_of(source), {"fc.weight": torch.ones(64, 192), "d2t": torch.zeros(40)}),
        ),
        ["knows no LlamaForCausalLMEagle3, and its LlamaModel needs layers.0.", "as it is"],
    ),
    "a wrapper's prefix": (
        lambda s: write(s, config_of(s), {f"_orig_mod.{name}": t for name, t in tensors_of(s).items()}),
        ["tensor names begin with '_orig_mod.'; save the model without its wrapper"],
    ),
    "a part's config": (config(text_config={"hidden_size": 64}), ["describes no model", "without parts"]),
    "a tensor by two names": (
        lambda s: write(
            s, config_of(s), tensors_of(s) | {f"{Q}.weight".removeprefix("model."): torch.ones(64, 64)}
        ),
        [f"are both the model's {Q}.weight; remove one of them"],
    ),
    "a fused layer beside its parts": (
        lambda s: rewrite(s, **{Q.replace("q_proj", "qkv_proj.weight"): torch.ones(128, 64)}),
        ["layers.1.self_attn.qkv_proj.weight and ", "are both in ", "vLLM makes one layer of them"],
    ),
    "a method that nothing has": (
        config(quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}),
        [
            "all stay unchanged (not quantized in the source); if",
            "floats, remove quantization_config from its",
        ],
    ),
    "modules.json of others": (
        lambda source: (source / "modules.json").write_text('[{"name": "1"}]'),
        ["modules.json is not a list of modules"],
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_invalid_sources_are_refused(tmp_path: Path, name: str) -> None:
    source = llama(tmp_path / "source")
    change, words = SOURCES[name]
    change(source)
    message = refused(source, *words)
    assert "\n" not in message
    assert len(message) < 700


def test_decoder_that_embeds_texts_needs_no_head(tmp_path: Path) -> None:
    """It is published by the class of a language model, as Qwen3-Embedding is."""
    source = llama(tmp_path / "source")
    rewrite(source, **{"lm_head.weight": None})
    (source / "modules.json").write_text('[{"path": ""}]')
    assert sorted(convert(source, tmp_path / "out").plan.patterns) == LINEARS


ENDLESS = "(.|.)*q$"
GATE = "model.layers.1.mlp.gate_proj but not model.layers.1.mlp.up_proj"

BUDGET, RANDOM = Budget(0.5, tokens=(16,)), Calibration(("random",))

# Options, and words of the message
OPTIONS: list[tuple[dict[str, Any], list[str], type[Exception]]] = [
    ({"quant": "x"}, ["--quant 'x'", "int8, fp8"], CheckpointError),
    ({"layout": "packed"}, ["--layout 'packed'", "dense, slided"], CheckpointError),
    ({"pattern": "2:4@50%"}, ["2:4@50% is no pattern to convert to", "synth"], CheckpointError),
    ({"pattern": "dense", "layout": "slided"}, ["--layout slided", "dense;"], CheckpointError),
    ({"ignore": ["mlp.(down"]}, ["--ignore 'mlp.(down'", "missing )"], CheckpointError),
    ({"ignore": ["(" * 999]}, ["--ignore '(((((", "is not a regular expression"], CheckpointError),
    ({"ignore": ["a" * 1001]}, ["--ignore", "more than 1000"], CheckpointError),
    ({"ignore": ["o_proj", "down_porj"]}, ["--ignore 'down_porj'", "14 linear layers"], CheckpointError),
    ({"ignore": ["1.mlp.gate"]}, ["--ignore covers", GATE], CheckpointError),
    ({"ignore": ["."]}, ["left to prune: all stay unchanged (--ignore); ", "ignore fewer"], CheckpointError),
    ({"ignore": ["o_proj", ENDLESS]}, [f"--ignore {ENDLESS!r} takes more than"], CheckpointError),
    ({"layer": [".=dense"]}, ["no linear layer is left to prune; leave fewer dense"], CheckpointError),
    ({"layer": [".=dense"], "ignore": ["o_p"]}, ["leave fewer dense, or ignore fewer"], CheckpointError),
    ({"layer": ["down_proj"]}, ["--layer 'down_proj'", "REGEX=PATTERN"], CheckpointError),
    ({"layer": ["down_proj=7:8"]}, ["--layer 'down_proj=7:8'", "'7:8'"], PatternError),
    ({"layer": ["porj=6:8"]}, ["--layer 'porj'"], CheckpointError),
    ({"layer": ["o_proj=4:6"], "ignore": ["o_p"]}, ["that stay unchanged", "(--ignore)"], CheckpointError),
    ({"layer": ["1.mlp.gate_proj=4:6"]}, ["--layer covers", GATE], CheckpointError),
    ({"layer": ["gate_proj=4:6", "up_proj=2:4"]}, ["--layer covers", "of them alike"], CheckpointError),
    ({"layer": [f"{ENDLESS}=8:10"]}, [f"--layer {ENDLESS!r} takes more than"], CheckpointError),
    ({"budget": BUDGET}, ["--max-loss 50%", "--calib"], CalibrationError),
    (
        {"budget": BUDGET, "calibration": RANDOM, "layer": ["down=8:10"]},
        ["only keep layers"],
        CalibrationError,
    ),
    ({"layer": ["down=budget"]}, ["--layer ...=budget needs a budget"], CalibrationError),
]


@pytest.mark.parametrize("case", OPTIONS, ids=lambda case: str(case[0])[:40])
def test_invalid_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[dict[str, Any], list[str], type[Exception]]
) -> None:
    options, words, error = case
    monkeypatch.setattr(names, "SECONDS", 0.2)
    assert len(refused(llama(tmp_path / "source"), *words, error=error, **options)) < 500


@pytest.mark.parametrize("option", [{"ignore": ["experts.1."]}, {"layer": ["experts.1.=4:6"]}])
def test_some_of_many_experts_are_refused_in_few_words(tmp_path: Path, option: dict[str, Any]) -> None:
    source = tiny("mixtral", tmp_path / "source", num_local_experts=40)
    assert len(refused(source, "covers model.layers.0.block_sparse_moe.experts.1.w1, ", **option)) < 700


# The output


def test_invalid_outputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the source is read, which may take minutes, and in a dry run too."""
    source, volume = llama(tmp_path / "source"), tmp_path / "volume"
    for folder in ("full", "current", "volume"):
        (tmp_path / folder).mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    (tmp_path / "file").write_text("")
    (tmp_path / ".linked.partial-1").symlink_to("full")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setattr(Path, "is_mount", lambda path: path == volume)
    monkeypatch.setattr(stream, "_check_values", lambda *_: pytest.fail("the source was read"))
    for out, words in {
        "full": f"{tmp_path / 'full'} is not empty",
        "new/..": f"{tmp_path}/new/.. is not empty",
        "source": "is not empty",
        "/": "is not empty",
        "file": "is a file",
        "loop": "is a link to itself",
        "file/new/below": f"below {tmp_path / 'file'}",
        "source/out": "inside the source",
        "current": "is the current folder, which would be replaced",
        "x" * 240: "has 240 bytes; choose one of at most 237",
        "x" * 300: "has 300 bytes; choose one of at most 237",
        "volume": f"{volume} is where a disk or volume is mounted; name a folder in it",
    }.items():
        refused(source, words, out=out)
        refused(source, words, out=out, dry_run=True)
    refused(source, "/.linked.partial-1 is a link or a file", out="linked", error=SlideSparseError)
    assert (tmp_path / "full" / "mine.txt").read_text() == "kept"


def test_unwritable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, closed = llama(tmp_path / "source"), tmp_path / "closed"
    closed.mkdir()
    access = os.access  # root, who may write, runs some of these tests
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and access(path, mode))
    for dry_run in (False, True):
        words = f"{closed} is not writable here"
        refused(source, words, error=EnvironmentFault, out="closed/new/out", dry_run=dry_run)


def test_output_filled_by_another_process_is_kept(tmp_path: Path) -> None:
    source, out = llama(tmp_path / "source"), tmp_path / "out"

    def fill(phase: str, done: int, total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "theirs").write_text("kept")

    with pytest.raises(CheckpointError, match="another process"):
        convert(source, out, progress=fill)
    assert snapshot(tmp_path).keys() == {*(f"source/{name}" for name in snapshot(source)), "out/theirs"}


def test_pickled_weights_of_a_module_are_refused_unless_there_are_others(tmp_path: Path) -> None:
    source = llama(tmp_path / "source")
    (source / "modules.json").write_text('[{"path": ""}, {"path": "2_Dense"}]')
    (source / "2_Dense").mkdir()
    (source / "2_Dense" / "pytorch_model.bin").write_bytes(b"a pickle")
    refused(source, "2_Dense/pytorch_model.bin", "safe_serialization")
    (source / "2_Dense" / MODEL).write_bytes(b"the same")
    assert convert(source, tmp_path / "out").left_out == ("2_Dense/pytorch_model.bin",)
    assert "2_Dense/model.safetensors" in snapshot(tmp_path / "out")


# Full disks


def test_disk_space_is_checked_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama(tmp_path / "source")
    convert(source, tmp_path / "first")
    needed = sum(len(raw) for name, raw in snapshot(tmp_path / "first").items() if name != "config.json")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    refused(source, "no space left", f"{needed / 1e6:.1f} MB", error=EnvironmentFault)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    convert(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("function", "call", "number"),
    [
        ("pwrite", 0, errno.ENOSPC),  # at the header
        ("pwrite", 1, errno.EDQUOT),  # at the first tensor
        ("pwrite", 20, errno.EFBIG),
        ("fsync", 0, errno.ENOSPC),
    ],
)
def test_full_disk_while_writing_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, call: int, number: int
) -> None:
    calls, original = [], getattr(os, function)

    def full(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > call:
            raise OSError(number, os.strerror(number))
        return original(*arguments)

    monkeypatch.setattr(os, function, full)
    facts = "no space left", str(tmp_path), os.strerror(number)
    refused(llama(tmp_path / "source"), *facts, error=EnvironmentFault)
    assert len(calls) > call
