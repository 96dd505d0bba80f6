// Quantizes tokens and lifts them into the windows of a pattern, in one launch:
//
//     scale[m] = max_k |x[m, k]| / Q        q[m, 4 j + i] = round(x[m, column(j) + i] / scale[m])
//
// Of a slid weight, word j of a row, four codes, is window l = j % (L/2 - 1) of block j / (L/2 -
// 1), for L = 4 or 6; its columns begin at L block + 2 l - phase.  L = 4 lifts nothing.  A coded
// weight has columns in another order.  The arithmetic is that of `slidesparse.quantize` ("cuda"),
// bit for bit.
//
// One CTA processes a row, or a cluster if rows are long.  Each CTA loads its part of the row into
// registers, and loads again what they do not hold.  It writes the part's codes to shared memory in
// the order of the row and gathers the windows from there, so that both loads and stores are
// coalesced.
//
// A norm or an activation may be fused in front: see row.cuh.  The flags of a stream-K GEMM that
// follows are cleared here: their memory may be in use until the kernels before have ended.

#pragma once

#include "row.cuh"
#include "runtime.cuh"

namespace slidesparse::hopper {

constexpr int kMaxParts = 8;       // CTAs that share a row: the portable cluster size
constexpr int kStoreCodes = 16;    // codes of one store
constexpr int kPartUnit = 8;       // groups of a part, if they are small: whole vectors and stores
constexpr int kCodedColumns = 32;  // whose order a coded weight changes: those of a wgmma
constexpr int kMaxQuantizeThreads = 1024;
constexpr float kMaxInt8 = 127.0f, kMaxFp8 = 448.0f;
constexpr float kMinFp8Scale = 1.0f / (448.0f * 512.0f);

// Rounds to the nearest integer, ties to even and NaN to 0, and saturates to 8 bits.  The first
// code is in the lowest byte.
__device__ __forceinline__ std::uint32_t Int8Word(float a, float b, float c, float d) {
  std::uint32_t word;
  asm("{\n.reg .b32 i0, i1, i2, i3, high;\n"
      "cvt.rni.s32.f32 i0, %1;\ncvt.rni.s32.f32 i1, %2;\n"
      "cvt.rni.s32.f32 i2, %3;\ncvt.rni.s32.f32 i3, %4;\n"
      "cvt.pack.sat.s8.s32.b32 high, i3, i2, 0;\n"
      "cvt.pack.sat.s8.s32.b32 %0, i1, i0, high;\n}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

// Two E4M3 codes in the low half of a word: rounded to nearest, ties to even, saturated to 448, NaN
// as 0x7F.
__device__ __forceinline__ std::uint32_t Fp8Pair(float low, float high) {
  std::uint32_t pair;
  asm("{\n.reg .b16 both;\n"
      "cvt.rn.satfinite.e4m3x2.f32 both, %2, %1;\n"
      "cvt.u32.u16 %0, both;\n}"
      : "=r"(pair)
      : "f"(low), "f"(high));
  return pair;
}

// A row's scale, and the conversion of its values to codes.
template <bool kFp8>
struct RowScale {
  float scale, factor, negated_scale;

  bool away;  // whether INT8 codes round halves away from zero

  // Tokens of experts are quantized as by vLLM's Triton kernel, others as by its CUDA kernels.
  __device__ __forceinline__ RowScale(float absmax, bool experts) : away(experts) {
    if (!kFp8 && experts) {
      absmax = fmaxf(absmax, 1e-10f);
      scale = DivideApproximately(absmax, kMaxInt8);
      factor = DivideApproximately(kMaxInt8, absmax);
    } else if (kFp8) {
      scale = fmaxf(__fdiv_rn(absmax, kMaxFp8), kMinFp8Scale);
      factor = __fdiv_rn(1.0f, scale);
      // With an infinite scale the quotient is zero, but its remainder would be NaN.
      negated_scale = isinf(scale) ? 0.0f : -scale;
    } else {
      scale = __fdiv_rn(absmax, kMaxInt8);
      factor = absmax == 0.0f ? 0.0f : __fdiv_rn(kMaxInt8, absmax);
    }
  }

  // value / scale, rounded so that its E4M3 code is that of the IEEE quotient, without a division:
  // value * (1 / scale), corrected once by its exact remainder.  The result never
  // differs from the IEEE quotient near a tie of E4M3; far below 2^-100, where the remainder is not
  // exact, both codes are zero.  The sum would lose the sign of -0.0, so the value's sign is set.
  __device__ __forceinline__ float Quotient(float value) const {
    const float approximate = __fmul_rn(value, factor);
    const float remainder = __fmaf_rn(approximate, negated_scale, value);
    const float quotient = __fmaf_rn(remainder, factor, approximate);
    return __uint_as_float(__float_as_uint(quotient) | (__float_as_uint(value) & 0x80000000u));
  }

  // The codes of four consecutive values, the first in the lowest byte.
  template <Float kInput>
  __device__ __forceinline__ std::uint32_t Word(const Vector<kInput>& vector, int first) const {
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = vector.Get(first + i);
      values[i] = kFp8 ? Quotient(value) : __fmul_rn(value, factor);
      // 0x1.fffffep-2 is the largest number below a half.
      if (!kFp8 && away) {
        values[i] = truncf(__fadd_rn(values[i], copysignf(0x1.fffffep-2f, values[i])));
      }
    }
    if (!kFp8) return Int8Word(values[0], values[1], values[2], values[3]);
    // Combined by arithmetic, because the compiler may merge the conversions with a move of halves.
    return Fp8Pair(values[0], values[1]) + Fp8Pair(values[2], values[3]) * 65536u;
  }
};

// All-gathers a word of every warp of the row's CTAs into `words` of each CTA, in the order of the
// parts.  All CTAs of the cluster must have started, as their shared memory is written.
__device__ __forceinline__ void Exchange(std::uint32_t of_warp, std::uint32_t* words, int part,
                                         int parts) {
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (parts == 1) {
    if (lane == 0) words[warp] = of_warp;
    __syncthreads();
  } else {
    if (lane < parts) {
      StoreCluster32(MapToCta(SharedAddress(words + part * warps + warp), lane), of_warp);
    }
    __syncwarp();
    ClusterArrive();
    ClusterWait();
  }
}

// Reduces the largest magnitude over a row.  Non-negative floats compare as their bits do.
__device__ __forceinline__ float RowAbsMax(float mine, std::uint32_t* words, int part, int parts) {
  Exchange(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(mine)), words, part, parts);
  std::uint32_t found = 0;
  for (int i = threadIdx.x % 32; i < parts * static_cast<int>(blockDim.x / 32); i += 32) {
    found = max(found, words[i]);
  }
  return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, found));
}

__device__ __forceinline__ float WarpSum(float mine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    mine = __fadd_rn(mine, __shfl_xor_sync(0xFFFFFFFFu, mine, offset));
  }
  return mine;
}

// Reduces a sum over a row in a fixed order, so that every thread and every run has the same bits.
__device__ __forceinline__ float RowSum(float mine, std::uint32_t* words, int part, int parts) {
  Exchange(__float_as_uint(WarpSum(mine)), words, part, parts);
  float found = 0.0f;
  for (int i = threadIdx.x % 32; i < parts * static_cast<int>(blockDim.x / 32); i += 32) {
    found = __fadd_rn(found, __uint_as_float(words[i]));
  }
  return WarpSum(found);
}

// Gathers words 4 i to 4 i + 3 of the part's codes, which `codes` has in the order of the row.
__device__ __forceinline__ uint4 LiftWords(const QuantizeArguments& arguments,
                                           const std::uint8_t* codes, int i) {
  const uint4* const vectors = reinterpret_cast<const uint4*>(codes);
  if (arguments.group == 4) return vectors[i];
  if (arguments.group == kCodedColumns) {
    // Of eight words the even ones first: see CodedConsumer.
    const uint4 low = vectors[i / 2 * 2], high = vectors[i / 2 * 2 + 1];
    return i % 2 ? make_uint4(low.y, low.w, high.y, high.w)
                 : make_uint4(low.x, low.z, high.x, high.z);
  }
  // 4:6: the windows of two blocks begin at columns 0, 2, 6 and 8.
  std::uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const std::uint8_t* const window = codes + 12 * i + w / 2 * 6 + w % 2 * 2;
    const auto* const pairs = reinterpret_cast<const std::uint16_t*>(window);
    words[w] = pairs[0] | std::uint32_t{pairs[1]} << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A thread keeps kVectors of its vectors in registers and loads the others again in each pass.
template <Float kInput, bool kFp8, bool kWide, int kVectors, Prologue kPrologue>
__global__ void __launch_bounds__(kMaxQuantizeThreads)
    Quantize(const __grid_constant__ QuantizeArguments arguments) {
  using RowOf = Row<kInput, kWide, kPrologue>;
  constexpr int kWords = kMaxParts * kMaxQuantizeThreads / 32;
  extern __shared__ __align__(16) std::uint8_t codes[];
  __shared__ std::uint32_t maxima[kWords], sums[RowOf::kIsNorm ? kWords : 1];
  const int parts = arguments.parts;
  const int part = blockIdx.x % parts;
  const std::int64_t row_index = blockIdx.x / parts;
  const int begin = part * arguments.part;
  const int padded = min(arguments.part, arguments.padded - begin);
  // Zero or less if this CTA has no columns.
  const int vectors = (padded + kVectorCodes - 1) / kVectorCodes;
  const int held = kVectors * blockDim.x;
  if (parts > 1) ClusterArriveRelaxed();
  const bool grouped = !RowOf::kIsNorm && arguments.offsets != nullptr;
  // The GEMM loads weights meanwhile, and waits for the codes itself.  Offsets, which say whose
  // weights, may come from the preceding kernel.
  if (!grouped) LaunchDependents();
  WaitForPredecessors();
  if (grouped) LaunchDependents();
  std::int64_t source = row_index;
  if (grouped) {
    if (row_index >= LoadGlobal32(arguments.offsets + arguments.experts)) return;
    if (arguments.top_k > 0) source = LoadGlobal32(arguments.order + row_index) / arguments.top_k;
  }
  const RowOf row(arguments, source);
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < arguments.flag_count; i += blockDim.x) {
      arguments.flags[i * kFlagWords] = 0;
    }
  }

  typename RowOf::Source sources[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * blockDim.x + threadIdx.x;
    if (at < vectors) sources[i] = row.Load(begin + at * kVectorCodes);
  }
  float factor = 1.0f;
  if (RowOf::kIsNorm) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = i * blockDim.x + threadIdx.x;
      if (at < vectors) squares += row.Squares(sources[i], begin + at * kVectorCodes);
    }
    for (int at = held + threadIdx.x; at < vectors; at += blockDim.x) {
      const int column = begin + at * kVectorCodes;
      squares += row.Squares(row.Load(column), column);
    }
    __syncwarp();
    if (parts > 1) ClusterWait();
    const float sum = RowSum(squares, sums, part, parts);
    factor = rsqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(arguments.k)), arguments.eps));
  }
  Vector<kInput> mine[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * blockDim.x + threadIdx.x;
    if (at < vectors) mine[i] = row.Make(sources[i], begin + at * kVectorCodes, factor);
  }
  const auto again = [&](int at) {
    const int column = begin + at * kVectorCodes;
    return row.Make(row.Load(column), column, factor);
  };
  float absmax = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) absmax = fmaxf(absmax, mine[i].AbsMax());
  for (int at = held + threadIdx.x; at < vectors; at += blockDim.x) {
    absmax = fmaxf(absmax, again(at).AbsMax());
  }
  __syncwarp();
  if (!RowOf::kIsNorm && parts > 1) ClusterWait();
  const RowScale<kFp8> scale(RowAbsMax(absmax, maxima, part, parts), grouped);

  uint2* const to = reinterpret_cast<uint2*>(codes);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * blockDim.x + threadIdx.x;
    if (at < vectors) to[at] = make_uint2(scale.Word(mine[i], 0), scale.Word(mine[i], 4));
  }
  for (int at = held + threadIdx.x; at < vectors; at += blockDim.x) {
    const auto vector = again(at);
    to[at] = make_uint2(scale.Word(vector, 0), scale.Word(vector, 4));
  }
  __syncthreads();
  const int first = part * arguments.part_codes;
  const int stores = min(arguments.part_codes, arguments.columns - first) / kStoreCodes;
  uint4* const out = reinterpret_cast<uint4*>(arguments.q + row_index * arguments.columns + first);
  for (int i = threadIdx.x; i < stores; i += blockDim.x) out[i] = LiftWords(arguments, codes, i);
  if (part == 0 && threadIdx.x == 0) arguments.scale[row_index] = scale.scale;
}

using QuantizeKernel = void (*)(QuantizeArguments);

// The kernel for a type of x and of codes, vector loads, and vectors a thread.  Each prologue has a
// translation unit of its own, of quantize_instance.cu.
template <Prologue kPrologue>
QuantizeKernel FindQuantize(Float input, bool fp8, bool wide, int vectors);

// Validates k, columns, phase and the length of the pattern, which a layer determines, computes
// from them what a call does not determine, and loads the kernels on the current device.  Returns
// null, or an error message.
const char* PrepareQuantize(QuantizeArguments& arguments, int length, bool fp8);

// Enqueues the quantization of m rows.  `arguments` are those of PrepareQuantize with the tensors.
const char* EnqueueQuantize(QuantizeArguments arguments, std::int64_t m, Float input, bool fp8,
                            Prologue prologue, cudaStream_t stream);

}  // namespace slidesparse::hopper
