// A cuSPARSELt that computes nothing: it logs calls and complains of those that the real one, up to
// 0.8.0 at least, would crash at or answer wrongly.

#include <cusparseLt.h>

#include "fake.h"

namespace {

cusparseStatus_t Status(int status) { return static_cast<cusparseStatus_t>(status); }

Object* InitMatrix(Call* call, const cusparseLtHandle_t* handle, cusparseLtMatDescriptor_t* matrix,
                   std::int64_t rows, std::int64_t cols, std::int64_t leading,
                   std::uint32_t alignment, cudaDataType type, cusparseOrder_t order) {
  Object* const used = call->Use("of", handle, "handle");
  Object* const made = call->Make(matrix, "matrix");
  made->values = {{"rows", rows}, {"cols", cols}, {"ld", leading}, {"order", order}};
  if (used != nullptr) made->parts["handle"] = used;
  call->Note("rows", rows);
  call->Note("cols", cols);
  call->Note("ld", leading);
  call->Note("alignment", std::int64_t{alignment});
  call->Note("type", std::int64_t{type});
  call->Note("order", std::int64_t{order});
  return made;
}

// The plan at `address`, made with `handle` and of objects that are still there.
Object* UsePlan(Call* call, const cusparseLtHandle_t* handle, const cusparseLtMatmulPlan_t* plan) {
  Object* const used = call->Use("with", handle, "handle");
  Object* const found = call->Use("plan", plan, "plan");
  if (found == nullptr) return nullptr;
  call->CheckParts(*found);
  if (found->parts["handle"] != used) call->Complain("the plan is another handle's");
  return found;
}

}  // namespace

extern "C" {

cusparseStatus_t cusparseLtInit(cusparseLtHandle_t* handle) {
  Call call("cusparseLtInit");
  if (const int status = call.failure()) return Status(status);
  call.Make(handle, "handle");
  call.NoteThread();
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseLtDestroy(const cusparseLtHandle_t* handle) {
  Call call("cusparseLtDestroy");
  call.Destroy(handle, "handle");
  return Status(call.failure());
}

cusparseStatus_t cusparseLtGetProperty(libraryPropertyType property, int* value) {
  Call call("cusparseLtGetProperty");
  if (const int status = call.failure()) return Status(status);
  const char* const names[] = {"major", "minor", "patch"};
  *value = static_cast<int>(Setting(names[property], 0));
  return CUSPARSE_STATUS_SUCCESS;
}

const char* cusparseLtGetErrorName(cusparseStatus_t status) {
  return status == CUSPARSE_STATUS_NOT_SUPPORTED ? "CUSPARSE_STATUS_NOT_SUPPORTED" : "unknown";
}

const char* cusparseLtGetErrorString(cusparseStatus_t status) {
  thread_local std::string words;
  words = Words(status);
  return words.c_str();
}

cusparseStatus_t cusparseLtDenseDescriptorInit(const cusparseLtHandle_t* handle,
                                               cusparseLtMatDescriptor_t* matrix, std::int64_t rows,
                                               std::int64_t cols, std::int64_t leading,
                                               std::uint32_t alignment, cudaDataType type,
                                               cusparseOrder_t order) {
  Call call("cusparseLtDenseDescriptorInit");
  if (const int status = call.failure()) return Status(status);
  InitMatrix(&call, handle, matrix, rows, cols, leading, alignment, type, order);
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseLtStructuredDescriptorInit(const cusparseLtHandle_t* handle,
                                                    cusparseLtMatDescriptor_t* matrix,
                                                    std::int64_t rows, std::int64_t cols,
                                                    std::int64_t leading, std::uint32_t alignment,
                                                    cudaDataType type, cusparseOrder_t order,
                                                    cusparseLtSparsity_t sparsity) {
  Call call("cusparseLtStructuredDescriptorInit");
  if (const int status = call.failure()) return Status(status);
  Object* const made =
      InitMatrix(&call, handle, matrix, rows, cols, leading, alignment, type, order);
  made->values["structured"] = 1;
  call.Note("sparsity", std::int64_t{sparsity});
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseLtMatDescriptorDestroy(const cusparseLtMatDescriptor_t* matrix) {
  Call call("cusparseLtMatDescriptorDestroy");
  const Object* const found = call.Destroy(matrix, "matrix");
  if (found != nullptr && found->values.count("structured") != 0 && !found->used) {
    call.Complain("0.8.0 crashes at a structured matrix that no product has used");
  }
  return Status(call.failure());
}

cusparseStatus_t cusparseLtMatmulDescriptorInit(
    const cusparseLtHandle_t* handle, cusparseLtMatmulDescriptor_t* product,
    cusparseOperation_t op_a, cusparseOperation_t op_b, const cusparseLtMatDescriptor_t* a,
    const cusparseLtMatDescriptor_t* b, const cusparseLtMatDescriptor_t* c,
    const cusparseLtMatDescriptor_t* d, cusparseComputeType compute) {
  Call call("cusparseLtMatmulDescriptorInit");
  if (const int status = call.failure()) return Status(status);
  Object* const used = call.Use("of", handle, "handle");
  Object* const made = call.Make(product, "product");
  call.Note("op_a", std::int64_t{op_a});
  call.Note("op_b", std::int64_t{op_b});
  Object* const matrices[] = {call.Use("a", a, "matrix"), call.Use("b", b, "matrix"),
                              call.Use("c", c, "matrix"), call.Use("d", d, "matrix")};
  call.Note("compute", std::int64_t{compute});
  made->values["vector"] = 0;
  made->parts["handle"] = used;
  const char* const names[] = {"a", "b", "c", "d"};
  for (int i = 0; i < 4; ++i) {
    if (matrices[i] == nullptr) return CUSPARSE_STATUS_INVALID_VALUE;
    made->parts[names[i]] = matrices[i];
    matrices[i]->used = true;
    if (matrices[i]->parts["handle"] != used) call.Complain("a matrix is another handle's");
  }
  if (matrices[0]->values.count("structured") == 0) call.Complain("A is not structured");
  CheckProduct(&call, *matrices[0], op_a == CUSPARSE_OPERATION_TRANSPOSE, *matrices[1],
               op_b == CUSPARSE_OPERATION_TRANSPOSE, *matrices[3], CUSPARSE_ORDER_COL);
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseLtMatmulDescSetAttribute(const cusparseLtHandle_t* handle,
                                                  cusparseLtMatmulDescriptor_t* product,
                                                  cusparseLtMatmulDescAttribute_t attribute,
                                                  const void* value, std::size_t bytes) {
  Call call("cusparseLtMatmulDescSetAttribute");
  if (const int status = call.failure()) return Status(status);
  call.Use("with", handle, "handle");
  Object* const used = call.Use("product", product, "product");
  call.Note("attribute", std::int64_t{attribute});
  const std::int64_t found = Value(&call, value, bytes, sizeof(int));
  call.Note("value", found);
  if (used != nullptr) used->values["vector"] = found;
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseLtMatmulAlgSelectionInit(const cusparseLtHandle_t* handle,
                                                  cusparseLtMatmulAlgSelection_t* selection,
                                                  const cusparseLtMatmulDescriptor_t* product,
                                                  cusparseLtMatmulAlg_t algorithm) {
  Call call("cusparseLtMatmulAlgSelectionInit");
  if (const int status = call.failure()) return Status(status);
  Object* const used = call.Use("with", handle, "handle");
  Object* const of = call.Use("product", product, "product");
  Object* const made = call.Make(selection, "selection");
  call.Note("algorithm", std::int64_t{algorithm});
  if (used == nullptr || of == nullptr) return CUSPARSE_STATUS_INVALID_VALUE;
  made->parts = {{"handle", used}, {"product", of}};
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseLtMatmulAlgSelectionDestroy(
    const cusparseLtMatmulAlgSelection_t* selection) {
  Call call("cusparseLtMatmulAlgSelectionDestroy");
  call.Destroy(selection, "selection");
  return Status(call.failure());
}

cusparseStatus_t cusparseLtMatmulAlgSetAttribute(const cusparseLtHandle_t* handle,
                                                 cusparseLtMatmulAlgSelection_t* selection,
                                                 cusparseLtMatmulAlgAttribute_t attribute,
                                                 const void* value, std::size_t bytes) {
  Call call("cusparseLtMatmulAlgSetAttribute");
  if (const int status = call.failure()) return Status(status);
  call.Use("with", handle, "handle");
  call.Use("selection", selection, "selection");
  call.Note("attribute", std::int64_t{attribute});
  const std::int64_t found = Value(&call, value, bytes, sizeof(int));
  call.Note("value", found);
  const bool mode = attribute == CUSPARSELT_MATMUL_SPLIT_K_MODE;
  if (mode && found == Setting("refused_mode", -1)) return CUSPARSE_STATUS_NOT_SUPPORTED;
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseLtMatmulAlgGetAttribute(const cusparseLtHandle_t* handle,
                                                 const cusparseLtMatmulAlgSelection_t* selection,
                                                 cusparseLtMatmulAlgAttribute_t attribute,
                                                 void* value, std::size_t bytes) {
  Call call("cusparseLtMatmulAlgGetAttribute");
  if (const int status = call.failure()) return Status(status);
  call.Use("with", handle, "handle");
  call.Use("selection", selection, "selection");
  call.Note("attribute", std::int64_t{attribute});
  Value(&call, value, bytes, sizeof(int));
  const int algorithms = static_cast<int>(Setting("algorithms", 0));
  std::memcpy(value, &algorithms, sizeof(algorithms));
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseLtMatmulPlanInit(const cusparseLtHandle_t* handle,
                                          cusparseLtMatmulPlan_t* plan,
                                          const cusparseLtMatmulDescriptor_t* product,
                                          const cusparseLtMatmulAlgSelection_t* selection) {
  Call call("cusparseLtMatmulPlanInit");
  if (const int status = call.failure()) return Status(status);
  Object* const used = call.Use("with", handle, "handle");
  Object* const of = call.Use("product", product, "product");
  Object* const chosen = call.Use("selection", selection, "selection");
  Object* const made = call.Make(plan, "plan");
  if (used == nullptr || of == nullptr || chosen == nullptr) return CUSPARSE_STATUS_INVALID_VALUE;
  made->parts = of->parts;  // the matrices
  made->parts["product"] = of;
  made->parts["selection"] = chosen;
  if (made->parts["handle"] != used) call.Complain("the product is another handle's");
  if (chosen->parts["product"] != of) call.Complain("the selection is another product's");
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseLtMatmulPlanDestroy(const cusparseLtMatmulPlan_t* plan) {
  Call call("cusparseLtMatmulPlanDestroy");
  call.Destroy(plan, "plan");
  return Status(call.failure());
}

cusparseStatus_t cusparseLtMatmulGetWorkspace(const cusparseLtHandle_t* handle,
                                              const cusparseLtMatmulPlan_t* plan,
                                              std::size_t* bytes) {
  Call call("cusparseLtMatmulGetWorkspace");
  if (const int status = call.failure()) return Status(status);
  UsePlan(&call, handle, plan);
  *bytes = static_cast<std::size_t>(Setting("workspace", 0));
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseLtMatmul(const cusparseLtHandle_t* handle,
                                  const cusparseLtMatmulPlan_t* plan, const void* alpha,
                                  const void* a, const void* b, const void* beta, const void* c,
                                  void* d, void* workspace, cudaStream_t* streams,
                                  std::int32_t stream_count) {
  Call call("cusparseLtMatmul");
  if (const int status = call.failure()) return Status(status);
  const Object* const used = UsePlan(&call, handle, plan);
  if (used == nullptr) return CUSPARSE_STATUS_INVALID_VALUE;
  if (used->parts.at("product")->values.at("vector") != 0) {
    call.Note("alphas", alpha);
  } else {
    call.Word("alpha", std::to_string(*static_cast<const float*>(alpha)));
  }
  call.Word("beta", std::to_string(*static_cast<const float*>(beta)));
  call.Note("a", a);
  call.Note("b", b);
  call.Note("c", c);
  call.Note("d", d);
  call.Note("workspace", workspace);
  call.Note("streams", std::int64_t{stream_count});
  call.Note("stream", static_cast<const void*>(streams[0]));
  call.NoteThread();
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseLtSpMMACompressedSize(const cusparseLtHandle_t* handle,
                                               const cusparseLtMatmulPlan_t* plan,
                                               std::size_t* bytes, std::size_t* buffer_bytes) {
  Call call("cusparseLtSpMMACompressedSize");
  if (const int status = call.failure()) return Status(status);
  UsePlan(&call, handle, plan);
  *bytes = static_cast<std::size_t>(Setting("compressed", 0));
  *buffer_bytes = static_cast<std::size_t>(Setting("buffer", 0));
  return CUSPARSE_STATUS_SUCCESS;
}

cusparseStatus_t cusparseLtSpMMACompress(const cusparseLtHandle_t* handle,
                                         const cusparseLtMatmulPlan_t* plan, const void* dense,
                                         void* compressed, void* buffer, cudaStream_t stream) {
  Call call("cusparseLtSpMMACompress");
  if (const int status = call.failure()) return Status(status);
  UsePlan(&call, handle, plan);
  call.Note("dense", dense);
  call.Note("compressed", compressed);
  call.Note("buffer", buffer);
  call.Note("stream", static_cast<const void*>(stream));
  return CUSPARSE_STATUS_SUCCESS;
}

}  // extern "C"
