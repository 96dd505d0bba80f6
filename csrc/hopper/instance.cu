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
  // Of the kernels for coded weights, those that are fastest or within a percent of it.
  constexpr bool kHasStreamK = !IsCoded(kBlocks) || kTokens == 256 || kStrips == 3;
  constexpr bool kHasSplitK = !IsCoded(kBlocks) || kStrips <= 3;
  if constexpr (kHasStreamK) {
    if (stream_k) {
      return {GemmStreamK<Type, kStrips, kTokens, kBlocks>, StreamK::kThreads,
              [](int stages, int) { return StreamK::SharedBytes(stages, kBlocks); }};
    }
  }
  if constexpr (kHasSplitK) {
    if (!stream_k) {
      return {GemmSplitK<Type, kStrips, kTokens, kBlocks>, SplitK::kThreads,
              [](int stages, int splits) { return SplitK::SharedBytes(stages, splits, kBlocks); }};
    }
  }
  return {};
}

template <int kStrips>
GemmKernel Instance(bool stream_k, Blocks blocks) {
  return blocks == Blocks::kSparse   ? Instance<kStrips, Blocks::kSparse>(stream_k)
         : blocks == Blocks::kMixed  ? Instance<kStrips, Blocks::kMixed>(stream_k)
         : blocks == Blocks::kCoded8 ? Instance<kStrips, Blocks::kCoded8>(stream_k)
                                     : Instance<kStrips, Blocks::kCoded10>(stream_k);
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
