// Wrappers of the PTX instructions of Hopper that the kernels use.  Addresses of 32 bits are in the
// shared state space.

#pragma once

#include <cuda.h>

#include <cstdint>

namespace slidesparse::hopper {

// L2 eviction policies, as createpolicy.fractional encodes them for a fraction of 1.
constexpr std::uint64_t kEvictNormal = 0x1000000000000000;
constexpr std::uint64_t kEvictFirst = 0x12F0000000000000;
constexpr std::uint64_t kEvictLast = 0x14F0000000000000;

__device__ __forceinline__ std::uint32_t SharedAddress(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers ----

__device__ __forceinline__ void BarrierInit(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized mbarriers visible to TMA and to the other CTAs of the cluster.
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives, and makes the current phase wait for `bytes` of asynchronous copies.
__device__ __forceinline__ void BarrierExpect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void BarrierArrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The address that a shared variable of this CTA has in CTA `rank` of the cluster.
__device__ __forceinline__ std::uint32_t MapToCta(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Arrives at the mbarrier at the same address in CTA `rank`.  The default semantics, release at CTA
// scope, order this thread's reads of the stage; release at cluster scope would also flush its
// writes, of which there are none.
__device__ __forceinline__ void BarrierArriveAt(std::uint32_t barrier, std::uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(MapToCta(barrier, rank))
               : "memory");
}

__device__ __forceinline__ bool BarrierTryWait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// The same with acquire semantics at cluster scope, for what other CTAs of the cluster have stored.
__device__ __forceinline__ bool BarrierTryWaitCluster(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Spins until `done`.  For debugging deadlocks: if SLIDESPARSE_TRAP is defined, a wait of more than
// two seconds traps, which ends the kernel with an error.
template <class Try>
__device__ __forceinline__ void Await(Try&& done) {
#ifdef SLIDESPARSE_TRAP
  if (done()) return;
  std::uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  while (!done()) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - start > 2000000000ull) asm volatile("trap;");
  }
#else
  while (!done()) {
  }
#endif
}

// Waits until the phase of `parity` is complete.
__device__ __forceinline__ void BarrierWait(std::uint32_t barrier, std::uint32_t parity) {
  Await([=] { return BarrierTryWait(barrier, parity); });
}

__device__ __forceinline__ void BarrierWaitCluster(std::uint32_t barrier, std::uint32_t parity) {
  Await([=] { return BarrierTryWaitCluster(barrier, parity); });
}

// Synchronizes `threads` threads of the CTA, whole warps, at named barrier `id`.
__device__ __forceinline__ void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The index of this thread's warp in the CTA.  Because of the shuffle the compiler knows that it is
// uniform in the warp.
__device__ __forceinline__ int WarpNumber() {
  return __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);
}

// True for one thread of the warp; all threads of the warp must call it.
__device__ __forceinline__ bool ElectOne() {
  std::uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected != 0;
}

// ---- clusters and programmatic dependent launches ----

// Arrives without ordering any memory access.
__device__ __forceinline__ void ClusterArriveRelaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Waits until the kernels that this launch depends on have ended and their writes are visible.
__device__ __forceinline__ void WaitForPredecessors() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Allows the dependent kernel to launch once every CTA of this one has called this or has ended.
__device__ __forceinline__ void LaunchDependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- TMA ----

// Copies contiguous global memory, without a tensor map, and completes on the mbarrier.
__device__ __forceinline__ void BulkLoad(std::uint32_t to, const void* from, std::uint32_t bytes,
                                         std::uint32_t barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the map's box at (column, row), and completes on the mbarrier.  What is outside the tensor
// is filled with zeros.
__device__ __forceinline__ void TmaLoad(std::uint32_t to, const CUtensorMap* map, int column,
                                        int row, std::uint32_t barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "l"(policy), "r"(column), "r"(row)
      : "memory");
}

// The same for every CTA of the cluster whose bit is set in `ctas`: the box arrives at the same
// address in each, and completes on the mbarrier at the same address.
__device__ __forceinline__ void TmaLoadMulticast(std::uint32_t to, const CUtensorMap* map,
                                                 int column, int row, std::uint32_t barrier,
                                                 std::uint16_t ctas, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6}], [%2], %3, %4;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(ctas), "l"(policy), "r"(column), "r"(row)
      : "memory");
}

// Stores a box from shared memory; what is outside the tensor is not written.
__device__ __forceinline__ void TmaStore(const CUtensorMap* map, int column, int row,
                                         std::uint32_t from, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint "
      "[%0, {%2, %3}], [%1], %4;" ::"l"(map),
      "r"(from), "r"(column), "r"(row), "l"(policy)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until TMA has read the shared memory of all of this thread's stores, which may then be
// overwritten.
__device__ __forceinline__ void TmaStoreWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Makes this thread's writes to shared memory visible to the async proxy, through which TMA reads.
__device__ __forceinline__ void ProxyFence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- loads and stores ----

__device__ __forceinline__ uint4 LoadShared128(std::uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// Loads four matrices of 8 rows x 16 bytes: lane l gives the address of row l % 8 of matrix l / 8,
// and gets bytes 4 (l % 4) to 4 (l % 4) + 3 of row l / 4 of each matrix.
__device__ __forceinline__ uint4 LoadMatrices(std::uint32_t address) {
  uint4 value;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ std::uint32_t LoadShared32(std::uint32_t address) {
  std::uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint2 LoadShared64(std::uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ std::uint32_t LoadShared8(std::uint32_t address) {
  std::uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void StoreShared32(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void StoreCluster32(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Stores asynchronously into another CTA of the cluster, whose mbarrier counts the bytes that
// arrive.
__device__ __forceinline__ void StoreAsyncCluster128(std::uint32_t address, std::uint32_t x,
                                                     std::uint32_t y, std::uint32_t z,
                                                     std::uint32_t w, std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 "
      "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// Stores two 8 x 8 matrices of 16-bit elements, transposed: lane l < 16 gives the address of column
// l % 8 of matrix l / 8, and lane 4 r + c elements 2 c (low half) and 2 c + 1 of row r of both.
__device__ __forceinline__ void StoreTransposed(std::uint32_t address, std::uint32_t first,
                                                std::uint32_t second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(first), "r"(second)
               : "memory");
}

// Byte i of the result is byte `selectors` >> 4 i & 7 of both operands, `low` first; bits 3 of the
// selectors must be zero.  __byte_perm would clear them.
__device__ __forceinline__ std::uint32_t Permute(std::uint32_t low, std::uint32_t high,
                                                 std::uint32_t selectors) {
  std::uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
  return bytes;
}

// Loads and stores that are cached in L2 alone, as L1 is not coherent between SMs.
__device__ __forceinline__ uint4 LoadGlobal128(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ std::int32_t LoadGlobal32(const std::int32_t* from) {
  std::int32_t value;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// A predicated load: if `condition` is false the words keep their values.
__device__ __forceinline__ void LoadGlobal128If(bool condition, const uint4* from, std::uint32_t& x,
                                                std::uint32_t& y, std::uint32_t& z,
                                                std::uint32_t& w) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(x), "+r"(y), "+r"(z), "+r"(w)
      : "l"(from), "r"(static_cast<int>(condition))
      : "memory");
}

__device__ __forceinline__ void StoreGlobal128(uint4* to, uint4 value) {
  asm volatile("st.global.cg.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

// ---- flags in global memory ----

// Sets a flag with release semantics, which are cumulative: after a barrier of the CTA, one thread
// publishes the writes of all.
__device__ __forceinline__ void SetFlag(std::uint32_t* flag) {
  asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}

__device__ __forceinline__ bool FlagIsSet(const std::uint32_t* flag) {
  std::uint32_t found;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
  return found != 0;
}

__device__ __forceinline__ void WaitForFlag(const std::uint32_t* flag) {
  Await([=] { return FlagIsSet(flag); });
}

// A load that the compiler does not sink to its use, so that its latency overlaps the main loop.
__device__ __forceinline__ float LoadVolatile(const float* from) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ std::uint16_t LoadVolatile(const std::uint16_t* from) {
  std::uint16_t value;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(value) : "l"(from) : "memory");
  return value;
}

}  // namespace slidesparse::hopper
