// How the quantizer reads rows, and its prologue: the norm or activation that is fused into it.
//
// A prologue computes in float32 and rounds once, to x's type, as Inductor compiles vLLM's RMSNorm
// and SiluAndMul.  SiLU has Inductor's bits; a norm sums its mean in another order.  Experts' SiLU
// is rounded before it is multiplied, as vLLM's CUDA kernel does.

#pragma once

#include "common.cuh"

namespace slidesparse::hopper {

constexpr int kVectorCodes = 8;   // columns that a thread loads and quantizes together
constexpr int kElementBytes = 2;  // of an element of x; addresses in bytes take fewer registers

// What is quantized.
enum class Prologue : int {
  kNone = 0,        // x
  kRmsNorm = 1,     // x / sqrt(mean_k x^2 + eps) * gain
  kAddRmsNorm = 2,  // the same of total = x + residual, which is stored
  kSiluMul = 3,     // silu(x[m, k]) * x[m, K + k]
};

struct QuantizeArguments {
  const void* x;         // [m, k], with kSiluMul [m, 2 k]; rows `stride` elements apart
  std::uint8_t* q;       // [m, columns]
  float* scale;          // [m]
  std::uint32_t* flags;  // of the GEMM that follows, which are set to zero
  const void* residual;  // kAddRmsNorm: [m, k], rows `residual_stride` elements apart
  void* total;           // kAddRmsNorm: [m, k]
  const void* gain;      // norms: [k].  residual, total and gain have x's type
  std::int64_t stride, residual_stride;
  float eps;
  int k, columns;
  int phase;
  int group,
      group_codes;  // columns that are ordered or lifted together, and how many codes they are
  int padded;       // columns of a row, in whole groups and with the phase
  int parts;        // CTAs that share a row
  int part;         // padded columns of one part
  int part_codes;   // columns of q that these become
  int flag_count;   // kFlagWords each
  // Experts only: rows are those of `offsets` [experts + 1].  Row i is made of row order[i] / top_k
  // of x.
  const std::int32_t *offsets, *order;
  int experts, top_k;  // top_k 0: x's rows are in order
};

// Eight consecutive columns of a row, as they are in memory.
template <Float kInput>
struct Vector {
  std::uint32_t words[4] = {};

  __device__ __forceinline__ float Get(int i) const {
    const std::uint32_t word = words[i / 2];
    if (kInput == Float::kBFloat16) {
      return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
    }
    return __half2float(__ushort_as_half(static_cast<std::uint16_t>(i % 2 ? word >> 16 : word)));
  }

  // The values, rounded to the type.
  __device__ __forceinline__ static Vector Of(const float (&values)[kVectorCodes]) {
    Vector rounded;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rounded.words[i] = Narrow(values[2 * i], values[2 * i + 1], kInput);
    }
    return rounded;
  }

  // The largest magnitude.  fmaxf ignores NaN, so it counts as zero.
  __device__ __forceinline__ float AbsMax() const {
    float absmax = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectorCodes; ++i) absmax = fmaxf(absmax, fabsf(Get(i)));
    return absmax;
  }
};

// Loads columns `column` to `column` + 7 of the padded row; columns that x does not have are zero.
// kWide: by vector loads, for phase 0, a multiple of 8 columns, and rows aligned to 16 bytes.
template <Float kInput, bool kWide>
__device__ __forceinline__ Vector<kInput> LoadVector(const QuantizeArguments& arguments,
                                                     const std::uint8_t* row, int column) {
  Vector<kInput> vector;
  if (kWide) {
    if (column < arguments.k) {
      const uint4 found =
          *reinterpret_cast<const uint4*>(row + std::int64_t{column} * kElementBytes);
      vector.words[0] = found.x;
      vector.words[1] = found.y;
      vector.words[2] = found.z;
      vector.words[3] = found.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVectorCodes; ++i) {
      const int at = column + i - arguments.phase;
      if (at < 0 || at >= arguments.k) continue;
      vector.words[i / 2] |=
          static_cast<std::uint32_t>(reinterpret_cast<const std::uint16_t*>(row)[at])
          << (i % 2 * 16);
    }
  }
  return vector;
}

// The inverse: columns that x does not have are not written.
template <Float kInput, bool kWide>
__device__ __forceinline__ void StoreVector(const QuantizeArguments& arguments, std::uint8_t* row,
                                            int column, const Vector<kInput>& vector) {
  if (kWide) {
    if (column < arguments.k) {
      *reinterpret_cast<uint4*>(row + std::int64_t{column} * kElementBytes) =
          make_uint4(vector.words[0], vector.words[1], vector.words[2], vector.words[3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVectorCodes; ++i) {
      const int at = column + i - arguments.phase;
      if (at < 0 || at >= arguments.k) continue;
      reinterpret_cast<std::uint16_t*>(row)[at] =
          static_cast<std::uint16_t>(vector.words[i / 2] >> (i % 2 * 16));
    }
  }
}

// What Triton compiles `/` to, for the same bits.
__device__ __forceinline__ float DivideApproximately(float dividend, float divisor) {
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(dividend), "f"(divisor));
  return quotient;
}

// A row of x, from which the prologue makes the row that is quantized.
template <Float kInput, bool kWide, Prologue kPrologue>
struct Row {
  static constexpr bool kIsNorm =
      kPrologue == Prologue::kRmsNorm || kPrologue == Prologue::kAddRmsNorm;

  const QuantizeArguments& arguments;
  const std::uint8_t *x, *other;  // the residual, or the second half of x
  std::uint8_t* total;

  __device__ __forceinline__ Row(const QuantizeArguments& given, std::int64_t row)
      : arguments(given),
        x(static_cast<const std::uint8_t*>(given.x) + row * given.stride * kElementBytes),
        other(kPrologue == Prologue::kAddRmsNorm
                  ? static_cast<const std::uint8_t*>(given.residual) +
                        row * given.residual_stride * kElementBytes
                  : x + std::int64_t{given.k} * kElementBytes),
        total(static_cast<std::uint8_t*>(given.total) + row * given.k * kElementBytes) {}

  // Eight consecutive columns of what the prologue reads.
  struct Source {
    Vector<kInput> x, other;

    // The term that a norm squares.
    __device__ __forceinline__ float Sum(int i) const {
      return kPrologue == Prologue::kAddRmsNorm ? __fadd_rn(x.Get(i), other.Get(i)) : x.Get(i);
    }
  };

  __device__ __forceinline__ Source Load(int column) const {
    Source source;
    source.x = LoadVector<kInput, kWide>(arguments, x, column);
    if (kPrologue == Prologue::kAddRmsNorm || kPrologue == Prologue::kSiluMul) {
      source.other = LoadVector<kInput, kWide>(arguments, other, column);
    }
    return source;
  }

  // Returns the sum of squares for a norm; with a residual it also stores x + residual.
  __device__ __forceinline__ float Squares(const Source& source, int column) const {
    float sums[kVectorCodes], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectorCodes; ++i) {
      sums[i] = source.Sum(i);
      squares = __fmaf_rn(sums[i], sums[i], squares);
    }
    if (kPrologue == Prologue::kAddRmsNorm) {
      StoreVector<kInput, kWide>(arguments, total, column, Vector<kInput>::Of(sums));
    }
    return squares;
  }

  // Returns the values to quantize; `factor` is the norm's 1 / sqrt(mean x^2 + eps).
  __device__ __forceinline__ Vector<kInput> Make(const Source& source, int column,
                                                 float factor) const {
    if (kPrologue == Prologue::kNone) return source.x;
    float made[kVectorCodes];
    if (kIsNorm) {
      const auto gain = LoadVector<kInput, kWide>(
          arguments, static_cast<const std::uint8_t*>(arguments.gain), column);
#pragma unroll
      for (int i = 0; i < kVectorCodes; ++i) {
        made[i] = __fmul_rn(__fmul_rn(source.Sum(i), factor), gain.Get(i));
      }
    } else {
      const bool experts = arguments.offsets != nullptr;
#pragma unroll
      for (int i = 0; i < kVectorCodes; ++i) {
        const float gate = source.x.Get(i), divisor = __fadd_rn(expf(-gate), 1.0f);
        float silu = experts ? __fdiv_rn(gate, divisor) : DivideApproximately(gate, divisor);
        if (experts) silu = Vector<kInput>{{Narrow(silu, 0.0f, kInput)}}.Get(0);
        made[i] = __fmul_rn(silu, source.other.Get(i));
      }
    }
    return Vector<kInput>::Of(made);
  }
};

}  // namespace slidesparse::hopper
