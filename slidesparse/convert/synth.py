"""``slidesparse synth``: a checkpoint of random weights, for measuring speed without the real ones.

Names, shapes, config and metadata come from the plan of converting a float checkpoint of the model, so they are those
that `slidesparse.convert.stream` writes.  Values are generated at the speed of the disk.  For each projection, one
sample of rows is drawn, pruned and quantized as in a conversion::

    w ~ N(0, 1/K), which preserves the scale of the inputs                 embeddings, lm_head, biases:
    codes, scales = quantize_rows(prune(w))                                N(0, initializer_range^2); norms: 1

Each group of R rows of a tensor is this sample, changed so that no two rows of a tensor are equal::

    sample row    | block 0 | block 1 | block 2 | block 3 | tail |      blocks of L weights, L of the pattern
    rolled by 1   | block 1 | block 2 | block 3 | block 0 | tail |      each group by a different number
    negated         for a random half of the rows (zeros keep their sign, also in FP8)
    shuffled        rows, with their scales, in a random order

Whole blocks move, so the pattern holds.  In the slided layout a block is (N-1) windows, and the result is the slided
form of the rolled row.  R is large enough that no tensor uses a shift twice.  Without a pattern a block is one weight.
With a mixed pattern it is 128 columns, and strips of 64 rows are shuffled, and the rows within each strip.  The codes
of BitNet are the signs of w, with the smallest TERNARY_ZEROS set to 0, about as many as in trained models.  With "bf16"
rows are written as drawn, which gives a float checkpoint to convert.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

import slidesparse
from slidesparse.blocks import BLOCK, STRIP
from slidesparse.calibrate.task import Progress, no_progress
from slidesparse.checkpoint.architectures import architecture_of
from slidesparse.checkpoint.bitnet import is_bitnet
from slidesparse.checkpoint.metadata import KEY
from slidesparse.checkpoint.output import (
    chunk_seed,
    full_disk_explained,
    partial_folder,
    publish,
    remove_stale,
    require_free_name,
    require_space,
    workers,
)
from slidesparse.checkpoint.storage import (
    CONFIG,
    DTYPES,
    QUANTIZATION,
    Checkpoint,
    CheckpointError,
    StoredTensor,
    TensorSpec,
    Writer,
)
from slidesparse.checkpoint.w8a8 import KINDS
from slidesparse.convert.options import ConvertOptions
from slidesparse.convert.plan import ConversionPlan, Part, make_plan
from slidesparse.convert.synth_model import TOKENIZER, first_layers, read_config, tensors, tokenizer_files
from slidesparse.pattern import MixedPattern, Pattern, SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import NAMES, quantize_rows
from slidesparse.slide import bits, slide

MARK = "slidesparse_synth"  # key in config.json that marks random weights
SHARD_BYTES = 4 * 10**9
TERNARY_ZEROS = 0.42  # share of BitNet's codes
INITIALIZER_RANGE = 0.02  # default
BF16 = "bf16"
QUANTS = (*KINDS, BF16)


@dataclass(frozen=True)
class SynthReport:
    """The checkpoint that was written."""

    out: Path
    architecture: str
    layers: int  # number of decoder layers
    pattern: Pattern | None
    quant: str
    layout: str
    seed: int
    files: int  # shards
    bytes_out: int
    seconds: float
    replaced: str | None  # quant_method of the config's own quantization_config

    @property
    def rate(self) -> float:
        """The MB of tensors written per second, including fsync."""
        return self.bytes_out / 1e6 / max(self.seconds, 1e-9)


def parse_size(option: str, text: str) -> int:
    """Read ``"2GB"`` or ``"500MB"`` as bytes.  Raises CheckpointError, which names the ``option``."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(MB|GB)", text.strip(), re.IGNORECASE)
    if not match:
        raise CheckpointError(f"{option} {text!r} is not a size; use MB or GB, such as 500MB or 4GB")
    return int(float(match[1]) * {"MB": 10**6, "GB": 10**9}[match[2].upper()])


def synth(
    config: str | Path,
    out: str | Path,
    *,
    quant: str = "int8",
    pattern: Pattern | None = None,
    layout: str = "dense",
    seed: int = 0,
    layers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = no_progress,
) -> SynthReport:
    """Write the checkpoint ``out`` of a model with random weights and a placeholder tokenizer.

    Args:
        config: a config.json, a folder that holds one, or a name of `slidesparse.convert.synth_model.PUBLIC`.
        out: the folder to create; absent or empty.
        quant: "int8" or "fp8" for W8A8, or "bf16" for a float source: all tensors in BF16, whatever the config says,
            and no quantization_config.
        pattern: the pattern of the linear layers, or None for dense ones; not with "bf16", because float checkpoints
            have no metadata for it.
        layout: "dense" [N, K] or, with a pattern, "slided" [N, K'] or "packed", without zeros.
        seed: with the same seed and the same torch, the output is deterministic.
        layers: number of decoder layers to keep, from the first.
        shard_bytes: maximum bytes of tensors in a file, unless one tensor is larger.
        progress: called with "writing", bytes written and total bytes.

    Raises CheckpointError before anything is written when the config or the options cannot be used, EnvironmentFault
    when the output does not fit.
    """
    started = time.monotonic()
    out = Path(out)
    require_free_name(Path(config) / CONFIG, out)
    model = read_config(config)
    replaced = _own_quantization(model)
    model.pop("auto_map", None)  # names code, which is not written; transformers and vLLM have the model
    if layers is not None:
        model = first_layers(model, layers)
    std = _initializer_range(model)
    plan = _plan(model, quant, pattern, layout, seed, shard_bytes)
    remove_stale(out)
    require_space(out, plan.disk_bytes())
    advice = "nothing is left behind. Free some space, choose another output folder, or make fewer --layers"
    with (
        full_disk_explained(out, plan.disk_bytes(), advice),
        workers() as pool,
        partial_folder(out) as partial,
    ):
        _write(_Recipe(plan, std, seed), pool, partial, progress)
        (partial / TOKENIZER).mkdir()
        for file, content in tokenizer_files(model).items():
            (partial / TOKENIZER / file).write_bytes(content)
        for file, content in plan.small_files():
            (partial / file).write_bytes(content)
        publish(partial, out)
    return SynthReport(
        out=out,
        architecture=str(architecture_of(model)),
        layers=int(model["num_hidden_layers"]),
        pattern=pattern,
        quant=plan.quant,
        layout=layout,
        seed=seed,
        files=len(plan.checkpoint.files),
        bytes_out=plan.bytes_out,
        seconds=time.monotonic() - started,
        replaced=replaced,
    )


def _own_quantization(model: dict[str, Any]) -> str | None:
    """Remove the config's own quantization, and return its quant_method."""
    blocks = [model.pop(key, None) for key in QUANTIZATION]
    block = next((block for block in blocks if block), None)
    return None if block is None else str(block.get("quant_method") if isinstance(block, dict) else block)


def _initializer_range(model: dict[str, Any]) -> float:
    value = model.get("initializer_range", INITIALIZER_RANGE)
    if not isinstance(value, int | float) or not 0 < value < 1:
        raise CheckpointError(f"config.json: initializer_range is {value!r}; it must lie between 0 and 1")
    return float(value)


def _plan(
    model: dict[str, Any], quant: str, pattern: Pattern | None, layout: str, seed: int, limit: int
) -> ConversionPlan:
    """Plan how a float checkpoint of the model would be converted, cut into shards."""
    if quant not in QUANTS:
        raise CheckpointError(f"--quant {quant!r} is not known; use one of {', '.join(QUANTS)}")
    if quant == BF16 and (pattern is not None or layout != "dense"):
        raise CheckpointError(
            "--quant bf16 writes unquantized weights, which are not pruned; leave --sparsity and --layout "
            "out, and prune the result: slidesparse convert OUT PRUNED --sparsity 6:8"
        )
    if quant == "fp8" and is_bitnet(model):
        raise CheckpointError(
            "--quant fp8: BitNet was trained for INT8 activations; use int8, or bf16 for master weights"
        )
    if pattern is None and layout in ("slided", "packed"):
        raise CheckpointError(f"--layout {layout} needs a pattern: give --sparsity, such as 6:8")
    if limit < 1:
        raise CheckpointError(f"--shard-size is {limit} bytes; it must be at least 1")
    file = "model.safetensors"
    if quant == BF16:
        model = {key: value for key, value in model.items() if key != "dtype"} | {"torch_dtype": "bfloat16"}
    marked = {
        **model,
        MARK: {"weights": "random", "seed": seed, "tool": f"slidesparse {slidesparse.__version__}"},
    }
    stored = {spec.name: StoredTensor(spec, file, 0) for spec in tensors(model)}
    source = Checkpoint(Path(file), marked, None, (file,), stored)
    kind = None if quant == BF16 else quant
    plan = make_plan(source, ConvertOptions(pattern or SlidePattern(None), kind, layout, seed=seed))
    if quant == BF16:
        parts = tuple(replace(part, out=(part.source,), pattern=None) for part in plan.parts)
        plan = replace(plan, quant=quant, parts=parts, config=marked)
    elif pattern is None:
        block = {key: value for key, value in plan.config["quantization_config"].items() if key != KEY}
        plan = replace(plan, config={**plan.config, "quantization_config": block})
    return _sharded(plan, limit)


def _sharded(plan: ConversionPlan, limit: int) -> ConversionPlan:
    """Distribute the plan's tensors, in order, over files of at most ``limit`` bytes of tensors."""
    numbers, size = [0], 0
    for part in plan.parts:
        added = sum(spec.nbytes for spec in part.out)
        full = size > 0 and size + added > limit
        numbers.append(numbers[-1] + full)
        size = added if full else size + added
    count = numbers[-1] + 1
    if count == 1:
        return plan
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    parts = tuple(replace(part, file=names[i]) for part, i in zip(plan.parts, numbers[1:], strict=True))
    return replace(plan, parts=parts, checkpoint=replace(plan.checkpoint, files=tuple(names), index={}))


@dataclass(frozen=True)
class _Sample:
    """The R rows from which all rows are generated; see the module docstring."""

    doubled: Tensor  # [2R, 2W] integers: rows above their negatives, with the W columns of whole blocks twice
    tail: Tensor  # [2R, columns after the whole blocks]
    scale: Tensor | None  # [R, 1] float32
    dtype: torch.dtype
    rows: int  # R
    shifts: int  # number of different shifts: that of whole blocks, at least 1
    strip: int  # rows that stay together

    def make(self, count: int, shift: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Return ``count`` <= R rows [count, columns], rolled by ``shift`` blocks, and their scales."""
        strips = self.rows // self.strip
        order = self.strip * torch.randperm(strips, generator=generator)[:, None]
        if self.strip > 1:
            order = order + torch.randperm(self.strip, generator=generator)
        order = torch.cat([order.flatten(), torch.arange(strips * self.strip, self.rows)])[:count]
        signed = order + self.rows * torch.randint(0, 2, (count,), generator=generator)
        width = self.doubled.shape[1] // 2
        start = shift % self.shifts * (width // self.shifts)
        values = self.doubled[:, start : start + width].index_select(0, signed)
        if self.tail.shape[1]:
            values = torch.cat([values, self.tail.index_select(0, signed)], 1)
        return values.view(self.dtype), None if self.scale is None else self.scale.index_select(0, order)


@dataclass(frozen=True)
class _Recipe:
    """A generator of the values of each tensor."""

    plan: ConversionPlan
    std: float  # standard deviation of tensors other than linear layers
    seed: int

    @property
    def pattern(self) -> Pattern:
        """The pattern of the linear layers."""
        return self.plan.options.pattern

    @property
    def slided(self) -> bool:
        """Whether linear layers are written in the slided layout."""
        return self.plan.options.layout == "slided"

    @property
    def rolls_first(self) -> bool:
        """Whether rows must be rolled before sliding: a row of 2_inf is a single block."""
        return self.slided and self.pattern.length is None

    def draw(self, part: Part) -> _Sample:
        """Draw the sample for a tensor's `projection`."""
        n, k = part.source.shape
        length, strip = (self.pattern.length if part.layer else None) or 1, 1
        if part.layer and isinstance(self.pattern, MixedPattern):
            length, strip = BLOCK, STRIP
        blocks = k // length
        least = next(part.chunks()).stop
        rows = min(n, max(least, -(-n // blocks // strip) * strip)) if blocks else n
        generator = torch.Generator().manual_seed(chunk_seed(self.seed, projection(part), 0))
        pieces = TensorSpec("", part.source.dtype, (rows, k)).chunks(strip)
        drawn = [self._rows(part, piece.stop - piece.start, generator) for piece in pieces]
        values = torch.cat([bits(codes) for codes, _ in drawn])
        dtype = drawn[0][0].dtype
        stacked = torch.cat([values, _negated(values, dtype)])
        unit = length
        if part.layer and self.slided and not self.rolls_first and isinstance(self.pattern, SlidePattern):
            unit = self.pattern.layout(length).slided
        width = blocks * unit
        return _Sample(
            doubled=torch.cat([stacked[:, :width], stacked[:, :width]], 1),
            tail=stacked[:, width:].contiguous(),
            scale=torch.cat([scale for _, scale in drawn]) if len(part.out) > 1 else None,
            dtype=dtype,
            rows=rows,
            shifts=max(1, blocks),
            strip=strip,
        )

    def _rows(self, part: Part, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw ``count`` output rows and their scales (empty if they are not quantized)."""
        k = part.source.columns
        values = torch.randn(count, k, generator=generator).mul_(k**-0.5 if part.layer else self.std)
        values = values.to(DTYPES[part.source.dtype])
        if part.layer is None or self.plan.quant == BF16:
            return values, torch.empty(0)
        if is_bitnet(self.plan.config):
            codes, scale = _ternary(values.float(), k**-0.5)
            codes = prune(codes, self.pattern)
        else:
            codes, scale = quantize_rows(prune(values, self.pattern), NAMES[self.plan.quant], "cuda")
        if self.slided and not self.rolls_first and isinstance(self.pattern, SlidePattern):
            codes = slide(codes, self.pattern, layer=part.layer)
        return codes, scale

    def make(self, part: Part, rows: slice, sample: _Sample | None) -> tuple[Tensor, Tensor | None]:
        """Return output rows [rows, columns] of a tensor, or a whole vector, and the rows' scales."""
        name, count = part.source.name, rows.stop - rows.start
        generator = torch.Generator().manual_seed(chunk_seed(self.seed, name, rows.start))
        if sample is None:
            values = torch.ones(count, 1)
            if name.endswith(".bias"):
                values = torch.randn(count, 1, generator=generator).mul_(self.std)
            return values.to(DTYPES[part.source.dtype]), None
        first = chunk_seed(self.seed, name, 0)
        values, scale = sample.make(count, first + rows.start // sample.rows, generator)
        if part.layer and self.rolls_first and isinstance(self.pattern, SlidePattern):
            values = slide(values, self.pattern, layer=part.layer)
        return values, scale


def projection(part: Part) -> str:
    """Return a tensor's name without the layer number; tensors with the same name share a sample."""
    return re.sub(r"\.\d+\.", ".", part.source.name)


def _ternary(w: Tensor, std: float) -> tuple[Tensor, Tensor]:
    """Return ternary codes [N, K] of normal weights, and scales [N, 1] that preserve their standard deviation."""
    least = std * NormalDist().inv_cdf((1 + TERNARY_ZEROS) / 2)
    codes = w.sign().masked_fill_(w.abs() < least, 0.0).to(torch.int8)
    return codes, torch.full((len(w), 1), std * (1 - TERNARY_ZEROS) ** -0.5)


def _negated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bits of -x from those of x; zeros stay +0.0, which sliding treats as absent weights."""
    if not dtype.is_floating_point:
        return -values  # symmetric codes: never -128
    limits = torch.iinfo(values.dtype)
    return torch.where((values & limits.max) == 0, values, values ^ limits.min)


def _write(recipe: _Recipe, pool: ThreadPoolExecutor, folder: Path, progress: Progress) -> None:
    parts, done = recipe.plan.parts, 0
    matrices = {projection(part): part for part in parts if len(part.source.shape) == 2}
    samples = dict(zip(matrices, pool.map(recipe.draw, matrices.values()), strict=True))
    for file in recipe.plan.checkpoint.files:
        jobs = [
            (part, rows, samples.get(projection(part)))
            for part in parts
            if part.file == file
            for rows in _runs(part, samples.get(projection(part)))
        ]

        with Writer(folder / file, recipe.plan.specs(file)) as writer:

            def work(job: tuple[Part, slice, _Sample | None], writer: Writer = writer) -> int:
                part, rows, sample = job
                values, scale = recipe.make(part, rows, sample)
                return part.write(writer, rows.start, values, scale)

            for size in pool.map(work, jobs):
                done += size
                progress("writing", done, recipe.plan.bytes_out)


def _runs(part: Part, sample: _Sample | None) -> Iterator[slice]:
    """Yield the rows of a tensor in groups of the sample's size; a vector as a whole."""
    n = part.source.rows
    step = sample.rows if sample else n
    return (slice(start, min(start + step, n)) for start in range(0, n, step))
