// Hand-written N:M SpMM for CUDA cores: 32 x 32 tiles, 64 threads, 4 x 4 outputs a thread.
//
// A CTA iterates over tiles of the compressed dimension.  A tile is as many whole groups as fit
// into kTileK in-features and kTileW kept values.  In shared memory, with own offsets for each
// out-feature, or with offsets that the 32 out-features of a strip share:
//
//              own offsets                   shared by a strip
//     x        [in-feature][token], all      [kept value][token], gathered
//     values   [kept value][out-feature]     [kept value][out-feature]
//     offsets  [kept value][out-feature]     -
//
// 8 x 8 threads compute 4 contiguous tokens x 4 contiguous out-features each.
//
// With own offsets each out-feature reads its own row of x, so a kept value costs a thread four
// loads of four tokens for 16 multiplications.  Where the 32 out-features of a strip share their
// offsets, x is gathered while it is copied, and the inner loop is that of a dense product: one
// load.
//
// Loads from shared memory have no bank conflicts in float32: a quarter of a warp reads 8 x 16
// bytes of one row of x, and values and offsets are broadcast.  In float16 half a warp reads two
// rows of 64 bytes with own offsets, which collide when both are even or both odd.
//
// Every variant accumulates an output's kept values in the same order by fused multiply-adds, so
// that results are equal bit for bit.  With split-K SumPartials adds the partial sums in order,
// without atomics, so that results are deterministic.

#pragma once

#include "device.cuh"
#include "interface.h"

namespace slidesparse::spmm {

constexpr int kTile = 32;  // tokens and out-features of a tile
constexpr int kEach = 4;   // tokens and out-features of a thread
constexpr int kAcross = kTile / kEach;
constexpr int kThreads = kAcross * kAcross;
constexpr int kTileK = 64;     // in-features of a tile at most
constexpr int kTileW = 32;     // kept values of a tile at most
constexpr int kMaxGroup = 32;  // so that a tile has one group at least
// Offsets are masked with these bits.  Those of out-features beyond the last are arbitrary, and so
// stay within the tile, in which the values follow x.
constexpr int kMaxOffset = kMaxGroup - 1;
constexpr int kVector = 16;  // bytes that a thread copies at once

static_assert(kMaxGroup <= kTileK && kMaxGroup <= kTileW && (kMaxGroup & kMaxOffset) == 0);
static_assert(kTileK - 1 + kMaxOffset < kTileK + kTileW);

enum class Variant { kBaseline = 0, kPrefetch = 1, kDouble = 2 };

template <class T>
struct Arguments {
  const T* x;
  const T* values;
  const std::uint8_t* offsets;
  T* out;
  float* partials;  // null: the sums are the output
  std::int64_t ldx, ldw, ldo;
  int m, n, k;
  int kept, group;
  int groups;           // of the whole K
  int tile_groups;      // of a tile
  int tiles;            // along K
  int tiles_per_split;  // the last split may have fewer
  unsigned reciprocal;  // row / kept == row * reciprocal >> 16 for every row of a tile
};

constexpr int CeilDiv(int a, int b) { return (a + b - 1) / b; }

template <class T>
inline Arguments<T> ArgumentsOf(const SlidesparseSpmm& call) {
  Arguments<T> a = {};
  a.x = static_cast<const T*>(call.x);
  a.values = static_cast<const T*>(call.values);
  a.offsets = static_cast<const std::uint8_t*>(call.offsets);
  a.out = static_cast<T*>(call.out);
  a.partials = static_cast<float*>(call.partials);
  a.ldx = call.ldx;
  a.ldw = call.ldw;
  a.ldo = call.ldo;
  a.m = call.m;
  a.n = call.n;
  a.k = call.k;
  a.kept = call.kept;
  a.group = call.group;
  a.groups = CeilDiv(a.k, a.group);
  const int by_k = kTileK / a.group, by_w = kTileW / a.kept;
  a.tile_groups = by_k < by_w ? by_k : by_w;
  a.tiles = CeilDiv(a.groups, a.tile_groups);
  a.tiles_per_split = a.tiles > call.splits ? CeilDiv(a.tiles, call.splits) : 1;
  a.reciprocal = (65536u + a.kept - 1) / a.kept;
  return a;
}

// The number of splits that have a tile; 1 if there are no tiles.
template <class T>
inline int SplitsOf(const Arguments<T>& a) {
  return a.tiles > 0 ? CeilDiv(a.tiles, a.tiles_per_split) : 1;
}

template <class T, bool kStrip>
struct alignas(kVector) Tile {
  static constexpr int kRows = kStrip ? kTileW : kTileK;
  T x[kRows][kTile];
  T values[kTileW][kTile];
  std::uint8_t offsets[kStrip ? 1 : kTileW][kTile];
};

// The 16-byte copies that a thread makes of a matrix of kRows rows, and of a whole tile.
template <class T, int kRows>
constexpr int kCopiesOf = kRows * kTile * static_cast<int>(sizeof(T)) / kVector / kThreads;

template <class T, bool kStrip>
constexpr int kCopies = kCopiesOf<T, Tile<T, kStrip>::kRows> + kCopiesOf<T, kTileW> +
                        (kStrip ? 0 : kCopiesOf<std::uint8_t, kTileW>);

static_assert(kCopiesOf<std::uint8_t, kTileW> * kThreads * kVector == kTileW * kTile);

__device__ __forceinline__ int GroupsIn(int tile, int groups, int tile_groups) {
  const int left = groups - tile * tile_groups;
  return left < tile_groups ? left : tile_groups;
}

// Calls move(shared, global, in_bounds, i) for copy i of kCopies that this thread makes of a tile;
// where `in_bounds` is false, move writes zeros and must not read global.
template <class T, bool kStrip, class Move>
__device__ __forceinline__ void ForEachCopy(const Arguments<T>& a, Tile<T, kStrip>& to, int tile,
                                            Move move) {
  const int first = tile * a.tile_groups, groups = GroupsIn(tile, a.groups, a.tile_groups);
  const int first_k = first * a.group, first_w = first * a.kept, rows = groups * a.kept;
  const int first_m = blockIdx.x * kTile, first_n = blockIdx.y * kTile;
  constexpr int kElements = kVector / sizeof(T), kAlong = kTile / kElements;
  constexpr int kX = kCopiesOf<T, Tile<T, kStrip>::kRows>, kValues = kCopiesOf<T, kTileW>;
#pragma unroll
  for (int i = 0; i < kX; ++i) {
    const int index = threadIdx.x + i * kThreads;
    const int row = index / kAlong, column = index % kAlong * kElements;
    int k = first_k + row;
    bool in_bounds = row < (kStrip ? rows : groups * a.group) && first_m + column < a.m;
    if (kStrip && in_bounds) {
      const int group = static_cast<int>(row * a.reciprocal >> 16);
      k = first_k + group * a.group + a.offsets[(first_w + row) * a.ldw + first_n];
    }
    in_bounds = in_bounds && k < a.k;
    move(&to.x[row][column], in_bounds ? a.x + k * a.ldx + first_m + column : a.x, in_bounds, i);
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int index = threadIdx.x + i * kThreads;
    const int row = index / kAlong, column = index % kAlong * kElements;
    const bool in_bounds = row < rows && first_n + column < a.n;
    const std::int64_t at = in_bounds ? (first_w + row) * a.ldw + first_n + column : 0;
    move(&to.values[row][column], a.values + at, in_bounds, kX + i);
  }
  if constexpr (!kStrip) {
    constexpr int kBytesAlong = kTile / kVector, kOffsets = kCopiesOf<std::uint8_t, kTileW>;
#pragma unroll
    for (int i = 0; i < kOffsets; ++i) {
      const int index = threadIdx.x + i * kThreads;
      const int row = index / kBytesAlong, column = index % kBytesAlong * kVector;
      const bool in_bounds = row < rows && first_n + column < a.n;
      const std::int64_t at = in_bounds ? (first_w + row) * a.ldw + first_n + column : 0;
      move(&to.offsets[row][column], a.offsets + at, in_bounds, kX + kValues + i);
    }
  }
}

// A tile in registers, on its way from global to shared memory.
template <class T, bool kStrip>
struct Registers {
  uint4 at[kCopies<T, kStrip>];

  __device__ __forceinline__ void Fetch(const Arguments<T>& a, Tile<T, kStrip>& to, int tile) {
    ForEachCopy(a, to, tile, [&](void*, const void* global, bool in_bounds, int i) {
      at[i] = in_bounds ? Load(global) : uint4{0, 0, 0, 0};
    });
  }
  __device__ __forceinline__ void Place(const Arguments<T>& a, Tile<T, kStrip>& to,
                                        int tile) const {
    ForEachCopy(a, to, tile, [&](void* shared, const void*, bool, int i) {
      *static_cast<uint4*>(shared) = at[i];
    });
  }
};

template <class T, bool kStrip>
__device__ __forceinline__ void Multiply(const Arguments<T>& a, const Tile<T, kStrip>& from,
                                         int tile, float (&sums)[kEach][kEach]) {
  const int rows = GroupsIn(tile, a.groups, a.tile_groups) * a.kept;
  const int token = threadIdx.x % kAcross * kEach, feature = threadIdx.x / kAcross * kEach;
  int group = 0, left = a.kept;  // the group's first row of x; its kept values that are left
#pragma unroll 4
  for (int row = 0; row < rows; ++row) {
    const Four weights = LoadFour(&from.values[row][feature]);
    std::uint32_t offsets = 0;
    Four x = {};
    if constexpr (kStrip) {
      x = LoadFour(&from.x[row][token]);
    } else {
      offsets = *reinterpret_cast<const std::uint32_t*>(&from.offsets[row][feature]);
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if constexpr (!kStrip) {
        x = LoadFour(&from.x[0][token] + (group + (offsets >> 8 * j & kMaxOffset)) * kTile);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) sums[j][i] = Fma(weights.at[j], x.at[i], sums[j][i]);
    }
    if (--left == 0) {
      left = a.kept;
      group += a.group;
    }
  }
}

// Stores four consecutive tokens, of which only the first `left` exist.
template <class T>
__device__ __forceinline__ void StoreSome(T* to, const Four& four, int left) {
  if (left >= kEach) {
    StoreFour(to, four);
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i < left) StoreOne(to + i, four.at[i]);
    }
  }
}

template <class T, Variant kVariant, bool kStrip>
__global__ void __launch_bounds__(kThreads) Spmm(const Arguments<T> a) {
  __shared__ Tile<T, kStrip> tiles[kVariant == Variant::kDouble ? 2 : 1];
  float sums[kEach][kEach] = {};
  const int begin = blockIdx.z * a.tiles_per_split;
  const int end = begin + a.tiles_per_split < a.tiles ? begin + a.tiles_per_split : a.tiles;

  if constexpr (kVariant == Variant::kDouble) {
    const auto copy = [](void* shared, const void* global, bool in_bounds, int) {
      CopyAsync(shared, global, in_bounds);
    };
    if (begin < end) ForEachCopy(a, tiles[0], begin, copy);
    CommitCopies();
    for (int tile = begin; tile < end; ++tile) {
      const int now = (tile - begin) & 1;
      if (tile + 1 < end) ForEachCopy(a, tiles[now ^ 1], tile + 1, copy);
      CommitCopies();  // also an empty group, so that this tile's is always the last but one
      WaitForCopies<1>();
      __syncthreads();  // the copies of all threads are visible
      Multiply(a, tiles[now], tile, sums);
      __syncthreads();  // all threads have read the tile, which is overwritten next
    }
  } else {
    Registers<T, kStrip> next;
    if (kVariant == Variant::kPrefetch && begin < end) next.Fetch(a, tiles[0], begin);
    for (int tile = begin; tile < end; ++tile) {
      if (kVariant == Variant::kBaseline) next.Fetch(a, tiles[0], tile);
      next.Place(a, tiles[0], tile);
      __syncthreads();
      if (kVariant == Variant::kPrefetch && tile + 1 < end) next.Fetch(a, tiles[0], tile + 1);
      Multiply(a, tiles[0], tile, sums);
      __syncthreads();
    }
  }

  const int token = blockIdx.x * kTile + threadIdx.x % kAcross * kEach;
  const int feature = blockIdx.y * kTile + threadIdx.x / kAcross * kEach;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (feature + j >= a.n) break;
    const Four four = {sums[j][0], sums[j][1], sums[j][2], sums[j][3]};
    if (a.partials != nullptr) {
      const std::int64_t row = std::int64_t{blockIdx.z} * a.n + feature + j;
      StoreSome(a.partials + row * a.ldo + token, four, a.m - token);
    } else {
      StoreSome(a.out + (feature + j) * a.ldo + token, four, a.m - token);
    }
  }
}

// out = partials[0] + partials[1] + ...  A CTA computes one out-feature, a thread four tokens.
template <class T>
__global__ void __launch_bounds__(kThreads) SumPartials(const Arguments<T> a, int splits) {
  const int token = (blockIdx.y * kThreads + threadIdx.x) * kEach;
  if (token >= a.m) return;
  const std::int64_t at = blockIdx.x * a.ldo + token;
  Four sums = LoadFour(a.partials + at);
  for (int split = 1; split < splits; ++split) {
    const Four part = LoadFour(a.partials + split * (a.n * a.ldo) + at);
#pragma unroll
    for (int i = 0; i < kEach; ++i) sums.at[i] += part.at[i];
  }
  StoreSome(a.out + at, sums, a.m - token);
}

}  // namespace slidesparse::spmm
