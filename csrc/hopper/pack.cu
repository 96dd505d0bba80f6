// The packer's functions of interface.cuh.

#include "interface.cuh"
#include "pack.cuh"
#include "runtime.cuh"

using namespace slidesparse::hopper;

extern "C" {

std::int64_t slidesparse_hopper_pack_bytes(const SlidesparseLayer* layer) {
  if (layer->length < 4) return 0;  // slidesparse_hopper_pack refuses it
  const PackArguments arguments = MakePackArguments(*layer);
  return PackGrid(arguments) * BlockBytes(arguments);
}

const char* slidesparse_hopper_pack(const SlidesparseLayer* layer, const void* weight,
                                    std::int64_t stride, std::int32_t mixed, void* packed,
                                    void* broken, void* stream) {
  const int n = layer->n, k = layer->k, length = layer->length, phase = layer->phase;
  if (const char* error = CheckPattern(length, phase)) return error;
  if (mixed != 0 && (length != 4 || phase != 0)) {
    return Fail("a mixed weight in blocks of %d columns at phase %d: it is not slid, 4 at phase 0",
                length, phase);
  }
  PackArguments arguments = MakePackArguments(*layer);
  arguments.weight = static_cast<const std::uint8_t*>(weight);
  arguments.stride = stride;
  arguments.mixed = mixed != 0;
  arguments.packed = static_cast<std::uint8_t*>(packed);
  arguments.broken = static_cast<int*>(broken);
  // Kernels count the columns of whole blocks, at most twice those of windows, in 32 bits.
  constexpr int kMaxBlocks = INT32_MAX / (2 * kBlockColumns);
  if (n < 0 || k < 0 || arguments.blocks > kMaxBlocks || PackGrid(arguments) > INT32_MAX) {
    return Fail("a weight [%d, %d] in blocks of %d columns: no such sizes can be packed", n, k,
                length);
  }
  if (PackGrid(arguments) == 0) return nullptr;
  void* values[] = {&arguments};
  const cudaError_t error = cudaLaunchKernel(
      reinterpret_cast<const void*>(Pack), dim3(static_cast<unsigned>(PackGrid(arguments))),
      dim3(kPackThreads), values, 0, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return nullptr;
  return Fail("%s (%s) for packing [%d, %d] in blocks of %d at phase %d", cudaGetErrorName(error),
              cudaGetErrorString(error), n, k, length, phase);
}

}  // extern "C"
