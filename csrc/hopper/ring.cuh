// The ring of stages in shared memory: a producer that fills it and the warpgroups that multiply
// what it holds.
//
// A stage is 128 columns: the activations of kTokens tokens, which the tensor cores read, and the
// packed weight of kStrips strips, which they read, too, or take from registers.  Work is counted
// in units, a tile of 64 kStrips out-features x kTokens tokens by one stage, and runs on from tile
// to tile without a break.

#pragma once

#include "common.cuh"

namespace slidesparse::hopper {

template <int kStrips, int kTokens>
struct Shape {
  static constexpr int kConsumers = kStrips * 128;  // threads
  // Registers are limited by quarters of a multiprocessor: 12 warps may have 168 each, 13 only 128.
  // With many tokens two warpgroups multiply, and a third, whose registers they get, fills the
  // ring.
  static constexpr bool kWide = kTokens > 128;
  static constexpr int kProducers = kWide ? 128 : 32;
  static constexpr int kThreads = kConsumers + kProducers;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(!kWide || kStrips == 2);
  // Blocks that a multiprocessor must have the registers for.
  static constexpr int kResident = kTokens > 64   ? 1
                                   : kStrips == 1 ? 4
                                   : kStrips == 2 ? 3
                                   : kStrips == 3 ? 2
                                                  : 1;
  static constexpr int kTokenBytes = kTokens * kBlockColumns;
  static constexpr int kStageBytes = kTokenBytes + kStrips * kPackedBytes;
};

// At the beginning of what a warpgroup of producers, or of consumers, does.
template <class S, bool kProducer>
__device__ __forceinline__ void DealRegisters() {
  if (!S::kWide) return;
  if (kProducer) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kProducerRegisters));
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kConsumerRegisters));
  }
}

// Of the blocks of a cluster those that read the same activations; each loads a part for all.
struct Sharers {
  int first, count, mine;  // the first's rank in the cluster, and this one's number among them
};

// The tiles of a block of threads: where its part of the shared ones begins, its first whole tile
// and the step to the next.
struct Turns {
  int tile, block;
  int whole, step;
};

// Where a block of threads stands in its work: its whole tiles, then its part of the shared ones.
struct Walk {
  int turn, tile, block;  // and the stage's block of columns
  int strip, token;       // the tile's first, of sharer 0

  // Tiles are walked by groups of `together` rows of tokens; in a group by tokens, then by
  // out-features, so that a weight serves several tiles while the cache holds it.
  __device__ __forceinline__ void Find(const Arguments& arguments, int tokens, int strips) {
    int across = tile, by_token = 0;
    if (arguments.by_token > 1) {
      const int group = arguments.of_group.Of(tile);
      const int within = tile - group * arguments.of_group.divisor;
      const bool last = (group + 1) * arguments.together.divisor > arguments.by_token;
      across = last ? arguments.last.Of(within) : arguments.together.Of(within);
      const int high = last ? arguments.last.divisor : arguments.together.divisor;
      by_token = group * arguments.together.divisor + within - across * high;
    }
    strip = across * strips;
    token = by_token * tokens;
  }

  __device__ __forceinline__ void Begin(const Arguments& arguments, const Turns& turns, int tokens,
                                        int strips) {
    turn = -1;
    Turn(arguments, turns, tokens, strips);
  }

  // To the tile after this one.
  __device__ __forceinline__ void Turn(const Arguments& arguments, const Turns& turns, int tokens,
                                       int strips) {
    ++turn;
    const int of_part = turn - arguments.rounds;
    tile = of_part < 0 ? turns.whole + turn * turns.step : turns.tile + of_part;
    block = of_part == 0 ? turns.block : 0;
    Find(arguments, tokens, strips);
  }
};

// The ring as one thread walks it.
struct Cursor {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void Advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Fills the ring.  For all threads of a warp, of which one copies: the compiler then sees that they
// compute the same, keeps it in uniform registers, and has no loop around each copy.
template <int kStrips, int kTokens>
class Producer {
  using S = Shape<kStrips, kTokens>;

 public:
  __device__ Producer(const Arguments& arguments, const Sharers& sharers, const Walk& begin,
                      const Turns& turns, int count, std::uint32_t ring, std::uint32_t full,
                      std::uint32_t empty)
      : arguments_(arguments),
        sharers_(sharers),
        begin_(begin),
        next_(begin),
        turns_(turns),
        first_(min(count, arguments.stages)),
        count_(count),
        ring_(ring),
        full_(full),
        empty_(empty) {}

  // Weights of as many stages as there are.
  __device__ void Begin() {
    FindWeights();
    for (int i = 0; i < first_; ++i) {
      LoadWeights(i);
      Advance();
    }
  }

  // Their activations, when these and the cluster's barriers are there, and the rest.  Returns when
  // no sharer will arrive at this block's stages any more: to arrive at a block that has ended
  // fails the launch.
  __device__ void Run() {
    Walk walk = begin_;
    for (int i = 0; i < first_; ++i) {
      LoadTokens(walk, i);
      if (++walk.block == arguments_.blocks) {
        walk.Turn(arguments_, turns_, kTokens, kStrips * sharers_.count);
      }
    }
    Cursor cursor;
    for (int i = first_; i < count_; ++i) {
      BarrierWait(empty_ + 8 * cursor.stage, cursor.parity);
      LoadWeights(cursor.stage);
      LoadTokens(next_, cursor.stage);
      Advance();
      cursor.Advance(arguments_.stages);
    }
    if (sharers_.count == 1) return;
    for (int i = 0; i < first_; ++i) {  // stages that have been read and not filled again
      BarrierWait(empty_ + 8 * cursor.stage, cursor.parity);
      cursor.Advance(arguments_.stages);
    }
  }

 private:
  __device__ __forceinline__ void FindWeights() {
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      // strips beyond the last are not stored
      const int strip = min(next_.strip + kStrips * sharers_.mine + i, arguments_.strips - 1);
      weights_[i] =
          arguments_.weight +
          (static_cast<std::size_t>(strip) * arguments_.blocks + next_.block) * kPackedBytes;
    }
  }

  __device__ __forceinline__ void LoadWeights(int stage) {
    const std::uint32_t barrier = full_ + 8 * stage;
    const std::uint32_t to = ring_ + stage * S::kStageBytes + S::kTokenBytes;
    if (!ElectOne()) return;
    BarrierExpect(barrier, S::kStageBytes);
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      CopyBytes(to + i * kPackedBytes, weights_[i], kPackedBytes, barrier, arguments_.keep_weight);
    }
  }

  __device__ __forceinline__ void LoadTokens(const Walk& walk, int stage) {
    const std::uint32_t barrier = full_ + 8 * stage;
    const std::uint32_t to = ring_ + stage * S::kStageBytes;
    const int column = walk.block * kBlockColumns;
    if (!ElectOne()) return;
    if (sharers_.count == 1) {
      CopyTile(to, &arguments_.q, column, walk.token, barrier, arguments_.keep_tokens);
    } else {
      const int first = sharers_.mine * arguments_.shared_tokens;
      const int blocks = ((1 << sharers_.count) - 1) << sharers_.first;
      CopyTileToBlocks(to + first * kBlockColumns, &arguments_.q, column, walk.token + first,
                       barrier, static_cast<std::uint16_t>(blocks), arguments_.keep_tokens);
    }
  }

  // To the stage after the one whose weights were asked for last.
  __device__ __forceinline__ void Advance() {
    if (++next_.block < arguments_.blocks) {
#pragma unroll
      for (int i = 0; i < kStrips; ++i) weights_[i] += kPackedBytes;
    } else {
      next_.Turn(arguments_, turns_, kTokens, kStrips * sharers_.count);
      FindWeights();
    }
  }

  const Arguments& arguments_;
  const Sharers& sharers_;
  const Walk begin_;
  Walk next_;
  const std::uint8_t* weights_[kStrips];  // of `next_`
  Turns turns_;
  int first_, count_;
  std::uint32_t ring_, full_, empty_;
};

// A weight's registers for one product.
struct Fragment {
  uint4 values;
  std::uint32_t places;
};
static_assert(kProducts == 2);

// Keeps whatever moves sums from register to register on this side of products.
template <int kSums>
__device__ __forceinline__ void Pin(std::uint32_t (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+r"(sums[i])::"memory");
}

// Sums of nothing.  Of a zero that it knows the compiler makes a second set of sums for the first
// product; the grid has no third dimension, which it does not know.
template <int kSums>
__device__ __forceinline__ void Clear(std::uint32_t (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = blockIdx.z;
}

// The ring as a warpgroup that multiplies walks it.
class Consumer {
 protected:
  __device__ Consumer(const Arguments& arguments, const Sharers& sharers, std::uint32_t ring,
                      std::uint32_t full, std::uint32_t empty)
      : arguments_(arguments), sharers_(sharers), ring_(ring), full_(full), empty_(empty) {}

  // Until the next stage is there.
  __device__ __forceinline__ void Wait() { BarrierWait(full_ + 8 * next_.stage, next_.parity); }

  // Tells the producers of all that write into it that the oldest stage is free.
  __device__ __forceinline__ void Release() {
    const int lane = threadIdx.x % 32;
    const std::uint32_t barrier = empty_ + 8 * oldest_;
    if (sharers_.count == 1) {
      if (lane == 0) BarrierArrive(barrier);
    } else if (lane < sharers_.count) {
      BarrierArriveAt(barrier, sharers_.first + lane);
    }
    if (++oldest_ == arguments_.stages) oldest_ = 0;
  }

  const Arguments& arguments_;
  const Sharers& sharers_;
  std::uint32_t ring_, full_, empty_;
  Cursor next_;
  int oldest_ = 0;
};

// With up to 128 tokens: weights from registers; the tensor cores would take longer to read them.
template <class Type, int kStrips, int kTokens>
class NarrowConsumer : Consumer {
  using S = Shape<kStrips, kTokens>;

 public:
  __device__ NarrowConsumer(const Arguments& arguments, const Sharers& sharers, std::uint32_t ring,
                            std::uint32_t full, std::uint32_t empty)
      : Consumer(arguments, sharers, ring, full, empty) {
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
    const std::uint32_t weight = ring + S::kTokenBytes + threadIdx.x / 128 * kPackedBytes;
    values_ = weight + thread / 32 * 512 + lane / 8 % 2 * 256 + lane / 16 * 128 + lane % 8 * 16;
    places_ = weight + kValueBytes + thread * 4;
  }

  // Adds the products of the ring's next `count` stages, at least one, to `sums`.  A product's
  // weight is read while the one before it runs.
  __device__ __forceinline__ void Run(int count, std::uint32_t (&sums)[kTokens / 2]) {
    Fragment first, second;
    Pin(sums);
    Wait();
    Load(first, 0);
    for (int i = 0; i < count; ++i) {
      Multiply(first, 0, sums);
      ProductWait<1>();  // the products of the stage before have read it, and `second`
      if (i > 0) Release();
      Load(second, 1);
      Multiply(second, 1, sums);
      ProductWait<1>();
      next_.Advance(arguments_.stages);
      if (i + 1 < count) {
        Wait();
        Load(first, 0);
      }
    }
    ProductWait<0>();
    Pin(sums);
    Release();
  }

 private:
  __device__ __forceinline__ void Load(Fragment& fragment, int product) {
    const std::uint32_t at = next_.stage * S::kStageBytes;
    fragment.values = LoadMatrices(values_ + at + product * (kValueBytes / kProducts));
    fragment.places = LoadShared32(places_ + at + product * (kPlaceBytes / kProducts));
  }

  __device__ __forceinline__ void Multiply(const Fragment& fragment, int product,
                                           std::uint32_t (&sums)[kTokens / 2]) {
    const std::uint64_t tokens =
        Descriptor(ring_ + next_.stage * S::kStageBytes + product * kProductColumns);
    ProductFence();
    Product<Type, kTokens>::Add(sums, fragment.values, tokens, fragment.places);
    ProductCommit();
  }

  std::uint32_t values_, places_;
};

// With 256 tokens: a product takes twice as long, so weights come from shared memory as well, which
// leaves registers for the places of two stages, and a stage's products go together.
template <class Type, int kStrips, int kTokens>
class WideConsumer : Consumer {
  using S = Shape<kStrips, kTokens>;

 public:
  __device__ WideConsumer(const Arguments& arguments, const Sharers& sharers, std::uint32_t ring,
                          std::uint32_t full, std::uint32_t empty)
      : Consumer(arguments, sharers, ring, full, empty) {
    const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    weight_ = S::kTokenBytes + group * kPackedBytes;
    places_ = ring + weight_ + kValueBytes + threadIdx.x % 128 * 4;
  }

  // Sums the products of the ring's next `count` stages, at least one: adds them to `sums` if these
  // are `begun`, else overwrites them.
  __device__ __forceinline__ void Run(int count, bool begun, std::uint32_t (&sums)[kTokens / 2]) {
    Places even, odd;
    int i = 0;
    Pin(sums);
    Wait();
    if (count % 2 == 1) {
      Load(even);
      Step(even, odd, i, count, begun, sums);
    } else {
      Load(odd);
    }
    while (i < count) {  // no branch may leave it while products run, so two stages at a time
      Step(odd, even, i, count, begun || i > 0, sums);
      Step(even, odd, i, count, true, sums);
    }
    ProductWait<0>();
    Pin(sums);
    Release();
  }

 private:
  using Places = std::uint32_t[kProducts];

  __device__ __forceinline__ void Load(Places& places) {
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      places[product] = LoadShared32(places_ + next_.stage * S::kStageBytes +
                                     product * (kPlaceBytes / kProducts));
    }
  }

  // Multiplies stage `i`, and reads the places of the one after it.
  __device__ __forceinline__ void Step(const Places& now, Places& then, int& i, int count,
                                       bool accumulate, std::uint32_t (&sums)[kTokens / 2]) {
    const std::uint32_t stage = ring_ + next_.stage * S::kStageBytes;
    ProductFence();
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      Product<Type, kTokens>::AddShared(
          sums, WeightDescriptor(stage + weight_ + product * (kValueBytes / kProducts)),
          Descriptor(stage + product * kProductColumns), now[product], accumulate || product > 0);
    }
    ProductCommit();
    ProductWait<1>();  // the stage before has been read
    if (i > 0) Release();
    next_.Advance(arguments_.stages);
    if (++i < count) {
      Wait();
      Load(then);
    }
  }

  std::uint32_t weight_;  // the strip's, in a stage
  std::uint32_t places_;
};

}  // namespace slidesparse::hopper
