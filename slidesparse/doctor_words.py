"""What `slidesparse.doctor` found, as text for people.  Standard library only."""

from __future__ import annotations

from typing import Any

from slidesparse import nvcc, toolchain
from slidesparse.backends import INSTALL

Report = dict[str, Any]

SATURATES = (
    "This x86 CPU has neither VNNI nor AMX: stock vLLM's INT8 kernel (oneDNN) saturates sums of pairs at 16\n"
    "bits here, so its results differ from exact arithmetic. The reference backend is exact."
)


def render(report: Report) -> str:
    """The report as text for people.  Never raises on what `collect` returns."""
    lines = [f"slidesparse {report['slidesparse']['version']}  ({report['slidesparse']['path']})", ""]
    for title, text in _lines(report):
        lines.append(f"  {title:<19} {text}")
    lines += ["", "Backends"]
    for name, backend in report["backends"].items():
        state = "usable" if backend["usable"] else "not usable"
        lines.append(f"  {name:<12} {state:<11} {backend['description']}")
        lines += [f"  {'':<12} lacks       {lack}" for lack in backend["lacks"]]
        if backend["remedy"]:
            lines.append(f"  {'':<12} remedy      {backend['remedy']}")
    if report["system"].get("int8_saturates"):
        lines += ["", SATURATES]
    return "\n".join(lines)


def _lines(report: Report) -> list[tuple[str, str]]:
    system, torch, vllm, gpus = (report[key] for key in ("system", "torch", "vllm", "gpus"))
    features = ", ".join(system.get("features", [])) or "no vector extension known here"
    lines = [
        ("Python", f"{report['python']['version']}  ({report['python']['executable']})"),
        ("system", _or_error(system, f"{system.get('os')}")),
        ("CPU", _or_error(system, f"{system.get('cpu')}, {system.get('cores')} cores; {features}")),
    ]
    for gpu in gpus.get("list", []):
        words = (
            f"compute capability {gpu['compute_capability']}, {gpu['memory_mib']} MiB, driver {gpu['driver']}"
        )
        lines.append(("GPU", f"{gpu['name']}, {words}"))
    if not gpus.get("list", []):
        lines.append(("GPU", f"none: {gpus.get('error') or gpus.get('why')}"))
    lines += [
        ("torch", _torch_words(torch)),
        ("Triton", report["triton"] or "not installed"),
        ("vLLM", _or_error(vllm, _vllm_words(vllm))),
        ("compressed-tensors", report["compressed_tensors"] or "not installed (it comes with vLLM)"),
    ]
    lines += _library_lines(report["libraries"])
    plugin, flags = report["plugin"], report["flags"]
    lines.append(
        ("vLLM plugin", "registered" if plugin.get("loads") else plugin.get("error") or plugin.get("why", ""))
    )
    chosen = " ".join(f"{name}={value}" for name, value in flags.get("set", {}).items())
    lines.append(("flags", chosen or "none set"))
    if flags.get("error"):
        lines.append(("", f"wrong: {flags['error']}"))
    elif flags.get("pattern"):
        lines.append(("", f"pattern {flags['pattern']}"))
    return lines


def _library_lines(libraries: Report) -> list[tuple[str, str]]:
    lines = []
    for name in toolchain.EXTENSIONS:
        title = toolchain.LIBRARIES[name].name
        lines.append((title, _or_error(libraries, _found_words(libraries.get(name)))))
        state = libraries.get("extensions", {}).get(name, {})
        lines.append(("  its extension", _or_error(libraries, _state_words(state))))
    state = libraries.get("extensions", {}).get(nvcc.NAME, {})
    lines.append(("Hopper kernels", _or_error(libraries, _state_words(state))))
    for key, title in (("nvcc", "nvcc"), ("cxx", "C++ compiler")):
        lines.append((title, _or_error(libraries, _found_words(libraries.get(key)))))
    return lines


def _state_words(state: Report) -> str:
    note = f" ({state['note']})" if state.get("note") else ""
    return state.get("lack") or f"{state.get('state')}: {state.get('path')}{note}"


def _or_error(section: Report, words: str) -> str:
    return f"unknown ({section['error']})" if "error" in section else words


def _torch_words(torch: Report) -> str:
    if torch.get("version") is None:
        return torch.get("error") or "not installed"
    if torch.get("error"):
        return f"{torch['version']}, cannot be imported: {torch['error']}"
    if torch["cuda_build"] is None:
        return f"{torch['version']}, a CPU build"
    state = "uses the GPU" if torch["cuda_available"] else "finds no GPU it can use"
    return f"{torch['version']}, built for CUDA {torch['cuda_build']}, {state}"


def _vllm_words(vllm: Report) -> str:
    if vllm.get("version") is None:
        return f"not installed: {INSTALL}"
    return f"{vllm['version']} ({vllm['distribution']}), {vllm['status']}"


def _found_words(found: Report | None) -> str:
    if found is None:
        return "not found"
    if "lack" in found:
        return str(found["lack"])
    source = f" ({found['from']})" if "from" in found else ""
    return f"{found['version'] or ''}{source} {found['path']}".strip()
