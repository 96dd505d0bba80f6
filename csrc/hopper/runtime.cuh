// Launching a kernel, and errors in words.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace slidesparse::hopper {

// Formats an error, in words that stay valid until this thread calls again.  Defined in about.cu.
__attribute__((format(printf, 1, 2))) const char* Fail(const char* format, ...);

// A launch of `ctas` CTAs in clusters of `cluster`.  Every kernel here is a programmatic dependent
// launch: it may start before the preceding kernel has ended, and waits for that itself
// (`WaitForPredecessors`).  `config` points into the object, so it is not copied.
struct Launch {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};

  Launch(cudaStream_t stream, std::int64_t ctas, int threads, int shared_bytes, int cluster) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = 1;
    attributes[1].val.clusterDim.z = 1;
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
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
