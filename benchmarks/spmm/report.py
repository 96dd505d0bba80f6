"""Tables of the hand-written N:M kernels, from spmm.csv: speed-ups over cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from benchmarks.kernel import DENSE, SQUARE
from benchmarks.spmm.bench import CPU, CUBLAS, NONE, OWN, SHARED, SPMM, TF32, TYPES, VARIANTS
from benchmarks.tables import NO_VALUE, digits, ratio, read, table

KINDS = {OWN: "own offsets", SHARED: "strips"}
MAIN = "2:4"
OTHERS = ("1:4", "2:8", "1:2", "4:8")


def _squares(folder: Path) -> pd.DataFrame:
    """Return microseconds of square products: rows (dtype, M), columns (sparsity, offsets, provider)."""
    rows = read(folder, SPMM)
    rows = rows[(rows["mode"] == SQUARE) & rows["dtype"].isin(TYPES)]
    columns = ["sparsity", "offsets", "provider"]
    us = rows.pivot(index=["dtype", "M"], columns=columns, values="p50_us")
    cells = [(DENSE, NONE, CUBLAS), (DENSE, NONE, TF32), (MAIN, OWN, CPU)]
    cells += [(MAIN, kind, name) for kind in KINDS for name in VARIANTS]
    cells += [(other, OWN, name) for other in OTHERS for name in VARIANTS]
    return us.reindex(columns=pd.MultiIndex.from_tuples(cells, names=columns)).sort_index(axis=1)


def squares(folder: Path) -> str:
    """Each variant over cuBLAS of the same type, with offsets of each out-feature and of strips."""
    us, lines = _squares(folder), []
    for (dtype, m), row in us.sort_index(level=["dtype", "M"], ascending=[False, True]).iterrows():
        base = row[DENSE, NONE, CUBLAS]
        speedups = (ratio(base / row[MAIN, kind, name]) for kind in KINDS for name in VARIANTS)
        lines.append((dtype.upper(), m, digits(base), digits(row[DENSE, NONE, TF32]), *speedups))
    header = [f"{words}: {name}" for words in KINDS.values() for name in VARIANTS]
    return table(("", "M", "cuBLAS us", "TF32 us", *header), lines)


def others(folder: Path) -> str:
    """The fastest variant over cuBLAS in FP32 at other sparsities, and cuBLAS and ours over one CPU thread."""
    us, lines = _squares(folder).loc["fp32"], []
    for m, row in us.iterrows():
        base, cpu = row[DENSE, NONE, CUBLAS], row[MAIN, OWN, CPU]
        fastest = {each: row[each, OWN].drop(CPU, errors="ignore").min() for each in (MAIN, *OTHERS)}
        over_cpu = (NO_VALUE if pd.isna(cpu) else f"{cpu / us:.0f}" for us in (base, fastest[MAIN]))
        lines.append((m, *(ratio(base / fastest[each]) for each in (MAIN, *OTHERS)), *over_cpu))
    return table(("M", MAIN, *OTHERS, "cuBLAS over one thread", "2:4 over one thread"), lines, 0)


def page(folder: Path) -> Iterator[str]:
    """Yield the blocks of a folder's page, none without spmm.csv."""
    if (folder / "spmm.csv").exists():
        yield "## Hand-written N:M kernels"
        yield squares(folder)
        yield others(folder)
