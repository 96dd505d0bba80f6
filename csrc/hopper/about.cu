// What the library says of itself, by C linkage.

#include <cuda_runtime.h>

#include <cstdio>

#define SLIDESPARSE_TEXT_OF(word) #word
#define SLIDESPARSE_TEXT(word) SLIDESPARSE_TEXT_OF(word)

extern "C" {

// The digest of the sources it was compiled from, so that a stale one is noticed.
__attribute__((visibility("default"))) const char* slidesparse_hopper_sources() {
  return SLIDESPARSE_TEXT(SLIDESPARSE_SOURCES);
}

// Null, or why the driver cannot run it, in words that stay valid until this thread calls again.
__attribute__((visibility("default"))) const char* slidesparse_hopper_unusable() {
  static thread_local char message[192];
  int driver = 0;
  if (cudaError_t error = cudaDriverGetVersion(&driver)) {
    std::snprintf(message, sizeof(message), "the driver does not say its version: %s",
                  cudaGetErrorString(error));
    return message;
  }
  if (driver / 1000 >= CUDART_VERSION / 1000) return nullptr;
  std::snprintf(message, sizeof(message),
                "the driver is for CUDA %d.%d, the kernels were compiled by CUDA %d.%d; update the "
                "driver, or set SLIDESPARSE_NVCC to an nvcc of CUDA %d",
                driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
                CUDART_VERSION % 1000 / 10, driver / 1000);
  return message;
}

}  // extern "C"
