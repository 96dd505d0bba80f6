"""Tiny source checkpoints for the tests of conversion, and functions that damage them; vLLM is not needed."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from commands import run
from models import Decoder, float_tensors, write_w8a8
from packed import packed_layout
from safetensors.torch import load_file, save_file
from strategies import assert_same_bits
from tiny import build, fill
from torch import Tensor

from slidesparse.checkpoint.storage import CheckpointError
from slidesparse.convert import stream
from slidesparse.convert.options import ConvertOptions, parse_layer_pattern
from slidesparse.convert.stream import Report
from slidesparse.pattern import SlidePattern, parse_pattern
from slidesparse.progress import Progress, no_progress
from slidesparse.serving import Skeletons

TOKENIZER = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"w0": 0}, "unk_token": "w0"}}'
MODEL, INDEX = models.MODEL, "model.safetensors.index.json"
LLAMA = Decoder("LlamaForCausalLM", hidden=64, intermediate=88, heads=2, kv_heads=1, layers=2, vocabulary=40)
DOWN = "model.layers.0.mlp.down_proj"
Q = "model.layers.1.self_attn.q_proj"


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """Write a checkpoint of one file, or of several shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    if shards == 1:
        return models.write(folder, config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total, "note": "kept"}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def llama(folder: Path, shards: int = 1, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a float Llama-style model."""
    tensors = {name: tensor.to(dtype) for name, tensor in float_tensors(LLAMA).items()}
    return write(folder, LLAMA.config(), tensors, shards)


def w8a8(folder: Path, quant: str = "int8", strategy: str = "channel") -> Path:
    """Write the same model as an unpruned W8A8 checkpoint, whose layer DOWN is ignored and stays float."""
    (write_w8a8(LLAMA, folder, quant, strategy, (DOWN,)) / "tokenizer.json").write_text(TOKENIZER)
    return folder


def bert(folder: Path) -> Path:
    """Write a two-layer BERT in float32, with a tokenizer of the words w0 to w49."""
    model = build("bert", hidden_size=32, intermediate_size=48, vocab_size=50, max_position_embeddings=16)
    fill(model, 1)
    model.save_pretrained(folder)
    rewrite(folder, **{"embeddings.position_ids": torch.arange(16).reshape(1, 16)})  # as older files have it
    write_tokenizer(folder, [f"w{i}" for i in range(50)])
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return folder


def write_tokenizer(folder: Path, words: Sequence[str]) -> None:
    """Write a tokenizer.json whose tokens are ``words``, separated by spaces."""
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": words[0]}
    splitter = {"type": "WhitespaceSplit"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": splitter, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint with the safetensors library."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check for the same names, and equal dtypes, shapes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor)


def config_of(folder: Path) -> dict[str, Any]:
    """Read config.json."""
    return json.loads((folder / "config.json").read_text())


def edit_json(path: Path, **values: Any) -> None:
    """Replace top-level entries of a JSON file, or remove them with None."""
    document = json.loads(path.read_text())
    document.update(values)
    path.write_text(json.dumps({name: value for name, value in document.items() if value is not None}))


def block_of(folder: Path) -> dict[str, Any]:
    """Read quantization_config."""
    return config_of(folder)["quantization_config"]


def edit_block(folder: Path, **changed: Any) -> None:
    """Replace entries of quantization_config, or remove them with None."""
    block = {name: value for name, value in {**block_of(folder), **changed}.items() if value is not None}
    edit_json(folder / "config.json", quantization_config=block)


def rewrite(folder: Path, **changed: Tensor | None) -> None:
    """Replace tensors of a checkpoint of one file, or remove them with None."""
    tensors = {name: x for name, x in {**tensors_of(folder), **changed}.items() if x is not None}
    write(folder, config_of(folder), tensors)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Contents of every file below a folder, to check that they are equal or untouched."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def convert(
    source: Path,
    out: Path,
    pattern: str | SlidePattern = "6:8",
    *,
    dry_run: bool = False,
    progress: Progress = no_progress,
    skeletons: Skeletons | None = None,
    layer: Sequence[str] = (),
    **options: Any,
) -> Report:
    """Convert with options in their command-line notation."""
    parsed = ConvertOptions(
        parse_pattern(pattern) if isinstance(pattern, str) else pattern,
        layer_patterns=tuple(map(parse_layer_pattern, layer)),
        **{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
    )
    return stream.convert(source, out, parsed, dry_run=dry_run, progress=progress, skeletons=skeletons)


def converted(source: Path, out: Path, pattern: str, layout: str = "dense", **options: Any) -> Path:
    """Convert and return ``out``; the packed layout is what version 0.2 wrote."""
    if layout == "packed":
        return packed_layout(converted(source, out.with_name(f"{out.name}-dense"), pattern, **options), out)
    convert(source, out, pattern, layout=layout, **options)
    return out


KILLED = """
import json, os, signal, sys
import torch
from slidesparse.calibrate.task import Calibration
from slidesparse.checkpoint.storage import Writer
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.stream import convert
from slidesparse.pattern import SlidePattern
torch.set_num_threads(1)
source, out, most, calibration = sys.argv[1:]
written, write = 0, Writer.write
def write_then_die(self, *arguments):
    global written
    write(self, *arguments)
    written += 1
    if written == int(most):
        os.kill(os.getpid(), signal.SIGKILL)
Writer.write = write_then_die
options = json.loads(calibration)
convert(source, out, ConvertOptions(SlidePattern(8), calibration=Calibration(**options) if options else None))
"""


def killed(source: Path, out: Path, writes: int, **calibration: Any) -> None:
    """Convert to 6:8 in a process that is killed at this number of writes."""
    process = run(KILLED, source, out, writes, json.dumps(calibration))
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()


def refused(
    source: Path, *fragments: str, error: type[Exception] = CheckpointError, out: str = "out", **options: Any
) -> str:
    """Expect that conversion fails with all ``fragments`` in its message and leaves the source's folder unchanged."""
    before, names = snapshot(source), sorted(path.name for path in source.parent.iterdir())
    with pytest.raises(error) as caught:
        convert(source, source.parent / out, **options)
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message, message
    assert snapshot(source) == before
    assert sorted(path.name for path in source.parent.iterdir()) == names
    return message
