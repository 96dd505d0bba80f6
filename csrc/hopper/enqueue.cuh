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

template <class Arguments>
cudaError_t Enqueue(void (*kernel)(Arguments), Prepared& prepared, const Arguments& arguments,
                    const Launch& launch) {
  if (cudaError_t error = Prepare(reinterpret_cast<const void*>(kernel), prepared)) {
    return error;
  }
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (launch.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = launch.cluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  if (launch.dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = launch.grid;
  config.blockDim = dim3(launch.threads);
  config.dynamicSmemBytes = launch.shared;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace slidesparse::hopper
