// Launching a kernel, and errors in words.

#pragma once

#include <cuda_runtime.h>

namespace slidesparse::hopper {

// Formats an error, in words that stay valid until this thread calls again.  Defined in about.cu.
__attribute__((format(printf, 1, 2))) const char* Fail(const char* format, ...);

// A launch.  Every kernel here is a programmatic dependent launch: it may start before the kernel
// in front has ended, and waits for that itself (`WaitForPredecessors`).
struct Launch {
  cudaStream_t stream;
  dim3 grid;
  int threads, shared_bytes;  // of a CTA
  int cluster;                // CTAs
};

// A launch in the runtime's form, which points into itself.
struct RuntimeLaunch {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};

  explicit RuntimeLaunch(const Launch& launch) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = launch.cluster;
    attributes[1].val.clusterDim.y = 1;
    attributes[1].val.clusterDim.z = 1;
    config.gridDim = launch.grid;
    config.blockDim = dim3(launch.threads);
    config.dynamicSmemBytes = launch.shared_bytes;
    config.stream = launch.stream;
    config.attrs = attributes;
    config.numAttrs = launch.cluster > 1 ? 2 : 1;
  }
  RuntimeLaunch(const RuntimeLaunch&) = delete;
  RuntimeLaunch& operator=(const RuntimeLaunch&) = delete;
};

// Loads a kernel on the current device, allows its CTAs all shared memory of an SM, and asks for
// the L1 carveout that leaves room for another kernel's CTAs beside them.
inline cudaError_t LoadKernel(const void* kernel) {
  int device = 0, most = 0;
  cudaFuncAttributes found;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  if (cudaError_t error =
          cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) {
    return error;
  }
  if (cudaError_t error = cudaFuncGetAttributes(&found, kernel)) return error;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               most - static_cast<int>(found.sharedSizeBytes))) {
    return error;
  }
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

}  // namespace slidesparse::hopper
