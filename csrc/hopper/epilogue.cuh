// From sums to outputs, a warp's 16 out-features at a time: scales and bias, then through shared
// memory, as a thread's registers hold two out-features and the outputs' rows are tokens.

#pragma once

#include "common.cuh"

namespace slidesparse::hopper {

// Of the two out-features that a thread has sums of; loaded before the products, so that the
// epilogue need not wait.
struct RowScales {
  float weight[2] = {}, bias[2] = {-0.0f, -0.0f};  // which added changes nothing

  // Of out-features `first` and `first` + 8.
  __device__ __forceinline__ void Load(const Arguments& arguments, int first) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + 8 * r;
      if (row < arguments.n) {
        weight[r] = LoadNow(arguments.scale_w + row);
        if (arguments.bias_type != Float::kNone) {
          bias[r] = Widen(arguments.bias, row, arguments.bias_type);
        }
      }
    }
  }
};

__device__ __forceinline__ float ApplyScales(float sum, float weight, float token, float bias) {
  return __fmaf_rn(__fmul_rn(sum, weight), token, bias);
}

// Of the tokens of a tile, each in a lane of every warp.
template <int kTokens>
struct TokenScales {
  static constexpr int kWords = (kTokens + 31) / 32;
  float of[kWords] = {};

  __device__ __forceinline__ void Load(const Arguments& arguments, int first) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int token = i * 32 + threadIdx.x % 32;
      if (token < kTokens && first + token < arguments.m) {
        of[i] = LoadNow(arguments.scale_x + first + token);
      }
    }
  }

  // Those of the two tokens that a thread has sums of, among tokens 8 j to 8 j + 7.
  __device__ __forceinline__ float2 Eight(int j) const {
    const int lane = 8 * j % 32 + threadIdx.x % 4 * 2;
    const float mine = of[8 * j / 32];
    return make_float2(__shfl_sync(0xFFFFFFFF, mine, lane),
                       __shfl_sync(0xFFFFFFFF, mine, lane + 1));
  }
};

// Eight tokens' outputs, of sums 4 j to 4 j + 3, to staging memory: `to` is where lane l < 16 has
// token 8 j + l % 8, out-features 8 (l / 8) on.
template <class Type, int kSums>
__device__ __forceinline__ void StageTokens(const Arguments& arguments, const RowScales& scales,
                                            const std::uint32_t (&sums)[kSums], int j,
                                            float2 by_token, std::uint32_t to) {
  std::uint32_t rows[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float first = ToFloat(FromBits<Type>(sums[4 * j + 2 * r]));
    const float second = ToFloat(FromBits<Type>(sums[4 * j + 2 * r + 1]));
    rows[r] = Narrow(ApplyScales(first, scales.weight[r], by_token.x, scales.bias[r]),
                     ApplyScales(second, scales.weight[r], by_token.y, scales.bias[r]),
                     arguments.out_type);
  }
  StoreTransposed(to, rows[0], rows[1]);
}

// Eight neighbouring out-features of a token, from `row` < n on.
__device__ __forceinline__ void StoreOutputs(const Arguments& arguments, int token, int row,
                                             const uint4& packed) {
  std::uint16_t* to = static_cast<std::uint16_t*>(arguments.y) +
                      static_cast<std::size_t>(token) * arguments.n + row;
  if (arguments.wide) {
    *reinterpret_cast<uint4*>(to) = packed;
    return;
  }
  const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (row + e < arguments.n) to[e] = static_cast<std::uint16_t>(words[e / 2] >> (e % 2 * 16));
  }
}

}  // namespace slidesparse::hopper
