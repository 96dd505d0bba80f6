"""``slidesparse synth``: a checkpoint of random weights, for measuring speed without the real ones.

Names, shapes and config are those of transformers' model, and the checkpoint is planned and written like a conversion
whose pattern is that of routed experts, too.
Of each linear layer, SAMPLE rows are drawn, pruned and quantized, and all others repeat them from another row on::

    w ~ N(0, 1/K), which preserves the scale of the inputs                 embeddings, lm_head, biases:
    codes, scales = quantize_rows(prune(w))                                N(0, initializer_range^2); norms: 1

The codes of BitNet are the signs of w, with the smallest TERNARY_ZEROS set to 0, about as many as in trained models.
With "bf16" rows are written as drawn, which gives a float checkpoint to convert.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from slidesparse.blocks import STRIP
from slidesparse.checkpoint.bitnet import is_bitnet
from slidesparse.checkpoint.metadata import KEY
from slidesparse.checkpoint.names import EXPERT, WEIGHT, architecture_of, experts, is_expert
from slidesparse.checkpoint.output import (
    full_disk_explained,
    remove_stale,
    require_free_name,
    require_space,
)
from slidesparse.checkpoint.skeleton import Skeleton
from slidesparse.checkpoint.storage import (
    CONFIG,
    MODEL,
    NAMES,
    Checkpoint,
    CheckpointError,
    Reader,
    StoredTensor,
    TensorSpec,
    parse_json,
    text_config,
    unquantized_config,
)
from slidesparse.checkpoint.w8a8 import KINDS
from slidesparse.convert.options import BUDGET, ConvertOptions, LayerPatterns
from slidesparse.convert.plan import ConversionPlan, Planner
from slidesparse.convert.source import Floats, Prune
from slidesparse.convert.stream import write_output
from slidesparse.errors import shown
from slidesparse.pattern import Pattern, SlidePattern
from slidesparse.progress import Progress, no_progress
from slidesparse.quantize import INT8

SAMPLE = 8 * STRIP  # rows of a layer that are drawn
BUFFER = 2**22  # random numbers that all others are taken from
TERNARY_ZEROS = 0.42  # share of BitNet's codes
BF16 = "bf16"
QUANTS = (*KINDS, BF16)
TOKENIZER = "tokenizer"  # the folder of `tokenizer_files` in a checkpoint

# The sizes of base models, as their config.json on the Hub gives them
PUBLIC: Mapping[str, Mapping[str, Any]] = json.loads(
    (Path(__file__).parent / "public_models.json").read_text()
)


def synth(
    config: str | Path,
    out: str | Path,
    *,
    quant: str = "int8",
    pattern: Pattern | None = None,
    layout: str = "dense",
    layers: int | None = None,
    layer_patterns: LayerPatterns = (),
    progress: Progress = no_progress,
) -> tuple[ConversionPlan, Skeleton]:
    """Write the checkpoint ``out`` of a model with random weights and a placeholder tokenizer.

    Returns its plan, and the model.

    Args:
        config: a config.json, a folder that holds one, or a name in PUBLIC.
        out: the folder to create; absent or empty.
        quant: "int8" or "fp8" for W8A8, or "bf16" for a float source.
        pattern: the pattern of the linear layers and routed experts, or None for dense ones; not with "bf16".
        layout: "dense" [N, K] or, with a pattern, "slided" [N, K'].
        layers: number of transformer blocks to keep, from the first.
        layer_patterns: those of `ConvertOptions`; not with "bf16".
        progress: called with "writing", bytes written and total bytes.

    The output is deterministic with the same torch.  Raises CheckpointError before anything is written when the config
    or the options cannot be used, EnvironmentFault when the output does not fit.
    """
    out = Path(out)
    require_free_name(Path(config) / CONFIG, out)
    values = _config(config, quant, layers)
    if quant not in QUANTS:
        raise CheckpointError(f"--quant {quant!r} is not known; use one of {', '.join(QUANTS)}")
    if named := next((regex for regex, chosen in layer_patterns if chosen is None), None):
        raise CheckpointError(
            f"--layer {named}={BUDGET}: random weights have no losses to choose by; give a pattern, as in "
            f"--layer {named}=6:8"
        )
    if quant == BF16 and (pattern or layout != "dense" or layer_patterns):
        raise CheckpointError(
            "--quant bf16 writes weights that are not pruned; leave --sparsity, --layer and --layout out"
        )
    if layout != "dense" and not pattern:
        raise CheckpointError(
            f"--layout {layout} stores pruned layers; add --sparsity, or leave --layout out"
        )
    if quant == "fp8" and is_bitnet(values):
        raise CheckpointError("--quant fp8: BitNet was trained for INT8 activations; use int8, or bf16")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(values))
        try:
            plan, skeleton = _plan(Path(folder), values, quant, pattern, layout, layer_patterns)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(Path(folder) / CONFIG), str(config))) from error
        remove_stale(out)
        require_space(out, plan.disk_bytes())
        explained = full_disk_explained(out, plan.disk_bytes(), "nothing is left behind")
        with explained, plan.checkpoint.reader() as reader:
            tokenizer = tokenizer_files(getattr(skeleton.text_config, "vocab_size", 0))
            write_output(plan, out, reader, None, progress, tokenizer)
    return plan, skeleton


def _config(config: str | Path, quant: str, layers: int | None) -> dict[str, Any]:
    """Read a config.json, or the one of a folder, or one of PUBLIC by name, without its quantization."""
    path = Path(config) / CONFIG if Path(config).is_dir() else Path(config)
    if str(config) in PUBLIC:
        values = dict(PUBLIC[str(config)])
    elif path.is_file():
        values = parse_json(path.read_bytes(), path)
    else:
        raise CheckpointError(
            f"{str(config)!r} is neither one of {', '.join(PUBLIC)}, nor a {CONFIG}, nor a folder that holds one"
        )
    if not architecture_of(values):
        raise CheckpointError(
            f"{config}: architectures is {shown(values.get('architectures'))}; let it list the model's class in "
            "transformers, such as LlamaForCausalLM"
        )
    values = unquantized_config(values)
    values.pop("auto_map", None)
    text: Any = text_config(values)
    total = text.get("num_hidden_layers")
    if layers is not None:
        if type(total) is not int:
            raise CheckpointError(f"{config}: num_hidden_layers is {shown(total)}; let it be a number")
        if not 1 <= layers <= total:
            raise CheckpointError(f"--layers {layers} must be from 1 to {total}, the layers of the model")
        text["num_hidden_layers"] = layers
        if isinstance(text.get("layer_types"), list):  # one entry a layer
            text["layer_types"] = text["layer_types"][:layers]
    return {**values, "dtype": "bfloat16"}


def _source(folder: Path, values: dict[str, Any]) -> tuple[RandomCheckpoint, Skeleton]:
    """Return a float checkpoint of the model, and the model."""
    source = RandomCheckpoint(folder, values, None, (), {})
    skeleton = Skeleton(source)
    shapes = skeleton.stored_shapes()
    if skeleton.is_tied:
        shapes.pop("lm_head" + WEIGHT, None)
    tensors = {
        name: StoredTensor(TensorSpec(name, NAMES[torch.bfloat16], shape), MODEL, 0)
        for name, shape in shapes.items()
    }
    return replace(source, files=(MODEL,), tensors=tensors), skeleton


def _plan(
    folder: Path,
    values: dict[str, Any],
    quant: str,
    pattern: Pattern | None,
    layout: str,
    of_layers: LayerPatterns,
) -> tuple[ConversionPlan, Skeleton]:
    """Plan how a float checkpoint of the model would be converted; return the model, too."""
    source, skeleton = _source(folder, values)
    if pattern and experts(source.tensors):
        of_layers = ((EXPERT.pattern, pattern), *of_layers)
    options = ConvertOptions(
        pattern or SlidePattern(None), None if quant == BF16 else quant, layout, layer_patterns=of_layers
    )
    plan = Planner(source, options, RandomWeights).plan()
    if quant == BF16:
        outputs = tuple(replace(o, specs=(o.source,), layer=None, pattern=None) for o in plan.outputs)
        return replace(plan, quant=quant, outputs=outputs, config=values), skeleton
    if pattern is None and all(each.density == 1 for each in plan.patterns.values()):
        block = {key: value for key, value in plan.config["quantization_config"].items() if key != KEY}
        plan = replace(plan, config={**plan.config, "quantization_config": block})
    return plan, skeleton


class RandomCheckpoint(Checkpoint):
    """A checkpoint whose tensors are drawn when they are read."""

    def reader(self) -> Reader:
        """Return a context manager for drawing tensors."""
        return _RandomReader(self)


class _RandomReader(Reader):
    """Draws the rows of tensors from a buffer of normal numbers, from a place that depends on the tensor's name."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._normal = torch.randn(BUFFER, generator=torch.Generator().manual_seed(0))

    def __enter__(self) -> Reader:
        return self

    def rows(self, name: str, rows: slice) -> Tensor:
        """Return rows of a tensor as [rows, columns]."""
        spec = self.checkpoint.require(name)
        if len(spec.shape) < 2 and name.endswith(WEIGHT):
            return torch.ones(rows.stop - rows.start, 1)  # norms
        start = (zlib.crc32(name.encode()) + rows.start * spec.columns) % BUFFER
        count = (rows.stop - rows.start) * spec.columns
        values = self._normal[torch.arange(start, start + count) % BUFFER].view(-1, spec.columns)
        is_layer = ".layers." in name and len(spec.shape) == 2
        return values * float(
            spec.columns**-0.5 if is_layer else self.checkpoint.config.get("initializer_range", 0.02)
        )


class RandomWeights(Floats):
    """Layers whose rows repeat SAMPLE rows that were drawn, pruned and quantized once."""

    def __init__(self, checkpoint: Checkpoint, quant: str | None, _: bool) -> None:
        super().__init__(checkpoint, quant)
        self._samples: dict[str, tuple[Tensor, Tensor]] = {}

    def codes(self, reader: Reader, layer: str, rows: slice, prune: Prune) -> tuple[Tensor, Tensor]:
        name = layer
        if is_expert(layer):  # all of a shape, because there may be tens of thousands
            layer = str(self.checkpoint.require(layer + WEIGHT).shape)
        if layer not in self._samples:
            spec = self.checkpoint.require(name + WEIGHT)
            if is_bitnet(self.checkpoint.config):
                w = reader.rows(spec.name, slice(0, SAMPLE))
                threshold = NormalDist().inv_cdf((1 + TERNARY_ZEROS) / 2) * spec.columns**-0.5
                codes = prune(torch.where(w.abs() < threshold, 0.0, w.sign()).to(INT8))
                self._samples[layer] = codes, torch.full((SAMPLE, 1), spec.columns**-0.5)
            else:
                codes, scale = super().codes(reader, name, slice(0, SAMPLE), prune)
                assert scale is not None
                self._samples[layer] = codes, scale
        codes, scale = self._samples[layer]
        # whole strips stay together, of which some blocks may be 2:4
        places = torch.arange(rows.start, rows.stop)
        index = (places + STRIP * (places // SAMPLE)) % SAMPLE
        return codes[index], scale[index]


def tokenizer_files(vocabulary: int) -> dict[str, bytes]:
    """Return the files of a tokenizer with one word per token, "t0" to "t151935": path in the checkpoint -> content.

    It replaces the real one, so that prompts keep their lengths when vLLM's commands tokenize them.  It needs a folder
    of its own: next to the model's config.json, transformers would use that model's tokenizer class, and some of these
    cannot read such words.  vLLM also looks for a config.json there; a GPT-2 config accepts any tokenizer.json.
    """
    words = {f"t{token}": token for token in range(vocabulary)}
    splitter = {"type": "WhitespaceSplit"}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "t0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": splitter, "model": model}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "pad_token": "t0"}
    files = {
        TOKENIZER + ".json": tokenizer,
        "tokenizer_config.json": settings,
        CONFIG: {"model_type": "gpt2"},
    }
    return {f"{TOKENIZER}/{name}": json.dumps(content).encode() for name, content in files.items()}
