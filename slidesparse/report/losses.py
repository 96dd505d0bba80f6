"""Where sparse linear layers lose to stock vLLM, in a plain table and in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slidesparse.pattern import SlidePattern
from slidesparse.report.data import STOCK, pattern_order
from slidesparse.report.markdown import NOTHING, microseconds, table, times
from slidesparse.report.sections import Section

EQUAL = 0.01  # times that differ by no more than this share count as equal
LISTED = SlidePattern(8)  # 6:8, whose every cell is listed


@dataclass(frozen=True)
class Cell:
    """Our latency and stock vLLM's, in microseconds, for one model, dtype and M."""

    model: str
    dtype: str
    m: int
    ours: float | None
    stock: float | None

    @property
    def ratio(self) -> float | None:
        """Ours / stock: below 1, ours is faster.  None unless both were measured."""
        return self.ours / self.stock if self.ours and self.stock else None

    @property
    def verdict(self) -> str:
        """``faster``, ``equal`` or ``slower``; ``-`` unless both were measured."""
        if self.ratio is None:
            return NOTHING
        if abs(self.ratio - 1) <= EQUAL + 1e-9:  # 1.01 is not exact in binary
            return "equal"
        return "faster" if self.ratio < 1 else "slower"

    def __str__(self) -> str:
        return f"{times(self.ratio)} of stock's time, {self.model} {self.dtype.upper()} at M {self.m}"


def cells(sections: Sequence[Section], pattern: SlidePattern) -> list[Cell]:
    """Every M of every section."""
    return [
        Cell(s.title, s.dtype, m, s.us.get((s.ours, pattern, m)), s.us.get((STOCK, None, m)))
        for s in sections
        for m in s.ms
    ]


def sentence(found: Sequence[Cell], pattern: SlidePattern) -> str:
    """How often ours is faster, equal and slower, and its best and worst cell."""
    ratios = [(cell.ratio, cell) for cell in found if cell.ratio is not None]
    if not ratios:
        return f"{pattern.ratio} cannot be compared with stock vLLM: no cell has both measured."
    counts = {word: sum(cell.verdict == word for _, cell in ratios) for word in ("faster", "equal", "slower")}
    best, worst = (choose(ratios, key=lambda pair: pair[0])[1] for choose in (min, max))
    unknown = len(found) - len(ratios)
    return (
        f"{pattern.ratio} is faster than stock vLLM in {counts['faster']} of {len(ratios)} cells, equal (within 1%) in "
        f"{counts['equal']} and slower in {counts['slower']}; best {best}; worst {worst}."
        + (f" {unknown} more cells lack a measurement." if unknown else "")
    )


def losses(sections: Sequence[Section]) -> list[str]:
    """Blocks of Markdown: a sentence for each pattern, all cells of 6:8."""
    if not sections:
        return []
    patterns = sorted({pattern for section in sections for pattern in section.patterns}, key=pattern_order)
    parts = ["## Where sparse loses to stock vLLM"]
    parts += [sentence(cells(sections, pattern), pattern) for pattern in patterns]
    if LISTED not in patterns:
        return [*parts, f"{LISTED.ratio} was not measured."]
    rows = [
        [
            c.model,
            c.dtype.upper(),
            str(c.m),
            microseconds(c.stock),
            microseconds(c.ours),
            times(c.ratio),
            c.verdict,
        ]
        for c in cells(sections, LISTED)
    ]
    header = ("model", "dtype", "M", "stock us", f"{LISTED.ratio} us", "ours / stock", "ours is")
    return [*parts, f"{LISTED.ratio}, every cell:", table(header, rows, left=2)]
