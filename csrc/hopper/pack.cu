// The packer's functions of interface.cuh.

#include "interface.cuh"
#include "pack.cuh"
#include "runtime.cuh"

using namespace slidesparse::hopper;

extern "C" {

void slidesparse_hopper_pack_bytes(const SlidesparseLayer* layer, std::int64_t* packed,
                                   std::int64_t* scratch) {
  *packed = *scratch = 0;
  if (layer->length < 4) return;  // slidesparse_hopper_pack refuses it
  const PackArguments arguments = MakePackArguments(*layer);
  *packed = PackGrid(arguments) * BlockBytes(arguments);
  if (layer->length > kLongLength) {
    *scratch = std::int64_t{layer->n} * arguments.pattern_blocks * 8;
  }
}

const char* slidesparse_hopper_pack(const SlidesparseLayer* layer, const void* weight,
                                    std::int64_t stride, std::int32_t mixed, void* packed,
                                    void* scratch, void* broken, void* stream) {
  const int n = layer->n, k = layer->k, length = layer->length, phase = layer->phase;
  if (length < 4 || length % 2 != 0 || phase < 0 || phase >= length) {
    return Fail("blocks of %d columns at phase %d: an even length of 4 or more, a phase below it",
                length, phase);
  }
  if (mixed != 0 && (length != 4 || phase != 0)) {
    return Fail("a mixed weight in blocks of %d columns at phase %d: it is not slid, 4 at phase 0",
                length, phase);
  }
  PackArguments arguments = MakePackArguments(*layer);
  arguments.weight = static_cast<const std::uint8_t*>(weight);
  arguments.stride = stride;
  arguments.mixed = mixed != 0;
  arguments.packed = static_cast<std::uint8_t*>(packed);
  arguments.zeros = length > kLongLength ? static_cast<int*>(scratch) : nullptr;
  arguments.broken = static_cast<int*>(broken);
  // Kernels count the columns of whole blocks, at most twice those of windows, in 32 bits.
  constexpr int kMaxBlocks = INT32_MAX / (2 * kBlockColumns);
  if (n < 0 || k < 0 || arguments.blocks > kMaxBlocks || PackGrid(arguments) > INT32_MAX ||
      FindGrid(arguments) > INT32_MAX) {
    return Fail("a weight [%d, %d] in blocks of %d columns: no such sizes can be packed", n, k,
                length);
  }
  if (PackGrid(arguments) == 0) return nullptr;
  void* values[] = {&arguments};
  const auto launch = [&](void (*kernel)(PackArguments), std::int64_t grid) {
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                            dim3(static_cast<unsigned>(grid)), dim3(kPackThreads), values, 0,
                            static_cast<cudaStream_t>(stream));
  };
  cudaError_t error = cudaSuccess;
  if (arguments.zeros != nullptr) error = launch(FindZeros, FindGrid(arguments));
  if (error == cudaSuccess) error = launch(Pack, PackGrid(arguments));
  if (error == cudaSuccess) return nullptr;
  return Fail("%s (%s) for packing [%d, %d] in blocks of %d at phase %d", cudaGetErrorName(error),
              cudaGetErrorString(error), n, k, length, phase);
}

}  // extern "C"
