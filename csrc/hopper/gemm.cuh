// The clustered kernel: Y [M, N] = (q [M, K'] @ W [N, K'].T) * scale_w [N] * scale_x [M] + bias
// [N], W in packed 2:4 form, where the parts of a tile's K' are summed inside a cluster.
//
// A block of threads computes 64 kStrips out-features by kTokens tokens over a part of K'.  The
// blocks of a cluster are `sharers` x `splits`:
//
//   - sharers have neighbouring out-features and the same tokens and columns, so that each loads a
//     part of the activations for all of them;
//   - splits have the same out-features and tokens and different columns.  Each owns every
//     splits-th warp's 16 out-features: the others send it their sums, in the order of registers,
//     and it adds them in a fixed order.  They go into shared memory that is kept for them, so that
//     nobody waits but for what comes; with 256 tokens, of which that memory would leave a ring of
//     three stages, into the ring itself, once its readers have said that they are through with it.
//
// The weight does not depend on the kernel before this one, so its first stages are on their way
// before that one has ended.

#pragma once

#include "epilogue.cuh"
#include "ring.cuh"

namespace slidesparse::hopper {

template <int kStrips, int kTokens>
struct SplitShape : Shape<kStrips, kTokens> {
  using S = Shape<kStrips, kTokens>;
  static constexpr int kWarps = 4 * kStrips;          // that multiply
  static constexpr int kWarpSumBytes = kTokens * 64;  // 16 out-features
  // A warp's outputs on their way out: 32 bytes a token, and 16 more, so that the eight rows of a
  // matrix lie in different banks.
  static constexpr int kPitch = 48;
  static constexpr int kStagingBytes = kTokens * kPitch;
  static_assert(kStagingBytes <= kWarpSumBytes);
  static_assert(kTokens <= S::kConsumers);

  static constexpr bool kSumsInRing = S::kWide;

  // Warps that a block owns, at most.
  static __host__ __device__ constexpr int Owned(int splits) {
    return (kWarps + splits - 1) / splits;
  }
  // What the others send.
  static __host__ __device__ constexpr int ReceivedBytes(int splits) {
    return Owned(splits) * (splits - 1) * kWarpSumBytes;
  }
  // The ring; in the end outputs stand there, where no sums come from others, or those sums.
  static __host__ __device__ constexpr int RingBytes(int stages, int splits) {
    const int ring = stages * S::kStageBytes;
    const int after = splits == 1   ? kWarps * kStagingBytes
                      : kSumsInRing ? ReceivedBytes(splits)
                                    : 0;
    return ring > after ? ring : after;
  }
  // From the ring's beginning.
  static __host__ __device__ constexpr int Received(int stages, int splits) {
    return kSumsInRing ? 0 : RingBytes(stages, splits);
  }
  static __host__ __device__ constexpr int Barriers(int stages, int splits) {
    return RingBytes(stages, splits) + (kSumsInRing ? 0 : ReceivedBytes(splits));
  }
  // Ring, the others' sums, then barriers: full, empty, the sums', and of the others' rings.
  static __host__ __device__ constexpr int SharedBytes(int stages, int splits) {
    return Barriers(stages, splits) + (2 * stages + Owned(splits) + 1) * 8;
  }
};

// Where a block of threads stands.
struct Place {
  int split;
  int begin, end;  // its blocks of columns
  Sharers sharers;
  Walk walk;  // at its tile
};

template <int kStrips, int kTokens>
__device__ __forceinline__ Place FindPlace(const Arguments& arguments) {
  const int cluster = arguments.sharers * arguments.splits;
  const int rank = blockIdx.x % cluster;
  Place place;
  place.split = rank / arguments.sharers;
  place.sharers = {place.split * arguments.sharers, arguments.sharers, rank % arguments.sharers};
  place.begin = arguments.blocks * place.split / arguments.splits;
  place.end = arguments.blocks * (place.split + 1) / arguments.splits;
  const int tile = blockIdx.x / cluster;
  place.walk.Begin(arguments, {tile, place.begin, 0, 0}, kTokens, kStrips * arguments.sharers);
  return place;
}

// Tells the other splits that this warp reads the ring no more.
__device__ __forceinline__ void OpenRing(const Arguments& arguments, const Place& place,
                                         std::uint32_t open) {
  const int split = threadIdx.x % 32;
  if (split < arguments.splits && split != place.split) {
    BarrierArriveAt(open, split * arguments.sharers + place.sharers.mine);
  }
}

// Sends a warp's sums to its owner.
template <int kStrips, int kTokens>
__device__ __forceinline__ void PushSums(const Arguments& arguments, const Place& place, int owner,
                                         int slot, int tokens, std::uint32_t received,
                                         std::uint32_t barriers,
                                         const std::uint32_t (&sums)[kTokens / 2]) {
  using S = SplitShape<kStrips, kTokens>;
  const int rank = owner * arguments.sharers + place.sharers.mine;
  const int number = place.split < owner ? place.split : place.split - 1;
  const std::uint32_t to =
      MapToBlock(received + (slot * (arguments.splits - 1) + number) * S::kWarpSumBytes +
                     threadIdx.x % 32 * 16,
                 rank);
  const std::uint32_t barrier = MapToBlock(barriers + 8 * slot, rank);
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    if (8 * j < tokens) {
      PushCluster128(to + j * 512, sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3],
                     barrier);
    }
  }
}

// Adds what the others have sent for a warp.
template <class Type, int kTokens>
__device__ __forceinline__ void AddReceived(int others, int tokens, std::uint32_t received,
                                            std::uint32_t (&sums)[kTokens / 2]) {
  for (int other = 0; other < others; ++other) {
    const std::uint32_t from = received + other * kTokens * 64 + threadIdx.x % 32 * 16;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      if (8 * j < tokens) {
        const uint4 found = LoadShared128(from + j * 512);
        const std::uint32_t words[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          std::uint32_t& sum = sums[4 * j + e];
          sum = ToBits(Add(words[e], FromBits<Type>(sum)));
        }
      }
    }
  }
}

// A warp's 16 out-features, from `row` on, by way of its staging memory.
template <class Type, int kStrips, int kTokens>
__device__ __forceinline__ void StoreWarp(const Arguments& arguments, int row, int first_token,
                                          int tokens, std::uint32_t staging,
                                          const RowScales& scales,
                                          const TokenScales<kTokens>& token_scales,
                                          const std::uint32_t (&sums)[kTokens / 2]) {
  using S = SplitShape<kStrips, kTokens>;
  const int lane = threadIdx.x % 32;
  const std::uint32_t to = staging + lane % 8 * S::kPitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    if (kTokens > 64 || 8 * j < tokens) {  // with few tokens registers are few, and outputs
      StageTokens<Type>(arguments, scales, sums, j, token_scales.Eight(j), to + 8 * j * S::kPitch);
    }
  }
  __syncwarp();
  const int first = row + lane % 2 * 8;
  const int stored = first < arguments.n ? tokens : 0;
  for (int token = lane / 2; token < stored; token += 16) {
    const uint4 packed = LoadShared128(staging + token * S::kPitch + lane % 2 * 16);
    StoreOutputs(arguments, first_token + token, first, packed);
  }
}

template <class Type, int kStrips, int kTokens>
__device__ __forceinline__ void Multiply(const Arguments& arguments, const Place& place,
                                         std::uint32_t ring, std::uint32_t full,
                                         std::uint32_t empty, std::uint32_t (&sums)[kTokens / 2]) {
  const int count = place.end - place.begin;
  if constexpr (Shape<kStrips, kTokens>::kWide) {
    WideConsumer<Type, kStrips, kTokens>(arguments, place.sharers, ring, full, empty)
        .Run(count, true, sums);
  } else {
    NarrowConsumer<Type, kStrips, kTokens>(arguments, place.sharers, ring, full, empty)
        .Run(count, sums);
  }
}

template <class Type, int kStrips, int kTokens>
__global__ void __launch_bounds__(Shape<kStrips, kTokens>::kThreads,
                                  Shape<kStrips, kTokens>::kResident)
    Gemm(const __grid_constant__ Arguments arguments) {
  using S = SplitShape<kStrips, kTokens>;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  const int splits = arguments.splits;
  const std::uint32_t ring = SharedAddress(shared);
  const std::uint32_t received = ring + S::Received(arguments.stages, splits);
  const std::uint32_t full = ring + S::Barriers(arguments.stages, splits);
  const std::uint32_t empty = full + 8 * arguments.stages;
  const std::uint32_t complete = empty + 8 * arguments.stages;
  const std::uint32_t open = complete + 8 * S::Owned(splits);
  const Place place = FindPlace<kStrips, kTokens>(arguments);
  const int tokens = min(kTokens, arguments.m - place.walk.token);
  Producer<kStrips, kTokens> feed(arguments, place.sharers, place.walk, Turns{},
                                  place.end - place.begin, ring, full, empty);

  const bool feeds = WarpNumber() == S::kConsumers / 32;
  if (feeds) {
    const bool leader = ElectOne();
    if (leader) {
      PrefetchMap(&arguments.q);
      for (int i = 0; i < arguments.stages; ++i) {
        BarrierInit(full + 8 * i, 1);
        BarrierInit(empty + 8 * i, kStrips * 4 * arguments.sharers);
      }
      if (splits > 1) {
        for (int i = 0; i < S::Owned(splits); ++i) BarrierInit(complete + 8 * i, 1);
        BarrierInit(open, S::kWarps * (splits - 1));
      }
      BarrierInitFence();
    }
    __syncwarp();
    feed.Begin();
    if (leader && splits > 1) {
      const int bytes = (splits - 1) * ((tokens + 7) / 8) * 512;
      for (int i = 0; i < S::Owned(splits); ++i) BarrierExpect(complete + 8 * i, bytes);
    }
  }
  __syncwarp();
  __syncthreads();
  if (arguments.sharers * splits > 1) {  // the barriers' initialization has its own fence
    ClusterArriveRelaxed();
    ClusterWait();
  }

  if (threadIdx.x >= S::kConsumers) {
    DealRegisters<S, true>();
    if (feeds) {
      WaitForPredecessors();
      feed.Run();
    }
  } else {
    DealRegisters<S, false>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int owner = warp % splits, slot = warp / splits;
    const int row = (place.walk.strip + kStrips * place.sharers.mine) * kStripRows + warp * 16;
    WaitForPredecessors();
    RowScales scales;
    TokenScales<kTokens> token_scales;
    if (owner == place.split) {
      scales.Load(arguments, row + lane / 4);
      token_scales.Load(arguments, place.walk.token);
    }
    std::uint32_t sums[kTokens / 2];
    Clear(sums);
    if (place.end > place.begin) {
      Multiply<Type, kStrips, kTokens>(arguments, place, ring, full, empty, sums);
    }
    if (S::kSumsInRing && splits > 1) {
      __syncwarp();
      OpenRing(arguments, place, open);
      if (owner != place.split) BarrierWaitCluster(open, 0);
    }
    if (owner != place.split) {
      PushSums<kStrips, kTokens>(arguments, place, owner, slot, tokens, received, complete, sums);
    }
    if (splits == 1) NamedBarrier(1, S::kConsumers);  // nobody reads the ring any more
    if (owner == place.split) {
      std::uint32_t staging = ring + warp * S::kStagingBytes;
      if (splits > 1) {
        staging = received + slot * (splits - 1) * S::kWarpSumBytes;
        BarrierWaitCluster(complete + 8 * slot, 0);
        AddReceived<Type, kTokens>(splits - 1, tokens, staging, sums);
        __syncwarp();  // all have read what outputs take the place of
      }
      StoreWarp<Type, kStrips, kTokens>(arguments, row, place.walk.token, tokens, staging, scales,
                                        token_scales, sums);
    }
  }
}

}  // namespace slidesparse::hopper
