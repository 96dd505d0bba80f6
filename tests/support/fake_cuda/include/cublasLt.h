#pragma once

#include "cuda_runtime_api.h"

enum cublasStatus_t : int { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_NOT_SUPPORTED = 15 };
enum cublasOperation_t : int { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasComputeType_t : int { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32I = 72 };
enum cublasLtOrder_t : int { CUBLASLT_ORDER_COL = 0, CUBLASLT_ORDER_ROW = 1 };
enum cublasLtMatmulDescAttributes_t : int {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_TRANSB = 4,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
  CUBLASLT_MATMUL_DESC_A_SCALE_POINTER = 17,
  CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = 18,
  CUBLASLT_MATMUL_DESC_FAST_ACCUM = 25,
  CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26,
};
enum cublasLtEpilogue_t : int { CUBLASLT_EPILOGUE_BIAS = 4 };
constexpr int CUBLASLT_MATRIX_LAYOUT_ORDER = 1, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1;

// The library owns the memory of all objects.
typedef void *cublasLtHandle_t, *cublasLtMatrixLayout_t, *cublasLtMatmulDesc_t,
    *cublasLtMatmulPreference_t;

struct cublasLtMatmulAlgo_t {
  std::uint64_t data[8];
};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  Size workspaceSize;
  cublasStatus_t state;
};

#define FAKE_FUNCTIONS(F)                                                                       \
  F(cublasLtCreate, (void** made), made)                                                        \
  F(cublasLtDestroy, (In gone), gone)                                                           \
  F(cublasLtMatrixLayoutCreate, (void** made, Int type, Int rows, Int cols, Int leading), made, \
    type, rows, cols, leading)                                                                  \
  F(cublasLtMatrixLayoutDestroy, (In gone), gone)                                               \
  F(cublasLtMatrixLayoutSetAttribute, (In matrix, Int attribute, In value, Size bytes), matrix, \
    attribute, value, bytes)                                                                    \
  F(cublasLtMatmulDescCreate, (void** made, Int compute, Int scale_type), made, compute,        \
    scale_type)                                                                                 \
  F(cublasLtMatmulDescDestroy, (In gone), gone)                                                 \
  F(cublasLtMatmulDescSetAttribute, (In product, Int attribute, In value, Size bytes), product, \
    attribute, value, bytes)                                                                    \
  F(cublasLtMatmulPreferenceCreate, (void** made), made)                                        \
  F(cublasLtMatmulPreferenceDestroy, (In gone), gone)                                           \
  F(cublasLtMatmulPreferenceSetAttribute, (In preference, Int attribute, In value, Size bytes), \
    preference, attribute, value, bytes)                                                        \
  F(cublasLtMatmul,                                                                             \
    (In handle, In product, In alpha, In a, In layout_a, In b, In layout_b, In beta, In c,      \
     In layout_c, In d, In layout_d, const cublasLtMatmulAlgo_t* algorithm, In workspace,       \
     Size workspace_bytes, cudaStream_t stream),                                                \
    handle, product, alpha, a, layout_a, b, layout_b, beta, c, layout_c, d, layout_d,           \
    algorithm->data[1], workspace, workspace_bytes, stream)

extern "C" {
#define FAKE_DECLARE(name, parameters, ...) cublasStatus_t name parameters;
FAKE_FUNCTIONS(FAKE_DECLARE)
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(In handle, In product, In layout_a, In layout_b,
                                              In layout_c, In layout_d, In preference, int most,
                                              cublasLtMatmulHeuristicResult_t* results, int* found);
cublasStatus_t cublasLtMatmulAlgoCheck(In handle, In product, In layout_a, In layout_b, In layout_c,
                                       In layout_d, const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result);
Size cublasLtGetVersion();
const char* cublasLtGetStatusName(cublasStatus_t status);
const char* cublasLtGetStatusString(cublasStatus_t status);
}  // extern "C"
