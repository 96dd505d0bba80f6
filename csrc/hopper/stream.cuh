// The streaming kernel: Y [M, N] = (q [M, K'] @ W [N, K'].T) * scale_w [N] * scale_x [M] + bias
// [N], W in packed 2:4 form, where every block of threads multiplies the same number of stages.
//
// Of many tiles every block first takes whole ones in turn, all blocks side by side.  The stages of
// the rest, less than two tiles a block, stand in one row, and block i of the grid takes the i-th
// equal part of it, from the end of the row:
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

#include <type_traits>

#include "epilogue.cuh"
#include "ring.cuh"

namespace slidesparse::hopper {

constexpr int kPartialsAtOnce = 2;  // of 8 tokens: what the registers have room for

// Tokens whose outputs are staged at a time; the wide kernel's shared memory is the ring's.
constexpr int StagedTokens(int tokens) { return tokens > 128 ? 16 : tokens > 64 ? 32 : tokens; }

template <int kStrips, int kTokens>
struct StreamShape : Shape<kStrips, kTokens> {
  using S = Shape<kStrips, kTokens>;
  // Of each warpgroup rows of 64 out-features, 16 bits each, swizzled by 128 bytes.
  static constexpr int kStagedTokens = StagedTokens(kTokens);
  static constexpr int kOutputBytes = kStagedTokens * kStripRows * 2;
  // So many that the copy engine need not be waited for while the next tokens are staged.
  static constexpr int kBuffers = kTokens > 128 ? 4 : kTokens > 64 ? 2 : 1;
  static constexpr int kStagingBytes = kStrips * kBuffers * kOutputBytes;

  // Ring, staging, barriers, then what would take registers.
  static __host__ __device__ constexpr int SharedBytes(int stages) {
    return stages * S::kStageBytes + kStagingBytes + 2 * stages * 8 + sizeof(Turns);
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
  RowScales rows;
  TokenScales<kTokens> tokens;

  __device__ __forceinline__ void Load(const Arguments& arguments, const Segment& segment) {
    const int thread = threadIdx.x % 128;
    rows.Load(arguments, (segment.strip + threadIdx.x / 128) * kStripRows + thread / 32 * 16 +
                             thread % 32 / 4);
    tokens.Load(arguments, segment.token);
  }
};

// Waits, with all threads of a warpgroup, until its staging memory has been read.
__device__ __forceinline__ void WaitForBuffers(int barrier) {
  if (threadIdx.x % 128 == 0) StoreWaitRead<0>();
  __syncwarp();
  NamedBarrier(barrier, 128);
}

// A warpgroup's strip of a whole tile, by way of its staging memory, from which the copy engine
// stores it while the next tokens are staged, or the next tile begins.
template <class Type, int kStrips, int kTokens>
__device__ __forceinline__ void StoreStrip(const Arguments& arguments, const Segment& segment,
                                           std::uint32_t staging,
                                           const StreamScales<kTokens>& scales,
                                           const std::uint32_t (&sums)[kTokens / 2]) {
  using S = StreamShape<kStrips, kTokens>;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;
  const int tokens = min(kTokens, arguments.m - segment.token);
  const std::uint32_t outputs = staging + group * S::kBuffers * S::kOutputBytes;
  const int barrier = 2 + group;
  const std::uint32_t to = outputs + lane % 8 * 128 + ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
  const int row = (segment.strip + group) * kStripRows;
  const bool leader = thread == 0;
  // Of 8 tokens; with more of them shuffles overlap, which takes registers.
  constexpr int kAtOnce = kTokens > 64 ? S::kStagedTokens / 8 : 1;
#pragma unroll
  for (int first = 0; first < kTokens; first += S::kStagedTokens) {
    const int buffer = first / S::kStagedTokens % S::kBuffers * S::kOutputBytes;
    if (first >= tokens) {
      WaitForBuffers(barrier);  // as the next tile begins with the first one
      break;
    }
    if (S::kBuffers == 1) WaitForBuffers(barrier);
#pragma unroll
    for (int eight = 0; eight < S::kStagedTokens / 8; eight += kAtOnce) {
      if (kTokens <= 64 && 8 * eight >= tokens) break;
      float2 by_token[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) by_token[j] = scales.tokens.Eight(first / 8 + eight + j);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        StageTokens<Type>(arguments, scales.rows, sums, first / 8 + eight + j, by_token[j],
                          to + buffer + 8 * (eight + j) * 128);
      }
    }
    CopyFence();
    if (S::kBuffers > 1 && leader) StoreWaitRead<S::kBuffers - 2>();  // so the next buffer is free
    __syncwarp();
    NamedBarrier(barrier, 128);
    if (arguments.wide) {
      if (leader && row < arguments.n) {
        StoreTile(&arguments.out, row, segment.token + first, outputs + buffer, arguments.keep_out);
      }
    } else {
      const int at = row + thread % 8 * 8;
      const int stored = at < arguments.n ? min(S::kStagedTokens, tokens - first) : 0;
      for (int token = thread / 8; token < stored; token += 16) {
        const std::uint32_t from = outputs + buffer + token * 128 + (thread % 8 ^ token % 8) * 16;
        StoreOutputs(arguments, segment.token + first + token, at, LoadShared128(from));
      }
    }
    __syncwarp();
  }
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
  const std::uint32_t full = staging + S::kStagingBytes;
  const std::uint32_t empty = full + 8 * arguments.stages;
  Turns& later = *reinterpret_cast<Turns*>(shared + (empty + 8 * arguments.stages - ring));
  const Sharers sharers = {0, arguments.sharers, static_cast<int>(blockIdx.x % arguments.sharers)};
  const int parts = gridDim.x / arguments.sharers;
  const int number = blockIdx.x / arguments.sharers;
  const int part = parts - 1 - number;
  const int begin = PartBegin(arguments, part, parts);
  const int end = PartBegin(arguments, part + 1, parts);
  int left = arguments.rounds * arguments.blocks + end - begin;
  const int strips = kStrips * arguments.sharers;
  const Turns turns = {arguments.rounds * parts + begin / arguments.blocks,
                       begin % arguments.blocks, number, parts};
  Walk walk;
  walk.Begin(arguments, turns, kTokens, strips);
  if (threadIdx.x >= S::kConsumers) {
    DealRegisters<S, true>();
    const bool feeds = WarpNumber() == S::kConsumers / 32;
    Producer<kStrips, kTokens> feed(arguments, sharers, walk, turns, left, ring, full, empty);
    if (feeds) {
      if (ElectOne()) {
        later = turns;
        PrefetchMap(&arguments.q);
        for (int i = 0; i < arguments.stages; ++i) {
          BarrierInit(full + 8 * i, 1);
          BarrierInit(empty + 8 * i, kStrips * 4 * arguments.sharers);
        }
        BarrierInitFence();
      }
      __syncwarp();
      feed.Begin();
    }
    SyncBlocks(arguments);
    if (feeds) {
      WaitForPredecessors();
      feed.Run();
    }
  } else {
    DealRegisters<S, false>();
    SyncBlocks(arguments);
    WaitForPredecessors();
    using Multiplier = std::conditional_t<S::kWide, WideConsumer<Type, kStrips, kTokens>,
                                          NarrowConsumer<Type, kStrips, kTokens>>;
    Multiplier consumer(arguments, sharers, ring, full, empty);
    std::uint32_t sums[kTokens / 2];
    Clear(sums);
    while (left > 0) {
      const int count = min(arguments.blocks - walk.block, left);
      const Segment segment = {walk.strip + kStrips * sharers.mine, walk.token, walk.block,
                               walk.block + count};
      const bool mine = segment.begin == 0;
      const bool shared_tile = segment.end < arguments.blocks;
      const int tokens = min(kTokens, arguments.m - segment.token);
      StreamScales<kTokens> scales;
      if (mine) scales.Load(arguments, segment);
      if (!S::kWide) Clear(sums);
      const bool seeded = mine && shared_tile && arguments.seeded;
      const int before = blockIdx.x - arguments.sharers;
      if (seeded) WaitForPartial<kStrips, kTokens>(arguments, before);
      Seed<kStrips, kTokens>(arguments, seeded, before, tokens, sums);
      if constexpr (S::kWide) {
        consumer.Run(count, seeded, sums);
      } else {
        consumer.Run(count, sums);
      }
      if (!mine) {
        StorePartial<kStrips, kTokens>(arguments, tokens, sums);
      } else {
        if (shared_tile && !arguments.seeded) {
          const int tile_end = end - left + arguments.blocks;
          for (int other = part + 1; PartBegin(arguments, other, parts) < tile_end; ++other) {
            const int block = blockIdx.x - (other - part) * arguments.sharers;
            WaitForPartial<kStrips, kTokens>(arguments, block);
            AddPartial<Type, kStrips, kTokens>(arguments, block, tokens, sums);
          }
        }
        StoreStrip<Type, kStrips, kTokens>(arguments, segment, staging, scales, sums);
      }
      left -= count;
      // Not `turns`, which would take registers.
      const std::uint32_t at = SharedAddress(&later);
      const Turns next = {
          static_cast<int>(LoadShared32(at)), static_cast<int>(LoadShared32(at + 4)),
          static_cast<int>(LoadShared32(at + 8)), static_cast<int>(LoadShared32(at + 12))};
      walk.Turn(arguments, next, kTokens, strips);
    }
  }
  if (threadIdx.x < S::kConsumers && threadIdx.x % 128 == 0) StoreWaitRead<0>();
}

}  // namespace slidesparse::hopper
