// Slides a weight into the windows of its pattern and packs them, in one pass over the weight.  In
// a mixed weight, blocks that the table marks as dense are copied instead.  6:8 weights
// are coded.
//
// A block of L columns has L / 2 pairs and L / 2 - 1 windows of two neighbouring pairs.  A pair's
// non-zeros are divided between the window that ends with it and the window that begins with it:
//
//     zeros[j]     = zeros of pairs 0..j of a block
//     previous[j]  = the first nonzeros[j] - max(0, 2 - zeros[j]) non-zeros of pair j, which go to
//                    window j - 1
//     window[j]    = pair j without previous[j], and previous[j + 1]
//
// except that all of the first pair goes to the first window and all of the last pair to the last
// one.  A thread independently makes a word of values, those of two consecutive windows of a row.
// This file uses no more of CUDA than qualifiers, indices and an atomic addition, so that tests
// compile it with a C++ compiler.

#pragma once

#include <cstdint>

#include "format.cuh"
#include "interface.cuh"

namespace slidesparse::hopper {

constexpr int kPackThreads = 256;
constexpr int kWindows = kBlockColumns / 4;  // of a row of a packed block
constexpr int kCodedGroups = kBlockColumns / kCodedLength;

struct PackArguments {
  const std::uint8_t* weight;
  std::uint8_t* packed;
  bool mixed;   // `packed` begins with its table, as the caller has written it
  int* broken;  // counts blocks with too many non-zeros
  std::int64_t stride;
  int n, k;
  int length, phase;    // of the pattern's blocks
  int pattern_blocks;   // of a row
  int blocks;           // packed blocks of a strip
  bool coded;           // whether the weight is coded, not slid
  std::uint32_t value;  // mask of the bits that are zero only in a zero: all but the sign of E4M3
};

// All but the tensors.
inline PackArguments MakePackArguments(const SlidesparseLayer& layer) {
  PackArguments arguments = {};
  arguments.n = layer.n;
  arguments.k = layer.k;
  arguments.length = layer.length;
  arguments.phase = layer.phase;
  if (layer.k > 0) {
    arguments.pattern_blocks =
        static_cast<int>(CeilDiv<std::int64_t>(std::int64_t{layer.k} + layer.phase, layer.length));
  }
  arguments.coded = layer.length == kCodedLength;
  const std::int64_t windows = std::int64_t{arguments.pattern_blocks} * (layer.length / 2 - 1);
  arguments.blocks =
      static_cast<int>(arguments.coded ? CeilDiv(arguments.pattern_blocks, kCodedGroups)
                                       : CeilDiv<std::int64_t>(windows, kWindows));
  arguments.value = layer.fp8 != 0 ? 0x7F : 0xFF;
  return arguments;
}

// The bytes of a packed block of a weight that is not mixed.
inline int BlockBytes(const PackArguments& arguments) {
  return arguments.coded ? kCodedBytes : kPackedBytes;
}

// CTAs of Pack, one for each packed block.
inline std::int64_t PackGrid(const PackArguments& arguments) {
  return CeilDiv<std::int64_t>(arguments.n, kStripRows) * arguments.blocks;
}

// Columns `column` and `column` + 1 of a row of `k`, the first in the low byte; zero outside of the
// row, and +0.0 for -0.0.
__device__ __forceinline__ std::uint32_t LoadPair(const PackArguments& arguments,
                                                  const std::uint8_t* row, int k, int column) {
  std::uint32_t pair = 0;
  for (int i = 0; i < 2; ++i) {
    if (column + i < 0 || column + i >= k) continue;
    const std::uint32_t code = row[column + i];
    if (code & arguments.value) pair |= code << 8 * i;
  }
  return pair;
}

__device__ __forceinline__ int CountNonzero(std::uint32_t pair) {
  return ((pair & 0xFF) != 0) + ((pair & 0xFF00) != 0);
}

// The non-zeros of a pair that go to the previous window.
__device__ __forceinline__ std::uint32_t Previous(std::uint32_t pair, int zeros) {
  const int take = CountNonzero(pair) - (zeros < 2 ? 2 - zeros : 0);
  if (take == 1 && (pair & 0xFF) != 0) return pair & 0xFF;
  return take > 0 ? pair : 0;
}

// The four bytes of window `index` of a row of `k`.
__device__ __forceinline__ std::uint32_t MakeWindow(const PackArguments& arguments,
                                                    const std::uint8_t* row, int k, int index) {
  const int windows = arguments.length / 2 - 1, block = index / windows, own = index % windows;
  const int first = block * arguments.length - arguments.phase;
  int zeros = own == 0 ? 0 : 2 - CountNonzero(LoadPair(arguments, row, k, first));  // own is 0 or 1
  const std::uint32_t pair = LoadPair(arguments, row, k, first + 2 * own);
  zeros += 2 - CountNonzero(pair);
  const std::uint32_t left = own == 0 ? pair : pair & ~Previous(pair, zeros);
  const std::uint32_t next = LoadPair(arguments, row, k, first + 2 * own + 2);
  zeros += 2 - CountNonzero(next);
  const bool last = own == windows - 1;
  if (last && zeros < 2) atomicAdd(arguments.broken, 1);
  return left | (last ? next : Previous(next, zeros)) << 16;
}

// The two bytes of a window that are stored, and their metadata, an index of two bits for each. The
// hardware requires ascending indices, so windows with fewer non-zeros store a zero, too.
struct Kept {
  std::uint32_t values, metadata;
};

__device__ __forceinline__ Kept Keep(std::uint32_t window) {
  const bool first = (window & 0xFF) != 0, second = (window >> 8 & 0xFF) != 0;
  const bool third = (window >> 16 & 0xFF) != 0, fourth = window >> 24 != 0;
  const std::uint32_t high = fourth ? 3 : third ? 2 : 1;
  const std::uint32_t low = first ? 0 : second && high > 1 ? 1 : third && high > 2 ? 2 : 0;
  return {(window >> 8 * low & 0xFF) | (window >> 8 * high & 0xFF) << 8, low | high << 2};
}

// The place in the weight of a word of a packed block, whose order is that of wgmma's core matrices
// of 8 rows x 16 bytes.  One wgmma reads 512 words.
struct Place {
  int row, column;  // in the strip; among the 32 bytes of a row that one wgmma reads

  __device__ explicit Place(int word)
      : row(word / 128 % 4 * 16 + word / 64 % 2 * 8 + word / 4 % 8),
        column(word / 32 % 2 * 16 + word % 4 * 4) {}
};

__device__ __forceinline__ void PackDense(const PackArguments& arguments, int strip, int block,
                                          std::uint8_t* packed) {
  for (int word = threadIdx.x; word < kDenseBytes / 4; word += kPackThreads) {
    const Place place(word);
    const int row = strip * kStripRows + place.row;
    const int column = block * kBlockColumns + word / 512 * 32 + place.column;
    const int k = row < arguments.n ? arguments.k : 0;
    const std::uint8_t* from = arguments.weight + (k > 0 ? row * arguments.stride : 0);
    reinterpret_cast<std::uint32_t*>(packed)[word] =
        LoadPair(arguments, from, k, column) | LoadPair(arguments, from, k, column + 2) << 16;
  }
}

__device__ __forceinline__ void PackSparse(const PackArguments& arguments, int strip, int block,
                                           std::uint8_t* packed) {
  for (int word = threadIdx.x; word < kValueBytes / 4; word += kPackThreads) {
    const Place place(word);
    const int row = strip * kStripRows + place.row;
    const int window = block * kWindows + word / 512 * 16 + place.column / 2;
    const int k = row < arguments.n ? arguments.k : 0;
    const std::uint8_t* from = arguments.weight + (k > 0 ? row * arguments.stride : 0);
    const Kept left = Keep(MakeWindow(arguments, from, k, window));
    const Kept right = Keep(MakeWindow(arguments, from, k, window + 1));
    reinterpret_cast<std::uint32_t*>(packed)[word] = left.values | right.values << 16;
    // The byte of these two windows in the metadata word of the thread that holds it for wgmma.
    const int thread = word / 512 * 128 + place.row / 16 * 32 + place.row % 8 * 4 +
                       place.column / 16 * 2 + place.row / 8 % 2;
    packed[kValueBytes + thread * 4 + word % 4] =
        static_cast<std::uint8_t>(left.metadata | right.metadata << 4);
  }
}

// The six values of a group and the number of the pair of columns that is left out, as
// CodedConsumer expands them.
struct Coded {
  std::uint64_t values;  // the first in the lowest byte
  int number;
};

__device__ __forceinline__ Coded Encode(const PackArguments& arguments, const std::uint8_t* row,
                                        int k, int column) {
  std::uint64_t values = 0;
  int first = 0, second = 1, zeros = 0, place = 0;
  for (int i = 0; i < kCodedLength; ++i) {
    const std::uint32_t pair = LoadPair(arguments, row, k, column + i / 2 * 2);
    const std::uint64_t value = pair >> i % 2 * 8 & 0xFF;
    if (value == 0 && zeros < 2) {
      (zeros == 0 ? first : second) = i;
      ++zeros;
    } else {
      values |= value << 8 * place++;
    }
  }
  if (zeros < 2) atomicAdd(arguments.broken, 1);
  // The number of pairs before this one in lexicographic order.
  return {values, first * (2 * kCodedLength - 1 - first) / 2 + second - first - 1};
}

// Each thread writes what one thread of the consumer's warpgroup reads: the codes of its four
// groups of two rows, and their values.
__device__ __forceinline__ void PackCoded(const PackArguments& arguments, int strip, int block,
                                          std::uint8_t* packed) {
  for (int thread = threadIdx.x; thread < 128; thread += kPackThreads) {
    std::uint64_t all = 0;
    for (int code = 0; code < 8; ++code) {  // of two rows in turn
      const int i = code / 2, lower = code % 2;
      const int row = strip * kStripRows + thread / 32 * 16 + lower * 8 + thread % 32 / 4;
      const int group = block * kCodedGroups + i * 4 + thread % 4;
      const int k = row < arguments.n ? arguments.k : 0;
      const std::uint8_t* from = arguments.weight + (k > 0 ? row * arguments.stride : 0);
      const Coded coded = Encode(arguments, from, k, group * kCodedLength - arguments.phase);
      all |= static_cast<std::uint64_t>(coded.number) << 5 * code;
      for (int value = 0; value < 6; ++value) {
        // Of 24 bytes for half of a block, 16 are in one array and 8 in the next.
        const int byte = i % 2 * 12 + (value < 4 ? lower * 4 + value : 8 + lower * 2 + value - 4);
        const int at = i / 2 * (kCodedValueBytes / 2) +
                       (byte < 16 ? thread * 16 + byte : 128 * 16 + thread * 8 + byte - 16);
        packed[at] = static_cast<std::uint8_t>(coded.values >> 8 * value);
      }
    }
    for (int i = 0; i < 5; ++i) {
      packed[kCodedValueBytes + (i < 4 ? thread * 4 + i : 128 * 4 + thread)] =
          static_cast<std::uint8_t>(all >> 8 * i);
    }
  }
}

__global__ void Pack(const PackArguments arguments) {
  const std::int64_t cta = blockIdx.x;
  const int strip = static_cast<int>(cta / arguments.blocks);
  const int block = static_cast<int>(cta % arguments.blocks);
  std::uint8_t* packed = arguments.packed;
  if (arguments.coded) {
    PackCoded(arguments, strip, block, packed + cta * kCodedBytes);
    return;
  }
  if (!arguments.mixed) {
    PackSparse(arguments, strip, block, packed + cta * kPackedBytes);
    return;
  }
  const std::uint32_t entry = reinterpret_cast<const std::uint32_t*>(packed)[cta];
  packed += static_cast<std::size_t>(entry / 2) * kTableUnit;
  if (entry % 2 == 1) {
    PackDense(arguments, strip, block, packed);
  } else {
    PackSparse(arguments, strip, block, packed);
  }
}

}  // namespace slidesparse::hopper
