"""The page of hand-written N:M kernels, its plots, and a comparison with the claims of a study of such kernels.

The study: J. Zeng, "GPU Accelerated Structured Sparsity Matrix Multiplication", an RTX 4070, FP32 at 2:4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.kernel import DENSE, SQUARE
from benchmarks.records import COUNTERS
from benchmarks.report.data import Table
from benchmarks.report.markdown import NO_VALUE, bullets, microseconds, percent, span, table, times
from benchmarks.report.plots import FIXED_PARAMETERS, PANEL, save
from benchmarks.spmm import CPU, CUBLAS, NONE, OWN, SHARED, TF32, TYPES, VARIANTS, split_sparsity

MAIN_PATTERN = "2:4"
KINDS = {OWN: "own offsets", SHARED: "strips"}
COLOURS = dict(zip(VARIANTS, ("#000000", "#E69F00", "#D55E00", "#009E73", "#0072B2"), strict=True))
Shape = int | tuple[str, str, int]  # a square's size, or (model, layer, M)
Value = Callable[[int, str], float]  # (size, offsets) -> a value
Show = Callable[[float], str]
STYLES = {OWN: ("-", "o"), SHARED: ("--", "s")}


class Products:
    """Median microseconds of the cells of a table, NaN where there is none."""

    def __init__(self, table: Table) -> None:
        self.rows = table.rows
        key = ["mode", "model", "layer", "M", "dtype", "sparsity", "offsets", "provider"]
        self._us = dict(
            zip(zip(*(self.rows[name] for name in key), strict=True), self.rows["p50_us"], strict=True)
        )
        squares = self.rows[self.rows["mode"] == SQUARE]
        self.sizes = sorted(squares["M"].unique())
        self.sparsities = sorted(
            set(squares["sparsity"]) - {DENSE},
            key=lambda sparsity: (sparsity != MAIN_PATTERN, Fraction(*split_sparsity(sparsity)), sparsity),
        )
        models = self.rows[self.rows["mode"] != SQUARE]
        self.layers = list(dict.fromkeys(zip(models["model"], models["layer"], models["M"], strict=True)))

    def us(
        self,
        shape: Shape,
        provider: str,
        dtype: str = "fp32",
        offsets: str = OWN,
        sparsity: str = MAIN_PATTERN,
    ) -> float:
        """Return the time of a square of this size, or of (model, layer, M)."""
        key = ("model", *shape) if isinstance(shape, tuple) else (SQUARE, SQUARE, SQUARE, shape)
        if provider in (CUBLAS, TF32):
            offsets, sparsity = NONE, DENSE
        return float(self._us.get((*key, dtype, sparsity, offsets, provider), math.nan))

    def speedup(self, shape: Shape, provider: str, over: str = CUBLAS, **kind: str) -> float:
        """Return time of ``over`` / time of ``provider``, for one dtype, offsets and sparsity."""
        return self.us(shape, over, **kind) / self.us(shape, provider, **kind)

    def best(self, shape: Shape, **kind: str) -> float:
        """Return the fastest variant's speed-up over cuBLAS."""
        speedups = [self.speedup(shape, name, **kind) for name in VARIANTS]
        return max((speedup for speedup in speedups if not math.isnan(speedup)), default=math.nan)

    def tflops(self, size: int, provider: str, offsets: str = OWN) -> float:
        """Return TFLOPS, counting the kept values at 2:4 and all values for cuBLAS."""
        share = 1.0 if provider == CUBLAS else 0.5
        return 2.0 * size**3 * share / self.us(size, provider, offsets=offsets) / 1e6


def page(measured: Table, counters: Table, images: Iterable[str]) -> list[str]:
    """Return the blocks of the page."""
    products = Products(measured)
    spread = (products.rows["p80_us"] - products.rows["p20_us"]) / products.rows["p50_us"]
    ours = products.rows[products.rows["provider"].isin(list(VARIANTS))]
    return [
        "# Hand-written N:M kernels",
        "SpMM on CUDA cores by `slidesparse.spmm`, which is not used for serving: 32 x 32 tiles of 64 threads with "
        "4 x 4 outputs each. `prefetch` loads the next tile into registers during the `baseline` computation; "
        "`double` copies it with cp.async into a second buffer; `split2` and `split8` do the same with K cut into "
        "parts. Own offsets: each out-feature keeps its own in-features. Strips: 32 out-features keep the same "
        "ones. Medians in microseconds, from CUDA graphs with operands that are not in the L2 cache (of squares "
        "below 512, in part). Speed-up: time of cuBLAS (dense, random weights; FP32 with TF32 off, or FP16) / ours, "
        "of the same run. `-`: not measured.",
        f"Spread, (p80 - p20) / p50: {percent(spread.median())} in the median, {percent(spread.max())} at most. Errors "
        "against float64, relative to the sum of the magnitudes of an output's products, of our kernels: "
        f"{ours['error'].max():.1e} at most.",
        *images,
        *_by_variant(products, f"## Squares at {MAIN_PATTERN}, M = N = K", products.sizes),
        *_sparsities(products),
        *_other_libraries(products),
        *_by_variant(products, f"## Layers of models at {MAIN_PATTERN}", products.layers),
        *_cpu(products),
        *_counters(counters, measured.conditions.get("counters")),
        "## The study's claims and our measurements",
        "The study's figures are from an RTX 4070, those here from the GPU of this page, as `strips / own offsets`. "
        "Times cannot agree between the two GPUs; only what follows from the design of the kernels can.",
        table(("claim", "the study", "here"), claims(products, Counters(counters)), 3),
        bullets(NOTES),
    ]


NOTES = (
    "The kernels printed in the study read one index for all 32 out-features of a tile, that of the first. They are "
    "correct if the out-features of a tile share their offsets, as in strips, and wrong for N:M weights in general.",
    "The registers that its prefetch kernel loads are never read, so a compiler may leave the loads out, and its L1 "
    "traffic is that of its baseline. Our prefetch kernel uses the registers it loads for the next tile.",
    "Its double-buffered kernel ran with K cut in two, and its baseline with tiles of 64 kept rows instead of 32. Here "
    "only one thing changes at a time.",
    "It calls its kernels bandwidth-bound at large sizes; its counters show DRAM at 5 to 9% of its peak at 2048, and "
    "it has no counters above that size.",
    "It adds the parts of a split K with atomics into zeroed memory, and does not time the zeroing. Ours are added in "
    "order by a second kernel, which is timed.",
)


def _by_variant(products: Products, title: str, shapes: Sequence[Shape]) -> list[str]:
    rows = []
    for dtype in TYPES:
        for shape in shapes:
            dense = [microseconds(products.us(shape, name, dtype)) for name in (CUBLAS, TF32)]
            ours = [
                times(products.speedup(shape, name, dtype=dtype, offsets=kind))
                for kind in KINDS
                for name in VARIANTS
            ]
            rows.append((dtype.upper(), _shape_label(shape), *dense, *ours))
    header = [f"{kind}: {name}" for kind in KINDS.values() for name in VARIANTS]
    return [title, table(("", "", "cuBLAS us", "TF32 us", *header), rows, 2)] if rows else []


def _sparsities(products: Products) -> list[str]:
    rows = [
        (
            dtype.upper(),
            size,
            *(times(products.best(size, dtype=dtype, sparsity=sparsity)) for sparsity in products.sparsities),
        )
        for dtype in TYPES
        for size in products.sizes
    ]
    title = "## Squares at other patterns"
    return [title, "The fastest variant, own offsets:", table(("", "M", *products.sparsities), rows, 1)]


def _other_libraries(products: Products) -> list[str]:
    """Return the section about sparse libraries, in their own precision."""
    rows = products.rows[~products.rows["provider"].isin({CUBLAS, TF32, CPU, *VARIANTS})]
    pairs = list(dict.fromkeys(zip(rows["provider"], rows["dtype"], strict=True)))
    if not pairs:
        return []
    shapes: list[Shape] = [*products.sizes, *products.layers]
    lines = []
    for shape in shapes:
        base = products.us(shape, CUBLAS, "fp16")
        speedups = [times(base / products.us(shape, name, dtype)) for name, dtype in pairs]
        ours = times(products.best(shape, dtype="fp16"))
        lines.append((_shape_label(shape), microseconds(base), ours, *speedups))
    return [
        f"## Compared with sparse tensor cores at {MAIN_PATTERN}",
        "Speed-up over cuBLAS in FP16. INT8 and FP8 are other precisions, with less to read; results are BF16 or FP16:",
        table(
            ("", "cuBLAS FP16 us", "ours FP16", *(f"{name} {dtype.upper()}" for name, dtype in pairs)),
            lines,
            1,
        ),
    ]


def _shape_label(shape: Shape) -> str:
    return "{} {}, M {}".format(*shape) if isinstance(shape, tuple) else str(shape)


def _cpu(products: Products) -> list[str]:
    rows = [
        (
            size,
            microseconds(products.us(size, CPU)),
            *(times(products.speedup(size, name, CPU)) for name in (CUBLAS, *VARIANTS)),
        )
        for size in products.sizes
        if not math.isnan(products.us(size, CPU))
    ]
    title = "## Compared with one CPU thread"
    text = "It multiplies the kept values, own offsets, FP32. Speed-up over it:"
    return [title, text, table(("M", "CPU us", "cuBLAS", *VARIANTS), rows)] if rows else []


class Counters:
    """Values of spmm_counters.csv, NaN where there is none."""

    def __init__(self, counters: Table) -> None:
        key = ["M", "offsets", "provider", "dtype"]
        rows = counters.rows
        self._rows = {index: row for row in rows.to_dict("records") if (index := tuple(row[k] for k in key))}

    def of(self, name: str, size: int, provider: str, offsets: str) -> float:
        """Return a counter of a float32 product."""
        return float(self._rows.get((size, offsets, provider, "fp32"), {}).get(name, math.nan))


def _counters(counters: Table, source: str | None) -> list[str]:
    title, rows = "## Counters", counters.rows
    if rows.empty:
        return [title, f"None: {source or 'they were not requested'}."]
    lines = [
        (
            *(row["dtype"].upper(), row["M"], row["offsets"], row["provider"]),
            *(NO_VALUE if pd.isna(row[name]) else _short(row[name]) for name in COUNTERS),
        )
        for row in rows.to_dict("records")
    ]
    return [
        title,
        f"At {MAIN_PATTERN}, from cold caches: {source}. Percent of the peak; conflicts are of shared memory; a stall "
        "is the average of warps that wait for it in an issue cycle.",
        table(("", "M", "offsets", "", *(name.replace("_", " ") for name in COUNTERS)), lines, 1),
    ]


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1e5 else f"{value:.2e}"


def claims(products: Products, counters: Counters) -> list[tuple[str, str, str]]:
    """Return (claim, the study's figure, ours) as text."""

    def at_sizes(sizes: Iterable[int], value: Value, show: Show = times) -> str:
        return ", ".join(
            f"{' / '.join(show(value(size, kind)) for kind in (SHARED, OWN))} at {size}" for size in sizes
        )

    def ratio(name: str, over: str) -> Value:
        return lambda size, kind: products.speedup(size, name, over, offsets=kind)

    def counted(name: str, *sizes: int) -> str:
        def value(provider: str) -> Value:
            return lambda size, kind: counters.of(name, size, provider, kind)

        before, after = (
            at_sizes(sizes, value(provider), _format_known) for provider in ("baseline", "double")
        )
        return f"{before} -> {after}"

    def own_over_strips(size: int) -> float:
        return products.us(size, "double", offsets=OWN) / products.us(size, "double", offsets=SHARED)

    cpu = [products.us(size, CPU) for size in products.sizes]
    gains = {
        kind: [
            c / products.us(size, "baseline", offsets=kind)
            for c, size in zip(cpu, products.sizes, strict=True)
        ]
        for kind in (SHARED, OWN)
    }
    ours = products.rows[products.rows["provider"].isin(list(VARIANTS))]["error"].max()
    return [
        (
            "The baseline is 10^2 to 10^4 times as fast as one thread of the CPU",
            "10^2 at 64, 10^3 to 10^4 from 512 to 2048",
            " / ".join(f"{span(gains[kind], lambda v: f'{v:.0f}')}" for kind in (SHARED, OWN)),
        ),
        ("cuBLAS is slower than that thread at 64", "0.1", times(products.speedup(64, CUBLAS, CPU))),
        (
            "The baseline beats cuBLAS up to 2048 and loses from 4096 on",
            "16 at 512, 5.9 at 1024, 1.7 to 1.9 at 2048, below 1 at 4096 and 8192",
            at_sizes((512, 1024, 2048, 4096, 8192), ratio("baseline", CUBLAS)),
        ),
        (
            "Its rate is highest near 1024 and falls after, TFLOPS of kept values",
            "4 to 5 at 1024, 2.6 at 2048, 2.1 to 2.9 at 4096 and 8192",
            at_sizes(
                (1024, 2048, 4096, 8192),
                lambda size, kind: products.tflops(size, "baseline", kind),
                _format_known,
            ),
        ),
        (
            "cuBLAS, TFLOPS",
            "0.43 at 512, 2.9 at 2048, 7.3 at 4096, 10.8 at 8192",
            ", ".join(
                f"{_format_known(products.tflops(size, CUBLAS))} at {size}"
                for size in (512, 2048, 4096, 8192)
            ),
        ),
        (
            "Double buffering pays from 2048 on, over the baseline",
            "up to 1 until 1024, 1.09 at 2048, more after (with K cut in two)",
            at_sizes((256, 1024, 2048, 4096, 8192), ratio("double", "baseline")),
        ),
        (
            "Cutting K in two, over double buffering alone",
            "in the figure above",
            at_sizes((256, 1024, 2048, 4096, 8192), ratio("split2", "double")),
        ),
        (
            "Prefetching to registers changes little, over the baseline",
            "a few percent up to 2048, a little faster above",
            at_sizes((256, 1024, 2048, 4096, 8192), ratio("prefetch", "baseline")),
        ),
        (
            "SM throughput in percent, baseline -> double",
            "7.8 -> 19.4 at 256, 35.5 -> 81.0 at 2048",
            counted("sm_pct", 256, 2048),
        ),
        (
            "DRAM throughput in percent, baseline -> double",
            "9.4 -> 22.3 at 256, 5.2 -> 9.4 at 2048",
            counted("dram_pct", 256, 2048, 8192),
        ),
        (
            "Bank conflicts of stores to shared memory, baseline -> double",
            "0 -> 62 at 256, 1.17e6 -> 8.3e5 at 2048",
            counted("store_conflicts", 256, 2048),
        ),
        (
            "Warps stalled on long scoreboard, baseline -> double",
            "4.2 -> 4.1 at 256, 2.6 -> 2.9 at 2048",
            counted("stall_long_scoreboard", 256, 2048),
        ),
        ("Errors stay below 1e-3", "of each output, numbers in [0, 1)", _format_known(ours)),
        (
            "Any N:M: own offsets beside strips, time over time",
            "printed kernels have strips",
            ", ".join(f"{times(own_over_strips(size))} at {size}" for size in (256, 2048, 8192)),
        ),
    ]


def _format_known(value: float) -> str:
    return NO_VALUE if pd.isna(value) else _short(value)


def draw(measured: Table, folder: Path) -> list[Path]:
    """Draw ``spmm-squares.svg``, if squares were measured: speed-ups over cuBLAS, a panel for each dtype."""
    products = Products(measured)
    if not products.sizes:
        return []
    with mpl.rc_context(FIXED_PARAMETERS):
        figure = Figure(figsize=(PANEL[0] * len(TYPES), PANEL[1] + 0.8), layout="constrained")
        for panel, dtype in zip(figure.subplots(1, len(TYPES), sharey=True), TYPES, strict=True):
            panel.axhline(1, color="#444444", linewidth=2)
            for kind, (line, marker) in STYLES.items():
                for name, colour in COLOURS.items():
                    speedups = [
                        products.speedup(size, name, dtype=dtype, offsets=kind) for size in products.sizes
                    ]
                    style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
                    panel.plot(products.sizes, speedups, label=f"{name}, {KINDS[kind]}", **style)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=2)
            panel.yaxis.set_major_formatter("{x:g}")
            panel.set_xticks(products.sizes, [str(size) for size in products.sizes], rotation=45)
            panel.minorticks_off()
            panel.set_title(dtype.upper())
            panel.set_xlabel("M = N = K")
        figure.supylabel("speed-up over cuBLAS of the same type", fontsize="medium")
        figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return [save(figure, folder / "spmm-squares.svg")]
