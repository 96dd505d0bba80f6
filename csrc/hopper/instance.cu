// The GEMM kernels for one element type and one tile width in tokens, the macros SLIDESPARSE_TYPE
// (Int8, Fp8) and SLIDESPARSE_TOKENS: a translation unit for each, so that they compile in
// parallel.

#include "gemm.cuh"
#include "split_k.cuh"
#include "stream_k.cuh"

namespace slidesparse::hopper {
namespace {

template <int kStrips, Blocks kBlocks>
GemmKernel Instance(bool stream_k) {
  using Type = SLIDESPARSE_TYPE;
  constexpr int kTokens = SLIDESPARSE_TOKENS;
  using SplitK = SplitKShape<kStrips, kTokens>;
  using StreamK = StreamKShape<kStrips, kTokens>;
  if (stream_k) {
    return {GemmStreamK<Type, kStrips, kTokens, kBlocks>, StreamK::kThreads,
            [](int stages, int) { return StreamK::SharedBytes(stages, kBlocks); }};
  }
  return {GemmSplitK<Type, kStrips, kTokens, kBlocks>, SplitK::kThreads,
          [](int stages, int splits) { return SplitK::SharedBytes(stages, splits, kBlocks); }};
}

// The 672 threads of the largest tile have too few registers to decode.
template <int kStrips>
constexpr bool kHasCoded = kStrips * SLIDESPARSE_TOKENS != 5 * 64;

template <int kStrips>
GemmKernel Instance(bool stream_k, Blocks blocks) {
  return blocks == Blocks::kSparse  ? Instance<kStrips, Blocks::kSparse>(stream_k)
         : blocks == Blocks::kMixed ? Instance<kStrips, Blocks::kMixed>(stream_k)
         : kHasCoded<kStrips>       ? Instance<kStrips, Blocks::kCoded>(stream_k)
                                    : GemmKernel{};
}

}  // namespace

template <>
GemmKernel FindGemm<SLIDESPARSE_TYPE, SLIDESPARSE_TOKENS>(int strips, bool stream_k,
                                                          Blocks blocks) {
  switch (strips) {
    case 2:
      return Instance<2>(stream_k, blocks);
#if SLIDESPARSE_TOKENS <= 128
    case 1:
      return Instance<1>(stream_k, blocks);
    case 3:
      return Instance<3>(stream_k, blocks);
#endif
#if SLIDESPARSE_TOKENS <= 64
    case 4:
      return Instance<4>(stream_k, blocks);
    case 5:
      return Instance<5>(stream_k, blocks);
#endif
    default:
      return {};
  }
}

}  // namespace slidesparse::hopper
