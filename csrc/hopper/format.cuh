// The packed weight: blocks of 64 out-features x 128 columns, each 2:4 (kPackedBytes) or dense
// (kDenseBytes).  slidesparse/gemm/hopper/format.py draws the order of the bytes.
//
//     all blocks 2:4   [strips][k_blocks][kPackedBytes]
//     mixed            a table [strips][k_blocks] of 32-bit entries, padded to a multiple of
//                      kTableUnit, then the blocks, aligned to kTableUnit.  Bit 0 of an entry tells
//                      whether the block is dense; the other bits are the block's offset from the
//                      table, in units of kTableUnit.
//     coded            [strips][k_blocks][kCodedBytes], of 6:8 weights
//
// Because of its table a mixed weight is larger than one of 2:4 blocks alone, so the size tells
// which of the two a weight is.

#pragma once

#include <cstdint>

namespace slidesparse::hopper {

constexpr int kStripRows = 64;      // out-features of a strip: the M of one wgmma
constexpr int kBlockColumns = 128;  // K' columns of a packed block: one pipeline stage
constexpr int kValueBytes = kStripRows * kBlockColumns / 2;
constexpr int kMetadataBytes = kStripRows * kBlockColumns / 8;
constexpr int kPackedBytes = kValueBytes + kMetadataBytes;
constexpr int kDenseBytes = kStripRows * kBlockColumns;
constexpr int kTableUnit = 1024;
constexpr int kCodedLength = 8;  // of the blocks of the pattern whose weights are coded
// A coded block: six values of each eight columns, and five bits for which six they are.
constexpr int kCodedValueBytes = kDenseBytes / 8 * 6;
constexpr int kCodedBytes = kCodedValueBytes + kDenseBytes / 8 * 5 / 8;
static_assert(kPackedBytes % kTableUnit == 0 && kDenseBytes % kTableUnit == 0);

// What the blocks of a weight are.
enum class Blocks { kSparse, kMixed, kCoded };

template <class Integer>
constexpr Integer CeilDiv(Integer a, Integer b) {
  return (a + b - 1) / b;
}

constexpr std::int64_t TableBytes(std::int64_t blocks) {
  return CeilDiv<std::int64_t>(4 * blocks, kTableUnit) * kTableUnit;
}

constexpr int StripsOf(int out_features) { return CeilDiv(out_features, kStripRows); }
constexpr int BlocksOf(int columns) { return CeilDiv(columns, kBlockColumns); }

}  // namespace slidesparse::hopper
