// The GEMM kernels for one element type and one tile width in tokens, the macros SLIDESPARSE_TYPE
// (Int8, Fp8) and SLIDESPARSE_TOKENS: a translation unit for each, so that they compile in
// parallel.

#include "gemm.cuh"
#include "split_k.cuh"
#include "stream_k.cuh"

namespace slidesparse::hopper {
namespace {

template <int kStrips, bool kMixed>
GemmKernel Instance(bool stream_k) {
  using Type = SLIDESPARSE_TYPE;
  constexpr int kTokens = SLIDESPARSE_TOKENS;
  using SplitK = SplitKShape<kStrips, kTokens>;
  using StreamK = StreamKShape<kStrips, kTokens>;
  if (stream_k) {
    return {GemmStreamK<Type, kStrips, kTokens, kMixed>, StreamK::kThreads,
            [](int stages, int) { return StreamK::SharedBytes(stages, kMixed); }};
  }
  return {GemmSplitK<Type, kStrips, kTokens, kMixed>, SplitK::kThreads,
          [](int stages, int splits) { return SplitK::SharedBytes(stages, splits, kMixed); }};
}

template <int kStrips>
GemmKernel Instance(bool stream_k, bool mixed) {
  return mixed ? Instance<kStrips, true>(stream_k) : Instance<kStrips, false>(stream_k);
}

}  // namespace

template <>
GemmKernel FindGemm<SLIDESPARSE_TYPE, SLIDESPARSE_TOKENS>(int strips, bool stream_k, bool mixed) {
  switch (strips) {
    case 2:
      return Instance<2>(stream_k, mixed);
#if SLIDESPARSE_TOKENS <= 128
    case 1:
      return Instance<1>(stream_k, mixed);
    case 3:
      return Instance<3>(stream_k, mixed);
#endif
#if SLIDESPARSE_TOKENS <= 64
    case 4:
      return Instance<4>(stream_k, mixed);
    case 5:
      return Instance<5>(stream_k, mixed);
#endif
    default:
      return {};
  }
}

}  // namespace slidesparse::hopper
