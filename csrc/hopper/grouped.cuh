// The grouped kernel, for experts: Y [P, N] = (q [P, K'] @ W[e] [N, K'].T) * scale_x [P] *
// scale_w [e, N] * slot_scale[order [P]], where expert e has the rows offsets[e] to offsets[e + 1].
// Only the device knows the offsets, so that a CUDA graph serves any routing.
//
// The grid is persistent.  Every CTA makes a table of the tiles in shared memory, of which it takes
// every gridDim.x-th, as stream-K does whole tiles: the ring is not drained between them.  An
// expert's tiles begin at its first row, tokens vary fastest, and its last one may reach into the
// next expert's rows: these products are not stored.

#pragma once

#include "stream_k.cuh"

namespace slidesparse::hopper {

template <int kStrips, int kTokens>
struct GroupedShape : StreamKShape<kStrips, kTokens> {
  // Decoding takes more registers than in stream-K.
  static constexpr int ResidentCtas(Blocks blocks) {
    const int most = TileShape<kStrips, kTokens>::ResidentCtas(blocks);
    return blocks == Blocks::kCoded && kTokens == 32 ? most - (most > 1) : most;
  }

  // Instead of a CTA's tiles: for each expert the end of its tiles, then all offsets.
  static __host__ __device__ constexpr int SharedBytes(int stages, Blocks blocks) {
    return StreamKShape<kStrips, kTokens>::SharedBytes(stages, blocks) - sizeof(CtaTiles) +
           (2 * kMaxExperts + 1) * 4;
  }
};

// The table of the tiles.
struct GroupedTiles {
  std::uint32_t ends, offsets;  // addresses in shared memory
  int count;                    // of all experts

  // Called by all threads of the CTA.
  template <int kTokens>
  static __device__ __forceinline__ GroupedTiles Make(const GemmArguments& arguments,
                                                      std::uint32_t table) {
    const int experts = arguments.experts;
    GroupedTiles tiles = {table, table + 4 * experts, 0};
    for (int i = threadIdx.x; i <= experts; i += blockDim.x) {
      StoreShared32(tiles.offsets + 4 * i, LoadGlobal32(arguments.offsets + i));
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      int sum = 0;
      for (int first = 0; first < experts; first += 32) {
        const int expert = first + threadIdx.x;
        int mine = 0;
        if (expert < experts) {
          const std::uint32_t at = tiles.offsets + 4 * expert;
          const int tokens = LoadShared32(at + 4) - LoadShared32(at);
          mine = (tokens + kTokens - 1) / kTokens * arguments.n_tiles;
        }
        mine = SumToLane(mine);
        if (expert < experts) StoreShared32(tiles.ends + 4 * expert, sum + mine);
        sum += __shfl_sync(0xFFFFFFFF, mine, 31);
      }
    }
    __syncthreads();
    tiles.count = LoadShared32(tiles.ends + 4 * (experts - 1));
    return tiles;
  }
};

// As TileScheduler.  Whole warps call its functions.
struct GroupedScheduler {
  using Tiles = GroupedTiles;
  int tile, k_block;
  int strip, token;    // of the tile's first output
  int expert, tokens;  // the tile's expert, and how many of its rows are left from `token` on

  __device__ __forceinline__ const std::uint8_t* Weight(const GemmArguments& arguments) const {
    return arguments.weight + expert * arguments.expert_bytes;
  }

  __device__ __forceinline__ void Locate(const GemmArguments& arguments, const GroupedTiles& tiles,
                                         int tile_tokens, int strips) {
    const int at = min(tile, tiles.count - 1);  // the producer looks for a tile after the last one
    int found = 0;
    for (int first = threadIdx.x % 32; first - threadIdx.x % 32 < arguments.experts; first += 32) {
      const bool before =
          first < arguments.experts && static_cast<int>(LoadShared32(tiles.ends + 4 * first)) <= at;
      found += __popc(__ballot_sync(0xFFFFFFFF, before));
    }
    const int within =
        at - (found > 0 ? static_cast<int>(LoadShared32(tiles.ends + 4 * found - 4)) : 0);
    const int begin = LoadShared32(tiles.offsets + 4 * found);
    const int end = LoadShared32(tiles.offsets + 4 * found + 4);
    const int height = (end - begin + tile_tokens - 1) / tile_tokens;
    const int n_tile = within / height;
    const int first_token = begin + (within - n_tile * height) * tile_tokens;
    // The shuffles tell the compiler that the values are warp-uniform.
    strip = __shfl_sync(0xFFFFFFFF, n_tile * strips, 0);
    token = __shfl_sync(0xFFFFFFFF, first_token, 0);
    expert = __shfl_sync(0xFFFFFFFF, found, 0);
    tokens = __shfl_sync(0xFFFFFFFF, end - first_token, 0);
  }

  __device__ __forceinline__ void Begin(const GemmArguments& arguments, const GroupedTiles& tiles,
                                        int tile_tokens, int strips) {
    tile = blockIdx.x - gridDim.x;
    Next(arguments, tiles, tile_tokens, strips);
  }

  __device__ __forceinline__ void Next(const GemmArguments& arguments, const GroupedTiles& tiles,
                                       int tile_tokens, int strips) {
    tile += gridDim.x;
    k_block = 0;
    Locate(arguments, tiles, tile_tokens, strips);
  }
};

template <class Type, int kStrips, int kTokens, Blocks kBlocks>
__global__ void __launch_bounds__(TileShape<kStrips, kTokens>::kThreads,
                                  GroupedShape<kStrips, kTokens>::ResidentCtas(kBlocks))
    GemmGrouped(const __grid_constant__ GemmArguments arguments) {
  using S = StreamKShape<kStrips, kTokens>;
  constexpr int kHalfTokens = S::kWide ? kTokens / 2 : 0;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  const std::uint32_t ring = SharedAddress(shared);
  const std::uint32_t staging = ring + arguments.stages * S::StageBytes(kBlocks);
  const std::uint32_t full = staging + S::kStagingBytes;
  const std::uint32_t empty = full + 8 * arguments.stages;
  const MulticastGroup group = {0, 1, 0};
  const auto tiles =
      GroupedTiles::Make<kTokens>(arguments, full + StageWordBytes(arguments.stages, kBlocks));
  const int index = blockIdx.x;
  if (index >= tiles.count) {
    // The grid must not end before its predecessors have, for which its successors wait by it.
    WaitForPredecessors();
    return;
  }
  int remaining = (tiles.count - index - 1) / static_cast<int>(gridDim.x) + 1;
  GroupedScheduler scheduler;
  scheduler.Begin(arguments, tiles, kTokens, kStrips);
  if (threadIdx.x >= S::kConsumerThreads) {
    ReallocateRegisters<S, true>();
    const bool produces = WarpNumber() == S::kConsumerThreads / 32;
    TmaProducer<kStrips, kTokens, kBlocks, GroupedScheduler> producer(
        arguments, group, scheduler, tiles, remaining * arguments.k_blocks, ring, full, empty);
    if (produces) {
      if (ElectOne()) {
        PrefetchTensorMap(&arguments.q);
        for (int i = 0; i < arguments.stages; ++i) {
          BarrierInit(full + 8 * i, 1);
          BarrierInit(empty + 8 * i, kStrips * 4);
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
    while (true) {
      StreamKScales<kTokens> scales;
      scales.Load(arguments, {scheduler.strip, scheduler.token, 0, arguments.k_blocks},
                  scheduler.expert);
      scales.routers.LoadRouters(arguments, scheduler.token, scheduler.tokens);
      // Experts' last tiles are seldom full: wide ones multiply one half alone if that is enough.
      if (scheduler.tokens > kHalfTokens) {
        consumer.Run(arguments.k_blocks, false, sums);
      } else if constexpr (kHalfTokens > 0) {
        consumer.Run(arguments.k_blocks, false,
                     reinterpret_cast<std::uint32_t (&)[kHalfTokens / 2]>(sums));
      }
      // Again, because the position would take registers during the main loop.
      scheduler.Locate(arguments, tiles, kTokens, kStrips);
      StoreStrip<Type, kStrips, kTokens, true>(
          arguments, {scheduler.strip, scheduler.token, 0, arguments.k_blocks},
          min(kTokens, scheduler.tokens), staging, scales, sums);
      if (--remaining == 0) break;
      scheduler.Next(arguments, tiles, kTokens, kStrips);
    }
    if (threadIdx.x % 128 == 0) TmaStoreWaitRead();
  }
}

}  // namespace slidesparse::hopper
