// Whether the library can run here, the current device, and error messages.

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>

#include "interface.cuh"
#include "runtime.cuh"

namespace slidesparse::hopper {

const char* Fail(const char* format, ...) {
  static thread_local char message[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(message, sizeof(message), format, values);
  va_end(values);
  return message;
}

}  // namespace slidesparse::hopper

extern "C" {

const char* slidesparse_hopper_unusable() {
  int driver = 0;
  if (cudaError_t error = cudaDriverGetVersion(&driver)) {
    return slidesparse::hopper::Fail("the driver does not say its version: %s",
                                     cudaGetErrorString(error));
  }
  if (driver / 1000 >= CUDART_VERSION / 1000) return nullptr;
  return slidesparse::hopper::Fail(
      "the driver is for CUDA %d.%d, the kernels were compiled by CUDA %d.%d; update the driver, "
      "or set SLIDESPARSE_NVCC to an nvcc of CUDA %d",
      driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10,
      driver / 1000);
}

std::int32_t slidesparse_hopper_device() {
  // Asks the driver, because the runtime returns device 0 for a thread without a context.
  using GetDevice = int (*)(int*);
  static const auto get_device = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    return driver ? reinterpret_cast<GetDevice>(dlsym(driver, "cuCtxGetDevice")) : nullptr;
  }();
  int device = -1;
  return get_device != nullptr && get_device(&device) == 0 ? device : -1;
}

}  // extern "C"
