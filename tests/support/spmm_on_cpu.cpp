// csrc/spmm/kernels.cuh on a CPU: 64 threads that wait for each other at barriers, one CTA after
// another.
//
// An asynchronous copy may write at any time until it is waited for: its target is filled with NaN
// at once, and with the data at the wait.  So a tile that is overwritten too early is a race, and
// one that is read too early gives NaN.

#include <pthread.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static

struct Index {
  unsigned x, y, z;
};
struct uint4 {
  std::uint32_t x, y, z, w;
};
static thread_local Index blockIdx, threadIdx;
static pthread_barrier_t barrier;
static void __syncthreads() { pthread_barrier_wait(&barrier); }

namespace slidesparse::spmm {

using Half = _Float16;

struct Four {
  float at[4];
};

inline float Fma(float a, float b, float c) { return std::fma(a, b, c); }

inline uint4 Load(const void* from) {
  uint4 loaded;
  std::memcpy(&loaded, from, sizeof(loaded));
  return loaded;
}

template <class T>
Four LoadFour(const T* from) {
  return {static_cast<float>(from[0]), static_cast<float>(from[1]), static_cast<float>(from[2]),
          static_cast<float>(from[3])};
}

template <class T>
void StoreOne(T* to, float value) {
  *to = static_cast<T>(value);
}

template <class T>
void StoreFour(T* to, const Four& four) {
  for (int i = 0; i < 4; ++i) StoreOne(to + i, four.at[i]);
}

struct Copy {
  void* shared;
  const void* global;
  bool there;
};
static thread_local std::deque<std::vector<Copy>> groups;
static thread_local std::vector<Copy> open_group;

inline void CopyAsync(void* shared, const void* global, bool there) {
  std::memset(shared, 0xFF, 16);
  open_group.push_back({shared, global, there});
}

inline void CommitCopies() {
  groups.push_back(std::move(open_group));
  open_group.clear();
}

template <int kLeft>
void WaitForCopies() {
  for (; groups.size() > kLeft; groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      if (copy.there) {
        std::memcpy(copy.shared, copy.global, 16);
      } else {
        std::memset(copy.shared, 0, 16);
      }
    }
  }
}

}  // namespace slidesparse::spmm

#include "kernels.cuh"
#include "sequential.h"

using namespace slidesparse::spmm;

namespace {

// Calls the kernel once for each thread of a grid.
void Run(Index grid, const std::function<void()>& kernel) {
  pthread_barrier_init(&barrier, nullptr, kThreads);
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      threadIdx = {thread, 0, 0};
      Index& at = blockIdx;
      for (at.z = 0; at.z < grid.z; ++at.z) {
        for (at.y = 0; at.y < grid.y; ++at.y) {
          for (at.x = 0; at.x < grid.x; ++at.x) {
            kernel();
            groups.clear();
            __syncthreads();  // CTAs share nothing on a GPU
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  pthread_barrier_destroy(&barrier);
}

template <class T, bool kStrip>
void Multiply(const SlidesparseSpmm& call) {
  Arguments<T> a = ArgumentsOf<T>(call);
  const int splits = SplitsOf(a);
  if (splits == 1) a.partials = nullptr;
  const auto ceil = [](int m, int by) { return static_cast<unsigned>(CeilDiv(m, by)); };
  const Index grid = {ceil(a.m, kTile), ceil(a.n, kTile), static_cast<unsigned>(splits)};
  Run(grid, [&] {
    if (call.variant == 0) return Spmm<T, Variant::kBaseline, kStrip>(a);
    if (call.variant == 1) return Spmm<T, Variant::kPrefetch, kStrip>(a);
    Spmm<T, Variant::kDouble, kStrip>(a);
  });
  if (splits == 1) return;
  const Index sums = {static_cast<unsigned>(a.n), ceil(a.m, kThreads * kEach), 1};
  Run(sums, [&] { SumPartials(a, splits); });
}

}  // namespace

const char* slidesparse_spmm(const SlidesparseSpmm* call) {
  if (call->half != 0) {
    call->strip != 0 ? Multiply<Half, true>(*call) : Multiply<Half, false>(*call);
  } else {
    call->strip != 0 ? Multiply<float, true>(*call) : Multiply<float, false>(*call);
  }
  return nullptr;
}
