// Launching a kernel, and error messages.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "format.cuh"

namespace slidesparse::hopper {

// Formats an error message, which stays valid until this thread's next call.  Defined in about.cu.
__attribute__((format(printf, 1, 2))) const char* Fail(const char* format, ...);

// Returns null, or why no weight has this pattern.
inline const char* CheckPattern(int length, int phase) {
  const bool known = length == 4 || length == 6 || length == kCodedLength;
  if (known && phase >= 0 && phase < length) return nullptr;
  return Fail("blocks of %d columns at phase %d: a length of 4, 6 or 8, a phase below it", length,
              phase);
}

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

// Loads a kernel on the current device and opts its CTAs in to all shared memory that a CTA may
// have.  It requests the maximal shared-memory carveout, so that CTAs of the next kernel, which is
// launched while this one runs, find room on the same SM.
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
