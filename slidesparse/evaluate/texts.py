"""Evaluation data: read texts, ids or pairs, and tokenize them with the checkpoint's own tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slidesparse.checkpoint.storage import CONFIG, parse_json, text_config
from slidesparse.checkpoint.tokens import clipped, read_ids, read_lines, read_records, read_text, tokenizer_of
from slidesparse.errors import SlideSparseError

Ids = list[list[int]]
SENTENCE_CONFIG = "sentence_bert_config.json"  # of sentence-transformers
WINDOW = 2048  # tokens
TEXT = 256  # tokens


def window_of(*folders: Path) -> int:
    """Return the window length in tokens for all checkpoints in ``folders``: WINDOW, or their least positions minus 1.

    vLLM generates one token after a window.  A config.json without a number of positions does not limit the window.
    """
    positions = [_config_number(folder, "max_position_embeddings") for folder in folders]
    return min([WINDOW, *(count - 1 for count in positions if count)])


def longest_text_of(*folders: Path) -> int:
    """Return the maximum length in tokens of texts for all checkpoints in ``folders``: TEXT, or their least limit.

    As in vLLM, max_seq_length of a sentence-transformers model is a limit, too.
    """
    positions = [_config_number(folder, "max_position_embeddings") for folder in folders]
    positions += [_config_number(folder, "max_seq_length", SENTENCE_CONFIG) for folder in folders]
    return min([TEXT, *filter(None, positions)])


def vocabulary_of(folder: Path) -> int | None:
    """Return the size of a model's vocabulary, or None if it is not in config.json."""
    size = _config_number(folder, "vocab_size")
    return None if size is None else max(1, size)


def _config_number(folder: Path, key: str, file: str = CONFIG) -> int | None:
    """Return a number from config.json or ``file``, or from its text_config, or None if there is none."""
    try:
        config = config_of(folder, file)
        return int({**config, **text_config(config)}[key])
    except (SlideSparseError, ValueError, TypeError, KeyError, OverflowError):
        return None  # vLLM will report what is wrong


def config_of(folder: Path, file: str = CONFIG) -> dict[str, Any]:
    """Read config.json or ``file`` of a checkpoint.  Raises SlideSparseError if it is missing or not a JSON object."""
    path = folder / file
    try:
        return parse_json(path.read_bytes(), path)
    except OSError as error:
        raise SlideSparseError(
            f"{folder} is no checkpoint folder: its {file} cannot be read ({error})"
        ) from error


def windows(data: str | Path, folder: Path, seqlen: int, samples: int | None) -> Ids:
    """Split data into consecutive windows of ``seqlen`` tokens for perplexity; return the first ``samples`` of them.

    Args:
        data: a .txt file, one text; a .jsonl file of texts, one stream; or a .npy file of ids, a stream [tokens] or
            rows [samples, tokens].

    Raises SlideSparseError for data without a whole window.
    """
    path = _data_file(data, (".txt", ".jsonl", ".npy"))
    _require_samples(samples)
    if seqlen < 2:
        raise SlideSparseError(
            f"--seqlen {seqlen} must be at least 2, as the first token of a window is not scored"
        )
    if path.suffix == ".npy":
        ids = read_ids(path)
        if ids.ndim == 2 and (len(ids) == 0 or ids.shape[1] < 2):
            raise SlideSparseError(
                f"{path} holds {list(ids.shape)} token ids, but a window needs at least 2: give longer samples"
            )
        if ids.ndim == 2:
            return [[int(token) for token in row[:seqlen]] for row in ids[:samples]]
        stream = [int(token) for token in ids]
    else:
        encode = tokenizer_of(folder)
        texts = (
            [read_text(path)]
            if path.suffix == ".txt"
            else [text for (text,) in read_records(path, ("text",))]
        )
        stream = [token for text in texts for token in encode(text)]
    count = len(stream) // seqlen
    if count == 0:
        raise SlideSparseError(
            f"{path} has {len(stream)} tokens, fewer than one window of {seqlen}; give more text or a smaller --seqlen"
        )
    count = count if samples is None else min(count, samples)
    return [stream[i * seqlen : (i + 1) * seqlen] for i in range(count)]


@dataclass(frozen=True)
class Texts:
    """Texts to embed: queries and, for pairs, the documents that they should retrieve."""

    queries: Ids
    documents: Ids | None  # one per query


def texts_or_pairs(data: str | Path, folder: Path, samples: int | None, longest: int) -> Texts:
    """Read a .jsonl file of "text", or pairs of "query" and "text", truncated to ``longest`` tokens each."""
    path = _data_file(data, (".jsonl",))
    _require_samples(samples)
    if longest < 2:
        raise SlideSparseError(f"--longest {longest} is too small; it must be at least 2")
    encode = tokenizer_of(folder)
    paired = _first_has_query(path)
    lines = read_records(path, ("query", "text") if paired else ("text",))[:samples]
    columns = [[clipped(encode(line[i]), longest) for line in lines] for i in range(len(lines[0]))]
    return Texts(columns[0], columns[1] if paired else None)


def _first_has_query(path: Path) -> bool:
    """Return whether the first non-empty line has a query; False if it is not JSON."""
    try:
        lines = read_lines(path)
        first = json.loads(next((line for line in lines if line.strip()), "null"))
    except ValueError:
        return False
    return isinstance(first, dict) and "query" in first


def _require_samples(samples: int | None) -> None:
    if samples is not None and samples < 1:
        raise SlideSparseError(
            f"--samples {samples} is too few; at least 1 is needed; leave it out to take all"
        )


def _data_file(data: str | Path, suffixes: tuple[str, ...]) -> Path:
    path = Path(data)
    if not path.is_file():
        raise SlideSparseError(f"--data {str(data)!r} is not a file; give one of {', '.join(suffixes)}")
    if path.suffix not in suffixes:
        raise SlideSparseError(
            f"--data {str(data)!r} is not a supported type of file; give one of {', '.join(suffixes)}"
        )
    return path
