// What the kernels are given, and the arithmetic of their epilogues.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "format.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace slidesparse::hopper {

constexpr int kProducts = kBlockColumns / kProductColumns;
constexpr int kMostSplits = 8;

enum class Float : int { kNone = 0, kBFloat16 = 1, kFloat16 = 2, kFloat32 = 3 };

// Divides numbers below 2^31 by a multiplication.
struct Divisor {
  int divisor = 1;
  std::uint32_t factor = 0, shift = 0;

  Divisor() = default;
  explicit Divisor(int by) : divisor(by) {
    if (by == 1) return;
    int bits = 0;
    while ((std::int64_t{1} << bits) < by) ++bits;
    factor = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + bits)) + by - 1) / by);
    shift = bits - 1;
  }
  __device__ __forceinline__ int Of(int number) const {
    return divisor == 1 ? number : static_cast<int>(__umulhi(number, factor) >> shift);
  }
};

struct Arguments {
  CUtensorMap q;    // boxes of kTokens / sharers rows by kBlockColumns, swizzled by 128 bytes
  CUtensorMap out;  // of the streaming kernel, if `wide`: boxes of staged tokens by kStripRows
  const std::uint8_t* weight;  // [strips][blocks][kPackedBytes]
  void* y;
  const float* scale_w;
  const float* scale_x;
  const void* bias;
  int m, n;
  int strips, blocks;  // of the packed weight
  int sharers, splits;
  int shared_tokens;  // that each of the sharers loads
  int stages;
  Float out_type, bias_type;
  bool wide;                               // rows of the output begin at multiples of 16 bytes
  int across, by_token;                    // tiles by out-features and by tokens
  Divisor together;                        // tiles by tokens whose weights are read together
  Divisor last;                            // those of the last group, if fewer
  Divisor of_group;                        // tiles of a group
  std::uint64_t keep_weight, keep_tokens;  // how long L2 is to keep them
  std::uint64_t keep_out;

  // Of the streaming kernel.
  std::uint32_t* flags;  // kFlagWords for each block of threads, all zero between launches
  uint4* partials;       // [blocks of threads][kTokens / 8][consumers]
  int rounds;            // whole tiles of each block of threads, before the shared ones
  std::uint32_t units;   // the shared tiles x blocks
  bool seeded;  // no tile is shared by more than two: the second's sums begin with the first's
};

constexpr int kFlagWords = 8;            // one sector of 32 bytes
constexpr int kMostStreamBlocks = 1024;  // of threads, of a launch of the streaming kernel

__device__ __forceinline__ float Widen(const void* from, int index, Float type) {
  if (type == Float::kFloat32) return LoadNow(static_cast<const float*>(from) + index);
  const std::uint16_t bits = LoadNow(static_cast<const std::uint16_t*>(from) + index);
  return type == Float::kBFloat16 ? __bfloat162float(__ushort_as_bfloat16(bits))
                                  : __half2float(__ushort_as_half(bits));
}

__device__ __forceinline__ std::uint16_t Narrow(float value, Float type) {
  return type == Float::kBFloat16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                                  : __half_as_ushort(__float2half_rn(value));
}

// Two, the first in the low half.
__device__ __forceinline__ std::uint32_t Narrow(float first, float second, Float type) {
  std::uint32_t both;
  if (type == Float::kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  }
  return both;
}

__device__ __forceinline__ int Add(std::uint32_t bits, int sum) {
  return static_cast<int>(bits) + sum;
}
__device__ __forceinline__ float Add(std::uint32_t bits, float sum) {
  return __fadd_rn(sum, __uint_as_float(bits));
}
__device__ __forceinline__ float ToFloat(int sum) { return __int2float_rn(sum); }
__device__ __forceinline__ float ToFloat(float sum) { return sum; }

template <class Type>
__device__ __forceinline__ typename Type::Sum FromBits(std::uint32_t bits) {
  return Add(bits, typename Type::Sum{});
}

__device__ __forceinline__ std::uint32_t ToBits(int sum) { return static_cast<std::uint32_t>(sum); }
__device__ __forceinline__ std::uint32_t ToBits(float sum) { return __float_as_uint(sum); }

}  // namespace slidesparse::hopper
