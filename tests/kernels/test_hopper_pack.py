"""Sliding and packing for the Hopper kernels, against `hopper_packers.pack`: bit for bit, on a CPU and on a GPU.

On a CPU, csrc/hopper/pack.cuh is compiled by a C++ compiler and runs one thread after another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import hopper_packers
import pytest
import torch
from gpu_layers import coded_order, require_hopper
from hypothesis import given, settings
from strategies import FILLS, Case, assert_same_bits, cases, is_zero, obeying, raw
from torch import Tensor

from slidesparse.blocks import dense_blocks
from slidesparse.build.compile import FLAGS, compile_with, sources_folder
from slidesparse.build.find import compiler
from slidesparse.gemm import cuda
from slidesparse.gemm.hopper import native
from slidesparse.gemm.hopper.backend import Hopper, pack_by_kernel
from slidesparse.gemm.problem import SIX_EIGHT, STORED_BY_CODERS, TWO_FOUR, Layer, LibraryError
from slidesparse.pattern import SlidePattern
from slidesparse.prune import prune
from slidesparse.quantize import FP8, INT8
from slidesparse.slide import slide

DTYPES = pytest.mark.parametrize("dtype", [INT8, FP8])
# pattern, N, K, phase: full strips and blocks, tails of both, one element, phases
GEOMETRIES = [("2:4", 64, 128, 0), ("2:4", 65, 132, 0), ("2:4", 1, 1, 0), ("4:6", 70, 193, 2)]
GEOMETRIES += [("6:8", 64, 256, 0), ("6:8", 130, 90, 3), ("6:8", 64, 333, 7)]
LARGE = [("6:8", 4608, 3584, 0), ("2:4", 1000, 18944, 0), ("4:6", 3584, 3585, 1)]

# CUDA features that a C++ compiler lacks, and the launch.
AROUND = """
#define __global__
#define __device__
#define __forceinline__ inline
struct Index { unsigned x; };
static Index blockIdx, threadIdx;
static int atomicAdd(int* at, int by) { const int before = *at; *at += by; return before; }
#include "pack.cuh"
using namespace slidesparse::hopper;
#define EXPORT extern "C" SLIDESPARSE_EXPORT
EXPORT std::int64_t slidesparse_hopper_pack_bytes(const SlidesparseLayer* layer) {
  const PackArguments arguments = MakePackArguments(*layer);
  return PackGrid(arguments) * BlockBytes(arguments);
}
EXPORT const char* slidesparse_hopper_pack(const SlidesparseLayer* layer, const void* weight,
                                           std::int64_t stride, std::int32_t mixed, void* packed,
                                           void* broken, void*) {
  PackArguments arguments = MakePackArguments(*layer);
  arguments.weight = static_cast<const std::uint8_t*>(weight);
  arguments.stride = stride;
  arguments.mixed = mixed != 0;
  arguments.packed = static_cast<std::uint8_t*>(packed);
  arguments.broken = static_cast<int*>(broken);
  for (blockIdx.x = 0; blockIdx.x < PackGrid(arguments); ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < kPackThreads; ++threadIdx.x) Pack(arguments);
  }
  return nullptr;
}
"""
PACKERS = ("pack_bytes", "pack")

# csrc/hopper/decode.cuh, with the shared memory and the intrinsics that it uses.
DECODER = """
#include <cstdint>
#include <cstring>
#define __host__
#define __device__
#define __forceinline__ inline
struct uint2 { std::uint32_t x, y; };
struct uint4 { std::uint32_t x, y, z, w; };
static struct { unsigned x; } threadIdx;
static std::uint8_t memory[8192];
template <class Word> static Word Load(std::uint32_t at) {
  Word word;
  std::memcpy(&word, memory + at, sizeof(word));
  return word;
}
static std::uint32_t LoadShared32(std::uint32_t at) { return Load<std::uint32_t>(at); }
static uint2 LoadShared64(std::uint32_t at) { return Load<uint2>(at); }
static uint4 LoadShared128(std::uint32_t at) { return Load<uint4>(at); }
static std::uint32_t __funnelshift_r(std::uint32_t low, std::uint32_t high, unsigned by) {
  return static_cast<std::uint32_t>((std::uint64_t{high} << 32 | low) >> by);
}
static std::uint32_t Permute(std::uint32_t low, std::uint32_t high, std::uint32_t selectors) {
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t selector = selectors >> 4 * i & 15;
    const std::uint32_t byte = (selector & 4 ? high : low) >> selector % 4 * 8 & 0xFF;
    result |= (selector & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << 8 * i;
  }
  return result;
}
#include "decode.cuh"
using namespace slidesparse::hopper;
extern "C" __attribute__((visibility("default")))
void decode(const std::uint8_t* block, std::uint32_t* words) {
  constexpr std::uint32_t kTable = 7168;  // a multiple of its size
  std::memcpy(memory, block, kCodedBytes);
  for (int code = 0; code < kSelectorBytes / 4; ++code) {
    const std::uint32_t selectors = Selectors(code);
    std::memcpy(memory + kTable + 4 * code, &selectors, 4);
  }
  for (threadIdx.x = 0; threadIdx.x < 128; ++threadIdx.x) {
    CodedHalf now, later;
    CodedOperands halves[2];
    const std::uint32_t codes = kCodedValueBytes;
    LoadHalves(now, later, 0, LoadShared32(codes + 4 * threadIdx.x), memory[codes + 512 + threadIdx.x],
               kTable);
    Expand(now, halves[0]);
    Expand(later, halves[1]);
    std::memcpy(words + 16 * threadIdx.x, halves, 64);
  }
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_source(tmp_path_factory.mktemp("pack"), AROUND)


def compile_source(folder: Path, source: str) -> ctypes.CDLL:
    (folder / "around.cpp").write_text(source)
    command = [*compiler(), *FLAGS, "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command += [f"-I{sources_folder() / 'hopper'}", str(folder / "around.cpp")]
    compile_with([*command, "-o", str(folder / "pack.so")])
    return ctypes.CDLL(str(folder / "pack.so"))


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Return the device of weights; on the CPU, the kernel of the C++ compiler packs them."""
    if request.param == "cuda":
        require_hopper()
        yield torch.device("cuda", 0)
        return
    compiled = request.getfixturevalue("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "FUNCTIONS", {name: native.FUNCTIONS[name] for name in PACKERS})
        native.declare_functions(compiled)
        patch.setattr(native, "library", lambda: compiled)
        patch.setattr(cuda, "on_device", lambda index: nullcontext())
        patch.setattr(cuda, "current_stream", lambda index: 0)
        yield torch.device("cpu")


def packed_by_torch(weight: Tensor, pattern: SlidePattern, phase: int) -> Tensor:
    """Pack by torch, with -0.0 replaced by +0.0."""
    if pattern == SIX_EIGHT:
        weight = torch.where(is_zero(weight), 0, raw(weight)).view(weight.dtype)
        return hopper_packers.pack_coded(weight, phase)
    windows = slide(weight, pattern, phase)
    return hopper_packers.pack(torch.where(is_zero(windows), 0, raw(windows)).view(windows.dtype))


def check(weight: Tensor, pattern: SlidePattern, phase: int, device: torch.device) -> None:
    packed, broken = pack_by_kernel(weight.to(device), pattern, phase)
    assert broken == 0
    assert_same_bits(packed.cpu(), packed_by_torch(weight, pattern, phase))


@DTYPES
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(("pattern", "n", "k", "phase"), GEOMETRIES)
def test_pack_kernel_equals_reference(
    device: torch.device, pattern: str, n: int, k: int, phase: int, fill: str, dtype: torch.dtype
) -> None:
    parsed = SlidePattern.parse(pattern)
    check(obeying(parsed, n, k, phase, dtype, fill, n + k), parsed, phase, device)


@DTYPES
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (1, 1), (70, 300), (200, 900)])
def test_dense_blocks_stay(device: torch.device, n: int, k: int, share: float, dtype: torch.dtype) -> None:
    """Blocks that obey 2:4 are packed so, the others keep every weight; nothing else is written."""
    generator = torch.Generator().manual_seed(n + k)
    weight = torch.randint(-100, 100, (n, k), generator=generator, dtype=torch.int8)
    weight[weight == -128] = 0
    sparse = torch.rand(-(-n // 64), -(-k // 128), generator=generator) < share
    sparse = sparse.repeat_interleave(64, 0).repeat_interleave(128, 1)[:n, :k]
    weight = torch.where(sparse, prune(weight.float(), TWO_FOUR).to(torch.int8), weight)
    codes = (weight.float() / 16).to(FP8) if dtype == FP8 else weight
    codes = torch.where(is_zero(codes), 0, raw(codes)).view(dtype)
    dense = dense_blocks(codes)
    if share == 0.0 and k > 4:
        assert bool(dense.all())
    packed, broken = pack_by_kernel(codes.to(device), TWO_FOUR, dense=dense.to(device))
    assert broken == 0
    assert_same_bits(packed.cpu(), hopper_packers.pack_mixed(codes, dense))


@given(cases(dtypes=(INT8, FP8), lengths=STORED_BY_CODERS))
@settings(max_examples=60)
def test_pack_kernel_equals_reference_on_random_weights(device: torch.device, case: Case) -> None:
    check(case.weight, case.pattern, case.phase, device)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize(("pattern", "n", "k", "phase"), LARGE)
def test_pack_kernel_at_model_sizes(pattern: str, n: int, k: int, phase: int, dtype: torch.dtype) -> None:
    require_hopper()
    parsed = SlidePattern.parse(pattern)
    check(obeying(parsed, n, k, phase, dtype, "mixed", n + k), parsed, phase, torch.device("cuda", 0))


@DTYPES
def test_pack_kernel_handles_every_2_4_mask(device: torch.device, dtype: torch.dtype) -> None:
    """Each mask occurs at every place of a block, and nothing is written around the output."""
    masks = torch.tensor([mask for mask in product((0, 1), repeat=4) if sum(mask) <= 2], dtype=torch.int8)
    order = torch.arange(64 * 64) * 7 % len(masks)  # 7 and 11 have no common divisor
    values = torch.randint(1, 127, (64, 256), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    weight = (masks[order].reshape(64, 256) * values).view(dtype).to(device)
    size = 2 * hopper_packers.BLOCK_BYTES
    packed = torch.full((size + 32,), 0x55, dtype=torch.uint8, device=device)
    broken = torch.zeros(3, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    native.call(
        "pack",
        *(native.integers(Layer.of(64, 256, TWO_FOUR, 0, dtype, 128)), weight.data_ptr(), 256, False),
        *(packed[16:].data_ptr(), broken[1:].data_ptr(), None),
    )
    assert_same_bits(packed[16:-16].cpu(), hopper_packers.pack(weight.cpu()))
    assert bool((packed[:16] == 0x55).all())
    assert bool((packed[-16:] == 0x55).all())
    assert broken.tolist() == [0, 0, 0]


def test_coded_weights_are_decoded(tmp_path: Path) -> None:
    """The registers of dense wgmmas, by the PTX ISA, hold the weight with its columns in the quantizer's order."""
    weight = obeying(SIX_EIGHT, 64, 128, 0, INT8, "mixed", 8)
    block = hopper_packers.pack_coded(weight)
    words = torch.zeros(128, 4, 4, dtype=torch.int32)
    decoder = compile_source(tmp_path, DECODER)
    decoder.decode(ctypes.c_void_p(block.data_ptr()), ctypes.c_void_p(words.data_ptr()))
    # thread: w, g, t; wgmma; register: half of the columns, r; byte -> rows w, r, g; columns wgmma, half, t, byte
    registers = words.view(torch.int8).view(4, 8, 4, 4, 2, 2, 4).permute(0, 5, 1, 3, 4, 2, 6)
    layer = Layer.of(64, 128, SIX_EIGHT, 0, INT8, 128, Hopper.coded)
    assert_same_bits(registers.reshape(64, 128), coded_order(weight, layer))


def test_pack_kernel_counts_violations(device: torch.device) -> None:
    weight = torch.zeros(70, 40, dtype=INT8)
    weight[69, 8:15], weight[3, 0:8] = 1, 1
    assert pack_by_kernel(weight.to(device), SlidePattern(8))[1] == 2
    assert pack_by_kernel(weight.to(device), SlidePattern(6))[1] == 1  # columns 0 to 5 of row 3
    weight[69, 8] = weight[3, 0] = 0
    assert pack_by_kernel(weight.to(device), SlidePattern(8))[1] == 1  # seven of eight


def test_pack_kernel_reads_strided_weights(device: torch.device) -> None:
    pattern = SlidePattern(8)
    weight = obeying(pattern, 70, 200, 0, INT8, "mixed", 3).to(device)
    expected = packed_by_torch(weight.cpu(), pattern, 0)
    wide, tall = torch.ones(70, 333, dtype=INT8, device=device), weight.t().contiguous()
    wide[:, 7:207] = weight
    for strided in (wide[:, 7:207], tall.t()):
        packed, broken = pack_by_kernel(strided, pattern)
        assert broken == 0
        assert_same_bits(packed.cpu(), expected)


def test_pack_handles_empty_and_refuses_other_dtypes(device: torch.device) -> None:
    for n, k in ((0, 64), (3, 0)):
        weight = torch.zeros(n, k, dtype=INT8, device=device)
        packed, broken = pack_by_kernel(weight, SlidePattern(8))
        assert (packed.numel(), broken) == (0, 0)
    for dtype in (torch.int16, torch.bfloat16):
        with pytest.raises(LibraryError, match=str(dtype)):
            Hopper().pack(torch.zeros(64, 64, dtype=dtype), SlidePattern(8))


def test_only_unpruned_int8_experts_wait_for_a_flag() -> None:
    """VLLM 0.25.1's results differ in INT8, as it does not quantize their inputs, and nobody has asked for others."""
    refused = {
        (dtype, pattern, asked): reason
        for dtype, pattern, asked in product((INT8, FP8), (SlidePattern(8), None), (False, True))
        if (reason := Hopper().refuses_experts(8, pattern, dtype, asked))
    }
    assert list(refused) == [(INT8, None, False)]
    assert "SLIDESPARSE=require" in refused[INT8, None, False]
