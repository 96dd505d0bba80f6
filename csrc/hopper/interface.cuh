// The library's C interface: raw device pointers, sizes and a stream; no torch and no CUDA types,
// so that one build serves any torch.
//
// Unless stated otherwise, a function that returns text returns null on success, else an error
// message that stays valid until this thread's next call.  Work is enqueued on the stream, and no
// function waits for it.  Functions act on the current CUDA device and are thread-safe.

#pragma once

#include <cstddef>
#include <cstdint>

#define SLIDESPARSE_EXPORT __attribute__((visibility("default")))

extern "C" {

// Element types: the values of every argument that is called a type.
enum SlidesparseType {
  SLIDESPARSE_NONE = 0,  // a bias that is absent
  SLIDESPARSE_BFLOAT16 = 1,
  SLIDESPARSE_FLOAT16 = 2,
  SLIDESPARSE_FLOAT32 = 3,
};

// The operation on x that is fused into the quantizer.
enum SlidesparsePrologue {
  SLIDESPARSE_NO_PROLOGUE = 0,
  SLIDESPARSE_RMS_NORM = 1,      // x / sqrt(mean x^2 + eps) * gain
  SLIDESPARSE_ADD_RMS_NORM = 2,  // the same of total = x + residual, which is stored
  SLIDESPARSE_SILU_MUL = 3,      // silu(x[:, :k]) * x[:, k:]
};

// A linear layer x [m, k] -> y [m, n], for any m.
struct SlidesparseLayer {
  std::int32_t n;        // 0 for a plan that only quantizes
  std::int32_t k;        // columns of x
  std::int32_t length;   // columns of a block of the pattern: 4, 6, or 8, which is coded
  std::int32_t phase;    // zero columns before the first block; length 4 at phase 0 lifts nothing
  std::int32_t fp8;      // 1: codes are E4M3; 0: INT8
  std::int32_t columns;  // of a row of codes: a multiple of 16, at least K'; zeros beyond K'.  If
                         // the weight is coded: a multiple of 32, at least phase + k
};

// Which blocks a packed weight is made of.
enum SlidesparseBlocks {
  SLIDESPARSE_ALL_2_4 = 0,
  SLIDESPARSE_MIXED = 1,  // both kinds; predictions assume that half of the blocks are dense
  SLIDESPARSE_ALL_DENSE = 2,
  SLIDESPARSE_BLOCK_KINDS = 3,
};

// The size of the buffer for a configuration's text, its terminating null included.
enum { SLIDESPARSE_TEXT_BYTES = 32 };

// ---- the library ----

// Null, or why the driver cannot run the kernels.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_unusable();

// The device of this thread's current CUDA context; -1 without one.
SLIDESPARSE_EXPORT std::int32_t slidesparse_hopper_device();

// ---- configurations, as configuration.cuh writes them ----

// Fits a configuration to the device: the pipeline stages of a CTA when rows are long, and the
// clusters that are resident at a time.  Fails for text that is no configuration, and for a
// configuration that cannot run.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_fit(const char* configuration, std::int32_t fp8,
                                                      std::int32_t* stages, std::int32_t* clusters);

// Up to `most` configurations for a layer whose weight is of `blocks`, a SlidesparseBlocks, and m
// tokens, in ascending order of the predicted time: their texts, SLIDESPARSE_TEXT_BYTES each, the
// predicted microseconds, and their number.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_candidates(const SlidesparseLayer* layer,
                                                             std::int32_t m, std::int32_t blocks,
                                                             std::int32_t most, char* texts,
                                                             double* us, std::int32_t* count);

// ---- plans ----

// A layer on the device that was current when the plan was made.
typedef struct SlidesparseHopperPlan SlidesparseHopperPlan;

// Makes a plan.  `tokens` and `texts` are the tuned table of `count` rows: the largest number of
// tokens that each row is for, ascending, where the last row is also for more tokens; and its
// configurations, one for each of SlidesparseBlocks.  A plan without rows only quantizes.  The
// caller deletes the plan, unless it is handed to slidesparse_hopper_serve.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_plan(const SlidesparseLayer* layer,
                                                       std::int32_t count,
                                                       const std::int32_t* tokens,
                                                       const char* const* texts,
                                                       SlidesparseHopperPlan** plan);
SLIDESPARSE_EXPORT void slidesparse_hopper_delete(SlidesparseHopperPlan* plan);

// Registers a plan, which slidesparse_hopper_find returns from now on for its device and layer.  A
// registered plan is never deleted, because another thread may be running it.
SLIDESPARSE_EXPORT void slidesparse_hopper_serve(SlidesparseHopperPlan* plan);

// The plan that is registered for a layer; null if there is none.
SLIDESPARSE_EXPORT SlidesparseHopperPlan* slidesparse_hopper_find(std::int32_t device,
                                                                  const SlidesparseLayer* layer);

// Makes and registers the plan of a layer for operators.cpp, on the current device.  On failure it
// writes why to `message`, of `size` bytes and empty before; it is a function of Python.
typedef void (*SlidesparsePlanner)(std::int32_t device, const SlidesparseLayer* layer,
                                   char* message, std::size_t size);

// Unregisters all plans, without deleting them.
SLIDESPARSE_EXPORT void slidesparse_hopper_forget();

// The bytes of scratch memory that slidesparse_hopper_linear and _product need for m tokens.
SLIDESPARSE_EXPORT std::int64_t slidesparse_hopper_scratch_bytes(const SlidesparseHopperPlan* plan,
                                                                 std::int64_t m);

// ---- running a plan ----
//
//   x           [m, k], with SILU_MUL [m, 2 k], of `type`, BF16 or FP16, rows `stride` elements
//               apart
//   prologue    a SlidesparsePrologue with its gain [k], its residual [m, k], whose rows are
//               `residual_stride` elements apart, and total [m, k], all of x's type; null where
//               the prologue has none
//   q, scale_x  codes [m, columns], aligned to 16 bytes, and float32 [m]
//   weight      as slidesparse_hopper_pack wrote it.  It must be complete before the preceding
//               kernel on the stream starts, because a GEMM loads it without waiting for that
//               kernel.  `weight_bytes` tell which SlidesparseBlocks it has
//   scale_w     float32 [n]
//   bias        [n] of bias_type
//   out         [m, n] of BF16 or FP16
//   scratch     slidesparse_hopper_scratch_bytes, aligned to 128 bytes

// Applies the prologue to x, quantizes the result and lifts it.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_quantize(
    const SlidesparseHopperPlan* plan, std::int64_t m, const void* x, std::int32_t type,
    std::int64_t stride, std::int32_t prologue, double eps, const void* gain, const void* residual,
    std::int64_t residual_stride, void* total, void* q, void* scale_x, void* stream);

// out = (q @ weight.T) * scale_w * scale_x + bias, for q [m, q_columns].
SLIDESPARSE_EXPORT const char* slidesparse_hopper_product(
    const SlidesparseHopperPlan* plan, std::int64_t m, const void* q, std::int64_t q_columns,
    const void* scale_x, const void* weight, std::int64_t weight_bytes, const void* scale_w,
    const void* bias, std::int32_t bias_type, void* out, std::int32_t out_type, void* scratch,
    void* stream);

// Both, through scratch memory.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_linear(
    const SlidesparseHopperPlan* plan, std::int64_t m, const void* x, std::int32_t type,
    std::int64_t stride, std::int32_t prologue, double eps, const void* gain, const void* residual,
    std::int64_t residual_stride, void* total, const void* weight, std::int64_t weight_bytes,
    const void* scale_w, const void* bias, std::int32_t bias_type, void* out, std::int32_t out_type,
    void* scratch, void* stream);

// ---- experts ----
//
// A layer of experts [n, k], of the plan of one of them.  P slots: expert k of token t has slot
// t * top_k + k.  Rows are slots sorted by expert.
//
//   order       int32 [P]: the slots, in order of their experts
//   rows        int32 [P]: the row of each slot; -1: its expert is not here
//   offsets     int32 [experts + 1]: expert e has rows offsets[e] to offsets[e + 1] - 1

// Sorts `slots` of numbers of experts, int32 or, if `wide`, int64.  `map` [experts of all devices],
// int32, tells the number of an expert here, -1: not here; null: all are here.  Slots of no expert
// have no row.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_route(const void* ids, std::int32_t wide,
                                                        std::int64_t slots, const void* map,
                                                        std::int32_t map_size, std::int32_t experts,
                                                        void* order, void* rows, void* offsets,
                                                        void* stream);

// out [slots, n] = the products of the rows, by `weights` [experts, weight_bytes] and `scale_w`
// [experts, n].  top_k > 0: row i is quantized from row order[i] / top_k of x.  top_k 0: from row i
// of x, to which SILU_MUL is applied if `silu_mul`.  `slot_scale`, float32 [slots] by slot, or
// null: multiplies the row of the slot.  `configuration`: a stream-K one for this call, whose tile
// is taken; null: a choice by the rows of an expert.  Scratch memory and other arguments as above.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_grouped(
    const SlidesparseHopperPlan* plan, std::int64_t slots, const void* x, std::int32_t type,
    std::int64_t stride, std::int32_t silu_mul, const void* order, std::int32_t top_k,
    const void* slot_scale, std::int32_t experts, const void* offsets, const void* weights,
    std::int64_t weight_bytes, const void* scale_w, void* out, std::int32_t out_type,
    const char* configuration, void* scratch, void* stream);

// out [slots / top_k, n] = the sum of each token's rows of y [slots, n] of `type`, without those of
// rows -1, rounded as vLLM does.  n is a multiple of 8; y and out are aligned to 16 bytes.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_combine(const void* y, std::int32_t type,
                                                          std::int64_t slots, std::int32_t top_k,
                                                          std::int32_t n, const void* rows,
                                                          void* out, void* stream);

// ---- weights ----

// The bytes of the packed form of a layer's weight that is not mixed.
SLIDESPARSE_EXPORT std::int64_t slidesparse_hopper_pack_bytes(const SlidesparseLayer* layer);

// Slides a layer's weight [n, k] of one-byte codes, rows `stride` bytes apart, that is pruned to
// blocks of `length` after `phase` zero columns, and packs its windows, or codes it.  The 32-bit
// counter `broken` is increased by the number of blocks with too many non-zeros; with any, the
// packed weight is invalid.  If `mixed`, the caller has written the table at the beginning of
// `packed`; length must be 4 and phase 0.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_pack(const SlidesparseLayer* layer,
                                                       const void* weight, std::int64_t stride,
                                                       std::int32_t mixed, void* packed,
                                                       void* broken, void* stream);

}  // extern "C"
