// The warp-specialized main loop: a ring of pipeline stages in shared memory, which a producer warp
// fills by TMA and consumer warpgroups multiply.
//
// A stage holds 128 columns of K': the activations of kTokens tokens, which wgmma reads from shared
// memory, and a packed block of each of kStrips strips, which wgmma reads from shared memory or
// from registers.  A CTA's work is a sequence of stages over one or more tiles of 64 kStrips
// out-features x kTokens tokens; the pipeline runs from one tile to the next without draining.
//
// Each stage has two mbarriers.  `full` completes when TMA has written all bytes of the stage;
// `empty` completes when every consumer warp of the multicast group has read the stage, because any
// of its CTAs writes into the stage of all.

#pragma once

#include <type_traits>

#include "common.cuh"
#include "decode.cuh"

namespace slidesparse::hopper {

// The shared memory that a stage reserves for a block.
__host__ __device__ constexpr int SlotBytes(Blocks blocks) {
  return blocks == Blocks::kMixed    ? kDenseBytes
         : blocks == Blocks::kSparse ? kPackedBytes
                                     : kCodedBytes;
}

// The bytes of what `stages` have outside of the ring: two mbarriers each, and for a mixed weight a
// word whose bit i tells whether strip i's block is dense.  A coded weight has a table of
// selectors, aligned to its size, behind them.
__host__ __device__ constexpr int StageWordBytes(int stages, Blocks blocks) {
  return stages * (blocks == Blocks::kMixed ? 3 * 8 : 2 * 8) +
         (blocks == Blocks::kCoded ? 2 * kSelectorBytes : 0);
}

template <int kStrips, int kTokens>
struct TileShape {
  static constexpr int kConsumerThreads = kStrips * 128;  // a warpgroup for each strip
  // The register file is divided among the four partitions of an SM: with 12 warps a thread may
  // have 168 registers, with 13 only 128.  256 tokens need 128 for the accumulators alone, so two
  // warpgroups multiply, and a third is the producer and hands its registers to them.
  static constexpr bool kWide = kTokens > 128;
  static constexpr int kProducerThreads = kWide ? 128 : 32;
  static constexpr int kThreads = kConsumerThreads + kProducerThreads;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(!kWide || kStrips == 2);
  // CTAs for which an SM must have registers: the second argument of __launch_bounds__.  Decoding
  // takes more of them.
  static constexpr int ResidentCtas(Blocks blocks) {
    const int most = kStrips == 1 ? 4 : kStrips == 2 ? 3 : kStrips == 3 ? 2 : 1;
    if (kTokens > 64) return 1;
    return blocks == Blocks::kCoded && kTokens > 32 && most > 1 ? most - 1 : most;
  }
  static constexpr int kTokenBytes = kTokens * kBlockColumns;

  // A stage must have room for dense blocks if the weight is mixed, and begins with activations,
  // whose swizzle repeats every 1024 bytes.
  static __host__ __device__ constexpr int StageBytes(Blocks blocks) {
    return (kTokenBytes + kStrips * SlotBytes(blocks) + 1023) / 1024 * 1024;
  }
};

// Moves registers from producer to consumers.  Every warp of a warpgroup must call it.
template <class S, bool kProducer>
__device__ __forceinline__ void ReallocateRegisters() {
  if (!S::kWide) return;
  if (kProducer) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kProducerRegisters));
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kConsumerRegisters));
  }
}

// The CTAs of a cluster that read the same activations; each loads a part and multicasts it.
struct MulticastGroup {
  int first, size, rank;  // the first member's rank in the cluster; this CTA's rank in the group
};

// The tiles of a CTA: the tile and k_block at which its part of the shared tiles begins, its first
// whole tile, and the distance to its next whole tile.
struct CtaTiles {
  int shared_tile, shared_k_block;
  int whole_tile, whole_stride;
};

// The tile scheduler: a CTA's position in its tiles, first the whole ones, then its shared part.
struct TileScheduler {
  using Tiles = CtaTiles;
  int visited, tile, k_block;
  int strip, token;  // of the tile's first output, in the multicast group's first CTA

  static __device__ __forceinline__ const std::uint8_t* Weight(const GemmArguments& arguments) {
    return arguments.weight;
  }

  // Tiles are rasterized in groups of `group_m_tiles` token tiles; within a group tokens vary
  // fastest, so that consecutive tiles use the same blocks of the weight while L2 holds them.
  __device__ __forceinline__ void Locate(const GemmArguments& arguments, int tokens, int strips) {
    int n_tile = tile, m_tile = 0;
    if (arguments.m_tiles > 1) {
      const int group = arguments.group_tiles.Divide(tile);
      const int within = tile - group * arguments.group_tiles.divisor;
      const bool last = (group + 1) * arguments.group_m_tiles.divisor > arguments.m_tiles;
      n_tile = last ? arguments.last_group_m_tiles.Divide(within)
                    : arguments.group_m_tiles.Divide(within);
      const int height =
          last ? arguments.last_group_m_tiles.divisor : arguments.group_m_tiles.divisor;
      m_tile = group * arguments.group_m_tiles.divisor + within - n_tile * height;
    }
    strip = n_tile * strips;
    token = m_tile * tokens;
  }

  __device__ __forceinline__ void Begin(const GemmArguments& arguments, const CtaTiles& tiles,
                                        int tokens, int strips) {
    visited = -1;
    Next(arguments, tiles, tokens, strips);
  }

  __device__ __forceinline__ void Next(const GemmArguments& arguments, const CtaTiles& tiles,
                                       int tokens, int strips) {
    ++visited;
    const int shared = visited - arguments.whole_tiles;
    tile =
        shared < 0 ? tiles.whole_tile + visited * tiles.whole_stride : tiles.shared_tile + shared;
    k_block = shared == 0 ? tiles.shared_k_block : 0;
    Locate(arguments, tokens, strips);
  }
};

// A thread's stage in the ring, and the parity of its mbarriers' current phase.
struct PipelineState {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void Advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Fills the ring.  The whole warp runs this and an elected lane issues the copies, so that the
// compiler sees warp-uniform values, keeps them in uniform registers, and needs no loop over the
// active lanes around a copy.
template <int kStrips, int kTokens, Blocks kBlocks, class Scheduler = TileScheduler>
class TmaProducer {
  using Tiles = typename Scheduler::Tiles;
  using S = TileShape<kStrips, kTokens>;
  static constexpr bool kMixed = kBlocks == Blocks::kMixed;
  static constexpr int kStageBytes = S::StageBytes(kBlocks);
  static constexpr int kBlockBytes = kBlocks == Blocks::kCoded ? kCodedBytes : kPackedBytes;

 public:
  __device__ TmaProducer(const GemmArguments& arguments, const MulticastGroup& group,
                         const Scheduler& begin, const Tiles& tiles, int count, std::uint32_t ring,
                         std::uint32_t full, std::uint32_t empty)
      : arguments_(arguments),
        group_(group),
        begin_(begin),
        next_(begin),
        tiles_(tiles),
        first_(min(count, arguments.stages)),
        count_(count),
        ring_(ring),
        full_(full),
        empty_(empty),
        dense_(empty + 8 * arguments.stages) {}

  // Loads the weights of as many stages as the ring holds.  They do not depend on the preceding
  // kernel, which may still be running.
  __device__ void Begin() {
    FindWeights();
    for (int i = 0; i < first_; ++i) {
      LoadWeights(i);
      Advance();
    }
  }

  // Loads the activations of these stages, which the preceding kernel must have written, then all
  // other stages.  Returns only when no CTA of the group will arrive at this CTA's mbarriers any
  // more: an arrival at a CTA that has exited fails the launch.
  __device__ void Run() {
    Scheduler scheduler = begin_;
    for (int i = 0; i < first_; ++i) {
      LoadTokens(scheduler, i);
      if (++scheduler.k_block == arguments_.k_blocks) {
        scheduler.Next(arguments_, tiles_, kTokens, kStrips * group_.size);
      }
    }
    PipelineState state;
    for (int i = first_; i < count_; ++i) {
      BarrierWait(empty_ + 8 * state.stage, state.parity);
      LoadWeights(state.stage);
      LoadTokens(next_, state.stage);
      Advance();
      state.Advance(arguments_.stages);
    }
    if (group_.size == 1) return;
    for (int i = 0; i < first_; ++i) {  // drains the last stages, which are not filled again
      BarrierWait(empty_ + 8 * state.stage, state.parity);
      state.Advance(arguments_.stages);
    }
  }

 private:
  // Finds where the next stage's blocks are.
  __device__ __forceinline__ void FindWeights() {
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      // A strip beyond the last one repeats the last one's products, which are not stored.
      const int strip = min(next_.strip + kStrips * group_.rank + i, arguments_.strips - 1);
      const std::size_t block =
          static_cast<std::size_t>(strip) * arguments_.k_blocks + next_.k_block;
      if constexpr (kMixed) {
        entries_[i] =
            __ldg(reinterpret_cast<const std::uint32_t*>(next_.Weight(arguments_)) + block);
      } else {
        weights_[i] = next_.Weight(arguments_) + block * kBlockBytes;
      }
    }
  }

  __device__ __forceinline__ void LoadWeights(int stage) {
    const std::uint32_t barrier = full_ + 8 * stage;
    const std::uint32_t to = ring_ + stage * kStageBytes + S::kTokenBytes;
    std::uint32_t dense = 0, bytes = S::kTokenBytes + kStrips * kBlockBytes;
    if constexpr (kMixed) {
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        // The shuffle tells the compiler that the value is warp-uniform.
        const std::uint32_t entry = __shfl_sync(0xFFFFFFFF, entries_[i], 0);
        weights_[i] = next_.Weight(arguments_) + static_cast<std::size_t>(entry / 2) * kTableUnit;
        dense |= (entry & 1) << i;
        bytes += (entry & 1) * (kDenseBytes - kPackedBytes);
      }
    }
    if (!ElectOne()) return;
    if constexpr (kMixed) StoreShared32(dense_ + 8 * stage, dense);
    BarrierExpect(barrier, bytes);
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      BulkLoad(to + i * SlotBytes(kBlocks), weights_[i], dense >> i & 1 ? kDenseBytes : kBlockBytes,
               barrier, arguments_.weight_policy);
    }
  }

  __device__ __forceinline__ void LoadTokens(const Scheduler& at, int stage) {
    const std::uint32_t barrier = full_ + 8 * stage;
    const std::uint32_t to = ring_ + stage * kStageBytes;
    const int column = at.k_block * kBlockColumns;
    if (!ElectOne()) return;
    if (group_.size == 1) {
      TmaLoad(to, &arguments_.q, column, at.token, barrier, arguments_.token_policy);
    } else {
      const int first = group_.rank * arguments_.multicast_tokens;
      const int ctas = ((1 << group_.size) - 1) << group_.first;
      TmaLoadMulticast(to + first * kBlockColumns, &arguments_.q, column, at.token + first, barrier,
                       static_cast<std::uint16_t>(ctas), arguments_.token_policy);
    }
  }

  __device__ __forceinline__ void Advance() {
    if (++next_.k_block == arguments_.k_blocks) {
      next_.Next(arguments_, tiles_, kTokens, kStrips * group_.size);
      FindWeights();
    } else if (kMixed) {
      FindWeights();
    } else {
#pragma unroll
      for (int i = 0; i < kStrips; ++i) weights_[i] += kBlockBytes;
    }
  }

  const GemmArguments& arguments_;
  const MulticastGroup& group_;
  const Scheduler begin_;
  Scheduler next_;
  const std::uint8_t* weights_[kStrips];  // the blocks at `next_`
  std::uint32_t entries_[kStrips];        // the table's entries at `next_`, if mixed
  Tiles tiles_;
  int first_, count_;  // stages: that Begin fills, and all
  std::uint32_t ring_, full_, empty_, dense_;
};

// A thread's registers of the weight for one wgmma.
struct Fragment {
  uint4 values;
  std::uint32_t metadata;
};
static_assert(kWgmmas == 2);

// Pins the accumulators to registers, so that the compiler moves them only outside of the main
// loop.
template <int kSums>
__device__ __forceinline__ void Pin(std::uint32_t (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+r"(sums[i])::"memory");
}

// Clears the accumulators by blockIdx.z, which is always zero but not known to be: for a constant
// the compiler peels the first wgmma off with a second set of accumulators.
template <int kSums>
__device__ __forceinline__ void Clear(std::uint32_t (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = blockIdx.z;
}

// The pipeline's consumer side, which both consumers share.
class Consumer {
 protected:
  __device__ Consumer(const GemmArguments& arguments, const MulticastGroup& group,
                      std::uint32_t ring, std::uint32_t full, std::uint32_t empty)
      : arguments_(arguments), group_(group), ring_(ring), full_(full), empty_(empty) {}

  // Waits until the next stage is full.
  __device__ __forceinline__ void Wait() { BarrierWait(full_ + 8 * next_.stage, next_.parity); }

  // Tells every producer that writes into the oldest stage that this warp has read it.
  __device__ __forceinline__ void Release() {
    const int lane = threadIdx.x % 32;
    const std::uint32_t barrier = empty_ + 8 * oldest_;
    __syncwarp();  // orders the reads of all lanes before the arrival
    if (group_.size == 1) {
      if (lane == 0) BarrierArrive(barrier);
    } else if (lane < group_.size) {
      BarrierArriveAt(barrier, group_.first + lane);
    }
    if (++oldest_ == arguments_.stages) oldest_ = 0;
  }

  const GemmArguments& arguments_;
  const MulticastGroup& group_;
  std::uint32_t ring_, full_, empty_;
  PipelineState next_;
  int oldest_ = 0;
};

// The consumer for up to 128 tokens and 2:4 blocks alone: wgmma takes the weight from registers,
// which is faster than from shared memory.
template <class Type, int kStrips, int kTokens>
class NarrowConsumer : Consumer {
  using S = TileShape<kStrips, kTokens>;

 public:
  __device__ NarrowConsumer(const GemmArguments& arguments, const MulticastGroup& group,
                            std::uint32_t ring, std::uint32_t full, std::uint32_t empty)
      : Consumer(arguments, group, ring, full, empty) {
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    const std::uint32_t weight = ring + S::kTokenBytes + threadIdx.x / 128 * kPackedBytes;
    values_ = weight + thread / 32 * 512 + lane / 8 % 2 * 256 + lane / 16 * 128 + lane % 8 * 16;
    metadata_ = weight + kValueBytes + thread * 4;
  }

  // As WideConsumer::Run.  The weight of a wgmma is loaded while the preceding wgmma runs.
  __device__ __forceinline__ void Run(int count, bool accumulate,
                                      std::uint32_t (&sums)[kTokens / 2]) {
    Fragment first, second;
    if (!accumulate) Clear(sums);
    Pin(sums);
    Wait();
    Load(first, 0);
    for (int i = 0; i < count; ++i) {
      Multiply(first, 0, sums);
      WgmmaWait<1>();  // the preceding stage and `second` are no longer read
      if (i > 0) Release();
      Load(second, 1);
      Multiply(second, 1, sums);
      WgmmaWait<1>();
      next_.Advance(arguments_.stages);
      if (i + 1 < count) {
        Wait();
        Load(first, 0);
      }
    }
    WgmmaWait<0>();
    Pin(sums);
    Release();
  }

 private:
  __device__ __forceinline__ void Load(Fragment& fragment, int wgmma) {
    const std::uint32_t at = next_.stage * S::StageBytes(Blocks::kSparse);
    fragment.values = LoadMatrices(values_ + at + wgmma * (kValueBytes / kWgmmas));
    fragment.metadata = LoadShared32(metadata_ + at + wgmma * (kMetadataBytes / kWgmmas));
  }

  __device__ __forceinline__ void Multiply(const Fragment& fragment, int wgmma,
                                           std::uint32_t (&sums)[kTokens / 2]) {
    const std::uint64_t tokens =
        Descriptor(ring_ + next_.stage * S::StageBytes(Blocks::kSparse) + wgmma * kWgmmaColumns);
    WgmmaFence();
    Wgmma<Type, kTokens>::FromRegisters(sums, fragment.values, tokens, fragment.metadata);
    WgmmaCommit();
  }

  std::uint32_t values_, metadata_;
};

// The consumer for 256 tokens, and for mixed weights with any number of tokens.  With 256 tokens a
// wgmma takes long enough to read the weight from shared memory without a loss, and the registers
// hold the metadata of two stages instead.  All wgmmas of a stage form one group.
template <class Type, int kStrips, int kTokens, Blocks kBlocks>
class WideConsumer : Consumer {
  using S = TileShape<kStrips, kTokens>;
  static constexpr bool kMixed = kBlocks == Blocks::kMixed;
  static constexpr int kStageBytes = S::StageBytes(kBlocks);

 public:
  __device__ WideConsumer(const GemmArguments& arguments, const MulticastGroup& group,
                          std::uint32_t ring, std::uint32_t full, std::uint32_t empty)
      : Consumer(arguments, group, ring, full, empty), dense_(empty + 8 * arguments.stages) {
    strip_ = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    weight_ = S::kTokenBytes + strip_ * SlotBytes(kBlocks);
    metadata_ = ring + weight_ + kValueBytes + threadIdx.x % 128 * 4;
  }

  // Multiplies the next `count` >= 1 stages: adds the products to `sums` if `accumulate`, otherwise
  // overwrites them.  Fewer sums are those of the first tokens.
  template <int kSums>
  __device__ __forceinline__ void Run(int count, bool accumulate, std::uint32_t (&sums)[kSums]) {
    Block even, odd;  // double-buffered registers, for alternate stages
    int i = 0;
    Pin(sums);
    Wait();
    if (count % 2 == 1) {
      Load(even);
      Step(even, odd, i, count, accumulate, sums);
    } else {
      Load(odd);
    }
    while (i < count) {  // two stages at a time, as no branch may exit while wgmmas are in flight
      Step(odd, even, i, count, accumulate || i > 0, sums);
      Step(even, odd, i, count, true, sums);
    }
    WgmmaWait<0>();
    Pin(sums);
    Release();
  }

 private:
  // What a thread loads of a stage's block.
  struct Block {
    std::uint32_t dense;
    std::uint32_t metadata[kWgmmas];  // meaningless if the block is dense
  };

  __device__ __forceinline__ void Load(Block& block) {
    if constexpr (kMixed) {
      const std::uint32_t dense = LoadShared32(dense_ + 8 * next_.stage) >> strip_ & 1;
      block.dense = __shfl_sync(0xFFFFFFFF, dense, 0);
    }
#pragma unroll
    for (int wgmma = 0; wgmma < kWgmmas; ++wgmma) {
      block.metadata[wgmma] =
          LoadShared32(metadata_ + next_.stage * kStageBytes + wgmma * (kMetadataBytes / kWgmmas));
    }
  }

  // Multiplies stage `i`, and meanwhile loads the registers of the following stage.
  template <int kSums>
  __device__ __forceinline__ void Step(const Block& current, Block& following, int& i, int count,
                                       bool accumulate, std::uint32_t (&sums)[kSums]) {
    const std::uint32_t stage = ring_ + next_.stage * kStageBytes;
    // Fence and commit are in both branches: otherwise ptxas serializes the wgmmas by waits.
    if (kMixed && current.dense) {
      WgmmaFence();
#pragma unroll
      for (int wgmma = 0; wgmma < kDenseWgmmas; ++wgmma) {
        Wgmma<Type, 2 * kSums>::Dense(
            sums, WeightDescriptor(stage + weight_ + wgmma * (kDenseBytes / kDenseWgmmas)),
            Descriptor(stage + wgmma * kDenseWgmmaColumns), accumulate || wgmma > 0);
      }
      WgmmaCommit();
    } else {
      WgmmaFence();
#pragma unroll
      for (int wgmma = 0; wgmma < kWgmmas; ++wgmma) {
        Wgmma<Type, 2 * kSums>::Sparse(
            sums, WeightDescriptor(stage + weight_ + wgmma * (kValueBytes / kWgmmas)),
            Descriptor(stage + wgmma * kWgmmaColumns), current.metadata[wgmma],
            accumulate || wgmma > 0);
      }
      WgmmaCommit();
    }
    WgmmaWait<1>();  // the preceding stage is no longer read
    if (i > 0) Release();
    next_.Advance(arguments_.stages);
    if (++i < count) {
      Wait();
      Load(following);
    }
  }

  std::uint32_t dense_;
  int strip_;             // index in the CTA
  std::uint32_t weight_;  // offset of the strip's block in a stage
  std::uint32_t metadata_;
};

// The consumer for coded weights.  Decoded values go from registers into dense wgmmas, two of
// which multiply half of a stage.
template <class Type, int kStrips, int kTokens>
class CodedConsumer : Consumer {
  using S = TileShape<kStrips, kTokens>;
  static constexpr int kStageBytes = S::StageBytes(Blocks::kCoded);

 public:
  __device__ CodedConsumer(const GemmArguments& arguments, const MulticastGroup& group,
                           std::uint32_t ring, std::uint32_t full, std::uint32_t empty)
      : Consumer(arguments, group, ring, full, empty) {
    table_ = (empty + 8 * arguments.stages + kSelectorBytes - 1) / kSelectorBytes * kSelectorBytes;
    block_ = ring + S::kTokenBytes + threadIdx.x / 128 * kCodedBytes;
    // Every warp writes the whole table, so that it need not wait for the others.
    for (int code = threadIdx.x % 32; code < kSelectorBytes / 4; code += 32) {
      StoreShared32(table_ + 4 * code, Selectors(code));
    }
    __syncwarp();
  }

  // As WideConsumer::Run.  Half of a stage is expanded while the other half is multiplied.
  template <int kSums>
  __device__ __forceinline__ void Run(int count, bool accumulate, std::uint32_t (&sums)[kSums]) {
    CodedOperands first, second;
    CodedHalf now, later;
    if (!accumulate) Clear(sums);
    Pin(sums);
    Wait();
    Load(now, later);
    Expand(now, first);
    for (int i = 0; i < count; ++i) {
      Multiply<0>(first, sums);
      WgmmaWait<1>();  // the preceding stage and `second` are no longer read
      if (i > 0) Release();
      Expand(later, second);
      Multiply<1>(second, sums);
      next_.Advance(arguments_.stages);
      if (i + 1 < count) {
        Wait();
        Load(now, later);
      }
      WgmmaWait<1>();  // `first` is no longer read
      if (i + 1 < count) Expand(now, first);
    }
    WgmmaWait<0>();
    Pin(sums);
    Release();
  }

 private:
  __device__ __forceinline__ void Load(CodedHalf& now, CodedHalf& later) {
    const int thread = threadIdx.x % 128;
    const std::uint32_t block = block_ + next_.stage * kStageBytes;
    const std::uint32_t codes = block + kCodedValueBytes;
    LoadHalves(now, later, block, LoadShared32(codes + 4 * thread),
               LoadShared8(codes + 128 * 4 + thread), table_);
  }

  template <int kHalf, int kSums>
  __device__ __forceinline__ void Multiply(CodedOperands& operands, std::uint32_t (&sums)[kSums]) {
    constexpr int kWgmmasOfHalf = kDenseWgmmas / 2;
    // Expanded before the fence.
#pragma unroll
    for (int i = 0; i < kWgmmasOfHalf; ++i) {
      asm volatile(""
                   : "+r"(operands[i].x), "+r"(operands[i].y), "+r"(operands[i].z),
                     "+r"(operands[i].w));
    }
    const std::uint32_t tokens =
        ring_ + next_.stage * kStageBytes + kHalf * kWgmmasOfHalf * kDenseWgmmaColumns;
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < kWgmmasOfHalf; ++i) {
      Wgmma<Type, 2 * kSums>::DenseFromRegisters(sums, operands[i],
                                                 Descriptor(tokens + i * kDenseWgmmaColumns));
    }
    WgmmaCommit();
  }

  std::uint32_t block_, table_;
};

template <class Type, int kStrips, int kTokens, Blocks kBlocks>
using ConsumerOf = std::conditional_t<
    kBlocks == Blocks::kCoded, CodedConsumer<Type, kStrips, kTokens>,
    std::conditional_t<TileShape<kStrips, kTokens>::kWide || kBlocks == Blocks::kMixed,
                       WideConsumer<Type, kStrips, kTokens, kBlocks>,
                       NarrowConsumer<Type, kStrips, kTokens>>>;

}  // namespace slidesparse::hopper
