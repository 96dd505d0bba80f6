// The quantizer's kernels for one prologue, the macro SLIDESPARSE_PROLOGUE (kNone, kRmsNorm, ...).

#include "quantize.cuh"

namespace slidesparse::hopper {
namespace {

constexpr Prologue kPrologue = Prologue::SLIDESPARSE_PROLOGUE;

template <Float kInput, bool kFp8>
QuantizeKernel FindVectors(bool wide, int vectors) {
  return !wide          ? Quantize<kInput, kFp8, false, 1, kPrologue>
         : vectors == 1 ? Quantize<kInput, kFp8, true, 1, kPrologue>
         : vectors == 2 ? Quantize<kInput, kFp8, true, 2, kPrologue>
                        : Quantize<kInput, kFp8, true, 4, kPrologue>;
}

template <Float kInput>
QuantizeKernel FindCodes(bool fp8, bool wide, int vectors) {
  return fp8 ? FindVectors<kInput, true>(wide, vectors) : FindVectors<kInput, false>(wide, vectors);
}

}  // namespace

template <>
QuantizeKernel FindQuantize<kPrologue>(Float input, bool fp8, bool wide, int vectors) {
  return input == Float::kBFloat16 ? FindCodes<Float::kBFloat16>(fp8, wide, vectors)
                                   : FindCodes<Float::kFloat16>(fp8, wide, vectors);
}

}  // namespace slidesparse::hopper
