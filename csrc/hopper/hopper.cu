// The library's functions, by C linkage.  Each returns null, or what went wrong in words that stay
// valid until this thread calls again.

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>

#include "interface.cuh"
#include "launch.cuh"
#include "quantize.cuh"

namespace slidesparse::hopper {
namespace {

thread_local char message[384];

constexpr int kLongRow = 1 << 16;  // blocks of columns, more than any ring's stages
constexpr int kFlagBytes = kMostStreamBlocks * kFlagWords * 4;

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// A function of the driver, which is in every process that has a CUDA context.
template <class Function>
Function OfDriver(const char* name) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  return driver ? reinterpret_cast<Function>(dlsym(driver, name)) : nullptr;
}

cudaError_t LaunchInstance(bool fp8, int tokens, const Arguments& arguments,
                           const ProductLaunch& launch) {
  switch (tokens) {
#define SLIDESPARSE_TOKENS(count)                            \
  case count:                                                \
    return fp8 ? LaunchTokens<Fp8, count>(arguments, launch) \
               : LaunchTokens<Int8, count>(arguments, launch);
    SLIDESPARSE_TOKENS(8)
    SLIDESPARSE_TOKENS(16)
    SLIDESPARSE_TOKENS(32)
    SLIDESPARSE_TOKENS(64)
    SLIDESPARSE_TOKENS(128)
    SLIDESPARSE_TOKENS(256)
#undef SLIDESPARSE_TOKENS
    default:
      return cudaErrorInvalidConfiguration;
  }
}

}  // namespace

const char* Fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(message, sizeof(message), format, values);
  va_end(values);
  return message;
}

extern "C" {

static bool IsGrid(int grid) { return grid >= 1 && grid <= kMostStreamBlocks; }

static const char* FailGrid(int grid) {
  return Fail("a grid of %d blocks: 1 to %d are allowed", grid, kMostStreamBlocks);
}

static const char* Run(const SlidesparseHopperCall* call, void* workspace, int grid) {
  if (call->m <= 0) return nullptr;
  if (call->sharers < 1) return Fail("%d sharers: 1 or more", call->sharers);
  static const auto encode = OfDriver<EncodeTiled>("cuTensorMapEncodeTiled");
  if (encode == nullptr) return Fail("libcuda.so.1 has no cuTensorMapEncodeTiled: it is too old");
  Arguments arguments = {};
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(call->k), static_cast<cuuint64_t>(call->m)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(call->k)};
  const cuuint32_t box[2] = {kBlockColumns, static_cast<cuuint32_t>(call->tokens / call->sharers)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult encoded =
      encode(&arguments.q, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(call->q), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (encoded != CUDA_SUCCESS) {
    return Fail("cuTensorMapEncodeTiled refused activations [%d, %d] at %p: error %d", call->m,
                call->k, call->q, static_cast<int>(encoded));
  }
  arguments.weight = static_cast<const std::uint8_t*>(call->weight);
  arguments.y = call->out;
  arguments.scale_w = static_cast<const float*>(call->scale_w);
  arguments.scale_x = static_cast<const float*>(call->scale_x);
  arguments.bias = call->bias;
  arguments.m = call->m;
  arguments.n = call->n;
  arguments.strips = call->strips;
  arguments.blocks = call->blocks;
  arguments.sharers = call->sharers;
  arguments.splits = call->splits;
  arguments.out_type = static_cast<Float>(call->out_type);
  arguments.bias_type = static_cast<Float>(call->bias_type);
  arguments.flags = static_cast<std::uint32_t*>(workspace);
  arguments.partials = reinterpret_cast<uint4*>(static_cast<std::uint8_t*>(workspace) + kFlagBytes);
  arguments.wide = call->n % 8 == 0 && reinterpret_cast<std::uintptr_t>(call->out) % 16 == 0;
  const ProductLaunch launch = {static_cast<cudaStream_t>(call->stream),
                                call->block_strips,
                                call->shared_bytes,
                                call->dependent != 0,
                                grid,
                                nullptr};
  if (grid > 0 && arguments.wide) {
    const cuuint64_t out_sizes[2] = {static_cast<cuuint64_t>(call->n),
                                     static_cast<cuuint64_t>(call->m)};
    const cuuint64_t out_strides[1] = {static_cast<cuuint64_t>(call->n) * 2};
    const cuuint32_t out_box[2] = {kStripRows, static_cast<cuuint32_t>(StagedTokens(call->tokens))};
    const CUresult encoded_out =
        encode(&arguments.out, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, call->out, out_sizes, out_strides,
               out_box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (encoded_out != CUDA_SUCCESS) {
      return Fail("cuTensorMapEncodeTiled refused outputs [%d, %d] at %p: error %d", call->m,
                  call->n, call->out, static_cast<int>(encoded_out));
    }
  }
  const cudaError_t error = LaunchInstance(call->fp8 != 0, call->tokens, arguments, launch);
  if (error == cudaSuccess) return nullptr;
  return Fail("%s (%s) for m %d, n %d, k %d, %d strips x %d tokens, cluster %d x %d, %d bytes",
              cudaGetErrorName(error), cudaGetErrorString(error), call->m, call->n, call->k,
              call->block_strips, call->tokens, call->sharers, call->splits, call->shared_bytes);
}

// The clustered kernel.
__attribute__((visibility("default"))) const char* slidesparse_hopper_gemm(
    const SlidesparseHopperCall* call) {
  return Run(call, nullptr, 0);
}

// The streaming kernel on `grid` blocks of threads, best as many as run at a time.  `workspace`
// holds slidesparse_hopper_workspace bytes, zero when it was allocated, for launches that follow
// each other.  The call's splits have no meaning.
__attribute__((visibility("default"))) const char* slidesparse_hopper_stream(
    const SlidesparseHopperCall* call, void* workspace, std::int32_t grid) {
  return IsGrid(grid) ? Run(call, workspace, grid) : FailGrid(grid);
}

// How an instance fits the current device, for rows that are long: of the call, fp8, block_strips,
// tokens, sharers, splits and shared_bytes count.  `stages` of the ring that shared_bytes hold, 0
// where there is no such instance or they are too few, then `clusters` that live at a time.
__attribute__((visibility("default"))) const char* slidesparse_hopper_fit(
    const SlidesparseHopperCall* call, std::int32_t streaming, std::int32_t* stages,
    std::int32_t* clusters) {
  Fit fit = {};
  Arguments arguments = {};
  arguments.m = arguments.n = arguments.strips = 1;
  arguments.blocks = kLongRow;
  arguments.sharers = call->sharers;
  arguments.splits = call->splits;
  const ProductLaunch launch = {
      nullptr, call->block_strips, call->shared_bytes, false, streaming ? call->sharers : 0, &fit};
  const bool possible = call->sharers >= 1 && call->sharers <= kMostSplits;
  const cudaError_t error =
      possible ? LaunchInstance(call->fp8 != 0, call->tokens, arguments, launch) : cudaSuccess;
  *stages = fit.stages;
  *clusters = fit.clusters;
  if (error == cudaSuccess || fit.stages == 0) return nullptr;
  return Fail("%s (%s) for %d strips x %d tokens, cluster %d x %d, %d bytes",
              cudaGetErrorName(error), cudaGetErrorString(error), call->block_strips, call->tokens,
              call->sharers, call->splits, call->shared_bytes);
}

// Quantizes and lifts, after norm or activation where there is one.
__attribute__((visibility("default"))) const char* slidesparse_hopper_quantize(
    const SlidesparseHopperQuantize* call) {
  const Before before = static_cast<Before>(call->before);
  const bool adds = before == Before::kAddNorm;
  if ((adds || before == Before::kNorm) != (call->gain != nullptr) ||
      adds != (call->residual != nullptr) || adds != (call->total != nullptr)) {
    return Fail(
        "what comes before, %d, with a gain at %p, a residual at %p and its sum at %p: norms have "
        "the first, and of sums all; nothing else has any",
        call->before, call->gain, call->residual, call->total);
  }
  QuantizeArguments arguments = {};
  arguments.x = call->x;
  arguments.residual = call->residual;
  arguments.total = call->total;
  arguments.gain = call->gain;
  arguments.residual_stride = call->residual_stride;
  arguments.eps = call->eps;
  arguments.q = static_cast<std::uint8_t*>(call->q);
  arguments.scale = static_cast<float*>(call->scale);
  arguments.stride = call->stride;
  arguments.k = call->k;
  arguments.columns = call->columns;
  arguments.length = call->length;
  arguments.phase = call->phase;
  arguments.trigger = static_cast<Trigger>(call->trigger);
  return EnqueueQuantize({arguments, call->m, static_cast<Float>(call->type), call->fp8 != 0,
                          before, call->parts, call->vectors},
                         static_cast<cudaStream_t>(call->stream), call->dependent != 0);
}

__attribute__((visibility("default"))) const char* slidesparse_hopper_linear(
    const SlidesparseHopperLinear* call) {
  if (call->grid != 0 && !IsGrid(call->grid)) return FailGrid(call->grid);
  SlidesparseHopperCall product = call->product;
  product.q = call->quantize.q;
  product.scale_x = call->quantize.scale;
  product.stream = call->quantize.stream;
  product.m = call->quantize.m;
  product.k = call->quantize.columns;
  product.fp8 = call->quantize.fp8;
  if (const char* error = slidesparse_hopper_quantize(&call->quantize)) return error;
  return Run(&product, call->workspace, call->grid);
}

std::int32_t slidesparse_hopper_device() {
  static const auto device_of_context = OfDriver<CUresult (*)(CUdevice*)>("cuCtxGetDevice");
  CUdevice device = -1;
  return device_of_context && device_of_context(&device) == CUDA_SUCCESS ? device : -1;
}

// Bytes that slidesparse_hopper_stream's workspace needs for an instance and a grid.  Every
// instance may use the workspace of the one that needs most.
__attribute__((visibility("default"))) std::int64_t slidesparse_hopper_workspace(
    std::int32_t block_strips, std::int32_t tokens, std::int32_t grid) {
  return kFlagBytes + static_cast<std::int64_t>(grid) * block_strips * kStripRows * tokens * 4;
}

}  // extern "C"
}  // namespace slidesparse::hopper
