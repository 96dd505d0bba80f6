// The C interface of the N:M SpMM kernels: raw pointers, sizes and a stream; no torch and no CUDA
// types.

#pragma once

#include <cstdint>

extern "C" {

// out [m, n] = x [m, k] @ weight [n, k].T, where a row of the weight has at most `kept` non-zeros
// in each group of `group` columns.  Tokens are contiguous in x and out, and out-features in the
// compressed weight:
//
//     x        [k, m]   rows ldx elements apart
//     values   [w, n]   rows ldw elements apart; w = ceil(k / group) * kept
//     offsets  [w, n]   bytes below `group`, rows ldw apart: values[i][j] is the weight of
//                       in-feature i / kept * group + offsets[i][j] and out-feature j
//     out      [n, m]   rows ldo elements apart
//
// Pointers and the rows of x are aligned to 16 bytes, rows of out to 4 elements, rows of values and
// offsets to 16 elements.  The last row, too, must be allocated up to its full pitch.
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
};

static_assert(sizeof(SlidesparseSpmm) == 112, "callers declare the same layout by ctypes");

// Enqueues the product on the stream, without allocating or synchronizing.  Returns null, or an
// error message that stays valid until this thread's next call.
__attribute__((visibility("default"))) const char* slidesparse_spmm(const SlidesparseSpmm* call);

// Computes the same product by one CPU thread, for float32 operands in host memory.
__attribute__((visibility("default"))) const char* slidesparse_spmm_sequential(
    const SlidesparseSpmm* call);

}  // extern "C"
