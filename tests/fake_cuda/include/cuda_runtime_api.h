// Stands in for NVIDIA's header of this name, in tests only: just what csrc/ uses, so that the
// extensions compile where CUDA is not installed.  No test compares it with the real one.

#pragma once

#include <cstddef>
#include <cstdint>

typedef struct FakeStream* cudaStream_t;

typedef enum {
  CUDA_R_32F = 0,
  CUDA_R_16F = 2,
  CUDA_R_8I = 3,
  CUDA_R_32I = 10,
  CUDA_R_16BF = 14,
  CUDA_R_8F_E4M3 = 28,
} cudaDataType;

typedef enum { MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL } libraryPropertyType;
