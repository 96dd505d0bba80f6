// Sorting tokens by expert, and adding up what a token's experts made of it.

#include <mutex>
#include <set>

#include "common.cuh"
#include "interface.cuh"
#include "runtime.cuh"

namespace slidesparse::hopper {
namespace {

constexpr int kCombineThreads = 256;
constexpr int kVector = 8;    // columns that a thread adds up
constexpr int kInFlight = 4;  // rows that it loads at once

struct RouteArguments {
  const void* ids;
  const std::int32_t* map;
  std::int32_t *order, *rows, *offsets;
  int slots, map_size, experts;
  bool wide;
};

// The expert of a slot here, or -1.
__device__ __forceinline__ int ExpertOf(const RouteArguments& arguments, int slot) {
  const std::int64_t id = arguments.wide ? static_cast<const std::int64_t*>(arguments.ids)[slot]
                                         : static_cast<const std::int32_t*>(arguments.ids)[slot];
  const int size = arguments.map != nullptr ? arguments.map_size : arguments.experts;
  if (id < 0 || id >= size) return -1;
  return arguments.map != nullptr ? arguments.map[id] : static_cast<int>(id);
}

// The warps that sort: their counters fit into 32 KB.
int RouteWarps(int experts) { return experts > 256 ? 16 : 32; }

// One CTA counts, adds up and sorts: warp w has the w-th part of the slots, and a counter for each
// expert, which then becomes the expert's next row.
__global__ void __launch_bounds__(1024) Route(const __grid_constant__ RouteArguments arguments) {
  extern __shared__ int counters[];  // [experts][warps]
  __shared__ int totals[kMaxExperts];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int experts = arguments.experts;
  const int part = (arguments.slots + blockDim.x - 1) / blockDim.x * 32;
  const int begin = min(warp * part, arguments.slots), end = min(begin + part, arguments.slots);
  for (int i = threadIdx.x; i < experts * warps; i += blockDim.x) counters[i] = 0;
  __syncthreads();
  LaunchDependents();
  WaitForPredecessors();
  for (int first = begin; first < end; first += 32) {
    const int slot = first + lane, expert = slot < end ? ExpertOf(arguments, slot) : -1;
    const unsigned same = __match_any_sync(0xFFFFFFFF, expert);
    if (expert >= 0 && lane == __ffs(same) - 1) {
      counters[expert * warps + warp] += __popc(same);
    }
    __syncwarp();
  }
  __syncthreads();
  for (int expert = warp; expert < experts; expert += warps) {  // exclusive sums over warps
    int* const counter = counters + expert * warps + lane;
    const int mine = lane < warps ? *counter : 0;
    const int sum = SumToLane(mine);
    if (lane < warps) *counter = sum - mine;
    if (lane == 31) totals[expert] = sum;
  }
  __syncthreads();
  if (warp == 0) {  // exclusive sums over experts
    int before = 0;
    for (int first = 0; first < experts; first += 32) {
      const int expert = first + lane, mine = expert < experts ? totals[expert] : 0;
      const int sum = SumToLane(mine);
      if (expert < experts) {
        totals[expert] = before + sum - mine;
        arguments.offsets[expert] = before + sum - mine;
      }
      before += __shfl_sync(0xFFFFFFFF, sum, 31);
    }
    if (lane == 0) arguments.offsets[experts] = before;
  }
  __syncthreads();
  for (int first = begin; first < end; first += 32) {
    const int slot = first + lane, expert = slot < end ? ExpertOf(arguments, slot) : -1;
    const unsigned same = __match_any_sync(0xFFFFFFFF, expert);
    int row = -1;
    if (expert >= 0) {
      row = totals[expert] + counters[expert * warps + warp] + __popc(same & ((1u << lane) - 1));
      arguments.order[row] = slot;
    }
    if (slot < end) arguments.rows[slot] = row;
    __syncwarp();
    if (expert >= 0 && lane == __ffs(same) - 1) {
      counters[expert * warps + warp] += __popc(same);
    }
    __syncwarp();
  }
}

struct CombineArguments {
  const std::uint16_t* y;
  const std::int32_t* rows;
  std::uint16_t* out;
  int tokens, top_k, n;
  Float type;
};

__global__ void __launch_bounds__(kCombineThreads)
    Combine(const __grid_constant__ CombineArguments arguments) {
  WaitForPredecessors();
  const int column = (blockIdx.y * kCombineThreads + threadIdx.x) * kVector;
  if (column >= arguments.n) return;
  const std::int64_t token = blockIdx.x, n = arguments.n;
  const auto widen = [&](std::uint32_t words, int i) {
    const auto bits = static_cast<std::uint16_t>(words >> (i % 2 * 16));
    return arguments.type == Float::kBFloat16 ? __bfloat162float(__ushort_as_bfloat16(bits))
                                              : __half2float(__ushort_as_half(bits));
  };
  // As vLLM does: in float32, in the order of the slots; those of experts elsewhere add zeros.
  float sums[kVector] = {};
  for (int first = 0; first < arguments.top_k; first += kInFlight) {
    int rows[kInFlight];
    std::uint32_t words[kInFlight][kVector / 2] = {};
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int k = first + j;
      rows[j] =
          k < arguments.top_k ? LoadGlobal32(arguments.rows + token * arguments.top_k + k) : -1;
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const auto* const from = reinterpret_cast<const uint4*>(arguments.y + rows[j] * n + column);
      LoadGlobal128If(rows[j] >= 0, from, words[j][0], words[j][1], words[j][2], words[j][3]);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] += widen(words[j][i / 2], i);
    }
  }
  std::uint32_t words[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    words[i] = Narrow(sums[2 * i], sums[2 * i + 1], arguments.type);
  }
  *reinterpret_cast<uint4*>(arguments.out + token * n + column) =
      make_uint4(words[0], words[1], words[2], words[3]);
}

// Loads the kernels, once for each device.
cudaError_t LoadKernels() {
  static std::mutex mutex;
  static std::set<int> loaded;
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  std::lock_guard lock(mutex);
  if (loaded.count(device) > 0) return cudaSuccess;
  if (cudaError_t error = LoadKernel(reinterpret_cast<const void*>(Route))) return error;
  if (cudaError_t error = LoadKernel(reinterpret_cast<const void*>(Combine))) return error;
  loaded.insert(device);
  return cudaSuccess;
}

}  // namespace
}  // namespace slidesparse::hopper

using namespace slidesparse::hopper;

extern "C" {

const char* slidesparse_hopper_route(const void* ids, std::int32_t wide, std::int64_t slots,
                                     const void* map, std::int32_t map_size, std::int32_t experts,
                                     void* order, void* rows, void* offsets, void* stream) {
  if (slots < 0 || slots > INT32_MAX / 2 || experts < 1 || experts > kMaxExperts) {
    return Fail("%lld slots of %d experts: 1 to %d experts", static_cast<long long>(slots), experts,
                kMaxExperts);
  }
  const RouteArguments arguments = {ids,
                                    static_cast<const std::int32_t*>(map),
                                    static_cast<std::int32_t*>(order),
                                    static_cast<std::int32_t*>(rows),
                                    static_cast<std::int32_t*>(offsets),
                                    static_cast<int>(slots),
                                    map_size,
                                    experts,
                                    wide != 0};
  const int warps = RouteWarps(experts);
  const Launch launch(static_cast<cudaStream_t>(stream), 1, 32 * warps, experts * warps * 4, 1);
  cudaError_t error = LoadKernels();
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&launch.config, Route, arguments);
  if (error == cudaSuccess) return nullptr;
  return Fail("%s (%s) for routing %lld slots to %d experts", cudaGetErrorName(error),
              cudaGetErrorString(error), static_cast<long long>(slots), experts);
}

const char* slidesparse_hopper_combine(const void* y, std::int32_t type, std::int64_t slots,
                                       std::int32_t top_k, std::int32_t n, const void* rows,
                                       void* out, void* stream) {
  if (slots == 0) return nullptr;
  if (n < 1 || n % kVector != 0) return Fail("rows of %d columns: a multiple of %d", n, kVector);
  const CombineArguments arguments = {static_cast<const std::uint16_t*>(y),
                                      static_cast<const std::int32_t*>(rows),
                                      static_cast<std::uint16_t*>(out),
                                      static_cast<int>(slots / top_k),
                                      top_k,
                                      n,
                                      static_cast<Float>(type)};
  Launch launch(static_cast<cudaStream_t>(stream), slots / top_k, kCombineThreads, 0, 1);
  launch.config.gridDim.y = CeilDiv(n, kCombineThreads * kVector);
  cudaError_t error = LoadKernels();
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&launch.config, Combine, arguments);
  if (error == cudaSuccess) return nullptr;
  return Fail("%s (%s) for adding up %lld rows of %d columns", cudaGetErrorName(error),
              cudaGetErrorString(error), static_cast<long long>(slots), n);
}

}  // extern "C"
