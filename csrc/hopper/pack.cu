// Packing a weight, by C linkage.

#include <cuda_runtime.h>

#include "enqueue.cuh"
#include "pack.cuh"

namespace slidesparse::hopper {

extern "C" {

__attribute__((visibility("default"))) const char* slidesparse_hopper_pack(
    const SlidesparseHopperPack* call) {
  const int length = call->length, phase = call->phase;
  if (length < 4 || length % 2 != 0 || phase < 0 || phase >= length) {
    return Fail("blocks of %d columns at phase %d: an even length of 4 or more, a phase below it",
                length, phase);
  }
  PackArguments arguments = PackArgumentsOf(*call);
  // Columns of whole blocks, twice those of windows at most, are counted in 32 bits.
  constexpr int kMostBlocks = INT32_MAX / (2 * kBlockColumns);
  if (call->n < 0 || call->k < 0 || call->blocks < 0 || call->blocks > kMostBlocks ||
      PackGrid(arguments) > INT32_MAX || FindGrid(arguments) > INT32_MAX) {
    return Fail("a weight [%d, %d] in %d blocks a strip: no such sizes can be packed", call->n,
                call->k, call->blocks);
  }
  if (PackGrid(arguments) == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(call->stream);
  void* values[] = {&arguments};
  const auto launch = [&](void (*kernel)(PackArguments), std::int64_t grid) {
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                            dim3(static_cast<unsigned>(grid)), dim3(kPackThreads), values, 0,
                            stream);
  };
  cudaError_t error = cudaSuccess;
  if (arguments.zeros != nullptr && FindGrid(arguments) > 0) {
    error = launch(FindZeros, FindGrid(arguments));
  }
  if (error == cudaSuccess) error = launch(Pack, PackGrid(arguments));
  if (error == cudaSuccess) return nullptr;
  return Fail("%s (%s) for packing [%d, %d] in blocks of %d at phase %d", cudaGetErrorName(error),
              cudaGetErrorString(error), call->n, call->k, length, phase);
}

}  // extern "C"
}  // namespace slidesparse::hopper
