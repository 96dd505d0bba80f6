// The packed weight: slidesparse/gemm/hopper_format.py has what lies where.

#pragma once

namespace slidesparse::hopper {

constexpr int kStripRows = 64;      // out-features of a warpgroup
constexpr int kBlockColumns = 128;  // of a stage, and of a packed block
constexpr int kValueBytes = kStripRows * kBlockColumns / 2;
constexpr int kPlaceBytes = kStripRows * kBlockColumns / 8;
constexpr int kPackedBytes = kValueBytes + kPlaceBytes;  // of a block of 64 x 128

}  // namespace slidesparse::hopper
