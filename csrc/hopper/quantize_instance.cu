// The quantizer's kernels for what may come before: SLIDESPARSE_BEFORE (kNone, kNorm, ...).

#include "quantize.cuh"

namespace slidesparse::hopper {
namespace {

constexpr Before kBefore = Before::SLIDESPARSE_BEFORE;

template <Float kInput, bool kFp8, bool kWide, int kVectors>
cudaError_t EnqueueInstance(const QuantizeArguments& arguments, const Launch& launch) {
  static Prepared prepared;
  return Enqueue(Quantize<kInput, kFp8, kWide, kVectors, kBefore>, prepared, arguments, launch);
}

template <Float kInput, bool kFp8>
cudaError_t EnqueueShape(const QuantizeArguments& arguments, const QuantizeLaunch& of) {
  if (!of.wide) return EnqueueInstance<kInput, kFp8, false, 1>(arguments, of.launch);
  switch (of.vectors) {
    case 1:
      return EnqueueInstance<kInput, kFp8, true, 1>(arguments, of.launch);
    case 2:
      return EnqueueInstance<kInput, kFp8, true, 2>(arguments, of.launch);
    default:
      return EnqueueInstance<kInput, kFp8, true, 4>(arguments, of.launch);
  }
}

template <Float kInput>
cudaError_t EnqueueInput(const QuantizeArguments& arguments, const QuantizeLaunch& of) {
  return of.fp8 ? EnqueueShape<kInput, true>(arguments, of)
                : EnqueueShape<kInput, false>(arguments, of);
}

}  // namespace

template <>
cudaError_t LaunchQuantize<kBefore>(const QuantizeArguments& arguments,
                                    const QuantizeLaunch& launch) {
  switch (launch.input) {
    case Float::kBFloat16:
      return EnqueueInput<Float::kBFloat16>(arguments, launch);
    case Float::kFloat16:
      return EnqueueInput<Float::kFloat16>(arguments, launch);
    case Float::kFloat32:
      return EnqueueInput<Float::kFloat32>(arguments, launch);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace slidesparse::hopper
