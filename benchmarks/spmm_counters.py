"""Hardware counters of the hand-written N:M kernels, by Nsight Compute; this file is also the program that it runs.

Nsight Compute runs each kernel several times, from cold caches, at the GPU's own clocks.  Where ncu is not installed or
may not read counters, the reason is what `measure` returns, and there are no figures.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import sys
from pathlib import Path

import torch

from benchmarks.e2e_runs import execute
from benchmarks.records import COUNTERS, SPMM_COUNTERS, Records, read_rows
from benchmarks.spmm import OWN, SHARED, VARIANTS, split_sparsity
from slidesparse.build.find import version_text
from slidesparse.gemm.problem import DTYPES
from slidesparse.spmm import STRIP, compress, prune, spmm

SIZES = (256, 2048, 8192)
LARGE, LONG = 2048, ("baseline", "double")  # the only larger sizes, which take ncu some seconds each
SPARSITY = "2:4"
# (dtype, offsets), by priority
KINDS = (("fp32", OWN), ("fp32", SHARED), ("fp16", OWN))
SECONDS = 180.0
USUAL, INSTALLED = "/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute"

Cell = tuple[int, str, str, str]  # size, dtype, offsets, provider


def cells() -> list[Cell]:
    """Return all cells to profile, in the order of their launches."""
    return [
        (size, dtype, offsets, name)
        for size in SIZES
        for dtype, offsets in KINDS
        for name in VARIANTS
        if size <= LARGE or (dtype == "fp32" and name in LONG)
    ]


def measure(folder: Path, seconds: float | None = None) -> str:
    """Fill FOLDER/spmm_counters.csv unless it is complete; return the outcome as text for the conditions."""
    rows, _ = read_rows(folder / "spmm_counters.csv", SPMM_COUNTERS.columns)
    measured = {tuple(row[name] for name in SPMM_COUNTERS.key) for row in rows}
    missing = [cell for cell in cells() if tuple(map(str, _row(cell).values())) not in measured]
    program = find_program()
    if program is None:
        return "ncu was not found"
    if not missing:
        return f"measured by ncu, {version(program)}"
    log = folder / "spmm_counters.log"
    log.unlink(missing_ok=True)
    command = [program, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--kernel-name", "regex:Spmm", "--metrics", ",".join(COUNTERS.values())]
    arguments = [",".join(map(str, cell)) for cell in missing]
    command += [sys.executable, "-m", "benchmarks.spmm_counters", *arguments]
    status = execute(command, os.environ, log, SECONDS if seconds is None else min(SECONDS, seconds))
    text = log.read_text(encoding="utf-8", errors="replace")
    counters = read(text)
    if status != 0 or len(counters) != len(missing):
        lines = text.strip().splitlines()
        errors = " ".join([line for line in lines if line.startswith("==ERROR==")] or lines[-3:])
        outcome = "took too long" if status is None else f"ended with {status}"
        return f"ncu {outcome} and {len(counters)} of {len(missing)} kernels: {errors}; see {log.name}"
    records = Records(folder, SPMM_COUNTERS)
    for cell, values in zip(missing, counters, strict=True):
        records.add(_row(cell) | values)
    return f"measured by ncu, {version(program)}"


def find_program() -> str | None:
    """Return the path of Nsight Compute's command line, from the PATH or the usual places."""
    candidates = [shutil.which("ncu"), USUAL, *map(str, sorted(Path(INSTALLED).glob("*/ncu"), reverse=True))]
    return next((path for path in candidates if path and Path(path).is_file()), None)


def version(program: str) -> str:
    """Return the line "Version 2025.3.1.0 (build ...)" of ``ncu --version``."""
    lines = (line.strip() for line in version_text(program).splitlines())
    return next((line for line in lines if line.startswith("Version")), "no version")


def read(text: str) -> list[dict[str, str]]:
    """Return the counters of each kernel in the output of ``ncu --csv --page raw``; "" for unknown counters.

    Lines before the table are messages; the line below the header has units.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    counters = []
    for row in rows:
        if row["ID"].isdigit():
            values = {name: (row.get(metric) or "").replace(",", "") for name, metric in COUNTERS.items()}
            counters.append({name: value if _is_number(value) else "" for name, value in values.items()})
    return counters


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _row(cell: Cell) -> dict[str, object]:
    size, dtype, offsets, provider = cell
    sizes = {"M": size, "N": size, "K": size, "provider": provider}
    return {"dtype": dtype, "sparsity": SPARSITY, "offsets": offsets, **sizes}


def launch(arguments: list[str]) -> None:
    """Launch one kernel for each cell of the command line, in order."""
    kept, group = split_sparsity(SPARSITY)
    generator = torch.Generator("cuda").manual_seed(0)
    operands: dict[tuple[str, str, str], tuple[torch.Tensor, object]] = {}
    for argument in arguments:
        size, dtype, offsets, provider = argument.split(",")
        if (size, dtype, offsets) not in operands:
            operands.clear()
            strip = STRIP if offsets == SHARED else 1
            x, dense = (
                torch.randn(int(size), int(size), generator=generator, device="cuda").to(DTYPES[dtype])
                for _ in range(2)
            )
            operands[size, dtype, offsets] = (
                x.t(),
                compress(prune(dense, kept, group, strip), kept, group, strip),
            )
        x, weight = operands[size, dtype, offsets]
        spmm(x, weight, *VARIANTS[provider])  # type: ignore[arg-type]
    torch.cuda.synchronize()


if __name__ == "__main__":
    launch(sys.argv[1:])
