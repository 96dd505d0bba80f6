"""Small result files of benchmarks, and the tables of the report made of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

FOUR = ("qkv", "o", "gate_up", "down")


def csv(folder: Path, name: str, header: Iterable[str], lines: Iterable[str]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in (",".join(header), *lines)))
    return path


def square(dtype: str, pattern: str, m: int, provider: str, us: float) -> str:
    return f"square,square,square,{dtype},{pattern},{m},{m},{m},{provider},{us * 0.9},{us},{us * 1.1},auto"


def layer(model: str, name: str, pattern: str, m: int, provider: str, us: float) -> str:
    return f"model,{model},{name},int8,{pattern},{m},100,200,{provider},{us},{us},{us},auto"


def four(model: str, pattern: str, m: int, provider: str, us: float) -> list[str]:
    """Rows of four layers that take ``us`` together: 1, 2, 3 and 4 tenths of it."""
    return [layer(model, name, pattern, m, provider, us * (i + 1) / 10) for i, name in enumerate(FOUR)]


def summed(model: str, pattern: str, m: int, provider: str, us: float, dtype: str = "int8") -> str:
    return f"{model},sum,{dtype},{pattern},{m},{provider},{us},{us},{us}"


def tables(text: str, heading: str) -> list[list[list[str]]]:
    """Return the cells of every table under a heading, the header row first, without the separator row."""
    body = re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    blocks = re.findall(r"(?:^\|.*\n)+", body, flags=re.MULTILINE)
    split = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        for block in blocks
    ]
    return [[rows[0], *rows[2:]] for rows in split]
