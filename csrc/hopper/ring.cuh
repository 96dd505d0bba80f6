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
  static constexpr int kThreads = kConsumers + 32;
  // Blocks that a multiprocessor must have the registers for.
  static constexpr int kResident = kTokens > 64   ? 1
                                   : kStrips == 1 ? 4
                                   : kStrips == 2 ? 3
                                   : kStrips == 3 ? 2
                                                  : 1;
  static constexpr int kTokenBytes = kTokens * kBlockColumns;
  static constexpr int kStageBytes = kTokenBytes + kStrips * kPackedBytes;
};

// Of the blocks of a cluster those that read the same activations; each loads a part for all.
struct Sharers {
  int first, count, mine;  // the first's rank in the cluster, and this one's number among them
};

// Where a producer stands.  Tiles follow each other by tokens, then by out-features.
struct Walk {
  int strip, token, block;  // the tile's first strip and token, and the stage's block of columns

  template <int kTokens>
  __device__ __forceinline__ void Advance(const Arguments& arguments, int strips) {
    if (++block < arguments.blocks) return;
    block = 0;
    token += kTokens;
    if (token < arguments.m) return;
    token = 0;
    strip += strips;
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
class Producer {
  using S = Shape<kStrips, kTokens>;

 public:
  __device__ Producer(const Arguments& arguments, const Sharers& sharers, const Walk& begin,
                      int count, std::uint32_t ring, std::uint32_t full, std::uint32_t empty)
      : arguments_(arguments),
        sharers_(sharers),
        weights_(begin),
        tokens_(begin),
        first_(min(count, arguments.stages)),
        count_(count),
        ring_(ring),
        full_(full),
        empty_(empty) {}

  // Weights of as many stages as there are.
  __device__ void Begin() {
    for (int i = 0; i < first_; ++i) LoadWeights(i);
  }

  // The rest, when the activations are there and the cluster's barriers are.
  __device__ void Run() {
    for (int i = 0; i < first_; ++i) LoadTokens(i);
    Cursor cursor;
    for (int i = first_; i < count_; ++i) {
      BarrierWait(empty_ + 8 * cursor.stage, cursor.parity);
      LoadWeights(cursor.stage);
      LoadTokens(cursor.stage);
      cursor.Advance(arguments_.stages);
    }
  }

 private:
  __device__ __forceinline__ void LoadWeights(int stage) {
    const std::uint32_t barrier = full_ + 8 * stage;
    const std::uint32_t to = ring_ + stage * S::kStageBytes + S::kTokenBytes;
    BarrierExpect(barrier, S::kStageBytes);
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      // strips beyond the last are not stored
      const std::size_t strip = min(weights_.strip + i, arguments_.strips - 1);
      CopyBytes(to + i * kPackedBytes,
                arguments_.weight + (strip * arguments_.blocks + weights_.block) * kPackedBytes,
                kPackedBytes, barrier, kEvictFirst);
    }
    weights_.Advance<kTokens>(arguments_, kStrips * sharers_.count);
  }

  __device__ __forceinline__ void LoadTokens(int stage) {
    const std::uint32_t barrier = full_ + 8 * stage;
    const std::uint32_t to = ring_ + stage * S::kStageBytes;
    const int column = tokens_.block * kBlockColumns;
    if (sharers_.count == 1) {
      CopyTile(to, &arguments_.q, column, tokens_.token, barrier, kEvictLast);
    } else {
      const int rows = kTokens / sharers_.count;
      const int first = sharers_.mine * rows;
      const int blocks = ((1 << sharers_.count) - 1) << sharers_.first;
      CopyTileToBlocks(to + first * kBlockColumns, &arguments_.q, column, tokens_.token + first,
                       barrier, static_cast<std::uint16_t>(blocks), kEvictLast);
    }
    tokens_.Advance<kTokens>(arguments_, kStrips * sharers_.count);
  }

  const Arguments& arguments_;
  const Sharers& sharers_;
  Walk weights_, tokens_;  // of the next loads
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
  __device__ __forceinline__ void Run(int count, std::uint32_t (&sums)[kTokens / 2]) {
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
