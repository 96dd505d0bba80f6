// Decoding of coded weights, see format.py: a thread expands its groups of a block into the
// registers of dense wgmmas by PRMT, with selectors from a table in shared memory.  This file uses
// no more of CUDA than a few intrinsics, so that tests compile it with a C++ compiler.

#pragma once

#include "format.cuh"

namespace slidesparse::hopper {

// The bytes of the table of selectors: a word for each code, to a power of two.
__host__ __device__ constexpr int SelectorBytes(Blocks blocks) {
  return blocks == Blocks::kCoded8 ? 32 * 4 : blocks == Blocks::kCoded10 ? 64 * 4 : 0;
}

// How CodedConsumer decodes a 6:8 weight.  The numbers of codes count the pairs of columns that
// have no value, in lexicographic order.
struct Decoder8 {
  using Half = uint4[2];  // a thread's registers of the weight for half of a stage

  // What a thread loads of half of a stage.
  struct Stored {
    uint4 most;
    uint2 rest;
    std::uint32_t selectors[4];
  };

  // The selectors by which PRMT expands the values of code `code`: the low half of the word for
  // columns 0 to 3, the high half for columns 4 to 7.  Bytes 0 to 5 of PRMT's operands are the
  // values, 6 is zero.
  static __device__ __forceinline__ std::uint32_t Selectors(int code) {
    int first = 0, second = code + 1;
    while (first < 6 && second >= 8) {
      ++first;
      second += first + 1 - 8;
    }
    std::uint32_t selectors = 0, value = 0;
#pragma unroll
    for (int column = 0; column < 8; ++column) {
      const bool zero = column == first || column == second;
      selectors |= (zero ? 6 : value) << 4 * column;
      value += zero ? 0 : 1;
    }
    return selectors;
  }

  // Loads both halves of a block, whose latencies overlap.
  static __device__ __forceinline__ void Load(Stored& now, Stored& later, std::uint32_t block,
                                              std::uint32_t low, std::uint32_t high,
                                              std::uint32_t table) {
    // Codes begin at bit 2, because a table entry has four bytes.
    LoadHalf(now, block, low << 2, table);
    LoadHalf(later, block + kCodedValueBytes / 2, __funnelshift_r(low, high, 20 - 2), table);
  }

  // Expands six values of each group to eight columns.
  static __device__ __forceinline__ void Expand(const Stored& stored, Half& half) {
    const std::uint32_t values[] = {stored.most.x, stored.most.y, stored.most.z,
                                    stored.most.w, stored.rest.x, stored.rest.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t upper = stored.selectors[2 * i], lower = stored.selectors[2 * i + 1];
      const std::uint32_t tails = values[3 * i + 2];
      half[i].x = Permute(values[3 * i], tails & 0xFFFF, upper);
      half[i].y = Permute(values[3 * i + 1], tails >> 16, lower);
      half[i].z = Permute(values[3 * i], tails & 0xFFFF, upper >> 16);
      half[i].w = Permute(values[3 * i + 1], tails >> 16, lower >> 16);
    }
  }
  static __device__ __forceinline__ void ExpandFirst(const Stored& now, Stored&, Half& half) {
    Expand(now, half);
  }
  static __device__ __forceinline__ void ExpandSecond(const Stored& later, Half& half) {
    Expand(later, half);
  }

 private:
  static __device__ __forceinline__ void LoadHalf(Stored& stored, std::uint32_t values,
                                                  std::uint32_t codes, std::uint32_t table) {
    const int thread = threadIdx.x % 128;
    stored.most = LoadShared128(values + 16 * thread);
    stored.rest = LoadShared64(values + 128 * 16 + 8 * thread);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      stored.selectors[i] = LoadShared32((codes >> 5 * i & 0x7C) | table);
    }
  }
};

// How CodedConsumer decodes an 8:10 weight: columns 0 to 7 of a thread's three groups of a row are
// those of three wgmmas, columns 8 and 9 of all of them those of the fourth, see format.py.
struct Decoder10 {
  using Half = uint4[2];

  // Two values words of each row, and a word of the table for each group.
  struct Stored {
    uint4 values[2];
    std::uint32_t words[4];
  };

  // Table word of code `code`: selectors as of Decoder8, for columns 0 to 3 of values 0 to 3 and
  // zeros from byte 4 on, for columns 4 to 7 of values 2 to 7 and zeros from byte 6 on.  Bits 15
  // and 31, which PRMT must not see there, tell whether columns 8 and 9 have a value.
  static __device__ __forceinline__ std::uint32_t Selectors(int code) {
    int first = 0, second = code + 1;
    while (first < 8 && second >= 10) {
      ++first;
      second += first + 1 - 10;
    }
    std::uint32_t selectors = 0, value = 0;
#pragma unroll
    for (int column = 0; column < 8; ++column) {
      const bool zero = column == first || column == second;
      // The seventh value of columns 0 to 7 has the place of column 8's if that has none.
      const std::uint32_t place = value == 6 && second == 9 && first != 8 ? 7 : value;
      selectors |= (column < 4 ? (zero ? 4 : place) : (zero ? 6 : place - 2)) << 4 * column;
      value += zero ? 0 : 1;
    }
    const bool eighth = first != 8 && second != 8, ninth = second != 9;
    return selectors | (eighth ? 1u << 15 : 0) | (ninth ? 1u << 31 : 0);
  }

  static __device__ __forceinline__ void Load(Stored& now, Stored& later, std::uint32_t block,
                                              std::uint32_t low, std::uint32_t high,
                                              std::uint32_t table) {
    const std::uint32_t values = block + threadIdx.x % 128 * 16;
    now.values[0] = LoadShared128(values);
    now.values[1] = LoadShared128(values + 128 * 16);
    later.values[0] = LoadShared128(values + 2 * 128 * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) now.words[i] = LoadShared32((low << 2 >> 6 * i & 0xFC) | table);
    const std::uint32_t rest = __funnelshift_r(low, high, 24 - 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) later.words[i] = LoadShared32((rest >> 6 * i & 0xFC) | table);
  }

  // Expands groups 0 and 1, and gathers their columns 8 and 9 in `later`, in reverse.  ExpandSecond
  // makes operands of them, because here wgmmas still read those of the stage before.
  static __device__ __forceinline__ void ExpandFirst(const Stored& now, Stored& later, Half& half) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      half[i] = Columns(now.values[i], now.words[2 * i], now.words[2 * i + 1]);
    later.words[2] = Reversed(now.values[0].y, now.words[0], now.values[1].y, now.words[2]);
    later.words[3] = Reversed(now.values[0].w, now.words[1], now.values[1].w, now.words[3]);
  }

  static __device__ __forceinline__ void ExpandSecond(const Stored& later, Half& half) {
    half[0] = Columns(later.values[0], later.words[0], later.words[1]);
    half[1] = make_uint4(Permute(later.words[2], 0, 0x0123), Permute(later.words[3], 0, 0x0123),
                         Permute(Reversed(later.values[0].y, later.words[0], 0, 0), 0, 0x0123),
                         Permute(Reversed(later.values[0].w, later.words[1], 0, 0), 0, 0x0123));
  }

 private:
  // Columns 0 to 7 of a group of both rows, values x and y of the upper one, z and w of the lower.
  static __device__ __forceinline__ uint4 Columns(const uint4& values, std::uint32_t upper,
                                                  std::uint32_t lower) {
    upper &= 0x77777777;
    lower &= 0x77777777;
    return make_uint4(
        Permute(values.x, 0, upper), Permute(values.z, 0, lower),
        Permute(__funnelshift_r(values.x, values.y, 16), values.y >> 16, upper >> 16),
        Permute(__funnelshift_r(values.z, values.w, 16), values.w >> 16, lower >> 16));
  }

  // Columns 8 and 9 of two groups of a row, from the last to the first.  PRMT repeats the sign of a
  // byte where bit 3 is set.
  static __device__ __forceinline__ std::uint32_t Reversed(std::uint32_t first,
                                                           std::uint32_t first_word,
                                                           std::uint32_t second,
                                                           std::uint32_t second_word) {
    return Permute(first, second, 0x2367) & Permute(first_word, second_word, 0x9BDF);
  }
};

}  // namespace slidesparse::hopper
