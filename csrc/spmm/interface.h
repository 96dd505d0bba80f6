// The C interface of the N:M SpMM kernels: raw pointers, sizes and a stream; no torch, no CUDA.

#pragma once

#include <cstdint>

extern "C" {

// out [m, n] = x [m, k] @ weight [n, k].T, where a row of the weight has at most `kept` non-zeros
// in each group of `group` columns.  Tokens of x and of out lie side by side, and so do
// out-features of the weight:
//
//     x        [k, m]   rows ldx elements apart
//     values   [w, n]   rows ldw elements apart; w = ceil(k / group) * kept
//     offsets  [w, n]   one byte each, rows ldw apart: row i of column j is the weight of
//                       in-feature i / kept * group + offsets[i][j]; below `group`
//     out      [n, m]   rows ldo elements apart
//
// Pointers and rows begin at multiples of 16 bytes (rows of out at multiples of 4 elements, those
// of values at multiples of 16), so memory must be there up to the end of each last row.
struct SlidesparseSpmm {
  const void* x;
  const void* values;
  const void* offsets;
  void* out;
  void* partials;  // [splits, n, ldo] float32; null for one split
  void* stream;
  std::int64_t ldx, ldw, ldo;
  std::int32_t m, n, k;
  std::int32_t kept, group;
  std::int32_t half;     // x, values and out are float16, else float32; sums are float32
  std::int32_t variant;  // 0: baseline, 1: register prefetch, 2: double buffer with cp.async
  std::int32_t strip;    // each 32 out-features share their offsets
  std::int32_t splits;   // of K, at most: each keeps at least one tile
  std::int32_t spare;
};

static_assert(sizeof(SlidesparseSpmm) == 112, "callers lay this out by hand");

// Launch on the stream; nothing is allocated, and nothing waits.  Null, or what went wrong in words
// that stay valid until this thread calls again.
__attribute__((visibility("default"))) const char* slidesparse_spmm(const SlidesparseSpmm* call);

// The same product by one thread of the CPU, in host memory and float32.
__attribute__((visibility("default"))) const char* slidesparse_spmm_sequential(
    const SlidesparseSpmm* call);

}  // extern "C"
