#include <map>
#include <mutex>
#include <tuple>

#include "flags.cuh"
#include "runtime.cuh"

namespace slidesparse::hopper {
namespace {

constexpr std::int64_t kFlagBytes = kMaxStreamKCtas * kFlagWords * 4;

// Device, stream, and the number of the capture, which is unique in the process; 0 outside of one.
using Key = std::tuple<int, cudaStream_t, unsigned long long>;

using Flags = std::map<Key, std::uint32_t*>::value_type;

// Never destroyed, because a graph may be destroyed later.
struct Memory {
  std::mutex mutex;  // not held during calls of CUDA, which may call Release on another thread
  std::map<Key, std::uint32_t*> used;
  std::multimap<int, std::uint32_t*> unused;  // by device
};
Memory& memory = *new Memory;

// Takes back the flags of a graph of which no copy exists or runs any more.
void Release(void* flags) {
  std::lock_guard lock(memory.mutex);
  const auto [key, address] = *static_cast<Flags*>(flags);
  memory.used.erase(key);
  memory.unused.emplace(std::get<0>(key), address);
}

// Allocates by cudaMalloc and not from torch's pools: when a server sleeps, vLLM discards the pool
// that weights are loaded in, and flags must stay zero.
//
// The stream may be in capture, which forbids this thread cudaMalloc and synchronization unless it
// is in the relaxed mode.  The memory is cleared on a stream of its own, so that the clearing is
// not captured and is over before the graph is launched.
cudaError_t Allocate(std::uint32_t** flags) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  if (cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode)) return error;
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void**>(flags), kFlagBytes);
  if (error == cudaSuccess) error = cudaMemsetAsync(*flags, 0, kFlagBytes, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (stream != nullptr) cudaStreamDestroy(stream);
  cudaThreadExchangeStreamCaptureMode(&mode);
  return error;
}

// Returns the flags in use for a key, or puts unused ones into use, after adding `spare` ones to
// these unless it is null.  Returns null if there are none.
Flags* Take(const Key& key, std::uint32_t* spare, bool* is_new) {
  std::lock_guard lock(memory.mutex);
  if (spare != nullptr) memory.unused.emplace(std::get<0>(key), spare);
  const auto found = memory.used.find(key);
  *is_new = found == memory.used.end();
  if (!*is_new) return &*found;
  const auto next = memory.unused.find(std::get<0>(key));
  if (next == memory.unused.end()) return nullptr;
  Flags* flags = &*memory.used.emplace(key, next->second).first;
  memory.unused.erase(next);
  return flags;
}

cudaError_t Find(int device, cudaStream_t stream, std::uint32_t** flags) {
  cudaStreamCaptureStatus status;
  unsigned long long capture = 0;  // only changed if the stream is in capture
  cudaGraph_t graph = nullptr;     // likewise
  if (cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &capture, &graph)) return error;
  const Key key = {device, stream, capture};
  bool is_new;
  Flags* found = Take(key, nullptr, &is_new);
  if (found == nullptr) {
    std::uint32_t* spare;
    if (cudaError_t error = Allocate(&spare)) return error;
    found = Take(key, spare, &is_new);
  }
  *flags = found->second;
  if (!is_new || graph == nullptr) return cudaSuccess;
  cudaUserObject_t object;  // calls Release when the graph and its executable copies are destroyed
  if (cudaError_t error =
          cudaUserObjectCreate(&object, found, Release, 1, cudaUserObjectNoDestructorSync)) {
    return error;
  }
  return cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
}

}  // namespace

const char* FindFlags(int device, cudaStream_t stream, std::uint32_t** flags) {
  const cudaError_t error = Find(device, stream, flags);
  if (error == cudaSuccess) return nullptr;
  return Fail("%s (%s) for the flags of a launch, %lld bytes", cudaGetErrorName(error),
              cudaGetErrorString(error), static_cast<long long>(kFlagBytes));
}

}  // namespace slidesparse::hopper
