// The kernel for one type and one tile of tokens: SLIDESPARSE_TYPE (Int8, Fp8) and
// SLIDESPARSE_TOKENS.

#include "launch.cuh"

namespace slidesparse::hopper {

template <>
cudaError_t LaunchTokens<SLIDESPARSE_TYPE, SLIDESPARSE_TOKENS>(const Arguments& arguments,
                                                               const ProductLaunch& launch) {
  using Type = SLIDESPARSE_TYPE;
  constexpr int kTokens = SLIDESPARSE_TOKENS;
  switch (launch.strips) {
    case 2:
      return LaunchShape<Type, 2, kTokens>(arguments, launch);
#if SLIDESPARSE_TOKENS <= 128
    case 3:
      return LaunchShape<Type, 3, kTokens>(arguments, launch);
    case 1:
      return LaunchShape<Type, 1, kTokens>(arguments, launch);
#endif
#if SLIDESPARSE_TOKENS <= 64
    case 4:
      return LaunchShape<Type, 4, kTokens>(arguments, launch);
    case 5:
      return LaunchShape<Type, 5, kTokens>(arguments, launch);
#endif
    default:
      return cudaErrorInvalidConfiguration;
  }
}

}  // namespace slidesparse::hopper
