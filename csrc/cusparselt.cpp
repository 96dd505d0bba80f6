// cuSPARSELt: out [M, N] = activations [M, K] @ weight [N, K].T with a 2:4 weight.
//
// The library wants the structured matrix on the left, so it computes
//
//     out.T [N, M] = weight [N, K] @ activations.T [K, M]
//
// and the column-major out.T is the row-major out [M, N].

#include <cuda_runtime_api.h>
#include <cusparseLt.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>

#include "library.h"

namespace py = pybind11;

namespace slidesparse {
namespace {

constexpr std::uint32_t kAlignment = 16;  // of every pointer, in bytes

struct Api {
  SharedLibrary library;
#define SLIDESPARSE_FUNCTIONS(X)         \
  X(cusparseLtInit)                      \
  X(cusparseLtDestroy)                   \
  X(cusparseLtGetProperty)               \
  X(cusparseLtGetErrorName)              \
  X(cusparseLtGetErrorString)            \
  X(cusparseLtDenseDescriptorInit)       \
  X(cusparseLtStructuredDescriptorInit)  \
  X(cusparseLtMatDescriptorDestroy)      \
  X(cusparseLtMatmulDescriptorInit)      \
  X(cusparseLtMatmulAlgSelectionInit)    \
  X(cusparseLtMatmulAlgSelectionDestroy) \
  X(cusparseLtMatmulAlgSetAttribute)     \
  X(cusparseLtMatmulAlgGetAttribute)     \
  X(cusparseLtMatmulPlanInit)            \
  X(cusparseLtMatmulPlanDestroy)         \
  X(cusparseLtMatmulGetWorkspace)        \
  X(cusparseLtMatmul)                    \
  X(cusparseLtSpMMACompressedSize)       \
  X(cusparseLtSpMMACompress)
#define SLIDESPARSE_DECLARE(name) decltype(&::name) name = nullptr;
  SLIDESPARSE_FUNCTIONS(SLIDESPARSE_DECLARE)
#undef SLIDESPARSE_DECLARE
};

Api api;

void Load(const std::string& path) {
  LoadOnce(&api, "cuSPARSELt", path, [](Api* found) {
#define SLIDESPARSE_FIND(name) found->library.Find(#name, &found->name);
    SLIDESPARSE_FUNCTIONS(SLIDESPARSE_FIND)
#undef SLIDESPARSE_FIND
  });
}

void Check(cusparseStatus_t status, const char* call, const std::string& what) {
  if (status != CUSPARSE_STATUS_SUCCESS) {
    Fail(call, api.cusparseLtGetErrorName(status), api.cusparseLtGetErrorString(status), what);
  }
}
#define SLIDESPARSE_CALL(what, name, ...) Check(api.name(__VA_ARGS__), #name, what)

std::tuple<int, int, int> Version() {
  if (!api.library.loaded()) throw std::runtime_error("cuSPARSELt is not loaded");
  int part[3] = {0, 0, 0};
  const libraryPropertyType types[3] = {MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL};
  for (int i = 0; i < 3; ++i) {
    SLIDESPARSE_CALL("asking for the version", cusparseLtGetProperty, types[i], &part[i]);
  }
  return {part[0], part[1], part[2]};
}

// A library handle for the device that is current at construction.  It is not thread-safe.
class Handle {
 public:
  Handle() {
    if (!api.library.loaded()) throw std::runtime_error("cuSPARSELt is not loaded");
    SLIDESPARSE_CALL("making a handle", cusparseLtInit, &handle_);
  }
  ~Handle() { api.cusparseLtDestroy(&handle_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const cusparseLtHandle_t* get() const { return &handle_; }

 private:
  cusparseLtHandle_t handle_{};
};

// A matrix descriptor: column-major with `rows` contiguous, or row-major with `cols` contiguous.
class Matrix {
 public:
  Matrix(const Handle& handle, std::int64_t rows, std::int64_t cols, cudaDataType type,
         cusparseOrder_t order, bool structured, const std::string& what) {
    const std::int64_t leading = order == CUSPARSE_ORDER_COL ? rows : cols;
    if (structured) {
      SLIDESPARSE_CALL(what, cusparseLtStructuredDescriptorInit, handle.get(), &matrix_, rows, cols,
                       leading, kAlignment, type, order, CUSPARSELT_SPARSITY_50_PERCENT);
    } else {
      SLIDESPARSE_CALL(what, cusparseLtDenseDescriptorInit, handle.get(), &matrix_, rows, cols,
                       leading, kAlignment, type, order);
    }
  }
  ~Matrix() { api.cusparseLtMatDescriptorDestroy(&matrix_); }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  const cusparseLtMatDescriptor_t* get() const { return &matrix_; }

 private:
  cusparseLtMatDescriptor_t matrix_{};
};

cusparseOperation_t Transposed(bool yes) {
  return yes ? CUSPARSE_OPERATION_TRANSPOSE : CUSPARSE_OPERATION_NON_TRANSPOSE;
}

struct Algorithm {
  int id = -1;  // -1: the library's heuristic
  int split_k = 1;
  int split_k_mode = 0;  // 0: not set
};

// A GEMM with its types, epilogue and algorithm, ready to run.
class Plan {
 public:
  Plan(std::shared_ptr<Handle> handle, std::int64_t n, std::int64_t k, std::int64_t m,
       int operand_type, int output_type, int compute_type, Algorithm algorithm, Layout layout,
       std::string what)
      : handle_(std::move(handle)), what_(std::move(what)) {
    const auto operand = static_cast<cudaDataType>(operand_type);
    activations_ =
        layout.activations_k
            ? std::make_unique<Matrix>(*handle_, m, k, operand, CUSPARSE_ORDER_ROW, false, what_)
            : std::make_unique<Matrix>(*handle_, k, m, operand, CUSPARSE_ORDER_ROW, false, what_);
    out_ = std::make_unique<Matrix>(*handle_, n, m, static_cast<cudaDataType>(output_type),
                                    layout.output_n ? CUSPARSE_ORDER_COL : CUSPARSE_ORDER_ROW,
                                    false, what_);
    weight_ =
        layout.weight_k
            ? std::make_unique<Matrix>(*handle_, n, k, operand, CUSPARSE_ORDER_ROW, true, what_)
            : std::make_unique<Matrix>(*handle_, k, n, operand, CUSPARSE_ORDER_ROW, true, what_);
    try {
      SLIDESPARSE_CALL(what_, cusparseLtMatmulDescriptorInit, handle_->get(), &matmul_,
                       Transposed(!layout.weight_k), Transposed(layout.activations_k),
                       weight_->get(), activations_->get(), out_->get(), out_->get(),
                       static_cast<cusparseComputeType>(compute_type));
    } catch (...) {
      weight_.release();  // leaked, because 0.8.0 crashes on destroying an unused one
      throw;
    }
    SLIDESPARSE_CALL(what_, cusparseLtMatmulAlgSelectionInit, handle_->get(), &selection_, &matmul_,
                     CUSPARSELT_MATMUL_ALG_DEFAULT);
    selection_made_ = true;
    try {
      SLIDESPARSE_CALL(what_, cusparseLtMatmulAlgGetAttribute, handle_->get(), &selection_,
                       CUSPARSELT_MATMUL_ALG_CONFIG_MAX_ID, &algorithms_, sizeof(algorithms_));
      if (algorithm.id >= 0) Set(CUSPARSELT_MATMUL_ALG_CONFIG_ID, algorithm.id);
      if (algorithm.split_k != 1) Set(CUSPARSELT_MATMUL_SPLIT_K, algorithm.split_k);
      if (algorithm.split_k_mode != 0) {
        Set(CUSPARSELT_MATMUL_SPLIT_K_MODE,
            static_cast<cusparseLtSplitKMode_t>(algorithm.split_k_mode));
      }
      SLIDESPARSE_CALL(what_, cusparseLtMatmulPlanInit, handle_->get(), &plan_, &matmul_,
                       &selection_);
      plan_made_ = true;
      SLIDESPARSE_CALL(what_, cusparseLtMatmulGetWorkspace, handle_->get(), &plan_, &workspace_);
    } catch (...) {
      Destroy();
      throw;
    }
  }
  ~Plan() { Destroy(); }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  std::size_t workspace() const { return workspace_; }
  int algorithms() const { return algorithms_; }  // ids are 0 to algorithms() - 1

  // Returns the bytes of the compressed weight, which every plan of its shape and type shares, and
  // of the temporary buffer for `Compress`.  The library can compute both without a plan, but 0.8.0
  // crashes on destroying the descriptor of a weight that no matmul descriptor has used.
  std::tuple<std::size_t, std::size_t> CompressedSize() const {
    std::size_t bytes = 0, buffer = 0;
    SLIDESPARSE_CALL(what_, cusparseLtSpMMACompressedSize, handle_->get(), &plan_, &bytes, &buffer);
    return {bytes, buffer};
  }

  void Compress(std::uintptr_t dense, std::uintptr_t compressed, std::uintptr_t buffer,
                std::uintptr_t stream) const {
    SLIDESPARSE_CALL(what_, cusparseLtSpMMACompress, handle_->get(), &plan_, Pointer(dense),
                     Pointer(compressed), Pointer(buffer),
                     static_cast<cudaStream_t>(Pointer(stream)));
  }

  // Launches on `stream`.  The arguments are those of cuBLASLt's plans, but scales and bias must be
  // 0, because the epilogue does not apply them.
  void Run(std::uintptr_t activations, std::uintptr_t weight, std::uintptr_t out,
           std::uintptr_t workspace, std::uintptr_t stream, std::uintptr_t weight_scales,
           std::uintptr_t token_scales, std::uintptr_t bias) const {
    const float one = 1.0f, zero = 0.0f;
    if (weight_scales != 0 || token_scales != 0 || bias != 0) {
      throw std::runtime_error("the scales or the bias given are not those of the plan; " + what_);
    }
    auto on_stream = static_cast<cudaStream_t>(Pointer(stream));
    SLIDESPARSE_CALL(what_, cusparseLtMatmul, handle_->get(), &plan_, &one, Pointer(weight),
                     Pointer(activations), &zero, Pointer(out), Pointer(out), Pointer(workspace),
                     &on_stream, 1);
  }

 private:
  template <typename Value>
  void Set(cusparseLtMatmulAlgAttribute_t attribute, Value value) {
    SLIDESPARSE_CALL(what_, cusparseLtMatmulAlgSetAttribute, handle_->get(), &selection_, attribute,
                     &value, sizeof(value));
  }

  void Destroy() {
    if (plan_made_) api.cusparseLtMatmulPlanDestroy(&plan_);
    if (selection_made_) api.cusparseLtMatmulAlgSelectionDestroy(&selection_);
    plan_made_ = selection_made_ = false;
  }

  std::shared_ptr<Handle> handle_;
  std::string what_;
  std::unique_ptr<Matrix> weight_, activations_, out_;
  cusparseLtMatmulDescriptor_t matmul_{};
  cusparseLtMatmulAlgSelection_t selection_{};
  cusparseLtMatmulPlan_t plan_{};
  bool selection_made_ = false, plan_made_ = false;
  int algorithms_ = 0;
  std::size_t workspace_ = 0;
};

}  // namespace
}  // namespace slidesparse

PYBIND11_MODULE(SLIDESPARSE_MODULE, module) {
  using namespace slidesparse;
  module.doc() = "cuSPARSELt on raw pointers";
  DefineCommon(module, CUSPARSE_COMPUTE_32I, CUSPARSE_COMPUTE_32F);
  module.def("load", &Load, py::arg("path"), "Open the library; RuntimeError when it cannot be.");
  module.def("version", &Version, "(major, minor, patch) of the library that is loaded.");
  py::class_<Handle, std::shared_ptr<Handle>>(module, "Handle",
                                              "A handle of the current device, for one thread.")
      .def(py::init<>());
  py::class_<Algorithm>(module, "Algorithm", py::module_local())
      .def(py::init<int, int, int>(), py::arg("id"), py::arg("split_k"), py::arg("split_k_mode"));
  py::class_<Plan>(module, "Plan")
      .def(py::init<std::shared_ptr<Handle>, std::int64_t, std::int64_t, std::int64_t, int, int,
                    int, Algorithm, Layout, std::string>(),
           py::arg("handle").none(false), py::arg("n"), py::arg("k"), py::arg("m"),
           py::arg("operand_type"), py::arg("output_type"), py::arg("compute_type"),
           py::arg("algorithm"), py::arg("layout"), py::arg("what"))
      .def_property_readonly("workspace", &Plan::workspace)
      .def_property_readonly("algorithms", &Plan::algorithms)
      .def("compressed_size", &Plan::CompressedSize)
      .def("compress", &Plan::Compress, py::arg("dense"), py::arg("compressed"), py::arg("buffer"),
           py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def("run", &Plan::Run, py::arg("activations"), py::arg("weight"), py::arg("out"),
           py::arg("workspace"), py::arg("stream"), py::arg("weight_scales"),
           py::arg("token_scales"), py::arg("bias"), py::call_guard<py::gil_scoped_release>());
}
