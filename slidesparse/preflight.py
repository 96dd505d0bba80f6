"""Tell whether SlideSparse serves a checkpoint on this machine: ``slidesparse doctor MODEL``.

Only headers, scales and the first rows of weights are read.  The rules are those of serving, in `slidesparse.resolve`,
`slidesparse.gemm` and `slidesparse.gemm.tuned`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slidesparse import doctor, flags, gemm
from slidesparse.calibrate.model import fused_layers
from slidesparse.checkpoint.bitnet import METHOD as BITNET
from slidesparse.checkpoint.bitnet import BitNetCheckpoint
from slidesparse.checkpoint.converted import DamagedError, open_checkpoint, restore
from slidesparse.checkpoint.inspection import RATIOS, expert_dtypes, linear_layers
from slidesparse.checkpoint.metadata import COMPRESSED_TENSORS, Metadata
from slidesparse.checkpoint.names import (
    FAMILIES,
    HEAD,
    WEIGHT,
    ZERO_POINT,
    architecture_of,
    layer_names,
)
from slidesparse.checkpoint.storage import FLOATS, Checkpoint, CheckpointError, Reader
from slidesparse.checkpoint.w8a8 import KINDS, Quantization, holds_floats, parse_block, require_float
from slidesparse.convert.times import DEFAULT_GPU, DEFAULT_TOKENS, LayerTimes, TimesError
from slidesparse.errors import ENVIRONMENT, FAILED, INSTALL_CUDA
from slidesparse.gemm import problem as gemms
from slidesparse.gemm.hopper.format import packed_bytes
from slidesparse.gemm.problem import DTYPES, LibraryError, Problem
from slidesparse.gemm.tuned import Subject, TableError, select_algorithm, slug
from slidesparse.pattern import DENSE_WEIGHT, SlidePattern, parse_pattern
from slidesparse.resolve import (
    BREAKS,
    CONVERT_STORED,
    FP8_CAPABILITY,
    NO_FP8_ACTIVATIONS,
    Resolution,
    ResolveError,
    claim,
    common_entry,
    left_to_vllm,
    pattern_of,
    require_dynamic_w8a8,
    require_invariance,
    unread_storage,
)
from slidesparse.slide import violations
from slidesparse.tune.session import served_outputs

ROWS = 16  # rows of a weight whose pattern is checked
TUNED = "tuned"
# How a layer is served: by SlideSparse, by vLLM's own kernels for quantized weights, or unquantized
OURS, STOCK, UNQUANTIZED = "sparse", "dense", "left"


@dataclass(frozen=True)
class Machine:
    """The GPU that vLLM would take, if there is one."""

    platform: str = "cpu"
    capability: tuple[int, int] | None = None
    gpu: str | None = None
    free: int | None = None  # bytes of its memory

    @classmethod
    def current(cls) -> Machine:
        """Return the machine that this process runs on."""
        if not torch.cuda.is_available():
            return cls()
        capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
        return cls("cuda", capability, name, torch.cuda.mem_get_info()[0])

    def times(self, backend: str | None) -> LayerTimes | None:
        """Return layer times of ``backend`` on this kind of GPU, or None; without a GPU those of DEFAULT_GPU."""
        gpu = DEFAULT_GPU if self.gpu is None else slug(self.gpu)
        try:
            times = LayerTimes.of(gpu)
        except TimesError:
            return None
        return times if self.gpu is None or (times.gpu == gpu and backend == "hopper") else None


@dataclass(frozen=True)
class Layer:
    """The linear layers of one name and shape, fused as vLLM fuses them."""

    name: str
    n: int
    k: int
    quant: str | None
    pattern: str | None  # from the metadata or the flags
    served: str  # OURS, STOCK or UNQUANTIZED
    reason: str = ""  # why not OURS
    count: int = 1
    tuned: str = ""  # TUNED, or what serves it instead of a tuned configuration; "" where nothing is tuned
    us: tuple[float | None, ...] = ()  # microseconds as it is served, for each of DEFAULT_TOKENS
    stock_us: tuple[float, ...] = ()  # microseconds by vLLM's dense kernels

    @property
    def ratios(self) -> list[float | None]:
        """The speedup over stock vLLM, for each of DEFAULT_TOKENS."""
        return [b / a if a else None for a, b in zip(self.us, self.stock_us, strict=True)]

    def slides(self) -> SlidePattern | None:
        """Return the pattern that the weight is slid for; only for one that is OURS."""
        pattern = parse_pattern(self.pattern or "")
        return pattern if isinstance(pattern, SlidePattern) else None

    def packed(self, alignment: int) -> gemms.Layer:
        """Return the layer as a backend with this ``alignment`` sees it; only for one that is OURS."""
        return gemms.Layer.of(self.n, self.k, self.slides(), 0, DTYPES[self.quant or ""], alignment)


@dataclass
class Report:
    """The answer whether and how a checkpoint is served here, with the facts behind it."""

    model: str
    architecture: str | None
    layout: str
    machine: Machine
    vllm: str
    quantization: str = "unquantized"  # the types of the quantized layers, as text
    layers: list[Layer] = field(default_factory=list)
    experts: dict[str, int] = field(default_factory=dict)  # dtype -> number of matrices of routed experts
    backend: str | None = None
    backend_reason: str = ""
    weight_bytes: int = 0  # bytes of all weights, packed for the backend
    times: str | None = None  # the GPU whose layer times are shown
    speedups: list[float | None] = field(default_factory=list)  # speedups of all quantized layers together
    missing: list[dict[str, str]] = field(default_factory=list)
    code: int = 0
    verdict: str = ""

    def lacks(self, problem: str, remedy: str, code: int = 0) -> None:
        """Record what is missing and its remedy; a ``code`` means that the checkpoint is not served for this reason."""
        self.missing.append({"what": problem, "remedy": remedy})
        if code and not self.code:
            self.code, self.verdict = code, problem

    def count(self, kind: str) -> int:
        """Return the number of layers whose ``served`` is ``kind``."""
        return sum(layer.count for layer in self.layers if layer.served == kind)

    @property
    def patterns(self) -> dict[str, int]:
        """The number of layers that we serve, by pattern."""
        counts: Counter[str] = Counter()
        for layer in self.layers:
            if layer.served == OURS:
                counts[str(layer.pattern)] += layer.count
        return dict(sorted(counts.items()))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        layers = [{**asdict(layer), "ratios": layer.ratios} for layer in self.layers]
        counts = {
            "patterns": self.patterns,
            **{kind: self.count(kind) for kind in (OURS, STOCK, UNQUANTIZED)},
        }
        return {**asdict(self), "layers": layers, **counts, "tokens": list(DEFAULT_TOKENS)}


def examine(model: str, folder: Path) -> Report:
    """Examine a checkpoint.  Raises CheckpointError for a broken one, FlagError for invalid flags."""
    checkpoint, metadata = open_checkpoint(folder)
    raw = checkpoint.source if isinstance(checkpoint, BitNetCheckpoint) else checkpoint
    machine = Machine.current()
    vllm, supported = doctor.vllm()
    layout = metadata.layout if metadata else "dense"
    report = Report(model, architecture_of(checkpoint.config), layout, machine, str(vllm["words"]))
    block = checkpoint.quantization_config()
    source, unread = None, ""
    try:
        source = parse_block(block, checkpoint.tensors) if block and not holds_floats(block) else None
    except CheckpointError as error:
        unread = str(error)
    for layer in () if block else linear_layers(checkpoint, metadata):
        require_float(checkpoint, layer)
    for problem, treatment in _unloadable(checkpoint, source) if source else ():
        remedy = f"slidesparse convert {model} OUT --sparsity 6:8, or dense to prune nothing, {treatment}"
        report.lacks(f"vLLM cannot load {problem}", remedy, FAILED)
    resolution = _resolution(report, raw)
    if resolution:
        report.backend, report.backend_reason = resolution.backend, resolution.reason
        report.layout = resolution.layout
    elif not report.code:
        _explain_unserved(
            report, raw.quantization_config() or {}, source, unread, _obeyed(checkpoint, source)
        )
    try:
        with checkpoint.reader() as reader:
            layer_counts = Counter(_layers(checkpoint, reader, metadata, source, resolution))
    except ResolveError as error:
        report.lacks(str(error), "", FAILED)
        layer_counts = Counter()
    times = machine.times(report.backend) if resolution else None
    report.layers = [_measured(layer, n, times, resolution, machine) for layer, n in layer_counts.items()]
    quants = sorted({layer.quant.upper() for layer in report.layers if layer.quant})
    if quants or unread:
        report.quantization = " and ".join(quants) or "quantized in another way"
    report.experts = expert_dtypes(checkpoint)
    report.weight_bytes = _weight_bytes(checkpoint, report.layers, resolution)
    if times:
        report.times = times.gpu
        report.speedups = _speedups(layer for layer in report.layers if layer.quant)
    if resolution and not report.code:
        _judge_layers(report, unread, resolution, machine)
    _judge_machine(report, supported)
    report.verdict = report.verdict if report.code else _verdict(report)
    return report


def _resolution(report: Report, raw: Checkpoint) -> Resolution | None:
    """Return what the plugin decides; None, with the reason in the report, when it does not serve the checkpoint."""
    machine, block = report.machine, raw.quantization_config() or {}
    if flags.disabled():
        report.lacks(f"{flags.DISABLE} is set", "unset it", FAILED)
        return None
    try:
        if not block:
            return None
        resolution = claim(block, None, lambda: (machine.platform, machine.capability))
        if resolution:
            require_dynamic_w8a8(block)
        return resolution
    except ResolveError as error:
        report.lacks(str(error), "", FAILED)
    except gemm.BackendError as error:
        report.lacks(str(error), "`slidesparse doctor` says what each of them needs", ENVIRONMENT)
    return None


def _explain_unserved(
    report: Report, block: Mapping[str, Any], source: Quantization | None, unread: str, obeyed: str
) -> None:
    """Record why only stock vLLM serves a checkpoint, and how SlideSparse could.

    Args:
        block: its quantization_config; empty if it has none.
        source: the same, parsed; None if it cannot be, for the reason ``unread``.
        obeyed: the result of `_obeyed`.
    """
    convert = f"slidesparse convert {report.model} OUT --sparsity {obeyed or '6:8'}"
    convert += "" if source else " --calib texts.jsonl"  # calibration updates float weights
    convert += "" if report.architecture in FAMILIES else " --linear REGEX"
    if stored := unread_storage(block):
        report.lacks(stored, f"USE_CUSPARSELT=1 serves it if it is W8A8; else {CONVERT_STORED}", FAILED)
    elif not block or block.get("quant_method") == BITNET:
        report.lacks("it has not been converted", convert, FAILED)
    elif source is None:
        report.lacks(unread, "", FAILED)
    elif source.method != COMPRESSED_TENSORS or not any(scheme.native for scheme in source.schemes):
        report.lacks("it is quantized in a way that only vLLM's own kernels serve", convert, FAILED)
    else:
        flag = "dense, where the backend hopper runs"
        if obeyed:
            flag = f"{parse_pattern(obeyed).flag}, which the first rows of its weights obey"
        report.lacks(
            f"it does not say that it is pruned, and {flags.USE_CUSPARSELT} is not set: vLLM's own kernels serve it",
            f"USE_CUSPARSELT=1 SPARSITY={flag}, or {convert}",
            FAILED,
        )


def _obeyed(checkpoint: Checkpoint, source: Quantization | None) -> str:
    """Return the sparsest pattern that the first ROWS rows of all layers, or of all quantized ones, obey; or ""."""
    dtypes = {name: checkpoint.tensors[name + WEIGHT].spec.dtype for name in linear_layers(checkpoint, None)}
    names = [
        name for name, dtype in dtypes.items() if (source.scheme(name, dtype) if source else dtype in FLOATS)
    ]
    patterns = [SlidePattern.parse(ratio) for ratio in RATIOS if names]
    with checkpoint.reader() as reader:
        for name in names:
            rows = _first_rows(reader, name)
            patterns = [pattern for pattern in patterns if violations(rows, pattern) is None]
    return patterns[0].ratio if patterns else ""


def _unloadable(checkpoint: Checkpoint, source: Quantization) -> Iterable[tuple[str, str]]:
    """Yield what vLLM cannot load of a W8A8 checkpoint, and what `convert` does with it."""
    zero_points = [name for name in checkpoint.tensors if name.endswith(ZERO_POINT)]
    if zero_points:
        yield f"zero points of W8A8 weights ({zero_points[0]})", "drops them"
    for name in filter(HEAD.search, layer_names(checkpoint.tensors)):
        dtype = checkpoint.tensors[name + WEIGHT].spec.dtype
        if dtype not in FLOATS and source.scheme(name, dtype) and not source.loads_head(name):
            yield f"a quantized {name} that no target names", "dequantizes it"


def _layers(
    checkpoint: Checkpoint,
    reader: Reader,
    metadata: Metadata | None,
    source: Quantization | None,
    resolution: Resolution | None,
) -> Iterable[Layer]:
    """Yield the linear layers as vLLM fuses them.  Raises ResolveError for a layer that is not served."""
    for unit in fused_layers(checkpoint, metadata):
        first = unit[0]
        specs = [checkpoint.tensors[name + WEIGHT].spec for name in unit]
        entries = {name: metadata.layers.get(name) if metadata else None for name in unit}
        entry = common_entry("+".join(unit), entries)
        scheme = source.scheme(first, specs[0].dtype) if source else None
        quant = scheme.quant if scheme and specs[0].dtype == KINDS[scheme.quant][1] else None
        pattern = entry.pattern.ratio if entry else None
        kind, reason = STOCK, "vLLM's own kernels"
        if specs[0].dtype in FLOATS:
            kind, reason = UNQUANTIZED, "not quantized"
        elif scheme and not scheme.native:
            reason = "block FP8" if scheme.block else f"{scheme.activations} activations"
        elif quant and resolution:
            layer_pattern = pattern_of(resolution, metadata, entry)
            reason = left_to_vllm(resolution, layer_pattern) or ""
            if not reason:
                kind = OURS
                pattern = layer_pattern.ratio if resolution.path == gemm.SPARSE else DENSE_WEIGHT
                if metadata:
                    _require_obeyed(reader, metadata, unit if resolution.path == gemm.SPARSE else ())
                elif _break(reader, unit, pattern):
                    kind, reason, pattern = STOCK, BREAKS, None
        yield Layer(
            "+".join(map(_last, unit)),
            sum(spec.rows for spec in specs),
            entry.in_features if entry else specs[0].columns,
            quant,
            pattern,
            kind,
            reason,
        )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _break(reader: Reader, unit: Sequence[str], pattern: str) -> bool:
    """Return whether the first ROWS rows of a weight break a pattern."""
    for name in unit if pattern != DENSE_WEIGHT else ():
        if violations(_first_rows(reader, name), SlidePattern.parse(pattern)):
            return True
    return False


def _require_obeyed(reader: Reader, metadata: Metadata, unit: Sequence[str]) -> None:
    """Raise ResolveError if the first ROWS rows of a weight are not what the metadata say."""
    for name in unit:
        if name in metadata.layers:
            try:
                restore(_first_rows(reader, name), metadata, name)
            except DamagedError as error:
                raise ResolveError(
                    f"{name}: row {error.violation.row} breaks {metadata.layers[name].pattern}, to which the metadata "
                    "say that it was pruned (`slidesparse inspect` counts all rows): convert the original model again"
                ) from error


def _first_rows(reader: Reader, layer: str) -> Tensor:
    rows = min(ROWS, reader.checkpoint.tensors[layer + WEIGHT].spec.rows)
    return reader.rows(layer + WEIGHT, slice(0, rows))


def _measured(
    layer: Layer, count: int, times: LayerTimes | None, resolution: Resolution | None, machine: Machine
) -> Layer:
    """Return the layer with its count, its times and what the tuned tables have for it."""
    us: list[float | None] = []
    stock: list[float] = []
    for tokens in DEFAULT_TOKENS if times and layer.quant else ():
        assert times is not None
        shape, quant = (layer.n, layer.k), layer.quant or ""
        stock.append(times.stock_us(quant, shape, tokens))
        us.append(stock[-1])
        if resolution and layer.served == OURS:
            us[-1] = None
            if layer.pattern == DENSE_WEIGHT or layer.slides():  # no times of mixed blocks are known
                with contextlib.suppress(TimesError):
                    us[-1] = times.us(quant, layer.slides(), shape, tokens)
    tuned = _tuned(layer, resolution, machine) if resolution and layer.served == OURS else ""
    return replace(layer, count=count, us=tuple(us), stock_us=tuple(stock), tuned=tuned)


def _tuned(layer: Layer, resolution: Resolution, machine: Machine) -> str:
    """Return what the tuned tables of this GPU have for a layer, as in `Layer.tuned`."""
    backend: Any = gemm.get(resolution.backend)
    if machine.gpu is None or machine.capability is None or not hasattr(backend, "algorithms"):
        return ""
    columns = layer.packed(backend.alignment).columns
    try:
        out, scale = served_outputs(backend, layer.quant or "")[0]
        subject = Subject(backend.name, backend.version(), machine.gpu, machine.capability)
        problems = [Problem(layer.quant or "", out, layer.n, columns, m, scale) for m in DEFAULT_TOKENS]
        notes = [select_algorithm(subject, problem, backend.max_shape_distance)[1] for problem in problems]
    except (LibraryError, TableError) as error:
        return str(error)
    return next(filter(None, notes), TUNED)


def _weight_bytes(checkpoint: Checkpoint, layers: Iterable[Layer], resolution: Resolution | None) -> int:
    """Return the bytes of all tensors, with OURS packed for the backend."""
    total = sum(stored.spec.nbytes for stored in checkpoint.tensors.values())
    for layer in layers:
        if resolution and layer.served == OURS:
            backend = gemm.get(resolution.backend)
            served = layer.packed(backend.alignment)
            halves = layer.slides() and backend.device_type == "cuda"
            packed = packed_bytes(layer.n, served.columns) if halves else layer.n * served.columns
            stored_columns = served.layout.slided if resolution.layout == "slided" else layer.k
            total += layer.count * (packed - layer.n * stored_columns)
    return total


def _speedups(layers: Iterable[Layer]) -> list[float | None]:
    """Return the speedup of all layers together over stock vLLM, for each of DEFAULT_TOKENS; None if unknown."""
    speedups: list[float | None] = []
    all_layers = list(layers)
    for i in range(len(DEFAULT_TOKENS)):
        times = [None if (us := layer.us[i]) is None else us * layer.count for layer in all_layers]
        known_times = [us for us in times if us is not None]
        complete = len(known_times) == len(all_layers) > 0
        stock_us = sum(layer.stock_us[i] * layer.count for layer in all_layers)
        speedups.append(stock_us / sum(known_times) if complete else None)
    return speedups


def _judge_layers(report: Report, unread: str, resolution: Resolution, machine: Machine) -> None:
    """Record why layers are not served, or are slower than they could be."""
    served = [layer for layer in report.layers if layer.served == OURS]
    convert = "slidesparse convert SRC OUT --sparsity 6:8"
    if not served:
        reasons = ", ".join(sorted({layer.reason for layer in report.layers})) or "it has none"
        report.lacks(unread or f"no linear layer can be served: {reasons}", convert, FAILED)
    quants = {layer.quant for layer in served}
    if "fp8" in quants and machine.capability and machine.capability < FP8_CAPABILITY:
        report.lacks(NO_FP8_ACTIVATIONS, f"{convert} --quant int8", FAILED)
    try:
        for quant in filter(None, quants):
            require_invariance(resolution.backend, quant)
    except gemm.BackendError as error:
        report.lacks(str(error), "", FAILED)
    for name in gemm.names(resolution.path):
        if name == resolution.backend or flags.BACKEND in resolution.reason:
            break
        if gemm.get(name).device_type == machine.platform:
            reason = gemm.get(name).unusable(torch.device(machine.platform), machine.capability) or ""
            report.lacks(f"the preferred backend {name} cannot run: {' '.join(reason.split())}", "")
    untuned = [layer for layer in served if layer.tuned not in ("", TUNED)]
    if untuned:
        problem = f"{len(untuned)} of {len(served)} shapes have no tuned table for {machine.gpu}"
        report.lacks(problem, f"slidesparse tune {report.model}")
    for pattern in (p for p in report.patterns if report.times and p != DENSE_WEIGHT):
        speedups = _speedups(layer for layer in served if layer.pattern == pattern)
        if None in speedups:
            problem = f"the times of {pattern} layers have not been measured on {report.times}"
            report.lacks(problem, "measure them with python -m benchmarks linear")
        elif all(ratio is not None and ratio <= 1 for ratio in speedups):
            steps = " or ".join(map(str, DEFAULT_TOKENS))
            problem = f"{pattern} speeds up no layer at {steps} tokens per forward pass on {report.times}"
            report.lacks(
                problem, "convert the original model to a sparser one, such as --sparsity 6:8 or 2:4"
            )


def _judge_machine(report: Report, supported: bool) -> None:
    """Record what the machine lacks."""
    if not supported:
        report.lacks(f"vLLM: {report.vllm}", "", ENVIRONMENT)
    plugin = doctor.plugin()
    if not plugin["loads"]:
        report.lacks(f"vLLM does not load the plugin: {plugin['words']}", "", ENVIRONMENT)
    machine = report.machine
    served_on_cpu = (*FLOATS, "I8") if torch.cpu._is_amx_tile_supported() else FLOATS
    unserved = sorted(set(report.experts) - set(served_on_cpu))
    if machine.platform == "cpu" and unserved:
        report.lacks(
            f"vLLM cannot serve routed experts in {' and '.join(unserved)} on this CPU: it needs a GPU, or for I8 a "
            "CPU with AMX",
            r"convert the original model with --ignore '\.experts\.', which leaves them unquantized",
            ENVIRONMENT,
        )
    if machine.gpu is None and doctor.gpus()["list"]:
        report.lacks("torch cannot use this machine's GPU", INSTALL_CUDA, ENVIRONMENT)
    if machine.free is not None and report.weight_bytes > machine.free:
        problem = f"the weights need {gib(report.weight_bytes)}, but only {gib(machine.free)} of GPU memory are free"
        report.lacks(
            problem, "free GPU memory, use a larger GPU, or several with --tensor-parallel-size", ENVIRONMENT
        )


def gib(count: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{count / 2**30:.2f} GiB"


def _verdict(report: Report) -> str:
    """Return how a checkpoint is served, and how fast."""
    layers = f"{report.count(OURS)} of {sum(layer.count for layer in report.layers)} linear layers"
    verdict = f"the backend {report.backend} serves {layers}"
    if report.machine.platform == "cpu":
        verdict += " with exact but slow CPU arithmetic, as this machine has no GPU"
    ratios = [
        f"{ratio:.2f}x with {tokens} tokens"
        for ratio, tokens in zip(report.speedups, DEFAULT_TOKENS, strict=False)
        if ratio is not None
    ]
    if not ratios:
        return verdict
    speeds = " and ".join(ratios)
    return (
        f"{verdict}; speed of linear layers relative to stock vLLM: {speeds} per forward pass (layer times of "
        f"{report.times})"
    )
