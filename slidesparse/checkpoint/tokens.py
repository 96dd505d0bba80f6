"""Read texts and token ids, and open the tokenizer of a checkpoint, for calibration and evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from slidesparse.errors import EnvironmentFault, SlideSparseError

TOKENIZER = "tokenizer.json"


def read_text(path: Path) -> str:
    """Read a file in UTF-8, without a byte order mark.  Raises SlideSparseError for another encoding."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as reason:
        raise SlideSparseError(
            f"{path} is not text in UTF-8 ({reason}); convert it: iconv -t utf-8"
        ) from reason


def read_lines(path: Path) -> list[str]:
    """Read the lines of a file, which end at line feeds only, because JSON strings may contain U+2028 and the like."""
    return read_text(path).split("\n")


def read_records(path: Path, keys: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Read the values of ``keys`` from each line of a ``.jsonl`` file; a line may also be a string, the "text".

    Empty lines and empty texts are skipped.  Raises SlideSparseError, with the line number, for a line without the
    keys, and if no text remains.
    """
    records = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            value = {"text": value} if isinstance(value, str) else value
            values = tuple(value[key] for key in keys)
            wrong = [type(entry).__name__ for entry in values if not isinstance(entry, str)]
            if wrong:
                raise TypeError(f"it holds a {wrong[0]}")
            for text in values:
                text.encode()  # half of a surrogate pair is no text for tokenizers
        except (ValueError, KeyError, TypeError, RecursionError) as reason:
            example = ", ".join(f'"{key}": "..."' for key in keys)
            plain = ' or "..."' if keys == ("text",) else ""
            raise SlideSparseError(
                f"{path}, line {number}: {type(reason).__name__}: {reason}; "
                f"each line must be {{{example}}}{plain} in JSON"
            ) from reason
        if all(text.strip() for text in values):
            records.append(values)
    if not records:
        raise SlideSparseError(f"{path} holds no text; give at least one line with a text that is not empty")
    return records


def read_ids(path: Path) -> np.ndarray:
    """Read the token ids of a ``.npy`` file, [samples, tokens] or one stream [tokens].

    Raises SlideSparseError, which names dtype and shape, for anything else.
    """
    try:
        ids = np.load(path, allow_pickle=False)
    except ValueError as reason:
        raise SlideSparseError(f"{path} is not an array of numbers that NumPy wrote: {reason}") from reason
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        content = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise SlideSparseError(
            f"{path} holds {content}; token ids are integers [samples, tokens], or [tokens]"
        )
    return ids


def require_ids(
    samples: Sequence[Sequence[int] | np.ndarray], vocabulary: int, data: str, folder: Path
) -> None:
    """Raise SlideSparseError if ``samples``, read from ``data``, have ids outside the vocabulary of ``folder``."""
    low = min(int(np.min(sample)) for sample in samples)
    high = max(int(np.max(sample)) for sample in samples)
    if not 0 <= low <= high < vocabulary:
        raise SlideSparseError(
            f"{data} holds token ids from {low} to {high}, but the vocabulary of {folder} has {vocabulary} tokens, "
            f"0 to {vocabulary - 1}; use ids from its own tokenizer"
        )


def clipped(tokens: list[int], longest: int) -> list[int]:
    """Truncate a text to ``longest`` tokens, keeping its last token, such as an end-of-sequence token."""
    return tokens if len(tokens) <= longest else [*tokens[: longest - 1], tokens[-1]]


def tokenizer_of(folder: Path) -> Callable[[str], list[int]]:
    """Return the checkpoint's tokenizer as a function from a text to ids, including special tokens.

    Raises SlideSparseError for a folder without a readable tokenizer, EnvironmentFault for a missing library.
    """
    if not (folder / TOKENIZER).is_file():
        return _slow_tokenizer(folder)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise EnvironmentFault(
            f"texts need a tokenizer, but the package tokenizers cannot be imported ({error}); pip install "
            "tokenizers, or give token ids instead of texts: ids.npy"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # the library raises plain Exception
        raise SlideSparseError(
            f"{folder / TOKENIZER} is not a tokenizer that the package tokenizers can read ({error}); fetch it again, "
            "or give token ids instead of texts: ids.npy"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return lambda text: list(tokenizer.encode(text).ids)


def _slow_tokenizer(folder: Path) -> Callable[[str], list[int]]:
    """Open a tokenizer in another format, such as tokenizer.model, with transformers."""
    if not any(path.is_file() for kind in ("tokenizer*", "vocab*") for path in folder.glob(kind)):
        raise SlideSparseError(
            f"{folder} has no tokenizer ({TOKENIZER}), which texts need; fetch it, or give token ids instead of "
            "texts: ids.npy"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise EnvironmentFault(
            f"{folder} has no {TOKENIZER}, and its other tokenizer needs the package transformers, which cannot be "
            f"imported ({error}); pip install transformers, or give token ids instead of texts: ids.npy"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise SlideSparseError(
            f"the tokenizer of {folder} cannot be read: {error}; give token ids instead of texts: ids.npy"
        ) from error
    return lambda text: list(tokenizer(text)["input_ids"])
