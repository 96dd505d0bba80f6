// The library's C interface: raw device pointers, sizes and a stream; no torch and no CUDA types.
//
// A function that returns text returns null, or what went wrong in words that stay valid until this
// thread calls again.  Work is enqueued on the stream and not waited for.  Functions act on the
// current CUDA device; any thread may call them.

#pragma once

#include <cstdint>

#define SLIDESPARSE_EXPORT __attribute__((visibility("default")))

extern "C" {

// The type of elements, wherever an argument is called a type.
enum SlidesparseType {
  SLIDESPARSE_NONE = 0,  // a bias that is absent
  SLIDESPARSE_BFLOAT16 = 1,
  SLIDESPARSE_FLOAT16 = 2,
  SLIDESPARSE_FLOAT32 = 3,
};

// What is computed of x before it is quantized.
enum SlidesparsePrologue {
  SLIDESPARSE_NO_PROLOGUE = 0,
  SLIDESPARSE_RMS_NORM = 1,      // x / sqrt(mean x^2 + eps) * gain
  SLIDESPARSE_ADD_RMS_NORM = 2,  // the same of total = x + residual, which is stored
  SLIDESPARSE_SILU_MUL = 3,      // silu(x[:, :k]) * x[:, k:]
};

// The blocks of a packed weight.
enum SlidesparseBlocks {
  SLIDESPARSE_ALL_2_4 = 0,
  SLIDESPARSE_MIXED = 1,  // as many dense ones, where a time is predicted
  SLIDESPARSE_ALL_DENSE = 2,
  SLIDESPARSE_BLOCK_KINDS = 3,
};

// The bytes that the text of a configuration has room for, its end included.
enum { SLIDESPARSE_TEXT_BYTES = 32 };

// ---- the library ----

// Null, or why the driver cannot run the kernels.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_unusable();

// The device of this thread's current CUDA context; -1 without one.
SLIDESPARSE_EXPORT std::int32_t slidesparse_hopper_device();

// ---- configurations, as configuration.cuh writes them ----

// How a configuration fits: stages of the ring for long rows, and clusters that are resident at a
// time.  An error for text that is no configuration, and for one that cannot run.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_fit(const char* configuration, std::int32_t fp8,
                                                      std::int32_t* stages, std::int32_t* clusters);

// Up to `most` configurations for a weight [n, columns] of `blocks`, a SlidesparseBlocks, and m
// tokens, the fastest prediction first: their texts, SLIDESPARSE_TEXT_BYTES each, the predicted
// microseconds, and how many there are.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_candidates(std::int32_t n, std::int32_t columns,
                                                             std::int32_t m, std::int32_t fp8,
                                                             std::int32_t blocks, std::int32_t most,
                                                             char* texts, double* us,
                                                             std::int32_t* count);

// ---- plans ----

// A layer x [m, k] -> y [m, n] on the device that was current when the plan was made, for any m.
typedef struct SlidesparseHopperPlan SlidesparseHopperPlan;

// Makes a plan.
//   length, phase   the pattern's blocks of columns, and the zero columns before the first block;
//                   a length of 4 at phase 0 lifts nothing
//   columns         of a row of codes: a multiple of 16, K' or more; zeros beyond K'
//   tokens, texts   the tuned table of `count` rows: the largest number of tokens that each is for,
//                   ascending, the last for more tokens, too; and its configurations, one for each
//                   of SlidesparseBlocks.  Without any the plan only quantizes, and n does not
//                   matter
// The plan is the caller's to delete, unless it is handed to slidesparse_hopper_serve.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_plan(
    std::int32_t n, std::int32_t k, std::int32_t length, std::int32_t phase, std::int32_t fp8,
    std::int32_t columns, std::int32_t count, const std::int32_t* tokens, const char* const* texts,
    SlidesparseHopperPlan** plan);
SLIDESPARSE_EXPORT void slidesparse_hopper_delete(SlidesparseHopperPlan* plan);

// From now on slidesparse_hopper_find returns this plan for its device, sizes and types.  Such
// plans are never deleted: another thread may be running one.
SLIDESPARSE_EXPORT void slidesparse_hopper_serve(SlidesparseHopperPlan* plan);

// The plan that serves such a layer; null when there is none.
SLIDESPARSE_EXPORT SlidesparseHopperPlan* slidesparse_hopper_find(
    std::int32_t device, std::int32_t n, std::int32_t k, std::int32_t length, std::int32_t phase,
    std::int32_t fp8, std::int32_t columns);

// Lets find return none of the plans that there are.
SLIDESPARSE_EXPORT void slidesparse_hopper_forget();

// The configuration that a plan chooses for m tokens and a packed weight of so many bytes; valid as
// long as the plan.  "" for a weight that it does not multiply.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_configuration(const SlidesparseHopperPlan* plan,
                                                                std::int64_t m,
                                                                std::int64_t weight_bytes);

// The bytes of scratch memory that slidesparse_hopper_linear wants for m tokens.
SLIDESPARSE_EXPORT std::int64_t slidesparse_hopper_scratch_bytes(const SlidesparseHopperPlan* plan,
                                                                 std::int64_t m);

// ---- running a plan ----
//
//   x           [m, k], with SILU_MUL [m, 2 k], of `type`, rows `stride` elements apart
//   prologue    a SlidesparsePrologue with its gain [k], its residual [m, k], whose rows are
//               `residual_stride` elements apart, and total [m, k], all of x's type; null where
//               the prologue has none
//   q, scale_x  codes [m, columns] at a multiple of 16 bytes, and float32 [m]
//   weight      as slidesparse_hopper_pack wrote it, before the kernel in front began;
//               `weight_bytes` tell its SlidesparseBlocks
//   scale_w     float32 [n]
//   bias        [n] of bias_type
//   out         [m, n] of BF16 or FP16
//   scratch     at a multiple of 128 bytes

// Quantizes and lifts x.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_quantize(
    const SlidesparseHopperPlan* plan, std::int64_t m, const void* x, std::int32_t type,
    std::int64_t stride, std::int32_t prologue, double eps, const void* gain, const void* residual,
    std::int64_t residual_stride, void* total, void* q, void* scale_x, void* stream);

// out = (q @ weight.T) * scale_w * scale_x + bias, for q [m, q_columns].
SLIDESPARSE_EXPORT const char* slidesparse_hopper_product(
    const SlidesparseHopperPlan* plan, std::int64_t m, const void* q, std::int64_t q_columns,
    const void* scale_x, const void* weight, std::int64_t weight_bytes, const void* scale_w,
    const void* bias, std::int32_t bias_type, void* out, std::int32_t out_type, void* stream);

// Both, through scratch memory.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_linear(
    const SlidesparseHopperPlan* plan, std::int64_t m, const void* x, std::int32_t type,
    std::int64_t stride, std::int32_t prologue, double eps, const void* gain, const void* residual,
    std::int64_t residual_stride, void* total, const void* weight, std::int64_t weight_bytes,
    const void* scale_w, const void* bias, std::int32_t bias_type, void* out, std::int32_t out_type,
    void* scratch, void* stream);

// ---- weights ----

// The bytes of the packed form of a weight [n, k] that is not mixed, and of the scratch memory that
// packing it wants.
SLIDESPARSE_EXPORT void slidesparse_hopper_pack_bytes(std::int32_t n, std::int32_t k,
                                                      std::int32_t length, std::int32_t phase,
                                                      std::int64_t* packed, std::int64_t* scratch);

// Slides a weight [n, k] of one-byte codes, rows `stride` bytes apart, that is pruned to blocks of
// `length` after `phase` zero columns, and packs its windows.  `broken`, 32 bits, is increased by
// the number of blocks with too many non-zeros; with any the packed form is of no use.
// If `mixed`, packed begins with its table, of a weight in blocks of 4 at phase 0.
SLIDESPARSE_EXPORT const char* slidesparse_hopper_pack(std::int32_t n, std::int32_t k,
                                                       std::int32_t length, std::int32_t phase,
                                                       std::int32_t fp8, const void* weight,
                                                       std::int64_t stride, std::int32_t mixed,
                                                       void* packed, void* scratch, void* broken,
                                                       void* stream);

}  // extern "C"
