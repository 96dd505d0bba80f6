// The arguments of the GEMM kernels, and conversions between number types.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "format.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace slidesparse::hopper {

constexpr int kWgmmas = kBlockColumns / kWgmmaColumns;  // of a 2:4 block
constexpr int kDenseWgmmas = kBlockColumns / kDenseWgmmaColumns;

enum class Float : int { kNone = 0, kBFloat16 = 1, kFloat16 = 2, kFloat32 = 3 };

// Division of non-negative numbers below 2^31 by an invariant divisor: a multiplication and a
// shift.
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
  __device__ __forceinline__ int Divide(int number) const {
    return divisor == 1 ? number : static_cast<int>(__umulhi(number, factor) >> shift);
  }
};

constexpr int kFlagWords = 8;          // of stream-K: one sector of 32 bytes for each CTA
constexpr int kMaxStreamKCtas = 1024;  // of one launch
constexpr int kMaxExperts = 512;       // of a grouped launch

struct GemmArguments {
  CUtensorMap q;    // boxes of kTokens / multicast rows x kBlockColumns, swizzled by 128 bytes
  CUtensorMap out;  // stream-K with `vector_stores`: boxes of staged tokens x kStripRows
  const std::uint8_t* weight;  // packed
  void* y;
  const float* scale_w;
  const float* scale_x;
  const void* bias;
  int m, n;
  int strips, k_blocks;  // of the packed weight
  int multicast;         // CTAs that share their activations: a multicast group
  int splits;            // split-K: CTAs of a cluster that divide K'
  int multicast_tokens;  // tokens whose activations each CTA of a multicast group loads
  int stages;            // of the ring
  Float out_type, bias_type;
  bool vector_stores;  // rows of the output begin at multiples of 16 bytes
  int n_tiles, m_tiles;
  // The tile scheduler visits tiles in groups of token tiles, so that all tiles of a group use a
  // block of the weight while L2 holds it.
  Divisor group_m_tiles;       // token tiles of a group
  Divisor last_group_m_tiles;  // token tiles of the last group, which may have fewer
  Divisor group_tiles;         // all tiles of a group
  std::uint64_t weight_policy, token_policy, output_policy;  // L2 eviction

  // Stream-K only.
  std::uint32_t* flags;         // kFlagWords for each CTA, zero before the launch
  uint4* partials;              // [CTAs][kTokens / 8][consumer threads]
  int whole_tiles;              // tiles that each CTA computes alone, before its shared ones
  std::uint32_t shared_stages;  // stages of all shared tiles together
  bool two_per_tile;            // no tile is shared by more than two CTAs

  // Grouped only.
  const std::int32_t* offsets;  // [experts + 1]: the rows of q of each expert
  const std::int32_t* order;    // the slots of the rows
  const float* slot_scale;      // by slot, or null
  int experts;
  std::int64_t expert_bytes;  // of an expert's weight
};

__device__ __forceinline__ float Widen(const void* from, int index, Float type) {
  if (type == Float::kFloat32) return LoadVolatile(static_cast<const float*>(from) + index);
  const std::uint16_t bits = LoadVolatile(static_cast<const std::uint16_t*>(from) + index);
  return type == Float::kBFloat16 ? __bfloat162float(__ushort_as_bfloat16(bits))
                                  : __half2float(__ushort_as_half(bits));
}

// Packs two numbers into one word, the first in the low half.
__device__ __forceinline__ std::uint32_t Narrow(float first, float second, Float type) {
  std::uint32_t both;
  if (type == Float::kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  }
  return both;
}

// The sum of the numbers of a warp's lanes up to this one.
__device__ __forceinline__ int SumToLane(int number) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFF, number, distance);
    if (static_cast<int>(threadIdx.x % 32) >= distance) number += other;
  }
  return number;
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
