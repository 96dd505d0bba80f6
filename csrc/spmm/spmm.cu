// Validates a call, and launches the kernel for its variant.

#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>

#include "interface.h"
#include "kernels.cuh"
#include "sequential.h"

namespace slidesparse::spmm {
namespace {

__attribute__((format(printf, 1, 2))) const char* Fail(const char* format, ...) {
  thread_local char words[256];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(words, sizeof(words), format, arguments);
  va_end(arguments);
  return words;
}

constexpr int kMaxK = 1 << 30;  // kernels index rows of x and values by 32 bits
constexpr int kMaxN = 65535 * kTile, kMaxM = 65535 * kThreads * kEach;

bool Aligned(const void* pointer) {
  return pointer != nullptr && reinterpret_cast<std::uintptr_t>(pointer) % kVector == 0;
}

// Returns null, or why the call is invalid.
const char* Validate(const SlidesparseSpmm& call) {
  if (call.m < 0 || call.n < 0 || call.k < 0 || call.m > kMaxM || call.n > kMaxN ||
      call.k > kMaxK) {
    return Fail("%d tokens, %d out-features, %d in-features: no such sizes can be multiplied",
                call.m, call.n, call.k);
  }
  if (call.kept < 1 || call.kept > call.group || call.group > kMaxGroup) {
    return Fail("%d of every %d kept: at least 1, at most all, of groups of at most %d", call.kept,
                call.group, kMaxGroup);
  }
  if (call.variant < 0 || call.variant > 2) return Fail("variant %d: 0, 1 or 2", call.variant);
  if (call.splits < 1 || call.splits > 65535 || (call.splits > 1 && !Aligned(call.partials))) {
    return Fail(
        "%d splits: 1 to 65535, and for more than one room for their sums at a multiple "
        "of %d bytes",
        call.splits, kVector);
  }
  if (!Aligned(call.out) ||
      (call.k > 0 && (!Aligned(call.x) || !Aligned(call.values) || !Aligned(call.offsets)))) {
    return Fail("pointers must be multiples of %d bytes", kVector);
  }
  const int along = call.half != 0 ? 8 : 4;
  if (call.ldx < call.m || call.ldx % along != 0 || call.ldo < call.m || call.ldo % kEach != 0 ||
      call.ldw < call.n || call.ldw % kVector != 0) {
    return Fail(
        "rows %lld, %lld and %lld elements apart: x needs a multiple of %d, values of %d "
        "and out of %d, none less than its columns",
        static_cast<long long>(call.ldx), static_cast<long long>(call.ldw),
        static_cast<long long>(call.ldo), along, kVector, kEach);
  }
  return nullptr;
}

template <class T>
using Kernel = void (*)(Arguments<T>);

// By variant and `strip`.
template <class T>
constexpr Kernel<T> kKernels[3][2] = {
    {Spmm<T, Variant::kBaseline, false>, Spmm<T, Variant::kBaseline, true>},
    {Spmm<T, Variant::kPrefetch, false>, Spmm<T, Variant::kPrefetch, true>},
    {Spmm<T, Variant::kDouble, false>, Spmm<T, Variant::kDouble, true>}};

template <class T>
cudaError_t Launch(const SlidesparseSpmm& call) {
  Arguments<T> a = ArgumentsOf<T>(call);
  const int splits = SplitsOf(a);
  if (splits == 1) a.partials = nullptr;
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const dim3 grid(CeilDiv(a.m, kTile), CeilDiv(a.n, kTile), splits);
  const Kernel<T> kernel = kKernels<T>[call.variant][call.strip != 0];
  kernel<<<grid, kThreads, 0, stream>>>(a);
  if (splits > 1) {
    const dim3 sums(a.n, CeilDiv(a.m, kThreads * kEach));
    SumPartials<T><<<sums, kThreads, 0, stream>>>(a, splits);
  }
  return cudaGetLastError();
}

}  // namespace
}  // namespace slidesparse::spmm

using namespace slidesparse::spmm;

const char* slidesparse_spmm(const SlidesparseSpmm* call) {
  if (call->m == 0 || call->n == 0) return nullptr;
  if (const char* reason = Validate(*call)) return reason;
  const cudaError_t error = call->half != 0 ? Launch<Half>(*call) : Launch<float>(*call);
  if (error == cudaSuccess) return nullptr;
  return Fail("%s (%s) for %d tokens, %d out-features, %d in-features", cudaGetErrorName(error),
              cudaGetErrorString(error), call->m, call->n, call->k);
}

const char* slidesparse_spmm_sequential(const SlidesparseSpmm* call) {
  if (call->m == 0 || call->n == 0) return nullptr;
  if (const char* reason = Validate(*call)) return reason;
  if (call->half != 0) return Fail("the sequential product is of float32 alone");
  Sequential(ArgumentsOf<float>(*call));
  return nullptr;
}
