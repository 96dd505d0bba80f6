"""Evaluation data: windows of token ids, from text by the checkpoint's own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slidesparse.checkpoint.storage import CONFIG, parse_json, text_config
from slidesparse.checkpoint.tokens import cut, read_documents, read_samples, tokenizer_of
from slidesparse.errors import SlideSparseError

WINDOW = 2048  # tokens


def window_of(*folders: Path) -> int:
    """Return the window length in tokens for all checkpoints in ``folders``: WINDOW, or their least positions minus 1.

    vLLM generates one token after a window.  A config.json without a number of positions does not limit the window.
    """
    positions = [config_number(folder, "max_position_embeddings") for folder in folders]
    return min([WINDOW, *(count - 1 for count in positions if count)])


def config_number(folder: Path, key: str) -> int | None:
    """Return a number from config.json, or from its text_config, or None if there is none."""
    try:
        config = config_of(folder)
        return int({**config, **text_config(config)}[key])
    except (SlideSparseError, ValueError, TypeError, KeyError, OverflowError):
        return None  # vLLM will report what is wrong


def config_of(folder: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint.  Raises SlideSparseError if it is missing or not a JSON object."""
    path = folder / CONFIG
    try:
        return parse_json(path.read_bytes(), path)
    except OSError as error:
        raise SlideSparseError(
            f"{folder} is no checkpoint folder: its {CONFIG} cannot be read ({error})"
        ) from error


def windows(data: str | Path, folder: Path, seqlen: int, samples: int | None) -> list[list[int]]:
    """Split data into consecutive windows of ``seqlen`` tokens for perplexity; return the first ``samples`` of them.

    Args:
        data: texts, as one stream, in a form that `read_documents` takes; or a .npy file of ids, a stream [tokens] or
            rows [samples, tokens].

    Raises SlideSparseError for data without a whole window.
    """
    if samples is not None and samples < 1:
        raise SlideSparseError(f"--samples {samples} is too few; leave it out to take all")
    if seqlen < 2:
        raise SlideSparseError(f"--seqlen {seqlen} is too short: the first token of a window is not scored")
    if Path(data).suffix == ".npy":
        found = read_samples(Path(data), seqlen)
    else:
        encode = tokenizer_of(folder)
        stream = [token for document in read_documents(str(data)) for token in encode(document)]
        found = cut(np.asarray(stream, dtype=np.int64), seqlen)
    if not found:
        raise SlideSparseError(
            f"{data} gives no window of {seqlen} tokens; give more text, or a smaller --seqlen"
        )
    return [window.tolist() for window in found[:samples]]
