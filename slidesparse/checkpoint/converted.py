"""Read the pruned layers of a converted checkpoint, validated and restored to [rows, K]."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from slidesparse.checkpoint.bitnet import as_int8
from slidesparse.checkpoint.metadata import KEY, LayerEntry, Metadata
from slidesparse.checkpoint.names import BIAS, SCALE, WEIGHT
from slidesparse.checkpoint.skeleton import require_few_layers
from slidesparse.checkpoint.storage import INDEX, SUFFIX, Checkpoint, CheckpointError
from slidesparse.checkpoint.w8a8 import parse_block, require_quantized
from slidesparse.errors import CheckFailed
from slidesparse.pattern import MixedPattern, PatternError
from slidesparse.quantize import is_finite
from slidesparse.slide import Violation, bits, slide, unslide, violation_message, violations

MISTRAL = "consolidated"  # beginning of the names of weights in Mistral's format


class DamagedError(CheckFailed, PatternError):
    """Stored rows break their pattern; ``violation`` is the first one."""

    def __init__(self, message: str, violation: Violation) -> None:
        super().__init__(message)
        self.violation = violation


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]


def open_checkpoint(folder: str | Path) -> tuple[Checkpoint, Metadata | None]:
    """Open a checkpoint (BitNet as INT8 codes), and return it with its SlideSparse metadata or None.

    The metadata, the tensors of all linear layers and config.json are checked against each other.  Raises
    CheckpointError, which names the layer, for a contradiction.
    """
    checkpoint = as_int8(Checkpoint.open(folder))
    require_few_layers(checkpoint.config, checkpoint.folder)
    block = checkpoint.quantization_config()
    metadata = Metadata.of_config(block)
    if metadata is None or block is None:
        return checkpoint, None
    if not metadata.layers and not metadata.experts:
        raise CheckpointError(
            f"quantization_config.{KEY} of {folder} lists no layer; start from the original checkpoint"
        )
    require_sole_weights(checkpoint)
    source = parse_block(block, checkpoint.tensors)
    with checkpoint.reader() as reader:
        for layer in metadata.layers:
            require_quantized(checkpoint, layer, source)
            _require_columns(checkpoint, metadata, layer)
            for name in (layer + SCALE, layer + BIAS):
                if name in checkpoint.tensors and not is_finite(reader.whole(name)):
                    raise CheckpointError(
                        f"tensor {name} holds NaN or Inf; convert the original checkpoint again"
                    )
    return checkpoint, metadata


def require_sole_weights(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if vLLM (0.28) loads other files than the checkpoint's, instead of them or as well."""
    folder, files = checkpoint.folder, checkpoint.files
    instead = [str(path.relative_to(folder)) for path in folder.rglob(f"{MISTRAL}*{SUFFIX}")]
    others = [path.name for path in folder.glob(f"[!.]*{SUFFIX}") if checkpoint.index is None]
    for names, problem in (
        (instead, f"for which vLLM passes over {files[0]}"),
        (others, f"and no {INDEX}, so that vLLM loads it beside {files[0]}"),
    ):
        if strange := sorted({*names} - {*files}):
            raise CheckpointError(
                f"{folder} holds {strange[0]}, {problem}; remove the file that is not of this model"
            )


def _require_columns(checkpoint: Checkpoint, metadata: Metadata, layer: str) -> None:
    """Raise CheckpointError unless a pruned layer's weight, a matrix, has as many columns as the metadata say."""
    spec, entry = checkpoint.require(layer + WEIGHT), metadata.layers[layer]
    if metadata.layout != "packed" and checkpoint.tensors[spec.name].parts:
        raise CheckpointError(
            f"tensor {spec.name} is stored in the packed form, but the metadata declare the {metadata.layout} layout; "
            "convert the original checkpoint again"
        )
    stored = entry.columns(metadata.layout)
    if spec.columns != stored:
        raise CheckpointError(
            f"tensor {spec.name} has shape {list(spec.shape)}; {entry.in_features} in-features at {entry.pattern} in "
            f"the {metadata.layout} layout have {stored} columns; convert the original checkpoint again"
        )


def restore(values: Tensor, entry: LayerEntry, layout: str, layer: str, first_row: int = 0) -> Tensor:
    """Restore stored rows of a pruned ``layer``, [rows, K] or slided, from ``first_row`` on, to [rows, K].

    Raises DamagedError with layer, row, block and count if they break the layer's pattern, or if slided rows are not
    the result of `slide` for any weight.  Rows of a mixed weight are not checked.
    """
    pattern = entry.pattern
    if isinstance(pattern, MixedPattern):
        return values
    dense = unslide(values, pattern, entry.in_features) if layout == "slided" else values
    violation = violations(dense, pattern)
    if violation:
        violation = violation._replace(row=first_row + violation.row)
        raise DamagedError(violation_message(layer, violation, pattern), violation)
    if layout == "slided":
        different = (bits(slide(dense, pattern)) != bits(values)).any(-1)
        if bool(different.any()):
            row = first_row + int(different.nonzero()[0])
            message = (
                f"{layer}: row {row} is not the slided form of any weight at {pattern}; the checkpoint is damaged, "
                "convert the original one again"
            )
            raise DamagedError(message, Violation(int(different.sum()), row, 0, 0))
    return dense
