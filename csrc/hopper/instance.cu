// The GEMM kernels for one element type and one tile width in tokens, the macros SLIDESPARSE_TYPE
// (Int8, Fp8) and SLIDESPARSE_TOKENS: a translation unit for each, so that they compile in
// parallel.

#include "gemm.cuh"
#include "grouped.cuh"
#include "split_k.cuh"
#include "stream_k.cuh"

namespace slidesparse::hopper {
namespace {

template <int kStrips, Blocks kBlocks>
GemmKernel Instance(const Configuration& configuration) {
  using Type = SLIDESPARSE_TYPE;
  constexpr int kTokens = SLIDESPARSE_TOKENS;
  using SplitK = SplitKShape<kStrips, kTokens>;
  using StreamK = StreamKShape<kStrips, kTokens>;
  // The kernels that are fastest or, by the second best of the tuning of an H200, 0.1% slower in
  // the mean.  Of those for coded weights fewer were compared.
  constexpr bool kHasStreamK = kTokens == 256 || kStrips == 3;
  constexpr bool kHasSplitK = kStrips <= 3 || (kBlocks != Blocks::kCoded &&
                                               (kTokens == 8 || (kTokens == 64 && kStrips == 4)));
  if (configuration.grouped) {
    if constexpr (kStrips <= 2 || (kStrips == 3 && kTokens <= 64)) {
      return {GemmGrouped<Type, kStrips, kTokens, kBlocks>, StreamK::kThreads, [](int stages, int) {
                return GroupedShape<kStrips, kTokens>::SharedBytes(stages, kBlocks);
              }};
    }
    return {};
  }
  if constexpr (kHasStreamK) {
    if (configuration.stream_k) {
      return {GemmStreamK<Type, kStrips, kTokens, kBlocks>, StreamK::kThreads,
              [](int stages, int) { return StreamK::SharedBytes(stages, kBlocks); }};
    }
  }
  if constexpr (kHasSplitK) {
    if (!configuration.stream_k) {
      return {GemmSplitK<Type, kStrips, kTokens, kBlocks>, SplitK::kThreads,
              [](int stages, int splits) { return SplitK::SharedBytes(stages, splits, kBlocks); }};
    }
  }
  return {};
}

template <int kStrips>
GemmKernel Instance(const Configuration& configuration, Blocks blocks) {
  return blocks == Blocks::kSparse  ? Instance<kStrips, Blocks::kSparse>(configuration)
         : blocks == Blocks::kMixed ? Instance<kStrips, Blocks::kMixed>(configuration)
                                    : Instance<kStrips, Blocks::kCoded>(configuration);
}

}  // namespace

template <>
GemmKernel FindGemm<SLIDESPARSE_TYPE, SLIDESPARSE_TOKENS>(const Configuration& configuration,
                                                          Blocks blocks) {
  switch (configuration.strips) {
    case 2:
      return Instance<2>(configuration, blocks);
#if SLIDESPARSE_TOKENS <= 128
    case 1:
      return Instance<1>(configuration, blocks);
    case 3:
      return Instance<3>(configuration, blocks);
#endif
#if SLIDESPARSE_TOKENS <= 64
    case 4:
      return Instance<4>(configuration, blocks);
    case 5:
      return Instance<5>(configuration, blocks);
#endif
    default:
      return {};
  }
}

}  // namespace slidesparse::hopper
