// The epilogue: y = sum * scale_w * scale_x + bias, for a warp's 16 out-features at a time. Outputs
// are transposed through shared memory, because a thread's accumulators are of two out-features
// while out-features are contiguous in the output.

#pragma once

#include "common.cuh"

namespace slidesparse::hopper {

// The scales and biases of a thread's two out-features, loaded before the main loop to hide their
// latency.
struct RowScales {
  float weight[2] = {}, bias[2] = {-0.0f, -0.0f};  // x + -0.0 is x for every x, -0.0 included

  // Loads those of out-features `first` and `first` + 8, of an expert if weights are grouped.
  __device__ __forceinline__ void Load(const GemmArguments& arguments, int first, int expert = 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + 8 * r;
      if (row < arguments.n) {
        weight[r] = LoadVolatile(arguments.scale_w + std::int64_t{expert} * arguments.n + row);
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

// The same for a row of an expert, with the router's weight, in the order of vLLM's Triton kernel.
__device__ __forceinline__ float ApplyExpertScales(float sum, float weight, float token,
                                                   float router) {
  return __fmul_rn(__fmul_rn(__fmul_rn(sum, token), weight), router);
}

// The scales of a tile's tokens, distributed over each warp: lane l holds tokens l, l + 32, ...
template <int kTokens>
struct TokenScales {
  static constexpr int kWords = (kTokens + 31) / 32;
  float scales[kWords] = {};

  __device__ __forceinline__ void Load(const GemmArguments& arguments, int first) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int token = i * 32 + threadIdx.x % 32;
      if (token < kTokens && first + token < arguments.m) {
        scales[i] = LoadVolatile(arguments.scale_x + first + token);
      }
    }
  }

  // Loads the routers' weights of `rows` rows of an expert instead.
  __device__ __forceinline__ void LoadRouters(const GemmArguments& arguments, int first, int rows) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int token = i * 32 + threadIdx.x % 32;
      scales[i] = 1.0f;
      if (arguments.slot_scale != nullptr && token < min(kTokens, rows)) {
        scales[i] =
            LoadVolatile(arguments.slot_scale + LoadGlobal32(arguments.order + first + token));
      }
    }
  }

  // The scales of the two tokens of a thread among tokens 8 j to 8 j + 7.
  __device__ __forceinline__ float2 Pair(int j) const {
    const int lane = 8 * j % 32 + threadIdx.x % 4 * 2;
    const float mine = scales[8 * j / 32];
    return make_float2(__shfl_sync(0xFFFFFFFF, mine, lane),
                       __shfl_sync(0xFFFFFFFF, mine, lane + 1));
  }
};

// Writes the outputs of tokens 8 j to 8 j + 7, computed from sums 4 j to 4 j + 3, to staging
// memory. In lane l < 16 `to` is the address of token 8 j + l % 8, out-features 8 (l / 8) and
// following.
template <class Type, bool kExperts = false, int kSums>
__device__ __forceinline__ void StageTokens(const GemmArguments& arguments, const RowScales& scales,
                                            const std::uint32_t (&sums)[kSums], int j,
                                            float2 token_scales, std::uint32_t to,
                                            float2 routers = {}) {
  std::uint32_t rows[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float first = ToFloat(FromBits<Type>(sums[4 * j + 2 * r]));
    const float second = ToFloat(FromBits<Type>(sums[4 * j + 2 * r + 1]));
    const float weight = scales.weight[r], bias = scales.bias[r];
    rows[r] = kExperts
                  ? Narrow(ApplyExpertScales(first, weight, token_scales.x, routers.x),
                           ApplyExpertScales(second, weight, token_scales.y, routers.y),
                           arguments.out_type)
                  : Narrow(ApplyScales(first, weight, token_scales.x, bias),
                           ApplyScales(second, weight, token_scales.y, bias), arguments.out_type);
  }
  StoreTransposed(to, rows[0], rows[1]);
}

// Stores eight neighbouring out-features of a token, from `row` < n on.
__device__ __forceinline__ void StoreOutputs(const GemmArguments& arguments, int token, int row,
                                             const uint4& packed) {
  std::uint16_t* to = static_cast<std::uint16_t*>(arguments.y) +
                      static_cast<std::size_t>(token) * arguments.n + row;
  if (arguments.vector_stores) {
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
