// The streaming kernel: Y [M, N] = (q [M, K'] @ W [N, K'].T) * scale_w [N] * scale_x [M] + bias
// [N], W in packed 2:4 form, where every block of threads multiplies the same number of stages.
//
// All tiles' stages stand in one row, and block i of the grid takes the i-th equal part of it, from
// the end of the row:
//
//     tiles    |        0        |        1        |        2        |        3        |
//     blocks   |      3     |      2      |      1      |     0     |
//
// A block works its part from left to right.  What it has of a tile whose beginning is another's
// goes to `partials`, in the order of its registers, and its flag up.  Who has a tile's beginning
// adds the others' in the order of columns and stores the tile.  A block waits for blocks of lower
// number only, which the GPU starts first; none waits in a circle, whatever else runs.
//
// The ring runs on from tile to tile, so that a tile's outputs are stored while the next one's
// weights come in.

#pragma once

#include "ring.cuh"

namespace slidesparse::hopper {

constexpr int kPartialsAtOnce = 2;  // of 8 tokens: what the registers have room for

template <int kStrips, int kTokens>
struct StreamShape : Shape<kStrips, kTokens> {
  using S = Shape<kStrips, kTokens>;
  // Outputs on their way out: of each warpgroup rows of 64 out-features, 16 bits each, and 16 bytes
  // more, so that the eight rows of a matrix lie in different banks; then its tokens' scales.
  static constexpr int kPitch = kStripRows * 2 + 16;
  static constexpr int kOutputBytes = kTokens * kPitch;
  static constexpr int kStagingBytes = kOutputBytes + kTokens * 4;
  static constexpr int kTokenScales = (kTokens + 127) / 128;  // of a thread
  static constexpr int kPartialBytes = S::kRows * kTokens * 4;

  // Ring, staging, then barriers.
  static __host__ __device__ constexpr int SharedBytes(int stages) {
    return stages * S::kStageBytes + kStrips * kStagingBytes + 2 * stages * 8;
  }
};

// A part of a tile: its blocks of columns `begin` to `end`.
struct Segment {
  int strip, token;  // the tile's first
  int begin, end;
};

// What the epilogue needs of a thread's vectors, loaded before the products so that it need not
// wait.
template <int kTokens>
struct StreamScales {
  float weight[2] = {}, bias[2] = {};  // of the thread's two rows
  float token[(kTokens + 127) / 128] = {};

  __device__ __forceinline__ void Load(const Arguments& arguments, const Segment& segment) {
    const int thread = threadIdx.x % 128;
    const int first =
        (segment.strip + threadIdx.x / 128) * kStripRows + thread / 32 * 16 + thread % 32 / 4;
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
#pragma unroll
    for (int i = 0; i < (kTokens + 127) / 128; ++i) {
      const int at = segment.token + i * 128 + thread;
      if (i * 128 + thread < kTokens && at < arguments.m) {
        token[i] = LoadNow(arguments.scale_x + at);
      }
    }
  }
};

__device__ __forceinline__ float ApplyScales(float sum, float weight, float token, float bias,
                                             bool biased) {
  const float scaled = __fmul_rn(sum, weight);
  return biased ? __fmaf_rn(scaled, token, bias) : __fmul_rn(scaled, token);
}

// A warpgroup's strip of a whole tile, by way of its staging memory.
template <class Type, int kStrips, int kTokens>
__device__ __forceinline__ void StoreStrip(const Arguments& arguments, const Segment& segment,
                                           std::uint32_t staging,
                                           const StreamScales<kTokens>& scales,
                                           const std::uint32_t (&sums)[kTokens / 2]) {
  using S = StreamShape<kStrips, kTokens>;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;
  const int tokens = min(kTokens, arguments.m - segment.token);
  const std::uint32_t outputs = staging + group * S::kStagingBytes;
  const std::uint32_t token_scales = outputs + S::kOutputBytes;
  const int barrier = 2 + group;
  NamedBarrier(barrier, 128);  // the tile before has been read
#pragma unroll
  for (int i = 0; i < S::kTokenScales; ++i) {
    if (i * 128 + thread < kTokens) {
      StoreShared32(token_scales + (i * 128 + thread) * 4, __float_as_uint(scales.token[i]));
    }
  }
  NamedBarrier(barrier, 128);
  const bool biased = arguments.bias_type != Float::kNone;
  const std::uint32_t to = outputs + lane % 8 * S::kPitch + (warp * 16 + lane / 8 % 2 * 8) * 2;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    if (8 * j < tokens) {
      const float2 by_token = LoadSharedFloats(token_scales + (8 * j + lane % 4 * 2) * 4);
      std::uint32_t rows[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float first = ToFloat(FromBits<Type>(sums[4 * j + 2 * r]));
        const float second = ToFloat(FromBits<Type>(sums[4 * j + 2 * r + 1]));
        rows[r] = Narrow(ApplyScales(first, scales.weight[r], by_token.x, scales.bias[r], biased),
                         ApplyScales(second, scales.weight[r], by_token.y, scales.bias[r], biased),
                         arguments.out_type);
      }
      StoreTransposed(to + 8 * j * S::kPitch, rows[0], rows[1]);
    }
  }
  NamedBarrier(barrier, 128);
  const int row = (segment.strip + group) * kStripRows + thread % 8 * 8;
  const int stored = row < arguments.n ? tokens : 0;
  std::uint16_t* out = static_cast<std::uint16_t*>(arguments.out) +
                       static_cast<std::size_t>(segment.token) * arguments.n + row;
  for (int token = thread / 8; token < stored; token += 16) {
    const uint4 packed = LoadShared128(outputs + token * S::kPitch + thread % 8 * 16);
    std::uint16_t* at = out + static_cast<std::size_t>(token) * arguments.n;
    if (arguments.wide) {
      *reinterpret_cast<uint4*>(at) = packed;
    } else {
      const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (row + e < arguments.n) at[e] = static_cast<std::uint16_t>(words[e / 2] >> (e % 2 * 16));
      }
    }
  }
  __syncwarp();
}

// The i-th of equal parts of all units.
__device__ __forceinline__ int PartBegin(const Arguments& arguments, int part, int parts) {
  return static_cast<int>(static_cast<std::uint64_t>(arguments.units) * part / parts);
}

template <int kStrips, int kTokens>
__device__ __forceinline__ uint4* PartialOf(const Arguments& arguments, int block) {
  using S = Shape<kStrips, kTokens>;
  return arguments.partials + static_cast<std::size_t>(block) * (kTokens / 8) * S::kConsumers +
         threadIdx.x;
}

// Begins sums with what block `block` has of a tile, if `seeded`.  The condition is on the loads:
// of a branch around them the compiler makes a second set of sums.
template <int kStrips, int kTokens>
__device__ __forceinline__ void Seed(const Arguments& arguments, bool seeded, int block, int tokens,
                                     std::uint32_t (&sums)[kTokens / 2]) {
  using S = Shape<kStrips, kTokens>;
  const uint4* from = PartialOf<kStrips, kTokens>(arguments, block);
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    LoadGlobal128If(seeded && 8 * j < tokens, from + j * S::kConsumers, sums[4 * j],
                    sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
  }
}

template <class Type, int kStrips, int kTokens>
__device__ __forceinline__ void AddPartial(const Arguments& arguments, int block, int tokens,
                                           std::uint32_t (&sums)[kTokens / 2]) {
  using S = Shape<kStrips, kTokens>;
  constexpr int kAtOnce = kTokens / 8 < kPartialsAtOnce ? kTokens / 8 : kPartialsAtOnce;
  const uint4* from = PartialOf<kStrips, kTokens>(arguments, block);
#pragma unroll
  for (int first = 0; first < kTokens / 8; first += kAtOnce) {
    uint4 found[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (8 * (first + j) < tokens) found[j] = LoadGlobal128(from + (first + j) * S::kConsumers);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (8 * (first + j) < tokens) {
        const std::uint32_t words[4] = {found[j].x, found[j].y, found[j].z, found[j].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          std::uint32_t& sum = sums[4 * (first + j) + e];
          sum = ToBits(Add(words[e], FromBits<Type>(sum)));
        }
      }
    }
  }
}

template <int kStrips, int kTokens>
__device__ __forceinline__ void StorePartial(const Arguments& arguments, int tokens,
                                             const std::uint32_t (&sums)[kTokens / 2]) {
  using S = Shape<kStrips, kTokens>;
  uint4* to = PartialOf<kStrips, kTokens>(arguments, blockIdx.x);
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    if (8 * j < tokens) {
      StoreGlobal128(to + j * S::kConsumers,
                     make_uint4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
    }
  }
  NamedBarrier(1, S::kConsumers);
  if (threadIdx.x == 0) RaiseFlag(arguments.flags + blockIdx.x * kFlagWords);
  __syncwarp();
}

// Waits, with all consumers, for what block `block` has of a tile.
template <int kStrips, int kTokens>
__device__ __forceinline__ void WaitForPartial(const Arguments& arguments, int block) {
  if (threadIdx.x == 0) TakeFlag(arguments.flags + block * kFlagWords);
  __syncwarp();
  NamedBarrier(1, Shape<kStrips, kTokens>::kConsumers);
}

// Barriers are initialized, in all blocks of the cluster; the initialization has its own fence.
__device__ __forceinline__ void SyncBlocks(const Arguments& arguments) {
  __syncwarp();
  __syncthreads();
  if (arguments.sharers > 1) {
    ClusterArriveRelaxed();
    ClusterWait();
  }
}

template <class Type, int kStrips, int kTokens>
__global__ void __launch_bounds__(Shape<kStrips, kTokens>::kThreads,
                                  Shape<kStrips, kTokens>::kResident)
    GemmStream(const __grid_constant__ Arguments arguments) {
  using S = StreamShape<kStrips, kTokens>;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  const std::uint32_t ring = SharedAddress(shared);
  const std::uint32_t staging = ring + arguments.stages * S::kStageBytes;
  const std::uint32_t full = staging + kStrips * S::kStagingBytes;
  const std::uint32_t empty = full + 8 * arguments.stages;
  const Sharers sharers = {0, arguments.sharers, static_cast<int>(blockIdx.x % arguments.sharers)};
  const int parts = gridDim.x / arguments.sharers;
  const int part = parts - 1 - blockIdx.x / arguments.sharers;
  int unit = PartBegin(arguments, part, parts);
  const int end = PartBegin(arguments, part + 1, parts);
  const int by_token = (arguments.m + kTokens - 1) / kTokens;
  Walk walk;
  {
    const int tile = unit / arguments.blocks;
    walk.strip = (tile / by_token * arguments.sharers + sharers.mine) * kStrips;
    walk.token = tile % by_token * kTokens;
    walk.block = unit - tile * arguments.blocks;
  }
  if (threadIdx.x >= S::kConsumers) {
    const bool leader = threadIdx.x == S::kConsumers;
    Producer<kStrips, kTokens> feed(arguments, sharers, walk, end - unit, ring, full, empty);
    if (leader) {
      PrefetchMap(&arguments.q);
      for (int i = 0; i < arguments.stages; ++i) {
        BarrierInit(full + 8 * i, 1);
        BarrierInit(empty + 8 * i, kStrips * 4 * arguments.sharers);
      }
      BarrierInitFence();
      feed.Begin();
    }
    SyncBlocks(arguments);
    if (leader) {
      WaitForPredecessors();
      feed.Run();
    }
  } else {
    SyncBlocks(arguments);
    WaitForPredecessors();
    Consumer<Type, kStrips, kTokens> consumer(arguments, sharers, ring, full, empty);
    while (unit < end) {
      const int count = min(arguments.blocks - walk.block, end - unit);
      const Segment segment = {walk.strip, walk.token, walk.block, walk.block + count};
      const bool mine = segment.begin == 0;
      const bool shared_tile = segment.end < arguments.blocks;
      const int tokens = min(kTokens, arguments.m - segment.token);
      StreamScales<kTokens> scales;
      if (mine) scales.Load(arguments, segment);
      std::uint32_t sums[kTokens / 2];
      Clear(sums);
      const bool seeded = mine && shared_tile && arguments.seeded;
      const int before = blockIdx.x - arguments.sharers;
      if (seeded) WaitForPartial<kStrips, kTokens>(arguments, before);
      Seed<kStrips, kTokens>(arguments, seeded, before, tokens, sums);
      consumer.Run(count, sums);
      if (!mine) {
        StorePartial<kStrips, kTokens>(arguments, tokens, sums);
      } else {
        if (shared_tile && !arguments.seeded) {
          const int tile_end = unit + arguments.blocks;
          for (int other = part + 1; PartBegin(arguments, other, parts) < tile_end; ++other) {
            const int block = blockIdx.x - (other - part) * arguments.sharers;
            WaitForPartial<kStrips, kTokens>(arguments, block);
            AddPartial<Type, kStrips, kTokens>(arguments, block, tokens, sums);
          }
        }
        StoreStrip<Type, kStrips, kTokens>(arguments, segment, staging, scales, sums);
      }
      unit += count;
      walk.block += count - 1;
      walk.Advance<kTokens>(arguments, kStrips * arguments.sharers);
    }
  }
  if (arguments.sharers >
      1) {  // shared memory and barriers stay until the others are through with them
    __syncwarp();
    ClusterArriveRelaxed();
    ClusterWait();
  }
}

}  // namespace slidesparse::hopper
