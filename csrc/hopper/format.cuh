// The packed 2:4 weight, [strips][k_blocks][kPackedBytes]: slidesparse/gemm/hopper/format.py draws
// the order of the bytes.

#pragma once

#include <cstdint>

namespace slidesparse::hopper {

constexpr int kStripRows = 64;      // out-features of a strip: the M of one wgmma
constexpr int kBlockColumns = 128;  // K' columns of a packed block: one stage of the ring
constexpr int kValueBytes = kStripRows * kBlockColumns / 2;
constexpr int kMetadataBytes = kStripRows * kBlockColumns / 8;
constexpr int kPackedBytes = kValueBytes + kMetadataBytes;

template <class Integer>
constexpr Integer CeilDiv(Integer a, Integer b) {
  return (a + b - 1) / b;
}

constexpr int StripsOf(int out_features) { return CeilDiv(out_features, kStripRows); }
constexpr int BlocksOf(int columns) { return CeilDiv(columns, kBlockColumns); }

}  // namespace slidesparse::hopper
