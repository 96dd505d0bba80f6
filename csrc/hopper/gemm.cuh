// The clustered kernel: Y [M, N] = (q [M, K'] @ W [N, K'].T) * scale_w [N] * scale_x [M] + bias
// [N], W in packed 2:4 form, where the parts of a tile's K' are summed inside a cluster.
//
// A block of threads computes 64 kStrips out-features by kTokens tokens over a part of K'.  The
// blocks of a cluster are `sharers` x `splits`:
//
//   - sharers have neighbouring out-features and the same tokens and columns, so that each loads a
//     part of the activations for all of them;
//   - splits have the same out-features and tokens and different columns; at the end each sums a
//     part of the outputs, in a fixed order, reading the others' shared memory.
//
// The weight does not depend on the kernel before this one, so its first stages are on their way
// before that one has ended.

#pragma once

#include "ring.cuh"

namespace slidesparse::hopper {

template <int kStrips, int kTokens>
struct SplitShape : Shape<kStrips, kTokens> {
  using S = Shape<kStrips, kTokens>;
  static constexpr int kPitch =
      S::kRows + 4;  // of sums in shared memory, in words: no two threads of a warp in one bank
  static constexpr int kSumBytes = kTokens * kPitch * 4;

  // Ring or sums, then scale_w, bias, scale_x, then barriers.
  static __host__ __device__ constexpr int RingBytes(int stages) {
    const int ring = stages * S::kStageBytes;
    return ring > kSumBytes ? ring : kSumBytes;
  }
  static __host__ __device__ constexpr int SharedBytes(int stages) {
    return RingBytes(stages) + (2 * S::kRows + kTokens) * 4 + 2 * stages * 8;
  }
};

// Where a block of threads stands.
struct Place {
  int split, strip, token;  // the first strip and token
  int begin, end;           // its blocks of columns
  Sharers sharers;
};

template <int kStrips, int kTokens>
__device__ __forceinline__ Place FindPlace(const Arguments& arguments) {
  const int cluster = arguments.sharers * arguments.splits;
  const int rank = blockIdx.x % cluster;
  const int sharer = rank % arguments.sharers;
  Place place;
  place.split = rank / arguments.sharers;
  place.sharers = {place.split * arguments.sharers, arguments.sharers, sharer};
  place.strip = (blockIdx.x / cluster * arguments.sharers + sharer) * kStrips;
  place.token = blockIdx.y * kTokens;
  place.begin = arguments.blocks * place.split / arguments.splits;
  place.end = arguments.blocks * (place.split + 1) / arguments.splits;
  return place;
}

// What the epilogue needs of a thread's vectors, loaded before the products so that it need not
// wait.
struct Scales {
  float weight = 0.0f, bias = 0.0f, token = 0.0f;
};

template <int kStrips, int kTokens>
__device__ __forceinline__ Scales LoadScales(const Arguments& arguments, const Place& place) {
  using S = SplitShape<kStrips, kTokens>;
  static_assert(kTokens <= S::kConsumers);
  Scales scales;
  const int row = place.strip * kStripRows + threadIdx.x;
  if (threadIdx.x < S::kRows && row < arguments.n) {
    scales.weight = LoadNow(arguments.scale_w + row);
    if (arguments.bias_type != Float::kNone) {
      scales.bias = Widen(arguments.bias, row, arguments.bias_type);
    }
  }
  WaitForPredecessors();
  const int token = place.token + threadIdx.x;
  if (threadIdx.x < kTokens && token < arguments.m)
    scales.token = LoadNow(arguments.scale_x + token);
  return scales;
}

// Sums to shared memory: words [kTokens][kPitch].
template <int kStrips, int kTokens>
__device__ __forceinline__ void StoreSums(std::uint32_t to, int tokens,
                                          const std::uint32_t (&sums)[kTokens / 2]) {
  using S = SplitShape<kStrips, kTokens>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp * 16 + lane / 4, first = lane % 4 * 2;
  const std::uint32_t base = to + (first * S::kPitch + row) * 4;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (8 * j + first + e < tokens) {
        const std::uint32_t at = base + (8 * j + e) * S::kPitch * 4;
        StoreShared32(at, sums[4 * j + e]);
        StoreShared32(at + 8 * 4, sums[4 * j + 2 + e]);
      }
    }
  }
}

// Eight neighbouring out-features of a token: the sums of all splits, scaled.
template <class Type>
__device__ __forceinline__ void SumSplits(std::uint32_t at, int sharer, int sharers, int splits,
                                          float (&values)[8]) {
  typename Type::Sum sums[8] = {};
  constexpr int kAtOnce = 4;
#pragma unroll
  for (int first = 0; first < kMostSplits; first += kAtOnce) {
    if (first < splits) {
      uint4 found[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < splits) {
          const std::uint32_t there = MapToBlock(at, (first + i) * sharers + sharer);
          found[i][0] = LoadCluster128(there);
          found[i][1] = LoadCluster128(there + 16);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < splits) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            sums[4 * h] = Add(found[i][h].x, sums[4 * h]);
            sums[4 * h + 1] = Add(found[i][h].y, sums[4 * h + 1]);
            sums[4 * h + 2] = Add(found[i][h].z, sums[4 * h + 2]);
            sums[4 * h + 3] = Add(found[i][h].w, sums[4 * h + 3]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = ToFloat(sums[i]);
}

// This block's part of the outputs, eight neighbours a thread at a time.
template <class Type, int kStrips, int kTokens>
__device__ __forceinline__ void StoreOutputs(const Arguments& arguments, const Place& place,
                                             int tokens, std::uint32_t sums, const float* scale_w,
                                             const float* bias, const float* scale_x) {
  using S = SplitShape<kStrips, kTokens>;
  constexpr int kChunks = S::kRows / 8;
  const int items = tokens * kChunks;
  const int begin = items * place.split / arguments.splits;
  const int end = items * (place.split + 1) / arguments.splits;
  for (int i = begin + threadIdx.x; i < end; i += S::kConsumers) {
    const int token = i / kChunks, row = i % kChunks * 8;
    const int first = place.strip * kStripRows + row;
    if (first >= arguments.n) continue;
    float values[8];
    SumSplits<Type>(sums + (token * S::kPitch + row) * 4, place.sharers.mine, arguments.sharers,
                    arguments.splits, values);
    const float by_token = scale_x[token];
    std::uint16_t codes[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float scaled = __fmul_rn(values[e], scale_w[row + e]);
      const float value = arguments.bias_type == Float::kNone
                              ? __fmul_rn(scaled, by_token)
                              : __fmaf_rn(scaled, by_token, bias[row + e]);
      codes[e] = Narrow(value, arguments.out_type);
    }
    std::uint16_t* to = static_cast<std::uint16_t*>(arguments.out) +
                        static_cast<std::size_t>(place.token + token) * arguments.n + first;
    if (arguments.wide) {
      uint4 packed;
      packed.x = codes[0] | static_cast<std::uint32_t>(codes[1]) << 16;
      packed.y = codes[2] | static_cast<std::uint32_t>(codes[3]) << 16;
      packed.z = codes[4] | static_cast<std::uint32_t>(codes[5]) << 16;
      packed.w = codes[6] | static_cast<std::uint32_t>(codes[7]) << 16;
      *reinterpret_cast<uint4*>(to) = packed;
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (first + e < arguments.n) to[e] = codes[e];
      }
    }
  }
}

template <class Type, int kStrips, int kTokens>
__global__ void __launch_bounds__(Shape<kStrips, kTokens>::kThreads,
                                  Shape<kStrips, kTokens>::kResident)
    Gemm(const __grid_constant__ Arguments arguments) {
  using S = SplitShape<kStrips, kTokens>;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  float* const scale_w = reinterpret_cast<float*>(shared + S::RingBytes(arguments.stages));
  float* const bias = scale_w + S::kRows;
  float* const scale_x = bias + S::kRows;
  const std::uint32_t ring = SharedAddress(shared);
  const std::uint32_t full = SharedAddress(scale_x + kTokens);
  const std::uint32_t empty = full + 8 * arguments.stages;
  const Place place = FindPlace<kStrips, kTokens>(arguments);
  const bool alone = arguments.sharers * arguments.splits == 1;
  const bool producer = threadIdx.x >= S::kConsumers;
  Producer<kStrips, kTokens> feed(arguments, place.sharers, {place.strip, place.token, place.begin},
                                  place.end - place.begin, ring, full, empty);

  if (threadIdx.x == S::kConsumers) {
    PrefetchMap(&arguments.q);
    for (int i = 0; i < arguments.stages; ++i) {
      BarrierInit(full + 8 * i, 1);
      BarrierInit(empty + 8 * i, kStrips * 4 * arguments.sharers);
    }
    BarrierInitFence();
    feed.Begin();
  }
  __syncwarp();
  __syncthreads();
  if (!alone) {  // the barriers' initialization has its own fence
    ClusterArriveRelaxed();
    ClusterWait();
  }

  if (producer) {
    if (threadIdx.x == S::kConsumers) {
      WaitForPredecessors();
      feed.Run();
    }
    __syncwarp();
    if (!alone) {  // as often as the consumers
      ClusterArriveRelaxed();
      ClusterWait();
      ClusterArriveRelaxed();
      ClusterWait();
    }
  } else {
    const Scales scales = LoadScales<kStrips, kTokens>(arguments, place);
    std::uint32_t sums[kTokens / 2];
    Clear(sums);
    if (place.end > place.begin) {
      Consumer<Type, kStrips, kTokens>(arguments, place.sharers, ring, full, empty)
          .Run(place.end - place.begin, sums);
    }

    const int tokens = min(kTokens, arguments.m - place.token);
    if (threadIdx.x < S::kRows) {
      scale_w[threadIdx.x] = scales.weight;
      bias[threadIdx.x] = scales.bias;
    }
    if (threadIdx.x < kTokens) scale_x[threadIdx.x] = scales.token;
    NamedBarrier(1, S::kConsumers);  // nobody reads the ring any more
    StoreSums<kStrips, kTokens>(ring, tokens, sums);
    if (alone) {
      NamedBarrier(1, S::kConsumers);
    } else {
      __syncwarp();
      ClusterArrive();
      ClusterWait();
    }
    StoreOutputs<Type, kStrips, kTokens>(arguments, place, tokens, ring, scale_w, bias, scale_x);
    if (!alone) {  // shared memory stays until the others have read it
      __syncwarp();
      ClusterArriveRelaxed();
      ClusterWait();
    }
  }
}

}  // namespace slidesparse::hopper
