// The headers in this folder stand in for NVIDIA's, in tests only: just what csrc/ uses, so that
// the extensions compile where CUDA is not installed.  Pointers are untyped, integers of 64 bits
// where NVIDIA's are of fewer.  Parameters called `made` and `gone` are objects that a call makes
// and destroys; ../fake.h defines every F(...).

#pragma once

#include <cstddef>
#include <cstdint>

using In = const void*;
using Int = std::int64_t;
using Size = std::size_t;

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
