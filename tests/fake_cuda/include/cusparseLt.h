// Stands in for NVIDIA's header of this name, in tests only: just what csrc/ uses, so that the
// extensions compile where CUDA is not installed.  No test compares it with the real one.

#pragma once

#include "cusparse.h"

#define CUSPARSELT_VER_MAJOR 0
#define CUSPARSELT_VER_MINOR 8
#define CUSPARSELT_VER_PATCH 0

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
enum cusparseLtSparsity_t : int { CUSPARSELT_SPARSITY_50_PERCENT = 0 };
enum cusparseLtMatmulDescAttribute_t : int { CUSPARSELT_MATMUL_ALPHA_VECTOR_SCALING = 5 };
enum cusparseLtMatmulAlg_t : int { CUSPARSELT_MATMUL_ALG_DEFAULT = 0 };
enum cusparseLtMatmulAlgAttribute_t : int {
  CUSPARSELT_MATMUL_ALG_CONFIG_ID = 0,
  CUSPARSELT_MATMUL_ALG_CONFIG_MAX_ID = 1,
  CUSPARSELT_MATMUL_SPLIT_K = 3,
  CUSPARSELT_MATMUL_SPLIT_K_MODE = 4,
  CUSPARSELT_MATMUL_SPLIT_K_BUFFERS = 5,
};
enum cusparseLtSplitKMode_t : int {
  CUSPARSELT_SPLIT_K_MODE_ONE_KERNEL = 1,
  CUSPARSELT_SPLIT_K_MODE_TWO_KERNELS = 2,
};

extern "C" {

cusparseStatus_t cusparseLtInit(cusparseLtHandle_t* handle);
cusparseStatus_t cusparseLtDestroy(const cusparseLtHandle_t* handle);
cusparseStatus_t cusparseLtGetProperty(libraryPropertyType property, int* value);
const char* cusparseLtGetErrorName(cusparseStatus_t status);
const char* cusparseLtGetErrorString(cusparseStatus_t status);

cusparseStatus_t cusparseLtDenseDescriptorInit(const cusparseLtHandle_t* handle,
                                               cusparseLtMatDescriptor_t* matrix, std::int64_t rows,
                                               std::int64_t cols, std::int64_t leading,
                                               std::uint32_t alignment, cudaDataType type,
                                               cusparseOrder_t order);
cusparseStatus_t cusparseLtStructuredDescriptorInit(const cusparseLtHandle_t* handle,
                                                    cusparseLtMatDescriptor_t* matrix,
                                                    std::int64_t rows, std::int64_t cols,
                                                    std::int64_t leading, std::uint32_t alignment,
                                                    cudaDataType type, cusparseOrder_t order,
                                                    cusparseLtSparsity_t sparsity);
cusparseStatus_t cusparseLtMatDescriptorDestroy(const cusparseLtMatDescriptor_t* matrix);

cusparseStatus_t cusparseLtMatmulDescriptorInit(
    const cusparseLtHandle_t* handle, cusparseLtMatmulDescriptor_t* product,
    cusparseOperation_t op_a, cusparseOperation_t op_b, const cusparseLtMatDescriptor_t* a,
    const cusparseLtMatDescriptor_t* b, const cusparseLtMatDescriptor_t* c,
    const cusparseLtMatDescriptor_t* d, cusparseComputeType compute);
cusparseStatus_t cusparseLtMatmulDescSetAttribute(const cusparseLtHandle_t* handle,
                                                  cusparseLtMatmulDescriptor_t* product,
                                                  cusparseLtMatmulDescAttribute_t attribute,
                                                  const void* value, std::size_t bytes);

cusparseStatus_t cusparseLtMatmulAlgSelectionInit(const cusparseLtHandle_t* handle,
                                                  cusparseLtMatmulAlgSelection_t* selection,
                                                  const cusparseLtMatmulDescriptor_t* product,
                                                  cusparseLtMatmulAlg_t algorithm);
cusparseStatus_t cusparseLtMatmulAlgSelectionDestroy(
    const cusparseLtMatmulAlgSelection_t* selection);
cusparseStatus_t cusparseLtMatmulAlgSetAttribute(const cusparseLtHandle_t* handle,
                                                 cusparseLtMatmulAlgSelection_t* selection,
                                                 cusparseLtMatmulAlgAttribute_t attribute,
                                                 const void* value, std::size_t bytes);
cusparseStatus_t cusparseLtMatmulAlgGetAttribute(const cusparseLtHandle_t* handle,
                                                 const cusparseLtMatmulAlgSelection_t* selection,
                                                 cusparseLtMatmulAlgAttribute_t attribute,
                                                 void* value, std::size_t bytes);

cusparseStatus_t cusparseLtMatmulPlanInit(const cusparseLtHandle_t* handle,
                                          cusparseLtMatmulPlan_t* plan,
                                          const cusparseLtMatmulDescriptor_t* product,
                                          const cusparseLtMatmulAlgSelection_t* selection);
cusparseStatus_t cusparseLtMatmulPlanDestroy(const cusparseLtMatmulPlan_t* plan);
cusparseStatus_t cusparseLtMatmulGetWorkspace(const cusparseLtHandle_t* handle,
                                              const cusparseLtMatmulPlan_t* plan,
                                              std::size_t* bytes);
cusparseStatus_t cusparseLtMatmul(const cusparseLtHandle_t* handle,
                                  const cusparseLtMatmulPlan_t* plan, const void* alpha,
                                  const void* a, const void* b, const void* beta, const void* c,
                                  void* d, void* workspace, cudaStream_t* streams,
                                  std::int32_t stream_count);

cusparseStatus_t cusparseLtSpMMACompressedSize(const cusparseLtHandle_t* handle,
                                               const cusparseLtMatmulPlan_t* plan,
                                               std::size_t* bytes, std::size_t* buffer_bytes);
cusparseStatus_t cusparseLtSpMMACompress(const cusparseLtHandle_t* handle,
                                         const cusparseLtMatmulPlan_t* plan, const void* dense,
                                         void* compressed, void* buffer, cudaStream_t stream);

}  // extern "C"
