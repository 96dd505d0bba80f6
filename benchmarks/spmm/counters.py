"""Hardware counters of the hand-written N:M kernels, by Nsight Compute; this file is also the program that it runs.

    python -m benchmarks.spmm.counters OUT      # on a GPU; writes OUT/spmm_counters.csv

Nsight Compute runs each kernel several times, from cold caches, at the GPU's own clocks.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch

from benchmarks.records import Format, Records
from benchmarks.spmm.bench import OWN, PRODUCT, SHARED, VARIANTS, split_sparsity
from benchmarks.spmm.kernels import STRIP, compress, prune, spmm
from slidesparse.errors import EnvironmentFault
from slidesparse.gemm.problem import DTYPES

COUNTERS = {  # column -> metric of Nsight Compute
    "sm_pct": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "ipc": "smsp__inst_executed.avg.per_cycle_active",
    "l1_bytes": "l1tex__t_bytes.sum",
    "load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    **{
        f"stall_{reason}": f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"
        for reason in ("long_scoreboard", "short_scoreboard", "mio_throttle", "barrier", "wait", "drain")
    },
}
SPMM_COUNTERS = Format("spmm_counters", PRODUCT, tuple(COUNTERS))
SIZES, SPARSITY = (256, 2048), "2:4"
KINDS = (("fp32", OWN), ("fp32", SHARED), ("fp16", OWN))  # type, offsets
CELLS = [(size, dtype, offsets, name) for size, (dtype, offsets), name in product(SIZES, KINDS, VARIANTS)]


def read(text: str) -> list[dict[str, str]]:
    """Return the counters of each kernel in the output of ``ncu --csv --page raw``; "" for unknown counters.

    Lines before the table are messages; the line below the header has units.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = [row for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))) if row["ID"].isdigit()]
    values = [
        {name: (row.get(metric) or "").replace(",", "") for name, metric in COUNTERS.items()} for row in rows
    ]
    return [{name: v if v.replace(".", "", 1).isdigit() else "" for name, v in row.items()} for row in values]


def measure(out: Path) -> None:
    """Write OUT/spmm_counters.csv.  Raises EnvironmentFault where ncu is not installed or may not read counters."""
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--kernel-name", "regex:Spmm", "--metrics", ",".join(COUNTERS.values())]
    command += [sys.executable, "-m", "benchmarks.spmm.counters"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise EnvironmentFault(f"Nsight Compute's ncu cannot be run: {error}; put it on the PATH") from error
    counters = read(process.stdout)
    if process.returncode or len(counters) != len(CELLS):
        last = (process.stdout + process.stderr).strip()[-500:]
        raise EnvironmentFault(f"ncu measured {len(counters)} of {len(CELLS)} kernels: {last}")
    records = Records(out, SPMM_COUNTERS)
    for (size, dtype, offsets, provider), values in zip(CELLS, counters, strict=True):
        key = (dtype, SPARSITY, offsets, size, size, size, provider)
        records.add({**dict(zip(PRODUCT, key, strict=True)), **values})


def launch() -> None:
    """Launch one kernel for each cell, in order."""
    kept, group = split_sparsity(SPARSITY)
    generator = torch.Generator("cuda").manual_seed(0)
    for size, dtype, offsets, name in CELLS:
        strip = STRIP if offsets == SHARED else 1
        x, dense = (
            torch.randn(size, size, generator=generator, device="cuda").to(DTYPES[dtype]) for _ in range(2)
        )
        variant, splits = VARIANTS[name]
        spmm(x.t(), compress(prune(dense, kept, group, strip), kept, group, strip), variant, splits)
    torch.cuda.synchronize()


def main(arguments: Sequence[str]) -> None:
    """Measure, or be measured."""
    if arguments:
        measure(Path(arguments[0]))
    else:
        launch()


if __name__ == "__main__":
    main(sys.argv[1:])
