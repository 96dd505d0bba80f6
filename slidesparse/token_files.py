"""Files of texts, a line each, and of token ids: read strictly, for calibrating and for measuring."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def read(path: Path, error: type[Exception]) -> str:
    """The text of a file in UTF-8, a byte order mark left out.  Raises ``error`` for another encoding."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as reason:
        raise error(f"{path} is not text in UTF-8 ({reason}); convert it: iconv -t utf-8") from reason


def lines(path: Path, error: type[Exception]) -> list[str]:
    """The lines of `read`; other characters that end lines in prose, such as U+2028, are legal in JSON strings."""
    return read(path, error).split("\n")


def texts(path: Path, keys: tuple[str, ...], error: type[Exception]) -> list[tuple[str, ...]]:
    """The values of ``keys`` of each line of a ``.jsonl`` file; a line may also be just a string, for "text".

    Empty lines are left out, and those with an empty text.  Raises ``error``, with the line's number, for a line
    without the keys, and when no text is left.
    """
    found = []
    for number, line in enumerate(lines(path, error), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            value = {"text": value} if isinstance(value, str) else value
            values = tuple(value[key] for key in keys)
            wrong = [type(one).__name__ for one in values if not isinstance(one, str)]
            if wrong:
                raise TypeError(f"it holds a {wrong[0]}")
        except (ValueError, KeyError, TypeError) as reason:
            wanted = ", ".join(f'"{key}": "..."' for key in keys)
            plain = ' or "..."' if keys == ("text",) else ""
            raise error(
                f"{path}, line {number}: {type(reason).__name__}: {reason}; "
                f"each line must be {{{wanted}}}{plain} in JSON"
            ) from reason
        if all(one.strip() for one in values):
            found.append(values)
    if not found:
        raise error(f"{path} holds no text")
    return found


def ids(path: Path, error: type[Exception]) -> np.ndarray:
    """The integers of a ``.npy`` file, [samples, tokens] or one stream [tokens].

    Raises ``error`` for anything else, saying what was found.
    """
    try:
        found = np.load(path, allow_pickle=False)
    except ValueError as reason:
        raise error(f"{path} is not an array of numbers that NumPy wrote: {reason}") from reason
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or found.ndim not in (1, 2):
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
        raise error(f"{path} holds {what}; token ids are integers [samples, tokens], or [tokens]")
    return found


def clipped(tokens: list[int], longest: int) -> list[int]:
    """Up to ``longest`` of a text's tokens; the last one, which ends it, is kept."""
    return tokens if len(tokens) <= longest else [*tokens[: longest - 1], tokens[-1]]
