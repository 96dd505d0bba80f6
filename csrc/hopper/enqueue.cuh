// Putting a kernel on a stream.

#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace slidesparse::hopper {

// What went wrong, in words that stay valid until this thread calls again.  Defined in hopper.cu.
__attribute__((format(printf, 1, 2))) const char* Fail(const char* format, ...);

// How the runtime is to start a kernel.
struct Launch {
  cudaStream_t stream;
  dim3 grid;
  int threads, shared;  // of a block; bytes
  int cluster;          // blocks
  bool dependent;       // start before the kernel in front has ended
};

// On which devices a kernel has been prepared; one for each kernel, with static storage.
struct Prepared {
  static constexpr int kDevices = 64;
  std::atomic<bool> on[kDevices];
};

// Lets a kernel's blocks have all the shared memory that there is, and divides the first-level
// cache so that another kernel's blocks find room beside them.  Asks the runtime once for each
// device.
inline cudaError_t Prepare(const void* kernel, Prepared& prepared) {
  int device = 0, most = 0;
  cudaFuncAttributes found;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  const bool known = device < Prepared::kDevices;
  if (known && prepared.on[device].load(std::memory_order_acquire)) return cudaSuccess;
  if (cudaError_t error =
          cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) {
    return error;
  }
  if (cudaError_t error = cudaFuncGetAttributes(&found, kernel)) return error;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               most - static_cast<int>(found.sharedSizeBytes))) {
    return error;
  }
  if (cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared)) {
    return error;
  }
  if (known) prepared.on[device].store(true, std::memory_order_release);
  return cudaSuccess;
}

// A launch as the runtime takes it; it points to itself.
struct RuntimeLaunch {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};

  explicit RuntimeLaunch(const Launch& launch) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = launch.cluster;
    attributes[0].val.clusterDim.y = 1;
    attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = launch.grid;
    config.blockDim = dim3(launch.threads);
    config.dynamicSmemBytes = launch.shared;
    config.stream = launch.stream;
    // A cluster of one block is none.
    config.attrs = launch.cluster > 1 ? attributes : attributes + 1;
    config.numAttrs = (launch.cluster > 1) + launch.dependent;
  }
  RuntimeLaunch(const RuntimeLaunch&) = delete;
  RuntimeLaunch& operator=(const RuntimeLaunch&) = delete;
};

template <class Arguments>
cudaError_t Enqueue(void (*kernel)(Arguments), Prepared& prepared, const Arguments& arguments,
                    const Launch& launch) {
  if (cudaError_t error = Prepare(reinterpret_cast<const void*>(kernel), prepared)) {
    return error;
  }
  const RuntimeLaunch runtime(launch);
  return cudaLaunchKernelEx(&runtime.config, kernel, arguments);
}

// How many clusters of such a launch the current device holds at a time.
template <class Arguments>
cudaError_t CountClusters(void (*kernel)(Arguments), Prepared& prepared, const Launch& launch,
                          int& clusters) {
  if (cudaError_t error = Prepare(reinterpret_cast<const void*>(kernel), prepared)) {
    return error;
  }
  RuntimeLaunch runtime(launch);
  runtime.config.attrs = runtime.attributes;
  runtime.config.numAttrs = 1;  // the cluster, of one block too
  return cudaOccupancyMaxActiveClusters(&clusters, kernel, &runtime.config);
}

}  // namespace slidesparse::hopper
