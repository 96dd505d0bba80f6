#pragma once

#include "cusparse.h"

// The caller owns the memory of all objects; the library fills it.
template <int kind>
struct FakeObject {
  alignas(16) std::uint8_t bytes[512];
};
using cusparseLtHandle_t = FakeObject<0>;
using cusparseLtMatDescriptor_t = FakeObject<1>;
using cusparseLtMatmulDescriptor_t = FakeObject<2>;
using cusparseLtMatmulAlgSelection_t = FakeObject<3>;
using cusparseLtMatmulPlan_t = FakeObject<4>;

enum cusparseComputeType : int { CUSPARSE_COMPUTE_32I = 0, CUSPARSE_COMPUTE_32F = 2 };
enum cusparseLtMatmulAlgAttribute_t : int {
  CUSPARSELT_MATMUL_ALG_CONFIG_ID = 0,
  CUSPARSELT_MATMUL_ALG_CONFIG_MAX_ID = 1,
  CUSPARSELT_MATMUL_SPLIT_K = 3,
  CUSPARSELT_MATMUL_SPLIT_K_MODE = 4,
};
enum cusparseLtSplitKMode_t : int {};
constexpr int CUSPARSELT_SPARSITY_50_PERCENT = 0, CUSPARSELT_MATMUL_ALG_DEFAULT = 0;

#define FAKE_FUNCTIONS(F)                                                                          \
  F(cusparseLtInit, (In made), made)                                                               \
  F(cusparseLtDestroy, (In gone), gone)                                                            \
  F(cusparseLtDenseDescriptorInit,                                                                 \
    (In handle, In made, Int rows, Int cols, Int leading, Int alignment, Int type, Int order),     \
    handle, made, rows, cols, leading, alignment, type, order)                                     \
  F(cusparseLtStructuredDescriptorInit,                                                            \
    (In handle, In made, Int rows, Int cols, Int leading, Int alignment, Int type, Int order,      \
     Int sparsity),                                                                                \
    handle, made, rows, cols, leading, alignment, type, order, sparsity)                           \
  F(cusparseLtMatDescriptorDestroy, (In gone), gone)                                               \
  F(cusparseLtMatmulDescriptorInit,                                                                \
    (In handle, In product, Int op_a, Int op_b, In a, In b, In c, In d, Int compute), handle,      \
    product, op_a, op_b, a, b, c, d, compute)                                                      \
  F(cusparseLtMatmulAlgSelectionInit, (In handle, In made, In product, Int algorithm), handle,     \
    made, product, algorithm)                                                                      \
  F(cusparseLtMatmulAlgSelectionDestroy, (In gone), gone)                                          \
  F(cusparseLtMatmulAlgSetAttribute,                                                               \
    (In handle, In selection, Int attribute, In value, Size bytes), handle, selection, attribute,  \
    value, bytes)                                                                                  \
  F(cusparseLtMatmulAlgGetAttribute,                                                               \
    (In handle, In selection, Int attribute, int* algorithms, Size bytes), handle, selection,      \
    attribute, algorithms, bytes)                                                                  \
  F(cusparseLtMatmulPlanInit, (In handle, In made, In product, In selection), handle, made,        \
    product, selection)                                                                            \
  F(cusparseLtMatmulPlanDestroy, (In gone), gone)                                                  \
  F(cusparseLtMatmulGetWorkspace, (In handle, In plan, Size * workspace), handle, plan, workspace) \
  F(cusparseLtMatmul,                                                                              \
    (In handle, In plan, In alpha, In a, In b, In beta, In c, In d, In workspace,                  \
     cudaStream_t * streams, int count),                                                           \
    handle, plan, alpha, a, b, beta, c, d, workspace, *streams, count)                             \
  F(cusparseLtSpMMACompressedSize, (In handle, In plan, Size * compressed, Size * buffer), handle, \
    plan, compressed, buffer)                                                                      \
  F(cusparseLtSpMMACompress,                                                                       \
    (In handle, In plan, In dense, In compressed, In buffer, cudaStream_t stream), handle, plan,   \
    dense, compressed, buffer, stream)

extern "C" {
#define FAKE_DECLARE(name, parameters, ...) cusparseStatus_t name parameters;
FAKE_FUNCTIONS(FAKE_DECLARE)
cusparseStatus_t cusparseLtGetProperty(libraryPropertyType property, int* value);
const char* cusparseLtGetErrorName(cusparseStatus_t status);
const char* cusparseLtGetErrorString(cusparseStatus_t status);
}  // extern "C"
