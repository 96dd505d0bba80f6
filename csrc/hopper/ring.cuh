// The ring of stages in shared memory: a producer that fills it and the warpgroups that multiply
// what it holds.
//
// A stage is 128 columns: the activations of kTokens tokens, which the tensor cores read, and the
// packed weight of kStrips strips, which a consumer's thread finds as the registers that its
// products take.  Work is counted in units, a tile of 64 kStrips out-features x kTokens tokens by
// one stage, and runs on from tile to tile without a break.

#pragma once

#include "common.cuh"

namespace slidesparse::hopper {

template <int kStrips, int kTokens>
struct Shape {
  static constexpr int kRows = kStrips * kStripRows;
  static constexpr int kConsumers = kStrips * 128;  // threads
  // Registers are limited by quarters of a multiprocessor: 12 warps may have 168 each, 13 only 128.
  // With many tokens two warpgroups multiply and one, whose registers they get, fills the ring; or
  // three multiply, and a thread of theirs fills it between products.
  static constexpr bool kSelfFed = kTokens > 128 && kStrips == 3;
  static constexpr bool kDealt = kTokens > 128 && !kSelfFed;
  static constexpr int kProducers = kSelfFed ? 0 : kDealt ? 128 : 32;
  static constexpr int kThreads = kConsumers + kProducers;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(!kDealt || kStrips == 2);
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
  if (!S::kDealt) return;
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

// Where the neighbouring tiles of a block of threads begin, and the step between its whole ones.
struct Turns {
  int tile, block, step;
};

// Where a block of threads stands in its work: `rounds` whole tiles, then stages of neighbouring
// tiles.
struct Walk {
  int tile, block;   // and the stage's block of columns
  int rounds;        // whole tiles from this one on
  int strip, token;  // the tile's first, of sharer 0

  // Tiles are walked by groups of `together` rows of tokens; in a group by tokens, then by
  // out-features, so that a weight serves several tiles while the cache holds it.
  __device__ __forceinline__ void Find(const Arguments& arguments, int tokens, int strips) {
    int across = tile, by_token = 0;
    if (arguments.by_token > 1) {
      const int of_group = arguments.together * arguments.across;
      const int first = tile / of_group * arguments.together;
      const int high = max(1, min(arguments.together, arguments.by_token - first));  // 1: no tile
      const int within = tile % of_group;
      across = within / high;
      by_token = first + within % high;
    }
    strip = across * strips;
    token = by_token * tokens;
  }

  // Of the first whole tile `number`, if there are any, else of the neighbours.
  __device__ __forceinline__ void Begin(const Arguments& arguments, int number, const Turns& turns,
                                        int tokens, int strips) {
    rounds = arguments.rounds;
    tile = rounds > 0 ? number : turns.tile;
    block = rounds > 0 ? 0 : turns.block;
    Find(arguments, tokens, strips);
  }

  // To the tile after this one.
  __device__ __forceinline__ void Turn(const Arguments& arguments, const Turns& turns, int tokens,
                                       int strips) {
    block = 0;
    if (rounds == 0) {
      ++tile;
    } else if (--rounds > 0) {
      tile += turns.step;
    } else {
      tile = turns.tile;
      block = turns.block;
    }
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

template <int kStrips, int kTokens>
__device__ __forceinline__ void LoadWeights(const Arguments& arguments, const Sharers& sharers,
                                            int first_strip, int block, int stage,
                                            std::uint32_t ring, std::uint32_t full) {
  using S = Shape<kStrips, kTokens>;
  const std::uint32_t barrier = full + 8 * stage;
  const std::uint32_t to = ring + stage * S::kStageBytes + S::kTokenBytes;
  BarrierExpect(barrier, S::kStageBytes);
#pragma unroll
  for (int i = 0; i < kStrips; ++i) {
    // strips beyond the last are not stored
    const std::size_t strip = min(first_strip + kStrips * sharers.mine + i, arguments.strips - 1);
    CopyBytes(to + i * kPackedBytes,
              arguments.weight + (strip * arguments.blocks + block) * kPackedBytes, kPackedBytes,
              barrier, arguments.keep_weight);
  }
}

template <int kStrips, int kTokens>
__device__ __forceinline__ void LoadTokens(const Arguments& arguments, const Sharers& sharers,
                                           int token, int block, int stage, std::uint32_t ring,
                                           std::uint32_t full) {
  using S = Shape<kStrips, kTokens>;
  const std::uint32_t barrier = full + 8 * stage;
  const std::uint32_t to = ring + stage * S::kStageBytes;
  const int column = block * kBlockColumns;
  if (sharers.count == 1) {
    CopyTile(to, &arguments.q, column, token, barrier, arguments.keep_tokens);
  } else {
    const int rows = kTokens / sharers.count;
    const int first = sharers.mine * rows;
    const int blocks = ((1 << sharers.count) - 1) << sharers.first;
    CopyTileToBlocks(to + first * kBlockColumns, &arguments.q, column, token + first, barrier,
                     static_cast<std::uint16_t>(blocks), arguments.keep_tokens);
  }
}

template <int kStrips, int kTokens>
class Producer {
  using S = Shape<kStrips, kTokens>;

 public:
  __device__ Producer(const Arguments& arguments, const Sharers& sharers, const Walk& begin,
                      const Turns& turns, int count, std::uint32_t ring, std::uint32_t full,
                      std::uint32_t empty)
      : arguments_(arguments),
        sharers_(sharers),
        weights_(begin),
        tokens_(begin),
        turns_(turns),
        first_(min(count, arguments.stages)),
        count_(count),
        ring_(ring),
        full_(full),
        empty_(empty) {}

  // Weights of as many stages as there are.
  __device__ void Begin() {
    for (int i = 0; i < first_; ++i) NextWeights(i);
  }

  // Their activations, when these and the cluster's barriers are there.
  __device__ void BeginTokens() {
    for (int i = 0; i < first_; ++i) NextTokens(i);
  }

  // The rest.
  __device__ void Run() {
    BeginTokens();
    Cursor cursor;
    for (int i = first_; i < count_; ++i) {
      BarrierWait(empty_ + 8 * cursor.stage, cursor.parity);
      NextWeights(cursor.stage);
      NextTokens(cursor.stage);
      cursor.Advance(arguments_.stages);
    }
  }

  // Of the stages after those that were asked for first.
  __device__ const Walk& Next() const { return weights_; }
  __device__ int Left() const { return count_ - first_; }

 private:
  __device__ __forceinline__ void NextWeights(int stage) {
    LoadWeights<kStrips, kTokens>(arguments_, sharers_, weights_.strip, weights_.block, stage,
                                  ring_, full_);
    Advance(weights_);
  }

  __device__ __forceinline__ void NextTokens(int stage) {
    LoadTokens<kStrips, kTokens>(arguments_, sharers_, tokens_.token, tokens_.block, stage, ring_,
                                 full_);
    Advance(tokens_);
  }

  __device__ __forceinline__ void Advance(Walk& walk) {
    if (++walk.block == arguments_.blocks) {
      walk.Turn(arguments_, turns_, kTokens, kStrips * sharers_.count);
    }
  }

  const Arguments& arguments_;
  const Sharers& sharers_;
  Walk weights_, tokens_;  // of the next loads
  Turns turns_;
  int first_, count_;
  std::uint32_t ring_, full_, empty_;
};

// Where a producer's next loads are: a tile, and the stage of its columns.
struct FeedTile {
  int strip, token, block;
};

// A producer that is also a consumer: it rests in shared memory and takes few registers.  The two
// tiles after its own are found between the consumer's tiles; while that works on one, the
// producer loads as many stages as this one has, and so begins no third: of neighbouring tiles only
// one, the first that is shared with others, is not whole.
struct Feed {
  Turns turns;
  FeedTile now, first, second;
  Walk walk;  // at the last of them
  int known;  // of `first` and `second`
  Cursor cursor;
  int left;

  __device__ void Begin(const Walk& at, int stages_left) {
    now = {at.strip, at.token, at.block};
    walk = at;
    known = 0;
    cursor = {};
    left = stages_left;
  }

  __device__ __forceinline__ void LookAhead(const Arguments& arguments, int tokens, int strips) {
    for (; known < 2; ++known) {
      walk.Turn(arguments, turns, tokens, strips);
      first = known == 0 ? FeedTile{walk.strip, walk.token, walk.block} : first;
      second = {walk.strip, walk.token, walk.block};
    }
  }

  template <int kStrips, int kTokens>
  __device__ __forceinline__ void Load(const Arguments& arguments, const Sharers& sharers,
                                       std::uint32_t ring, std::uint32_t full,
                                       std::uint32_t empty) {
    if (left == 0) return;
    --left;
    BarrierWait(empty + 8 * cursor.stage, cursor.parity);
    LoadWeights<kStrips, kTokens>(arguments, sharers, now.strip, now.block, cursor.stage, ring,
                                  full);
    LoadTokens<kStrips, kTokens>(arguments, sharers, now.token, now.block, cursor.stage, ring,
                                 full);
    cursor.Advance(arguments.stages);
    if (++now.block == arguments.blocks) {
      now = first;
      first = second;
      --known;
    }
  }
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

template <class Type, int kStrips, int kTokens>
class Consumer {
  using S = Shape<kStrips, kTokens>;

 public:
  __device__ Consumer(const Arguments& arguments, const Sharers& sharers, std::uint32_t ring,
                      std::uint32_t full, std::uint32_t empty)
      : arguments_(arguments), sharers_(sharers), ring_(ring), full_(full), empty_(empty) {
    const int thread = threadIdx.x % 128;
    values_ = ring + S::kTokenBytes + threadIdx.x / 128 * kPackedBytes + thread * 16;
    places_ = values_ - thread * 16 + kValueBytes + thread * 4;
  }

  // Adds the products of the ring's next `count` stages, at least one.  A product's weight is read
  // while the one before it runs.
  // `refill` is called where a stage was given back that the warpgroup no longer reads, once for
  // each stage.
  template <class Refill>
  __device__ __forceinline__ void Run(int count, std::uint32_t (&sums)[kTokens / 2],
                                      Refill&& refill) {
    Fragment first, second;
    Pin(sums);
    BarrierWait(full_ + 8 * next_.stage, next_.parity);
    Load(first, 0);
    for (int i = 0; i < count; ++i) {
      Multiply(first, 0, sums);
      ProductWait<1>();  // the products of the stage before have read it, and `second`
      if (i > 0) Release();
      Load(second, 1);
      Multiply(second, 1, sums);
      if (i > 0) refill();
      ProductWait<1>();
      next_.Advance(arguments_.stages);
      if (i + 1 < count) {
        BarrierWait(full_ + 8 * next_.stage, next_.parity);
        Load(first, 0);
      }
    }
    ProductWait<0>();
    Pin(sums);
    Release();
    refill();
  }

 private:
  __device__ __forceinline__ void Load(Fragment& fragment, int product) {
    const std::uint32_t at = next_.stage * S::kStageBytes;
    fragment.values = LoadShared128(values_ + at + product * (kValueBytes / kProducts));
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
  std::uint32_t values_, places_;
  Cursor next_;
  int oldest_ = 0;
};

}  // namespace slidesparse::hopper
