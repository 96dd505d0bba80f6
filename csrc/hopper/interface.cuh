// What callers hand over, by C linkage: raw device pointers, sizes and a stream; no torch, no CUDA.

#pragma once

#include <cstdint>

extern "C" {

// One product, as slidesparse.gemm.hopper lays it out.
struct SlidesparseHopperCall {
  const void* q;  // [m, k], rows k bytes apart
  const void* weight;
  void* out;  // [m, n]
  const void* scale_w;
  const void* scale_x;
  const void* bias;
  void* stream;
  std::int32_t m, n, k;
  std::int32_t strips, blocks;        // of the packed weight
  std::int32_t fp8;                   // else INT8
  std::int32_t out_type, bias_type;   // of Float
  std::int32_t block_strips, tokens;  // the instance
  std::int32_t sharers, splits;
  std::int32_t shared_bytes;
  std::int32_t dependent;
};

// One quantization: x [m, k], rows `stride` elements apart, or what a norm or activation makes of
// it -> codes [m, columns] and scales [m].
struct SlidesparseHopperQuantize {
  const void* x;  // [m, 2 k] for silu
  void* q;        // [m, columns], at a multiple of 16 bytes
  void* scale;
  void* stream;
  const void* residual;  // [m, k] for a norm of a sum, and null for all else
  void* total;           // the sum: [m, k]; null likewise
  const void* gain;      // [k] for norms; null for all else.  These three are of x's type
  std::int64_t stride;
  std::int64_t residual_stride;
  std::int32_t m, k;
  std::int32_t columns;        // of a row of codes: a multiple of 16, K' or more; zeros beyond K'
  std::int32_t type;           // of x: of Float
  std::int32_t fp8;            // else INT8
  std::int32_t length, phase;  // of the pattern's blocks; 4 lifts nothing
  std::int32_t trigger;        // of Trigger: when a kernel behind may start
  std::int32_t dependent;      // start before the kernel in front has ended
  std::int32_t parts;          // blocks of threads that share a row, 1 to 8; 0: chosen
  std::int32_t vectors;        // of 8 columns that a thread holds: 1, 2 or 4; 0: chosen
  std::int32_t before;         // of Before
  float eps;                   // of norms
};

// One linear layer: the quantization, then the product of its codes.
struct SlidesparseHopperLinear {
  SlidesparseHopperQuantize quantize;
  // q, scale_x, stream, m, k and fp8 are those of the quantization.
  SlidesparseHopperCall product;
  void* workspace;     // as slidesparse_hopper_stream has it; null for the clustered kernel
  std::int32_t grid;   // of the streaming kernel; 0 for the clustered one
  std::int32_t spare;  // nothing
};

// One weight [n, k] of one-byte codes, pruned to blocks of `length` with `phase` zeros in front ->
// its windows, packed.
struct SlidesparseHopperPack {
  const void* weight;  // rows `stride` bytes apart
  void* packed;        // strips of n x blocks x 5120 bytes, at a multiple of 4
  void* broken;        // 32 bits, increased by the blocks with too many non-zeros
  void* zeros;         // 32 bits x n x blocks of the pattern x 2, which are overwritten; or null
  void* stream;
  std::int64_t stride;
  std::int32_t n, k;
  std::int32_t length, phase;
  std::int32_t blocks;  // of 128 columns of windows, of a strip; zeros beyond the row's
  std::int32_t fp8;     // else INT8
};

// Callers lay these out by hand.
static_assert(sizeof(SlidesparseHopperCall) == 112);
static_assert(sizeof(SlidesparseHopperQuantize) == 128);
static_assert(sizeof(SlidesparseHopperLinear) == 256);
static_assert(sizeof(SlidesparseHopperPack) == 72);

// Quantizes, lifts and multiplies: two launches on one stream, the second a dependent one if the
// product is.  Nothing is allocated, and nothing waits.  Null, or what went wrong in words that
// stay valid until this thread calls again.
__attribute__((visibility("default"))) const char* slidesparse_hopper_linear(
    const SlidesparseHopperLinear* call);

// The CUDA device of this thread's current context, or -1.
std::int32_t slidesparse_hopper_device();

}  // extern "C"
