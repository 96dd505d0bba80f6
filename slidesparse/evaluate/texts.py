"""Evaluation data: texts, ids or pairs, as token ids of the checkpoint's own tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slidesparse.calibrate.data import tokenizer_of
from slidesparse.evaluate.engine import EvaluationError

Ids = list[list[int]]
LONGEST_TEXT = 512  # tokens of a text to embed


def windows(data: str | Path, folder: Path, seqlen: int, samples: int | None) -> Ids:
    """Consecutive windows of ``seqlen`` tokens for perplexity, the first ``samples`` of them.

    ``data``: a .txt file, one text; a .jsonl file of texts, one stream; or a .npy file of ids, a stream [tokens] or
    rows [samples, tokens].  Raises EvaluationError for data that give not one window.
    """
    path = _file(data, (".txt", ".jsonl", ".npy"))
    if seqlen < 2:
        raise EvaluationError(
            f"--seqlen {seqlen} is too short; a token is scored by those before it, so 2 at least"
        )
    if path.suffix == ".npy":
        found = _array(path)
        if found.ndim == 2:
            return [[int(token) for token in row[:seqlen]] for row in found[:samples]]
        stream = [int(token) for token in found]
    else:
        encode = tokenizer_of(folder)
        texts = (
            [path.read_text(encoding="utf-8")]
            if path.suffix == ".txt"
            else [t for (t,) in _lines(path, ("text",))]
        )
        stream = [token for text in texts for token in encode(text)]
    count = len(stream) // seqlen
    if count == 0:
        raise EvaluationError(
            f"{path} has {len(stream)} tokens, not one window of {seqlen}; give more text or a smaller --seqlen"
        )
    count = count if samples is None else min(count, samples)
    return [stream[i * seqlen : (i + 1) * seqlen] for i in range(count)]


@dataclass(frozen=True)
class Texts:
    """What is embedded: texts, or pairs of which the second is to be found by the first."""

    queries: Ids
    documents: Ids | None  # one a query


def texts_or_pairs(data: str | Path, folder: Path, samples: int | None, longest: int = LONGEST_TEXT) -> Texts:
    """Texts of a .jsonl file with "text", or pairs with "query" and "text", truncated to ``longest`` tokens each."""
    path = _file(data, (".jsonl",))
    encode = tokenizer_of(folder)
    first = json.loads(
        next((line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()), "null")
    )
    paired = isinstance(first, dict) and "query" in first
    lines = _lines(path, ("query", "text") if paired else ("text",))[:samples]

    def cut(text: str) -> list[int]:
        ids = encode(text)
        return ids if len(ids) <= longest else [*ids[: longest - 1], ids[-1]]

    columns = [[cut(line[i]) for line in lines] for i in range(len(lines[0]))]
    return Texts(columns[0], columns[1] if paired else None)


def _file(data: str | Path, suffixes: tuple[str, ...]) -> Path:
    path = Path(data)
    if path.suffix not in suffixes or not path.is_file():
        raise EvaluationError(f"--data {str(data)!r} is no file of a kind known here: {', '.join(suffixes)}")
    return path


def _array(path: Path) -> np.ndarray:
    try:
        found = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise EvaluationError(f"{path} is not an array of numbers that NumPy wrote: {error}") from error
    if found.dtype.kind not in "iu" or found.ndim not in (1, 2) or not found.size:
        raise EvaluationError(
            f"{path} holds {found.dtype} {list(found.shape)}; token ids are integers [samples, tokens], or [tokens]"
        )
    return np.asarray(found)


def _lines(path: Path, keys: tuple[str, ...]) -> list[tuple[str, ...]]:
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            value = {"text": value} if isinstance(value, str) else value
            found.append(tuple(str(value[key]) for key in keys))
        except (ValueError, KeyError, TypeError) as error:
            raise EvaluationError(
                f"{path}, line {number}: {type(error).__name__}: {error}; each line must be an object with "
                f"{' and '.join(keys)}"
            ) from error
    if not found:
        raise EvaluationError(f"{path} holds no text")
    return found
