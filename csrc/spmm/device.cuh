// The operations that only CUDA has.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace slidesparse::spmm {

using Half = __half;

struct Four {
  float at[4];
};

__device__ __forceinline__ float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// Loads 16 bytes through the read-only path: no kernel may write them meanwhile.
__device__ __forceinline__ uint4 Load(const void* from) {
  return __ldg(static_cast<const uint4*>(from));
}

__device__ __forceinline__ Four LoadFour(const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  return {four.x, four.y, four.z, four.w};
}

__device__ __forceinline__ Four LoadFour(const Half* from) {
  const uint2 four = *reinterpret_cast<const uint2*>(from);
  __half2 low, high;
  static_assert(sizeof(low) == sizeof(four.x));
  memcpy(&low, &four.x, sizeof(low));
  memcpy(&high, &four.y, sizeof(high));
  const float2 first = __half22float2(low), second = __half22float2(high);
  return {first.x, first.y, second.x, second.y};
}

__device__ __forceinline__ void StoreFour(float* to, const Four& four) {
  *reinterpret_cast<float4*>(to) = make_float4(four.at[0], four.at[1], four.at[2], four.at[3]);
}

__device__ __forceinline__ void StoreFour(Half* to, const Four& four) {
  const __half2 low = __floats2half2_rn(four.at[0], four.at[1]);
  const __half2 high = __floats2half2_rn(four.at[2], four.at[3]);
  uint2 both;
  memcpy(&both.x, &low, sizeof(low));
  memcpy(&both.y, &high, sizeof(high));
  *reinterpret_cast<uint2*>(to) = both;
}

__device__ __forceinline__ void StoreOne(float* to, float value) { *to = value; }
__device__ __forceinline__ void StoreOne(Half* to, float value) { *to = __float2half_rn(value); }

// Begins to copy 16 bytes, or 16 zeros where `in_bounds` is false, to shared memory.
__device__ __forceinline__ void CopyAsync(void* shared, const void* global, bool in_bounds) {
  const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
               "r"(in_bounds ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the last kPending committed groups of this thread's copies are pending.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace slidesparse::spmm
