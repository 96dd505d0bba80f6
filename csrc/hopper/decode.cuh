// Decoding of coded 6:8 weights, see format.py: a thread expands its groups of a block into the
// registers of dense wgmmas by PRMT, with selectors from a table in shared memory.  This file uses
// no more of CUDA than a few intrinsics, so that tests compile it with a C++ compiler.

#pragma once

#include "format.cuh"

namespace slidesparse::hopper {

// The bytes of the table of selectors: a word for each code, to a power of two.
constexpr int kSelectorBytes = 32 * 4;

using CodedOperands = uint4[2];  // a thread's registers of the weight for half of a stage

// What a thread loads of half of a stage.
struct CodedHalf {
  uint4 most;
  uint2 rest;
  std::uint32_t selectors[4];
};

// The selectors by which PRMT expands the values of code `code`, the number of the pair of columns
// that have no value, in lexicographic order: the low half of the word for columns 0 to 3, the high
// half for columns 4 to 7.  Bytes 0 to 5 of PRMT's operands are the values, 6 is zero.
__device__ __forceinline__ std::uint32_t Selectors(int code) {
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

__device__ __forceinline__ void LoadHalf(CodedHalf& half, std::uint32_t values, std::uint32_t codes,
                                         std::uint32_t table) {
  const int thread = threadIdx.x % 128;
  half.most = LoadShared128(values + 16 * thread);
  half.rest = LoadShared64(values + 128 * 16 + 8 * thread);
#pragma unroll
  for (int i = 0; i < 4; ++i) half.selectors[i] = LoadShared32((codes >> 5 * i & 0x7C) | table);
}

// Loads both halves of a block, whose latencies overlap.  `low` and `high` are the thread's codes.
__device__ __forceinline__ void LoadHalves(CodedHalf& now, CodedHalf& later, std::uint32_t block,
                                           std::uint32_t low, std::uint32_t high,
                                           std::uint32_t table) {
  // Codes begin at bit 2, because a table entry has four bytes.
  LoadHalf(now, block, low << 2, table);
  LoadHalf(later, block + kCodedValueBytes / 2, __funnelshift_r(low, high, 20 - 2), table);
}

// Expands six values of each group to eight columns.
__device__ __forceinline__ void Expand(const CodedHalf& half, CodedOperands& operands) {
  const std::uint32_t values[] = {half.most.x, half.most.y, half.most.z,
                                  half.most.w, half.rest.x, half.rest.y};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t upper = half.selectors[2 * i], lower = half.selectors[2 * i + 1];
    const std::uint32_t tails = values[3 * i + 2];
    operands[i].x = Permute(values[3 * i], tails & 0xFFFF, upper);
    operands[i].y = Permute(values[3 * i + 1], tails >> 16, lower);
    operands[i].z = Permute(values[3 * i], tails & 0xFFFF, upper >> 16);
    operands[i].w = Permute(values[3 * i + 1], tails >> 16, lower >> 16);
  }
}

}  // namespace slidesparse::hopper
