// A cuBLASLt that computes nothing: it logs calls and complains of those that the real one would
// crash at or answer wrongly.

#include <cublasLt.h>

#include <algorithm>

#include "fake.h"

namespace {

constexpr std::uint64_t kMagic = 0xa150;  // first in each algorithm that this library made

cublasStatus_t Status(int status) { return static_cast<cublasStatus_t>(status); }

// Objects are the addresses that the caller holds; they are never freed, so that a use after
// destruction is seen.
template <typename Pointer>
Object* Make(Call* call, Pointer* pointer, const char* kind) {
  *pointer = reinterpret_cast<Pointer>(new char[16]);
  return call->Make(*pointer, kind);
}

std::size_t BytesOf(int attribute) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
      return sizeof(void*);
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM:
      return sizeof(std::int8_t);
    default:
      return sizeof(std::int32_t);
  }
}

bool UseProduct(Call* call, cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                cublasLtMatrixLayout_t d) {
  call->Use("with", handle, "handle");
  Object* const used = call->Use("product_", product, "descriptor");
  const Object* const matrices[] = {
      call->Use("layout_a", a, "matrix"), call->Use("layout_b", b, "matrix"),
      call->Use("layout_c", c, "matrix"), call->Use("layout_d", d, "matrix")};
  if (used == nullptr) return false;
  for (const Object* matrix : matrices) {
    if (matrix == nullptr) return false;
  }
  auto& values = used->values;
  CheckProduct(call, *matrices[0], values[std::to_string(CUBLASLT_MATMUL_DESC_TRANSA)] != 0,
               *matrices[1], values[std::to_string(CUBLASLT_MATMUL_DESC_TRANSB)] != 0, *matrices[3],
               CUBLASLT_ORDER_COL);
  return true;
}

// An algorithm wants its number in MiB as a workspace.
std::size_t WorkspaceOf(const cublasLtMatmulAlgo_t& algorithm) { return algorithm.data[1] << 20; }

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  Call call("cublasLtCreate");
  if (const int status = call.failure()) return Status(status);
  Make(&call, handle, "handle");
  call.NoteThread();
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  Call call("cublasLtDestroy");
  call.Destroy(handle, "handle");
  return Status(call.failure());
}

std::size_t cublasLtGetVersion() {
  Call call("cublasLtGetVersion");
  return static_cast<std::size_t>(Setting("version", 0));
}

const char* cublasLtGetStatusName(cublasStatus_t status) {
  return status == CUBLAS_STATUS_NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED" : "unknown";
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
  thread_local std::string words;
  words = Words(status);
  return words.c_str();
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* matrix, cudaDataType type,
                                          std::uint64_t rows, std::uint64_t cols,
                                          std::int64_t leading) {
  Call call("cublasLtMatrixLayoutCreate");
  if (const int status = call.failure()) return Status(status);
  Object* const made = Make(&call, matrix, "matrix");
  const auto signed_rows = static_cast<std::int64_t>(rows);
  const auto signed_cols = static_cast<std::int64_t>(cols);
  made->values = {
      {"rows", signed_rows}, {"cols", signed_cols}, {"ld", leading}, {"order", CUBLASLT_ORDER_COL}};
  call.Note("rows", signed_rows);
  call.Note("cols", signed_cols);
  call.Note("ld", leading);
  call.Note("type", std::int64_t{type});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t matrix) {
  Call call("cublasLtMatrixLayoutDestroy");
  call.Destroy(matrix, "matrix");
  return Status(call.failure());
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t matrix,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, std::size_t bytes) {
  Call call("cublasLtMatrixLayoutSetAttribute");
  if (const int status = call.failure()) return Status(status);
  Object* const used = call.Use("of", matrix, "matrix");
  call.Note("attribute", std::int64_t{attribute});
  const std::int64_t found = Value(&call, value, bytes, sizeof(std::int32_t));
  call.Note("value", found);
  if (used != nullptr) used->values["order"] = found;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* product, cublasComputeType_t compute,
                                        cudaDataType scale_type) {
  Call call("cublasLtMatmulDescCreate");
  if (const int status = call.failure()) return Status(status);
  Object* const made = Make(&call, product, "descriptor");
  made->values["scale_type"] = scale_type;
  call.Note("compute", std::int64_t{compute});
  call.Note("scale_type", std::int64_t{scale_type});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t product) {
  Call call("cublasLtMatmulDescDestroy");
  call.Destroy(product, "descriptor");
  return Status(call.failure());
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t product,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t bytes) {
  Call call("cublasLtMatmulDescSetAttribute");
  if (const int status = call.failure()) return Status(status);
  Object* const used = call.Use("of", product, "descriptor");
  call.Note("attribute", std::int64_t{attribute});
  const std::int64_t found = Value(&call, value, bytes, BytesOf(attribute));
  call.Note("value", found);
  if (used != nullptr) used->values[std::to_string(attribute)] = found;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  Call call("cublasLtMatmulPreferenceCreate");
  if (const int status = call.failure()) return Status(status);
  Make(&call, preference, "preference");
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  Call call("cublasLtMatmulPreferenceDestroy");
  call.Destroy(preference, "preference");
  return Status(call.failure());
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, std::size_t bytes) {
  Call call("cublasLtMatmulPreferenceSetAttribute");
  if (const int status = call.failure()) return Status(status);
  Object* const used = call.Use("of", preference, "preference");
  call.Note("attribute", std::int64_t{attribute});
  const std::int64_t found = Value(&call, value, bytes, sizeof(std::size_t));
  call.Note("value", found);
  if (used != nullptr) used->values["workspace"] = found;
  return CUBLAS_STATUS_SUCCESS;
}

// Those within the workspace, in the order of their numbers; one that the test chose is not
// supported, which the library says of each alone.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int most,
                                              cublasLtMatmulHeuristicResult_t* results,
                                              int* found) {
  Call call("cublasLtMatmulAlgoGetHeuristic");
  if (const int status = call.failure()) return Status(status);
  const Object* const wanted = call.Use("by", preference, "preference");
  if (!UseProduct(&call, handle, product, a, b, c, d) || wanted == nullptr) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  call.Note("most", std::int64_t{most});
  const auto limit = static_cast<std::size_t>(wanted->values.at("workspace"));
  *found = 0;
  for (std::int64_t i = 0; i < Setting("algorithms", 0) && *found < most; ++i) {
    cublasLtMatmulHeuristicResult_t result{};
    result.algo.data[0] = kMagic;
    result.algo.data[1] = static_cast<std::uint64_t>(i);
    result.workspaceSize = WorkspaceOf(result.algo);
    const bool refused = i == Setting("unsupported", -1);
    result.state = refused ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
    if (result.workspaceSize <= limit) results[(*found)++] = result;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result) {
  Call call("cublasLtMatmulAlgoCheck");
  if (const int status = call.failure()) return Status(status);
  if (!UseProduct(&call, handle, product, a, b, c, d)) return CUBLAS_STATUS_INVALID_VALUE;
  if (algorithm->data[0] != kMagic) return CUBLAS_STATUS_INVALID_VALUE;
  call.Note("algorithm", static_cast<std::int64_t>(algorithm->data[1]));
  *result = {};
  result->algo = *algorithm;
  result->workspaceSize = WorkspaceOf(*algorithm);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                              const void* alpha, const void* a, cublasLtMatrixLayout_t a_layout,
                              const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              std::size_t workspace_bytes, cudaStream_t stream) {
  Call call("cublasLtMatmul");
  if (const int status = call.failure()) return Status(status);
  if (!UseProduct(&call, handle, product, a_layout, b_layout, c_layout, d_layout)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const auto& values = state().objects[product]->values;
  for (const auto& scalar : {std::make_pair("alpha", alpha), std::make_pair("beta", beta)}) {
    if (values.at("scale_type") == CUDA_R_32I) {
      call.Note(scalar.first, std::int64_t{*static_cast<const std::int32_t*>(scalar.second)});
    } else {
      call.Word(scalar.first, std::to_string(*static_cast<const float*>(scalar.second)));
    }
  }
  call.Note("a", a);
  call.Note("b", b);
  call.Note("c", c);
  call.Note("d", d);
  for (const int attribute :
       {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
        CUBLASLT_MATMUL_DESC_BIAS_POINTER}) {
    const auto found = values.find(std::to_string(attribute));
    if (found != values.end()) call.Note(("at" + found->first).c_str(), found->second);
  }
  if (algorithm->data[0] != kMagic) call.Complain("the real library crashes on this algorithm");
  call.Note("algorithm", static_cast<std::int64_t>(algorithm->data[1]));
  call.Note("workspace", workspace);
  call.Note("bytes", static_cast<std::int64_t>(workspace_bytes));
  if (workspace_bytes < WorkspaceOf(*algorithm)) call.Complain("the workspace is too small");
  call.Note("stream", static_cast<const void*>(stream));
  call.NoteThread();
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
