// wgmma.mma_async, d += a * b.T, where a is the weight (64 out-features), b the activations
// (kTokens tokens) and d the accumulators: sparse with 64 columns of K', a from registers or shared
// memory, or dense with 32 columns, a from shared memory.  b is always in shared memory.
//
// Of a sparse a, thread (warp w of 4, lane 4 g + t) of a warpgroup holds, with columns counted
// after compression:
//
//     a[0]  row 16 w + g      columns 4 t .. 4 t + 3
//     a[1]  row 16 w + g + 8  columns 4 t ..
//     a[2]  row 16 w + g      columns 16 + 4 t ..
//     a[3]  row 16 w + g + 8  columns 16 + 4 t ..
//
// and the metadata of half a row, 4 bits for each group of four columns: lane 4 g + 2 h + r holds
// those of row 16 w + g + 8 r, columns 32 h .. 32 h + 31, the first group in the lowest bits.  Of
// the accumulators it holds
//
//     d[4 j + 2 r + e]  row 16 w + g + 8 r, token 8 j + 2 t + e
//
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", sparse wgmma; the layouts of
// cute's SM90 atoms.

#pragma once

#include <cstdint>

namespace slidesparse::hopper {

// Element types, with the type of the accumulators.
struct Int8 {
  using Sum = int;
};
struct Fp8 {
  using Sum = float;
};

// Columns of the activations that one wgmma multiplies.  A sparse weight stores half of them.
constexpr int kWgmmaColumns = 64;
constexpr int kDenseWgmmaColumns = 32;

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the last `kPending` committed groups are pending.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The shared-memory matrix descriptor of a weight, without swizzle: 64 rows of 32 bytes as core
// matrices of 8 rows x 16 bytes, two side by side (leading offset 128 bytes), then the next eight
// rows (stride 256 bytes).
__device__ __forceinline__ std::uint64_t WeightDescriptor(std::uint32_t address) {
  constexpr std::uint64_t kStride = std::uint64_t{256 >> 4} << 32;
  constexpr std::uint64_t kLeading = std::uint64_t{128 >> 4} << 16;
  return kStride | kLeading | ((address & 0x3FFFF) >> 4);
}

// The shared-memory matrix descriptor of activations, as TMA loads them: rows of 128 bytes with the
// 128-byte swizzle, eight rows every 1024 bytes.
__device__ __forceinline__ std::uint64_t Descriptor(std::uint32_t address) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kStride = std::uint64_t{1024 >> 4} << 32;
  constexpr std::uint64_t kLeading = std::uint64_t{1} << 16;
  return kSwizzle128 | kStride | kLeading | ((address & 0x3FFFF) >> 4);
}

// FromRegisters: d += a * b.T.  Sparse, Dense: d = a * b.T, or d += a * b.T if `accumulate`.
template <class Type, int kTokens>
struct Wgmma;

// clang-format off
#define SLIDESPARSE_LIST_4 "%0, %1, %2, %3"
#define SLIDESPARSE_LIST_8 SLIDESPARSE_LIST_4 \
    ", %4, %5, %6, %7"
#define SLIDESPARSE_LIST_16 SLIDESPARSE_LIST_8 \
    ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SLIDESPARSE_LIST_32 SLIDESPARSE_LIST_16 \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SLIDESPARSE_LIST_64 SLIDESPARSE_LIST_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SLIDESPARSE_LIST_128 SLIDESPARSE_LIST_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define SLIDESPARSE_SUMS_4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define SLIDESPARSE_SUMS_8(i) SLIDESPARSE_SUMS_4(i), SLIDESPARSE_SUMS_4(i + 4)
#define SLIDESPARSE_SUMS_16(i) SLIDESPARSE_SUMS_8(i), SLIDESPARSE_SUMS_8(i + 8)
#define SLIDESPARSE_SUMS_32(i) SLIDESPARSE_SUMS_16(i), SLIDESPARSE_SUMS_16(i + 16)
#define SLIDESPARSE_SUMS_64(i) SLIDESPARSE_SUMS_32(i), SLIDESPARSE_SUMS_32(i + 32)
#define SLIDESPARSE_SUMS_128(i) SLIDESPARSE_SUMS_64(i), SLIDESPARSE_SUMS_64(i + 64)

// Operands are numbered: the accumulators from %0 on, then, from %SUMS on, those of the weight (four registers, or a
// descriptor), b's descriptor, a sparse weight's metadata, and whether to accumulate.  B to F are SUMS + 1 to SUMS + 5,
// which the preprocessor cannot compute into text.  SCALES are the signs of a and b, which floating-point kinds have.
#define SLIDESPARSE_WGMMA(TYPE, KIND, SCALES, TOKENS, SUMS, B, C, D, E, F)                                      \
  template <>                                                                                                   \
  struct Wgmma<TYPE, TOKENS> {                                                                                  \
    static __device__ __forceinline__ void FromRegisters(std::uint32_t (&d)[SUMS], const uint4& a,              \
                                                         std::uint64_t b, std::uint32_t metadata) {             \
      asm volatile(                                                                                             \
          "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                            \
          "wgmma.mma_async.sp.sync.aligned.m64n" #TOKENS "k64." KIND " {" SLIDESPARSE_LIST_##SUMS "}, {%" #SUMS \
          ", %" #B ", %" #C ", %" #D "}, %" #E ", %" #F ", 0, p" SCALES ";\n}"                                  \
          : SLIDESPARSE_SUMS_##SUMS(0)                                                                          \
          : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(metadata));                                     \
    }                                                                                                           \
    static __device__ __forceinline__ void DenseFromRegisters(std::uint32_t (&d)[SUMS], const uint4& a,         \
                                                              std::uint64_t b) {                               \
      asm volatile(                                                                                             \
          "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n" #TOKENS "k32." KIND " {" SLIDESPARSE_LIST_##SUMS "}, {%" #SUMS    \
          ", %" #B ", %" #C ", %" #D "}, %" #E ", p" SCALES ";\n}"                                              \
          : SLIDESPARSE_SUMS_##SUMS(0)                                                                          \
          : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));                                                    \
    }                                                                                                           \
    static __device__ __forceinline__ void Sparse(std::uint32_t (&d)[SUMS], std::uint64_t a, std::uint64_t b,   \
                                                  std::uint32_t metadata, int accumulate) {                     \
      asm volatile(                                                                                             \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #D ", 0;\n"                                                      \
          "wgmma.mma_async.sp.sync.aligned.m64n" #TOKENS "k64." KIND " {" SLIDESPARSE_LIST_##SUMS "}, %" #SUMS  \
          ", %" #B ", %" #C ", 0, p" SCALES ";\n}"                                                              \
          : SLIDESPARSE_SUMS_##SUMS(0)                                                                          \
          : "l"(a), "l"(b), "r"(metadata), "r"(accumulate));                                                    \
    }                                                                                                           \
    static __device__ __forceinline__ void Dense(std::uint32_t (&d)[SUMS], std::uint64_t a, std::uint64_t b,    \
                                                 int accumulate) {                                              \
      asm volatile(                                                                                             \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\n"                                                      \
          "wgmma.mma_async.sync.aligned.m64n" #TOKENS "k32." KIND " {" SLIDESPARSE_LIST_##SUMS "}, %" #SUMS     \
          ", %" #B ", p" SCALES ";\n}"                                                                          \
          : SLIDESPARSE_SUMS_##SUMS(0)                                                                          \
          : "l"(a), "l"(b), "r"(accumulate));                                                                   \
    }                                                                                                           \
  };

SLIDESPARSE_WGMMA(Int8, "s32.s8.s8", "", 8, 4, 5, 6, 7, 8, 9)
SLIDESPARSE_WGMMA(Int8, "s32.s8.s8", "", 16, 8, 9, 10, 11, 12, 13)
SLIDESPARSE_WGMMA(Int8, "s32.s8.s8", "", 32, 16, 17, 18, 19, 20, 21)
SLIDESPARSE_WGMMA(Int8, "s32.s8.s8", "", 64, 32, 33, 34, 35, 36, 37)
SLIDESPARSE_WGMMA(Int8, "s32.s8.s8", "", 128, 64, 65, 66, 67, 68, 69)
SLIDESPARSE_WGMMA(Int8, "s32.s8.s8", "", 256, 128, 129, 130, 131, 132, 133)
SLIDESPARSE_WGMMA(Fp8, "f32.e4m3.e4m3", ", 1, 1", 8, 4, 5, 6, 7, 8, 9)
SLIDESPARSE_WGMMA(Fp8, "f32.e4m3.e4m3", ", 1, 1", 16, 8, 9, 10, 11, 12, 13)
SLIDESPARSE_WGMMA(Fp8, "f32.e4m3.e4m3", ", 1, 1", 32, 16, 17, 18, 19, 20, 21)
SLIDESPARSE_WGMMA(Fp8, "f32.e4m3.e4m3", ", 1, 1", 64, 32, 33, 34, 35, 36, 37)
SLIDESPARSE_WGMMA(Fp8, "f32.e4m3.e4m3", ", 1, 1", 128, 64, 65, 66, 67, 68, 69)
SLIDESPARSE_WGMMA(Fp8, "f32.e4m3.e4m3", ", 1, 1", 256, 128, 129, 130, 131, 132, 133)

#undef SLIDESPARSE_WGMMA
// clang-format on

}  // namespace slidesparse::hopper
