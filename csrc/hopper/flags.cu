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

// Never destroyed, because a graph may be destroyed later.
struct Memory {
  std::mutex mutex;  // not held during calls of CUDA, which may call Release on another thread
  std::map<Key, std::uint32_t*> used;
  std::multimap<int, std::uint32_t*> unused;  // by device
};
Memory& memory = *new Memory;

// Takes back the flags of a graph of which no copy exists or runs any more.
void Release(void* graph_key) {
  const Key* key = static_cast<const Key*>(graph_key);
  {
    std::lock_guard lock(memory.mutex);
    const auto found = memory.used.find(*key);
    memory.unused.emplace(std::get<0>(*key), found->second);
    memory.used.erase(found);
  }
  delete key;
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
std::uint32_t* Take(const Key& key, std::uint32_t* spare, bool* is_new) {
  std::lock_guard lock(memory.mutex);
  if (spare != nullptr) memory.unused.emplace(std::get<0>(key), spare);
  const auto found = memory.used.find(key);
  *is_new = found == memory.used.end();
  if (!*is_new) return found->second;
  const auto next = memory.unused.find(std::get<0>(key));
  if (next == memory.unused.end()) return nullptr;
  std::uint32_t* flags = next->second;
  memory.unused.erase(next);
  return memory.used[key] = flags;
}

// Makes the graph in capture call Release when it and its executable copies are destroyed.
cudaError_t Retain(cudaGraph_t graph, const Key& key) {
  cudaUserObject_t object;
  if (cudaError_t error =
          cudaUserObjectCreate(&object, new Key(key), Release, 1, cudaUserObjectNoDestructorSync)) {
    return error;
  }
  cudaError_t error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (error != cudaSuccess) cudaUserObjectRelease(object, 1);
  return error;
}

}  // namespace

const char* FindFlags(int device, cudaStream_t stream, std::uint32_t** flags) {
  cudaStreamCaptureStatus status;
  unsigned long long capture = 0;
  cudaGraph_t graph = nullptr;
  bool is_new = false;
  cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &capture, &graph);
  if (error == cudaSuccess) {
    const bool captures = status == cudaStreamCaptureStatusActive;
    const Key key = {device, stream, captures ? capture : 0};
    *flags = Take(key, nullptr, &is_new);
    if (*flags == nullptr) {
      std::uint32_t* spare;
      error = Allocate(&spare);
      if (error == cudaSuccess) *flags = Take(key, spare, &is_new);
    }
    if (error == cudaSuccess && is_new && captures) error = Retain(graph, key);
  }
  if (error == cudaSuccess) return nullptr;
  return Fail("%s (%s) for the flags of a launch, %lld bytes", cudaGetErrorName(error),
              cudaGetErrorString(error), static_cast<long long>(kFlagBytes));
}

}  // namespace slidesparse::hopper
