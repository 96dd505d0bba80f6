"""What ptxas says of every kernel: no serialized wgmma, no spilled registers, no local memory.

Needs nvcc and no GPU.  The kernels are at the edge of their registers, and lose a large part of their speed beyond it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slidesparse.build import compile as compiling
from slidesparse.build import find
from slidesparse.build.find import ToolchainError

FOLDER = compiling.sources_folder()
UNITS = {
    " ".join([source.name, *(macro.removeprefix("-DSLIDESPARSE_") for macro in macros)]): (listed, index)
    for listed in (FOLDER / "hopper" / "units.txt", FOLDER / "spmm" / "units.txt")
    for index, (source, macros) in enumerate(compiling.read_units(listed))
}
FAST = ("pack.cu", "instance.cu TYPE=Int8 TOKENS=256")  # the latter's accumulators take most registers

# Kernels that may have local memory, by a pattern of their mangled names: how many bytes of a frame with CUDA 13.0.
FRAMES = {
    # Two or three CTAs share an SM's registers.  By their SASS, stores precede the main loop and loads follow it.
    r"GemmSplitKINS0_4Int8ELi[23]ELi64ELNS0_6BlocksE0E": 24,
    # As above.
    r"Gemm(SplitK|StreamK|Grouped)INS0_(4Int8|3Fp8)ELi[23]ELi(32|128)ELNS0_6BlocksE2E": 24,
}

BAD = """
__global__ void Serialized(float* out, unsigned long long a, unsigned long long b) {
  float sums[4] = {};
  for (int i = 0; i < 4; ++i) {
    asm volatile("wgmma.fence.sync.aligned;");
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, 1, 1, 1;"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;");
    sums[0] += 1.0f;  // not yet waited for
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = sums[i];
}
__global__ void InLocalMemory(float* out, int n) {
  float values[64];
  for (int i = 0; i < n; ++i) values[i] = out[i];
  for (int i = 0; i < n; ++i) out[i] = values[n - i];
}
"""


@pytest.fixture(scope="module")
def nvcc() -> str:
    try:
        return find.find_nvcc().path
    except ToolchainError as error:
        pytest.skip(f"the kernels cannot be compiled: {error.what}")


@pytest.fixture(scope="module")
def built(nvcc: str, request: pytest.FixtureRequest) -> list[str]:
    """Return what ptxas said of each unit of the Hopper kernels as they are built; they are if most are selected."""
    many = sum(item.path == request.path for item in request.session.items) > len(UNITS) / 2
    said = compiling.said_path(compiling.build("hopper") if many else compiling.target_path("hopper"))
    return json.loads(said.read_text()) if said.is_file() else []


def compile_unit(nvcc: str, listed: Path, index: int, folder: Path) -> str:
    """Compile a unit as the build does, and return what ptxas says."""
    commands, _ = compiling.cuda_commands(nvcc, listed, compiling.HOPPER, "x.so")
    return compiling.compile_with(commands[index], folder)


def faults(said: str) -> list[str]:
    """Return the lines of ptxas about serialized wgmmas, and about spills and frames that FRAMES does not allow."""
    found = [line for line in said.splitlines() if re.search(r"\(C75(1\d|20)\)", line)]
    counts = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    for name, frame, stores, loads in re.findall(rf"Function properties for (\S+)\s+{counts}", said):
        allowed = max((size for kernel, size in FRAMES.items() if re.search(kernel, name)), default=0)
        if int(frame) > allowed or (not allowed and int(stores) + int(loads)):
            found.append(f"{name}: a frame of {frame} bytes, {stores} bytes of stores, {loads} of loads")
    return found


@pytest.mark.parametrize(
    "unit", [pytest.param(u, marks=() if u in FAST else pytest.mark.slow) for u in UNITS]
)
def test_kernels_keep_their_registers(nvcc: str, built: list[str], unit: str, tmp_path: Path) -> None:
    listed, index = UNITS[unit]
    known = built and listed.parent.name == "hopper"
    said = built[index] if known else compile_unit(nvcc, listed, index, tmp_path)
    assert faults(said) == []
    has_kernels = unit.startswith(("experts", "pack", "instance", "quantize_instance", "spmm"))
    assert ("stack frame" in said) == has_kernels


def test_faults_of_kernels_are_found(nvcc: str, tmp_path: Path) -> None:
    (tmp_path / "units.txt").write_text("bad.cu\n")
    (tmp_path / "bad.cu").write_text(BAD)
    serialized, *frames = faults(compile_unit(nvcc, tmp_path / "units.txt", 0, tmp_path))[-2:]
    assert "are serialized" in serialized
    assert [line.split(",")[0] for line in frames] == ["_Z13InLocalMemoryPfi: a frame of 256 bytes"]
