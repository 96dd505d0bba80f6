// The clustered split-K kernel: Y [M, N] = (q [M, K'] @ W [N, K'].T) * scale_w [N] * scale_x [M] +
// bias [N], W packed (format.cuh).  The CTAs of a cluster divide K' and reduce their partial sums
// through distributed shared memory.
//
// A CTA computes a tile of 64 kStrips out-features x kTokens tokens over a part of K'.  A cluster
// has `multicast` x `splits` CTAs:
//
//   - the CTAs of a multicast group have neighbouring out-features and the same tokens and columns:
//     each loads a part of the activations and multicasts it to the group;
//   - splits have the same out-features and tokens and different columns.  Each split owns the 16
//     out-features of every splits-th warp: the others push their registers to the owner
//     (st.async), which adds them in a fixed order, so that results are deterministic.  The
//     received sums have shared memory of their own, so that a sender need not wait.  With 256
//     tokens that memory would leave room for three pipeline stages only, so they overwrite the
//     ring, after all consumer warps of the receiver have signalled that they have read it.
//
// The weight does not depend on the preceding kernel, so the first stages' weights are loaded while
// that kernel runs (programmatic dependent launch).

#pragma once

#include "epilogue.cuh"
#include "ring.cuh"

namespace slidesparse::hopper {

template <int kStrips, int kTokens>
struct SplitKShape : TileShape<kStrips, kTokens> {
  using S = TileShape<kStrips, kTokens>;
  static constexpr int kWarps = 4 * kStrips;          // consumer warps
  static constexpr int kWarpSumBytes = kTokens * 64;  // a warp's sums: 16 out-features
  // A warp's staged outputs: 32 bytes a token and 16 bytes of padding, so that the eight rows of a
  // matrix that stmatrix stores are in different banks.
  static constexpr int kPitch = 48;
  static constexpr int kStagingBytes = kTokens * kPitch;
  static_assert(kStagingBytes <= kWarpSumBytes);
  static_assert(kTokens <= S::kConsumerThreads);

  static constexpr bool kSumsInRing = S::kWide;

  // The most warps whose out-features a split owns.
  static __host__ __device__ constexpr int Owned(int splits) {
    return (kWarps + splits - 1) / splits;
  }
  // The sums that a split receives from all others.
  static __host__ __device__ constexpr int ReceivedBytes(int splits) {
    return Owned(splits) * (splits - 1) * kWarpSumBytes;
  }
  // The ring, which after the main loop is reused for staged outputs (one split) or received sums.
  static __host__ __device__ constexpr int RingBytes(int stages, int splits, Blocks blocks) {
    const int ring = stages * S::StageBytes(blocks);
    const int after = splits == 1   ? kWarps * kStagingBytes
                      : kSumsInRing ? ReceivedBytes(splits)
                                    : 0;
    return ring > after ? ring : after;
  }
  // Offset of the received sums from the ring.
  static __host__ __device__ constexpr int Received(int stages, int splits, Blocks blocks) {
    return kSumsInRing ? 0 : RingBytes(stages, splits, blocks);
  }
  static __host__ __device__ constexpr int Barriers(int stages, int splits, Blocks blocks) {
    return RingBytes(stages, splits, blocks) + (kSumsInRing ? 0 : ReceivedBytes(splits));
  }
  // The ring, the received sums, the words of each stage, and further mbarriers: one for each owned
  // warp's sums, and one that completes when the other splits' rings are free.
  static __host__ __device__ constexpr int SharedBytes(int stages, int splits, Blocks blocks) {
    return Barriers(stages, splits, blocks) + StageWordBytes(stages, blocks) +
           (Owned(splits) + 1) * 8;
  }
};

// A CTA's work.
struct SplitKWork {
  int split;
  int begin, end;  // k_blocks
  MulticastGroup group;
  TileScheduler tile;
};

template <int kStrips, int kTokens>
__device__ __forceinline__ SplitKWork FindWork(const GemmArguments& arguments) {
  const int cluster = arguments.multicast * arguments.splits;
  const int rank = blockIdx.x % cluster;
  SplitKWork work;
  work.split = rank / arguments.multicast;
  work.group = {work.split * arguments.multicast, arguments.multicast, rank % arguments.multicast};
  work.begin = arguments.k_blocks * work.split / arguments.splits;
  work.end = arguments.k_blocks * (work.split + 1) / arguments.splits;
  const int tile = blockIdx.x / cluster;
  work.tile.Begin(arguments, {tile, work.begin, 0, 0}, kTokens, kStrips * arguments.multicast);
  return work;
}

// Signals to the other splits that this warp has read this CTA's ring for the last time.
__device__ __forceinline__ void SignalRingFree(const GemmArguments& arguments,
                                               const SplitKWork& work, std::uint32_t ring_free) {
  const int split = threadIdx.x % 32;
  if (split < arguments.splits && split != work.split) {
    BarrierArriveAt(ring_free, split * arguments.multicast + work.group.rank);
  }
}

// Sends a warp's sums to the split that owns them, into the place of its `slot`-th owned warp.
template <int kStrips, int kTokens>
__device__ __forceinline__ void PushSums(const GemmArguments& arguments, const SplitKWork& work,
                                         int owner, int slot, int tokens, std::uint32_t received,
                                         std::uint32_t barriers,
                                         const std::uint32_t (&sums)[kTokens / 2]) {
  using S = SplitKShape<kStrips, kTokens>;
  const int rank = owner * arguments.multicast + work.group.rank;
  const int sender = work.split < owner ? work.split : work.split - 1;  // of the owner's others
  const std::uint32_t to =
      MapToCta(received + (slot * (arguments.splits - 1) + sender) * S::kWarpSumBytes +
                   threadIdx.x % 32 * 16,
               rank);
  const std::uint32_t barrier = MapToCta(barriers + 8 * slot, rank);
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    if (8 * j < tokens) {
      StoreAsyncCluster128(to + j * 512, sums[4 * j], sums[4 * j + 1], sums[4 * j + 2],
                           sums[4 * j + 3], barrier);
    }
  }
}

// Adds the sums that the other splits have sent for a warp, in the order of splits.
template <class Type, int kTokens>
__device__ __forceinline__ void AddReceived(int others, int tokens, std::uint32_t received,
                                            std::uint32_t (&sums)[kTokens / 2]) {
  for (int other = 0; other < others; ++other) {
    const std::uint32_t from = received + other * kTokens * 64 + threadIdx.x % 32 * 16;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      if (8 * j < tokens) {
        const uint4 partial = LoadShared128(from + j * 512);
        const std::uint32_t words[4] = {partial.x, partial.y, partial.z, partial.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          std::uint32_t& sum = sums[4 * j + e];
          sum = ToBits(Add(words[e], FromBits<Type>(sum)));
        }
      }
    }
  }
}

// The epilogue of a warp's 16 out-features, from `row` on, through its staging memory.
template <class Type, int kStrips, int kTokens>
__device__ __forceinline__ void StoreWarp(const GemmArguments& arguments, int row, int first_token,
                                          int tokens, std::uint32_t staging,
                                          const RowScales& scales,
                                          const TokenScales<kTokens>& token_scales,
                                          const std::uint32_t (&sums)[kTokens / 2]) {
  using S = SplitKShape<kStrips, kTokens>;
  const int lane = threadIdx.x % 32;
  const std::uint32_t to = staging + lane % 8 * S::kPitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    if (kTokens > 64 || 8 * j < tokens) {  // only small tiles skip tokens beyond the last
      StageTokens<Type>(arguments, scales, sums, j, token_scales.Pair(j), to + 8 * j * S::kPitch);
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

template <class Type, int kStrips, int kTokens, Blocks kBlocks>
__device__ __forceinline__ void Multiply(const GemmArguments& arguments, const SplitKWork& work,
                                         std::uint32_t ring, std::uint32_t full,
                                         std::uint32_t empty, std::uint32_t (&sums)[kTokens / 2]) {
  const int count = work.end - work.begin;
  ConsumerOf<Type, kStrips, kTokens, kBlocks>(arguments, work.group, ring, full, empty)
      .Run(count, true, sums);
}

template <class Type, int kStrips, int kTokens, Blocks kBlocks>
__global__ void __launch_bounds__(TileShape<kStrips, kTokens>::kThreads,
                                  TileShape<kStrips, kTokens>::ResidentCtas(kBlocks))
    GemmSplitK(const __grid_constant__ GemmArguments arguments) {
  using S = SplitKShape<kStrips, kTokens>;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  const int splits = arguments.splits;
  const std::uint32_t ring = SharedAddress(shared);
  const std::uint32_t received = ring + S::Received(arguments.stages, splits, kBlocks);
  const std::uint32_t full = ring + S::Barriers(arguments.stages, splits, kBlocks);
  const std::uint32_t empty = full + 8 * arguments.stages;
  const std::uint32_t complete = full + StageWordBytes(arguments.stages, kBlocks);
  const std::uint32_t ring_free = complete + 8 * S::Owned(splits);
  const SplitKWork work = FindWork<kStrips, kTokens>(arguments);
  const int tokens = min(kTokens, arguments.m - work.tile.token);
  TmaProducer<kStrips, kTokens, kBlocks> producer(arguments, work.group, work.tile, CtaTiles{},
                                                  work.end - work.begin, ring, full, empty);

  const bool produces = WarpNumber() == S::kConsumerThreads / 32;
  if (produces) {
    const bool leader = ElectOne();
    if (leader) {
      PrefetchTensorMap(&arguments.q);
      for (int i = 0; i < arguments.stages; ++i) {
        BarrierInit(full + 8 * i, 1);
        BarrierInit(empty + 8 * i, kStrips * 4 * arguments.multicast);
      }
      if (splits > 1) {
        for (int i = 0; i < S::Owned(splits); ++i) BarrierInit(complete + 8 * i, 1);
        BarrierInit(ring_free, S::kWarps * (splits - 1));
      }
      BarrierInitFence();
    }
    __syncwarp();
    producer.Begin();
    if (leader && splits > 1) {
      const int bytes = (splits - 1) * ((tokens + 7) / 8) * 512;
      for (int i = 0; i < S::Owned(splits); ++i) BarrierExpect(complete + 8 * i, bytes);
    }
  }
  __syncwarp();
  __syncthreads();
  if (arguments.multicast * splits > 1) {  // relaxed: BarrierInitFence has released the mbarriers
    ClusterArriveRelaxed();
    ClusterWait();
  }

  if (threadIdx.x >= S::kConsumerThreads) {
    ReallocateRegisters<S, true>();
    if (produces) {
      WaitForPredecessors();
      producer.Run();
      LaunchDependents();
    }
  } else {
    ReallocateRegisters<S, false>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int owner = warp % splits, slot = warp / splits;
    const int row = (work.tile.strip + kStrips * work.group.rank) * kStripRows + warp * 16;
    WaitForPredecessors();
    RowScales scales;
    TokenScales<kTokens> token_scales;
    if (owner == work.split) {
      scales.Load(arguments, row + lane / 4);
      token_scales.Load(arguments, work.tile.token);
    }
    std::uint32_t sums[kTokens / 2];
    Clear(sums);
    if (work.end > work.begin) {
      Multiply<Type, kStrips, kTokens, kBlocks>(arguments, work, ring, full, empty, sums);
    }
    if (S::kSumsInRing && splits > 1) {
      __syncwarp();
      SignalRingFree(arguments, work, ring_free);
      if (owner != work.split) BarrierWaitCluster(ring_free, 0);
    }
    if (owner != work.split) {
      PushSums<kStrips, kTokens>(arguments, work, owner, slot, tokens, received, complete, sums);
    }
    if (splits == 1) NamedBarrier(1, S::kConsumerThreads);  // all consumers have read the ring
    if (owner == work.split) {
      std::uint32_t staging = ring + warp * S::kStagingBytes;
      if (splits > 1) {
        staging = received + slot * (splits - 1) * S::kWarpSumBytes;
        BarrierWaitCluster(complete + 8 * slot, 0);
        AddReceived<Type, kTokens>(splits - 1, tokens, staging, sums);
        __syncwarp();  // outputs overwrite the sums, which all lanes have read
      }
      StoreWarp<Type, kStrips, kTokens>(arguments, row, work.tile.token, tokens, staging, scales,
                                        token_scales, sums);
    }
  }
}

}  // namespace slidesparse::hopper
