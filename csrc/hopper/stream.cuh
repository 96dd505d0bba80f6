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

#include "epilogue.cuh"
#include "ring.cuh"

namespace slidesparse::hopper {

constexpr int kPartialsAtOnce = 2;  // of 8 tokens: what the registers have room for

template <int kStrips, int kTokens>
struct StreamShape : Shape<kStrips, kTokens> {
  using S = Shape<kStrips, kTokens>;
  // Outputs on their way out, some tokens at a time: of each warpgroup rows of 64 out-features, 16
  // bits each, and 16 bytes more, so that the eight rows of a matrix lie in different banks; then
  // its tokens' scales.
  static constexpr int kPitch = kStripRows * 2 + 16;
  static constexpr int kStagedTokens = kTokens < 64 ? kTokens : 64;
  static constexpr int kOutputBytes = kStagedTokens * kPitch;
  static constexpr int kStagingBytes = kOutputBytes + kTokens * 4;
  static constexpr int kTokenScales = (kTokens + 127) / 128;  // of a thread

  // Ring, staging, barriers, then what would take registers.
  static __host__ __device__ constexpr int SharedBytes(int stages) {
    return stages * S::kStageBytes + kStrips * kStagingBytes + 2 * stages * 8 + sizeof(Feed);
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
  float token[(kTokens + 127) / 128] = {};

  __device__ __forceinline__ void Load(const Arguments& arguments, const Segment& segment) {
    const int thread = threadIdx.x % 128;
    rows.Load(arguments, (segment.strip + threadIdx.x / 128) * kStripRows + thread / 32 * 16 +
                             thread % 32 / 4);
#pragma unroll
    for (int i = 0; i < (kTokens + 127) / 128; ++i) {
      const int at = segment.token + i * 128 + thread;
      if (i * 128 + thread < kTokens && at < arguments.m) {
        token[i] = LoadNow(arguments.scale_x + at);
      }
    }
  }
};

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
  const std::uint32_t to = outputs + lane % 8 * S::kPitch + (warp * 16 + lane / 8 % 2 * 8) * 2;
  const int row = (segment.strip + group) * kStripRows + thread % 8 * 8;
  NamedBarrier(barrier, 128);  // the tile before has been read
#pragma unroll
  for (int i = 0; i < S::kTokenScales; ++i) {
    if (i * 128 + thread < kTokens) {
      StoreShared32(token_scales + (i * 128 + thread) * 4, __float_as_uint(scales.token[i]));
    }
  }
#pragma unroll
  for (int first = 0; first < kTokens; first += S::kStagedTokens) {
    if (first >= tokens) break;
    NamedBarrier(barrier, 128);  // scales are there; outputs before these have been read
#pragma unroll
    for (int j = 0; j < S::kStagedTokens / 8; ++j) {
      if (first + 8 * j < tokens) {
        StageTokens<Type>(arguments, scales.rows, sums, first / 8 + j,
                          token_scales + (first + 8 * j) * 4, to + 8 * j * S::kPitch);
      }
    }
    NamedBarrier(barrier, 128);
    const int stored = row < arguments.n ? min(S::kStagedTokens, tokens - first) : 0;
    for (int token = thread / 8; token < stored; token += 16) {
      const uint4 packed = LoadShared128(outputs + token * S::kPitch + thread % 8 * 16);
      StoreOutputs(arguments, segment.token + first + token, row, packed);
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
  const std::uint32_t full = staging + kStrips * S::kStagingBytes;
  const std::uint32_t empty = full + 8 * arguments.stages;
  // Of it consumers read the turns, and one that feeds itself the rest.
  Feed& rest = *reinterpret_cast<Feed*>(shared + (empty + 8 * arguments.stages - ring));
  const Sharers sharers = {0, arguments.sharers, static_cast<int>(blockIdx.x % arguments.sharers)};
  const int parts = gridDim.x / arguments.sharers;
  const int number = blockIdx.x / arguments.sharers;
  const int part = parts - 1 - number;
  const int begin = PartBegin(arguments, part, parts);
  const int end = PartBegin(arguments, part + 1, parts);
  int left = arguments.rounds * arguments.blocks + end - begin;
  const int strips = kStrips * arguments.sharers;
  const Turns turns = {arguments.rounds * parts + begin / arguments.blocks,
                       begin % arguments.blocks, parts};
  Walk walk;
  walk.Begin(arguments, number, turns, kTokens, strips);
  // The first stages' weights, and the barriers.
  const auto begin_feed = [&](Producer<kStrips, kTokens>& feed) {
    rest.turns = turns;
    PrefetchMap(&arguments.q);
    for (int i = 0; i < arguments.stages; ++i) {
      BarrierInit(full + 8 * i, 1);
      BarrierInit(empty + 8 * i, kStrips * 4 * arguments.sharers);
    }
    BarrierInitFence();
    feed.Begin();
  };
  const auto refill = [&] {
    if (!S::kSelfFed) return;
    if (threadIdx.x == 0) {
      rest.Load<kStrips, kTokens>(arguments, sharers, ring, full, empty);
    }
    __syncwarp();
  };
  if (threadIdx.x >= S::kConsumers) {
    DealRegisters<S, true>();
    const bool leader = threadIdx.x == S::kConsumers;
    Producer<kStrips, kTokens> feed(arguments, sharers, walk, turns, left, ring, full, empty);
    if (leader) begin_feed(feed);
    SyncBlocks(arguments);
    if (leader) {
      WaitForPredecessors();
      feed.Run();
    }
  } else {
    DealRegisters<S, false>();
    if (S::kSelfFed && threadIdx.x == 0) {
      Producer<kStrips, kTokens> feed(arguments, sharers, walk, turns, left, ring, full, empty);
      begin_feed(feed);
      rest.Begin(feed.Next(), feed.Left());
      rest.LookAhead(arguments, kTokens, strips);
    }
    SyncBlocks(arguments);
    WaitForPredecessors();
    if (S::kSelfFed && threadIdx.x == 0) {
      Producer<kStrips, kTokens>(arguments, sharers, walk, turns, left, ring, full, empty)
          .BeginTokens();
    }
    __syncwarp();
    Consumer<Type, kStrips, kTokens> consumer(arguments, sharers, ring, full, empty);
    while (left > 0) {
      const int count = min(arguments.blocks - walk.block, left);
      const Segment segment = {walk.strip + kStrips * sharers.mine, walk.token, walk.block,
                               walk.block + count};
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
      consumer.Run(count, sums, refill);
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
      const std::uint32_t at = SharedAddress(&rest.turns);
      const Turns next = {static_cast<int>(LoadShared32(at)),
                          static_cast<int>(LoadShared32(at + 4)),
                          static_cast<int>(LoadShared32(at + 8))};
      walk.Turn(arguments, next, kTokens, strips);
      if (S::kSelfFed && threadIdx.x == 0) rest.LookAhead(arguments, kTokens, strips);
      __syncwarp();
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
