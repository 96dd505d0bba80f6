// The stream-K kernel: Y [M, N] = (q [M, K'] @ W [N, K'].T) * scale_w [N] * scale_x [M] + bias [N],
// W packed (format.cuh).  The grid is persistent, and every CTA multiplies the same number of
// stages.
//
// CTAs first compute whole tiles in turn, so that neighbours read the same activations at the same
// time.  The stages of the remaining tiles, fewer than two tiles a CTA, form one sequence, of which
// CTA i of the grid takes the i-th equal part, counted from the end:
//
//     tiles    |        0        |        1        |        2        |        3        |
//     CTAs     |      3     |      2      |      1      |     0     |
//
// A CTA processes its part from left to right.  If a tile began in another CTA's part, the CTA
// writes its partial sums to `partials`, in the order of its registers, and sets its flag.  The CTA
// that has the beginning of a tile owns it: it adds the others' partial sums in the order of
// columns, so that results are deterministic, and stores the tile.  A CTA waits only for CTAs of
// lower index, which the GPU starts first, so waits cannot deadlock.
//
// The pipeline is not drained between tiles, so that the epilogue of a tile overlaps the loads of
// the next.

#pragma once

#include "epilogue.cuh"
#include "ring.cuh"

namespace slidesparse::hopper {

constexpr int kPartialsAtOnce = 2;  // loads of 8 tokens in flight, as many as registers allow

// Tokens whose outputs are staged at a time.  Each time takes a barrier: with 256 tokens fewer
// barriers are worth the pipeline stage that the larger staging memory costs.
constexpr int StagedTokens(int tokens) { return tokens > 128 ? 64 : tokens > 64 ? 32 : tokens; }

template <int kStrips, int kTokens>
struct StreamKShape : TileShape<kStrips, kTokens> {
  using S = TileShape<kStrips, kTokens>;
  // A warpgroup's staged outputs: rows of 64 out-features, 16 bits each, with the 128-byte swizzle.
  static constexpr int kStagedTokens = StagedTokens(kTokens);
  static constexpr int kOutputBytes = kStagedTokens * kStripRows * 2;
  // With two buffers TMA stores one while the next tokens are staged in the other.
  static constexpr int kBuffers = kTokens > 64 ? 2 : 1;
  static constexpr int kStagingBytes = kStrips * kBuffers * kOutputBytes;

  // The ring, staging memory, the words of each stage, and the CTA's tiles, to save registers.
  static __host__ __device__ constexpr int SharedBytes(int stages, Blocks blocks) {
    return stages * S::StageBytes(blocks) + StageWordBytes(stages, blocks) + kStagingBytes +
           sizeof(CtaTiles);
  }
};

// A CTA's part of a tile: k_blocks `begin` to `end`.
struct Segment {
  int strip, token;  // of the tile's first output
  int begin, end;
};

// The scales and biases of a thread's outputs, loaded before the main loop to hide their latency.
template <int kTokens>
struct StreamKScales {
  RowScales rows;
  TokenScales<kTokens> tokens, routers;  // the latter of experts alone

  __device__ __forceinline__ void Load(const GemmArguments& arguments, const Segment& segment,
                                       int expert = 0) {
    const int thread = threadIdx.x % 128;
    rows.Load(arguments,
              (segment.strip + threadIdx.x / 128) * kStripRows + thread / 32 * 16 + thread % 32 / 4,
              expert);
    tokens.Load(arguments, segment.token);
  }
};

// The whole warpgroup waits until TMA has read its staging memory, which then may be overwritten.
__device__ __forceinline__ void WaitForBuffers(int barrier) {
  if (threadIdx.x % 128 == 0) TmaStoreWaitRead();
  __syncwarp();
  NamedBarrier(barrier, 128);
}

// The epilogue of a warpgroup's strip, for the first `tokens` of the tile.  Outputs go through
// staging memory, from which TMA stores them while the next tokens are staged or the next tile is
// multiplied. kExperts: rows beyond `tokens` are another expert's, so that TMA stores whole boxes
// alone.
template <class Type, int kStrips, int kTokens, bool kExperts = false>
__device__ __forceinline__ void StoreStrip(const GemmArguments& arguments, const Segment& segment,
                                           int tokens, std::uint32_t staging,
                                           const StreamKScales<kTokens>& scales,
                                           const std::uint32_t (&sums)[kTokens / 2]) {
  using S = StreamKShape<kStrips, kTokens>;
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;
  const std::uint32_t outputs = staging + warpgroup * S::kBuffers * S::kOutputBytes;
  const int barrier = 2 + warpgroup;
  const std::uint32_t to = outputs + lane % 8 * 128 + ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
  const int row = (segment.strip + warpgroup) * kStripRows;
  const bool leader = thread == 0;
  // Groups of 8 tokens whose scales are shuffled together: more hide more latency, in more
  // registers.
  constexpr int kAtOnce = kTokens > 64 ? 4 : 1;
#pragma unroll
  for (int first = 0; first < kTokens; first += S::kStagedTokens) {
    const int buffer = first / S::kStagedTokens % S::kBuffers * S::kOutputBytes;
    if (first >= tokens) {
      WaitForBuffers(barrier);  // the next tile begins with the first buffer
      break;
    }
    if (S::kBuffers == 1) WaitForBuffers(barrier);
#pragma unroll
    for (int octet = 0; octet < S::kStagedTokens / 8; octet += kAtOnce) {
      if (kTokens <= 64 && 8 * octet >= tokens) break;
      float2 token_scales[kAtOnce], routers[kAtOnce] = {};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        token_scales[j] = scales.tokens.Pair(first / 8 + octet + j);
        if (kExperts) routers[j] = scales.routers.Pair(first / 8 + octet + j);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        StageTokens<Type, kExperts>(arguments, scales.rows, sums, first / 8 + octet + j,
                                    token_scales[j], to + buffer + 8 * (octet + j) * 128,
                                    routers[j]);
      }
    }
    ProxyFence();
    if (S::kBuffers > 1 && leader) TmaStoreWaitRead();  // so the next buffer is free
    __syncwarp();
    NamedBarrier(barrier, 128);
    if (arguments.vector_stores && (!kExperts || first + S::kStagedTokens <= tokens)) {
      if (leader && row < arguments.n) {
        TmaStore(&arguments.out, row, segment.token + first, outputs + buffer,
                 arguments.output_policy);
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

// The first stage of the `part`-th of `parts` equal parts of the shared stages.
__device__ __forceinline__ int PartBegin(const GemmArguments& arguments, int part, int parts) {
  return static_cast<int>(static_cast<std::uint64_t>(arguments.shared_stages) * part / parts);
}

// This thread's partial sums of CTA `cta`: four sums of 8 tokens for every consumer thread, then
// those of the next 8 tokens, so that a warp's accesses are coalesced.
template <int kStrips, int kTokens>
__device__ __forceinline__ uint4* PartialOf(const GemmArguments& arguments, int cta) {
  using S = TileShape<kStrips, kTokens>;
  return arguments.partials + static_cast<std::size_t>(cta) * (kTokens / 8) * S::kConsumerThreads +
         threadIdx.x;
}

// Initializes the accumulators with CTA `cta`'s partial sums, if `load`.  The loads are predicated,
// because for a branch around them the compiler makes a second set of accumulators.
template <int kStrips, int kTokens>
__device__ __forceinline__ void StartFromPartial(const GemmArguments& arguments, bool load, int cta,
                                                 int tokens, std::uint32_t (&sums)[kTokens / 2]) {
  using S = TileShape<kStrips, kTokens>;
  const uint4* from = PartialOf<kStrips, kTokens>(arguments, cta);
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    LoadGlobal128If(load && 8 * j < tokens, from + j * S::kConsumerThreads, sums[4 * j],
                    sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
  }
}

template <class Type, int kStrips, int kTokens>
__device__ __forceinline__ void AddPartial(const GemmArguments& arguments, int cta, int tokens,
                                           std::uint32_t (&sums)[kTokens / 2]) {
  using S = TileShape<kStrips, kTokens>;
  constexpr int kAtOnce = kTokens / 8 < kPartialsAtOnce ? kTokens / 8 : kPartialsAtOnce;
  const uint4* from = PartialOf<kStrips, kTokens>(arguments, cta);
#pragma unroll
  for (int first = 0; first < kTokens / 8; first += kAtOnce) {
    uint4 partials[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (8 * (first + j) < tokens)
        partials[j] = LoadGlobal128(from + (first + j) * S::kConsumerThreads);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (8 * (first + j) < tokens) {
        const std::uint32_t words[4] = {partials[j].x, partials[j].y, partials[j].z, partials[j].w};
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
__device__ __forceinline__ void StorePartial(const GemmArguments& arguments, int tokens,
                                             const std::uint32_t (&sums)[kTokens / 2]) {
  using S = TileShape<kStrips, kTokens>;
  uint4* to = PartialOf<kStrips, kTokens>(arguments, blockIdx.x);
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    if (8 * j < tokens) {
      StoreGlobal128(to + j * S::kConsumerThreads,
                     make_uint4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
    }
  }
  NamedBarrier(1, S::kConsumerThreads);
  if (threadIdx.x == 0) SetFlag(arguments.flags + blockIdx.x * kFlagWords);
  __syncwarp();
}

// Makes all consumers wait for CTA `cta`'s partial sums.
template <int kStrips, int kTokens>
__device__ __forceinline__ void WaitForPartial(const GemmArguments& arguments, int cta) {
  if (threadIdx.x == 0) WaitForFlag(arguments.flags + cta * kFlagWords);
  __syncwarp();
  NamedBarrier(1, TileShape<kStrips, kTokens>::kConsumerThreads);
}

// Waits until the mbarriers of all CTAs of the cluster are initialized.  The cluster barrier can be
// relaxed, because BarrierInitFence has released the initialization.
__device__ __forceinline__ void SyncCluster(const GemmArguments& arguments) {
  __syncwarp();
  __syncthreads();
  if (arguments.multicast > 1) {
    ClusterArriveRelaxed();
    ClusterWait();
  }
}

template <class Type, int kStrips, int kTokens, Blocks kBlocks>
__global__ void __launch_bounds__(TileShape<kStrips, kTokens>::kThreads,
                                  TileShape<kStrips, kTokens>::ResidentCtas(kBlocks))
    GemmStreamK(const __grid_constant__ GemmArguments arguments) {
  using S = StreamKShape<kStrips, kTokens>;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  const std::uint32_t ring = SharedAddress(shared);
  const std::uint32_t staging = ring + arguments.stages * S::StageBytes(kBlocks);
  const std::uint32_t full = staging + S::kStagingBytes;
  const std::uint32_t empty = full + 8 * arguments.stages;
  CtaTiles& stored_tiles = *reinterpret_cast<CtaTiles*>(
      shared + (full + StageWordBytes(arguments.stages, kBlocks) - ring));
  const MulticastGroup group = {0, arguments.multicast,
                                static_cast<int>(blockIdx.x % arguments.multicast)};
  // The CTAs of a multicast group work on the same part, with different strips.
  const int parts = gridDim.x / arguments.multicast;
  const int index = blockIdx.x / arguments.multicast;
  const int part = parts - 1 - index;
  const int begin = PartBegin(arguments, part, parts);
  const int end = PartBegin(arguments, part + 1, parts);
  int remaining = arguments.whole_tiles * arguments.k_blocks + end - begin;
  const int strips = kStrips * arguments.multicast;
  const CtaTiles tiles = {arguments.whole_tiles * parts + begin / arguments.k_blocks,
                          begin % arguments.k_blocks, index, parts};
  TileScheduler scheduler;
  scheduler.Begin(arguments, tiles, kTokens, strips);
  if (threadIdx.x >= S::kConsumerThreads) {
    ReallocateRegisters<S, true>();
    const bool produces = WarpNumber() == S::kConsumerThreads / 32;
    TmaProducer<kStrips, kTokens, kBlocks> producer(arguments, group, scheduler, tiles, remaining,
                                                    ring, full, empty);
    if (produces) {
      if (ElectOne()) {
        stored_tiles = tiles;
        PrefetchTensorMap(&arguments.q);
        for (int i = 0; i < arguments.stages; ++i) {
          BarrierInit(full + 8 * i, 1);
          BarrierInit(empty + 8 * i, kStrips * 4 * arguments.multicast);
        }
        BarrierInitFence();
      }
      __syncwarp();
      producer.Begin();
    }
    SyncCluster(arguments);
    if (produces) {
      WaitForPredecessors();
      producer.Run();
      LaunchDependents();
    }
  } else {
    ReallocateRegisters<S, false>();
    SyncCluster(arguments);
    WaitForPredecessors();
    ConsumerOf<Type, kStrips, kTokens, kBlocks> consumer(arguments, group, ring, full, empty);
    std::uint32_t sums[kTokens / 2];
    Clear(sums);
    while (remaining > 0) {
      const int count = min(arguments.k_blocks - scheduler.k_block, remaining);
      const Segment segment = {scheduler.strip + kStrips * group.rank, scheduler.token,
                               scheduler.k_block, scheduler.k_block + count};
      const bool owned = segment.begin == 0;  // this CTA stores the tile
      const bool shared_tile = segment.end < arguments.k_blocks;
      const int tokens = min(kTokens, arguments.m - segment.token);
      StreamKScales<kTokens> scales;
      if (owned) scales.Load(arguments, segment);
      // If only one other CTA has a part of the tile, the accumulators start from its partial sums,
      // which is cheaper than to add them afterwards.
      const bool from_partial = owned && shared_tile && arguments.two_per_tile;
      const int other_cta = blockIdx.x - arguments.multicast;
      if (from_partial) WaitForPartial<kStrips, kTokens>(arguments, other_cta);
      StartFromPartial<kStrips, kTokens>(arguments, from_partial, other_cta, tokens, sums);
      consumer.Run(count, from_partial, sums);
      if (!owned) {
        StorePartial<kStrips, kTokens>(arguments, tokens, sums);
      } else {
        if (shared_tile && !arguments.two_per_tile) {
          const int tile_end = end - remaining + arguments.k_blocks;
          for (int other = part + 1; PartBegin(arguments, other, parts) < tile_end; ++other) {
            const int cta = blockIdx.x - (other - part) * arguments.multicast;
            WaitForPartial<kStrips, kTokens>(arguments, cta);
            AddPartial<Type, kStrips, kTokens>(arguments, cta, tokens, sums);
          }
        }
        StoreStrip<Type, kStrips, kTokens>(arguments, segment, tokens, staging, scales, sums);
      }
      remaining -= count;
      // Read from shared memory, because `tiles` would take registers during the main loop.
      const std::uint32_t at = SharedAddress(&stored_tiles);
      const CtaTiles next = {
          static_cast<int>(LoadShared32(at)), static_cast<int>(LoadShared32(at + 4)),
          static_cast<int>(LoadShared32(at + 8)), static_cast<int>(LoadShared32(at + 12))};
      scheduler.Next(arguments, next, kTokens, strips);
    }
  }
  if (threadIdx.x < S::kConsumerThreads && threadIdx.x % 128 == 0) TmaStoreWaitRead();
}

}  // namespace slidesparse::hopper
