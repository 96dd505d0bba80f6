"""The tables of tuned algorithms: the fastest one for each problem, found by ``slidesparse tune``.

There is one JSON file per GPU, compute capability, library and library version, because each of them changes what is
fastest and what an algorithm's name means.  A file ships with the package, or is in the user's cache, which wins::

    {"format": 1, "gpu": "NVIDIA H200", "capability": "9.0", "library": "hopper", "version": "4",
     "entries": {
      "int8 -> bf16, scale both, bias no, n 4608, k 5376": {"64": "split:2x64/1x4/2"}}}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from slidesparse.build.compile import cache_folder, make_folder
from slidesparse.errors import EnvironmentFault, shown, warn_once
from slidesparse.files import locked, write_atomically
from slidesparse.gemm.problem import ALL_2_4, Problem

FORMAT = 1
# The algorithm of the largest tuned M, if at least MIN_EXTRAPOLATED_TOKENS, is used for up to this many times as many.
# On an H200, small dense layers at 1024 tokens took 20 to 35% longer with what was tuned for 512 than with what was
# tuned for 1024 tokens of 2:4 weights.
MAX_EXTRAPOLATION = 2
MIN_EXTRAPOLATED_TOKENS = 2048
# A tuned M serves fewer tokens, too: any number if it is at most SMALL_M, else down to this share of it.
MIN_SHARE, SMALL_M = 1 / 8, 64
CACHE_VARIABLE = "SLIDESPARSE_CACHE"  # environment variable: the folder, instead of ~/.cache/slidesparse
SHIPPED_TABLES = Path(__file__).parent.parent / "tuned_tables"


class TableError(EnvironmentFault, RuntimeError):
    """A table of tuned algorithms cannot be used; the message names the file and the remedy."""


@dataclass(frozen=True)
class Subject:
    """The GPU, library and version of a table."""

    library: str  # "cusparselt" or "hopper"
    version: str  # version of the library, such as "0.8.0"
    gpu: str  # full name of the GPU, such as "NVIDIA H200"
    capability: tuple[int, int]  # compute capability

    @property
    def file_name(self) -> str:
        """The table's file name, such as ``nvidia-h200_sm90_cusparselt-0.8.0.json``."""
        major, minor = self.capability
        return f"{slug(self.gpu)}_sm{major}{minor}_{slug(self.library)}-{slug(self.version)}.json"

    def facts(self) -> dict[str, str]:
        """Return the fields as stored in a table's file."""
        return {
            "gpu": self.gpu,
            "capability": ".".join(map(str, self.capability)),
            "library": self.library,
            "version": self.version,
        }


class Shape(NamedTuple):
    """A problem without its M: the key of its entries in a table."""

    types: str  # operands, output, epilogue and blocks, as text
    n: int
    k: int

    @classmethod
    def of_problem(cls, problem: Problem) -> Shape:
        """Return the shape of a problem."""
        blocks = "" if problem.blocks == ALL_2_4 else f", blocks {problem.blocks}"
        types = f"{problem.dtype} -> {problem.out}, scale {problem.scale}, bias no{blocks}"
        return cls(types, problem.n, problem.k)

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read what ``str`` wrote.  Raises ValueError for anything else."""
        match = re.fullmatch(r"(.+), n ([1-9][0-9]{0,9}), k ([1-9][0-9]{0,9})", text)
        if match is None:
            raise ValueError(
                f"{shown(text)} is no problem, such as 'int8 -> bf16, scale both, bias no, n 4608, k 5376'"
            )
        return cls(match[1], int(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.types}, n {self.n}, k {self.k}"


Entries = dict[Shape, dict[int, str]]  # shape -> M -> the best algorithm


def tables_folder() -> Path:
    """Return the folder of the user's tables, in $SLIDESPARSE_CACHE or its default."""
    return cache_folder() / "tuned"


def select_algorithm(
    subject: Subject,
    problem: Problem,
    max_distance: float = math.inf,
    suits: Callable[[str], bool] = lambda _: True,
) -> tuple[str | None, str]:
    """Return the algorithm to use for ``problem``, and its origin as text; "" if it was tuned for that shape.

    An untuned shape uses the algorithm of a near tuned one (see `tuned_algorithm`), else of one tuned on another GPU
    of the same compute capability, else the one for fewer tokens, else None: the library's own choice.  Of these, those
    that do not suit are skipped: on an H200, 8192 tokens took eight times as long by what was tuned for 16.
    """
    if algorithm := tuned_algorithm(subject, problem):
        return algorithm, ""
    if algorithm := tuned_algorithm(subject, problem, max_distance, suits):
        return algorithm, "that of a near tuned shape"
    for other in _similar_gpus(subject):
        if algorithm := tuned_algorithm(other, problem, max_distance, suits):
            return algorithm, f"one that was tuned on an {other.gpu}"
    if algorithm := tuned_algorithm(subject, problem, 0, suits, more_tokens=True):
        return algorithm, "that for fewer tokens"
    return None, "its own heuristic"


def tuned_algorithm(
    subject: Subject,
    problem: Problem,
    max_distance: float = 0,
    suits: Callable[[str], bool] = lambda _: True,
    more_tokens: bool = False,
) -> str | None:
    """Return the algorithm tuned for ``problem``, or for the nearest shape up to ``max_distance``, or None.

    The distance is |log2 of the ratio of n| + |log2 of the ratio of k|; types and epilogue must be equal.  Shapes whose
    algorithm does not suit are skipped.  That of a near shape is typically a few percent slower than the best, while
    the library's heuristic may take twice as long: which tile is fastest depends on the types and the number of tiles,
    and little on the shape.

    The smallest tuned M of at least m is used, else the largest, where that is close enough (see MIN_SHARE and
    MAX_EXTRAPOLATION); with ``more_tokens``, the largest for any more tokens.  Raises TableError for a damaged file.
    """
    types = Shape.of_problem(problem).types
    candidates = [
        (abs(math.log2(problem.n / shape.n)) + abs(math.log2(problem.k / shape.k)), shape, measured[m])
        for shape, measured in _merged_table(subject, tables_folder()).items()
        if shape.types == types and (m := _serving_m(measured, problem.m, more_tokens))
    ]
    near = sorted(candidates, key=lambda candidate: candidate[:2])
    return next((best for distance, _, best in near if distance <= max_distance and suits(best)), None)


def _serving_m(measured: Iterable[int], m: int, more_tokens: bool = False) -> int | None:
    """Return the tuned M whose algorithm serves m tokens, see `tuned_algorithm`, or None."""
    if at_least := [tokens for tokens in measured if tokens >= m]:
        smallest = min(at_least)
        return smallest if smallest <= SMALL_M or m >= MIN_SHARE * smallest else None
    largest = max(measured)
    near = largest >= MIN_EXTRAPOLATED_TOKENS and m <= MAX_EXTRAPOLATION * largest
    return largest if near or more_tokens else None


def tuned_tokens(subject: Subject, problem: Problem, shipped: bool = True) -> list[int]:
    """Return the numbers of tokens that the problem's shape was tuned for; without ``shipped``, by the user alone."""
    users = tables_folder()
    table = _merged_table(subject, users) if shipped else _read_table(users / subject.file_name, subject)
    return list(table.get(Shape.of_problem(problem), ()))


def note_untuned(library: str, dtype: str, n: int, k: int, instead: str) -> None:
    """Log once that a problem is not tuned, what runs ``instead``, and how to tune it with those around it."""
    warn_once(
        f"{library} has no tuned algorithm for {dtype} weights [{n}, {k}] and uses {instead}; to tune: slidesparse "
        f"tune FOLDER --library {library}, with the model's folder, or --shapes for its layers' parts on one of "
        "several GPUs"
    )


def note_refused(library: str, shape: Shape, algorithm: str, error: object) -> None:
    """Log once that a tuned algorithm does not run."""
    warn_once(
        f"{library} refuses the algorithm {algorithm} that was tuned for {shape}, and its own heuristic runs instead: "
        f"{error}"
    )


def save(subject: Subject, results: Iterable[tuple[Problem, str]]) -> Path:
    """Merge the best algorithms of problems into the user's table and publish it atomically; return its path.

    A lock on the folder preserves concurrent updates of other processes.  Raises TableError for a damaged file, which
    is not overwritten.
    """
    path = tables_folder() / subject.file_name
    make_folder(path.parent)
    with locked(path.parent):
        entries = _read_table(path, subject)
        for problem, best in results:
            entries.setdefault(Shape.of_problem(problem), {})[problem.m] = best
        write_atomically(path, _to_text(subject, entries).encode())
    _merged_table.cache_clear()
    return path


def _to_text(subject: Subject, entries: Entries) -> str:
    """Return a table as JSON, sorted, with a line for each shape."""
    shapes = [
        f"  {json.dumps(str(shape))}: {json.dumps(dict(sorted(measured.items())))}"
        for shape, measured in sorted(entries.items(), key=lambda item: str(item[0]))
    ]
    head = json.dumps({"format": FORMAT, **subject.facts()}, indent=1).removesuffix("\n}")
    return head + ',\n "entries": {\n' + ",\n".join(shapes) + "\n }\n}\n"


def _tokens(text: str) -> int:
    if (m := int(text)) < 1:
        raise ValueError(f"M is {m}")
    return m


def _algorithm(entry: Any) -> str:
    if isinstance(entry, dict):  # as 0.2.0 wrote it
        entry = entry["algorithm"]
    algorithm = entry[0] if isinstance(entry, list) else entry  # before its microseconds, until 0.3.0
    if not isinstance(algorithm, str):
        raise TypeError(f"an algorithm is {shown(algorithm)}")
    return algorithm


@cache
def _similar_gpus(subject: Subject) -> tuple[Subject, ...]:
    """Return other GPUs of this compute capability that tables of this library ship for, the largest table first."""
    pattern = "*" + replace(subject, gpu="").file_name
    paths = sorted(SHIPPED_TABLES.glob(pattern), key=lambda path: -path.stat().st_size)
    names = [json.loads(path.read_text(encoding="utf-8"))["gpu"] for path in paths]
    return tuple(replace(subject, gpu=name) for name in names if name != subject.gpu)


@cache
def _merged_table(subject: Subject, users: Path) -> Entries:
    """Return the shipped table, overridden by the user's entry by entry."""
    entries = _read_table(SHIPPED_TABLES / subject.file_name, subject)
    for key, measured in _read_table(users / subject.file_name, subject).items():
        entries.setdefault(key, {}).update(measured)
    return entries


def _read_table(path: Path, subject: Subject) -> Entries:
    """Return the entries of a file, or none if it does not exist."""
    if not path.exists():
        return {}
    if not path.is_file():  # such as a pipe, which would block
        raise _table_error(path, "is not a file")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        found = {name: document.get(name) for name in ("format", *subject.facts())}
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise _table_error(path, f"cannot be read as a JSON object: {error}") from error
    for name, expected in {"format": FORMAT, **subject.facts()}.items():
        if found[name] != expected:
            raise _table_error(path, f"has {name} {shown(found[name])}, not {expected!r}")
    try:
        return {
            Shape.parse(key): {_tokens(m): _algorithm(entry) for m, entry in measured.items()}
            for key, measured in document["entries"].items()
            if measured
        }
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _table_error(path, f"is damaged: {type(error).__name__}: {str(error)[:200]}") from error


def _table_error(path: Path, problem: str) -> TableError:
    return TableError(
        f"the table of tuned algorithms {path} {problem}; delete it and run `slidesparse tune` again, "
        f"or set {CACHE_VARIABLE} to another folder"
    )


def slug(text: str) -> str:
    """Turn the name of a GPU or a library into one for files, such as ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
