#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "runtime.cuh"
#include "workspace.cuh"

namespace slidesparse::hopper {
namespace {

std::shared_mutex mutex;
std::map<std::pair<int, cudaStream_t>, void*> workspaces;  // by device and stream

// Allocates by cudaMalloc and not from torch's pools: when a server sleeps, vLLM discards the pool
// that weights are loaded in, and the flags in a workspace must stay zero.
//
// The stream may be in capture, which forbids this thread cudaMalloc and synchronization unless it
// is in the relaxed mode.  The memory is cleared on a stream of its own, so that the clearing is
// not captured and is over before the graph is launched.
cudaError_t Allocate(void** memory) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  if (cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode)) return error;
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMalloc(memory, kWorkspaceBytes);
  if (error == cudaSuccess) error = cudaMemsetAsync(*memory, 0, kWorkspaceBytes, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (stream != nullptr) cudaStreamDestroy(stream);
  cudaThreadExchangeStreamCaptureMode(&mode);
  return error;
}

}  // namespace

const char* FindWorkspace(int device, cudaStream_t stream, void** workspace) {
  const std::pair<int, cudaStream_t> key = {device, stream};
  {
    std::shared_lock lock(mutex);
    const auto found = workspaces.find(key);
    if (found != workspaces.end()) {
      *workspace = found->second;
      return nullptr;
    }
  }
  std::unique_lock lock(mutex);
  void*& memory = workspaces[key];  // another thread may have been faster
  if (memory == nullptr) {
    if (cudaError_t error = Allocate(&memory)) {
      workspaces.erase(key);
      return Fail("%s (%s) for the workspace of a stream, %lld bytes", cudaGetErrorName(error),
                  cudaGetErrorString(error), static_cast<long long>(kWorkspaceBytes));
    }
  }
  *workspace = memory;
  return nullptr;
}

}  // namespace slidesparse::hopper
