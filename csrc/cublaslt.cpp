// cuBLASLt: out [M, N] = activations [M, K] @ weight [N, K].T, dense.
//
// The library is column-major, so it computes out.T [N, M] = weight [N, K] @ activations.T [K, M].
// On Hopper, from cuBLAS 12.9 on, the epilogue can scale FP8 products by a vector for each operand,
// weight scales [N] and token scales [M], and then add a bias [N].

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "library.h"

namespace py = pybind11;

namespace slidesparse {
namespace {

// The oldest supported headers lack these constants, whose values are part of the library's ABI.
const auto kScaleModeWeight = static_cast<cublasLtMatmulDescAttributes_t>(31);
const auto kScaleModeActivations = static_cast<cublasLtMatmulDescAttributes_t>(32);
constexpr std::int32_t kOuterVector = 3;

struct Api {
  SharedLibrary library;
#define SLIDESPARSE_FUNCTIONS(X)          \
  X(cublasLtCreate)                       \
  X(cublasLtDestroy)                      \
  X(cublasLtGetVersion)                   \
  X(cublasLtGetStatusName)                \
  X(cublasLtGetStatusString)              \
  X(cublasLtMatrixLayoutCreate)           \
  X(cublasLtMatrixLayoutDestroy)          \
  X(cublasLtMatrixLayoutSetAttribute)     \
  X(cublasLtMatmulDescCreate)             \
  X(cublasLtMatmulDescDestroy)            \
  X(cublasLtMatmulDescSetAttribute)       \
  X(cublasLtMatmulPreferenceCreate)       \
  X(cublasLtMatmulPreferenceDestroy)      \
  X(cublasLtMatmulPreferenceSetAttribute) \
  X(cublasLtMatmulAlgoGetHeuristic)       \
  X(cublasLtMatmulAlgoCheck)              \
  X(cublasLtMatmul)
#define SLIDESPARSE_DECLARE(name) decltype(&::name) name = nullptr;
  SLIDESPARSE_FUNCTIONS(SLIDESPARSE_DECLARE)
#undef SLIDESPARSE_DECLARE
};

Api api;

void Load(const std::string& path) {
  LoadOnce(&api, "cuBLASLt", path, [](Api* found) {
#define SLIDESPARSE_FIND(name) found->library.Find(#name, &found->name);
    SLIDESPARSE_FUNCTIONS(SLIDESPARSE_FIND)
#undef SLIDESPARSE_FIND
  });
}

void Check(cublasStatus_t status, const char* call, const std::string& what) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    Fail(call, api.cublasLtGetStatusName(status), api.cublasLtGetStatusString(status), what);
  }
}
#define SLIDESPARSE_CALL(what, name, ...) Check(api.name(__VA_ARGS__), #name, what)

std::size_t Version() {
  if (!api.library.loaded()) throw std::runtime_error("cuBLASLt is not loaded");
  return api.cublasLtGetVersion();
}

// A library handle for the device that is current at construction.  It is not thread-safe.
class Handle {
 public:
  Handle() {
    if (!api.library.loaded()) throw std::runtime_error("cuBLASLt is not loaded");
    SLIDESPARSE_CALL("making a handle", cublasLtCreate, &handle_);
  }
  ~Handle() { api.cublasLtDestroy(handle_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  cublasLtHandle_t get() const { return handle_; }

 private:
  cublasLtHandle_t handle_ = nullptr;
};

// A matrix: column-major with `rows` contiguous, or row-major with `cols` contiguous.
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t cols, cudaDataType type, bool column_major,
         const std::string& what) {
    SLIDESPARSE_CALL(what, cublasLtMatrixLayoutCreate, &matrix_, type, rows, cols,
                     column_major ? rows : cols);
    if (column_major) return;
    const cublasLtOrder_t order = CUBLASLT_ORDER_ROW;
    const auto status = api.cublasLtMatrixLayoutSetAttribute(matrix_, CUBLASLT_MATRIX_LAYOUT_ORDER,
                                                             &order, sizeof(order));
    if (status != CUBLAS_STATUS_SUCCESS) api.cublasLtMatrixLayoutDestroy(matrix_);
    Check(status, "cublasLtMatrixLayoutSetAttribute", what);
  }
  ~Matrix() { api.cublasLtMatrixLayoutDestroy(matrix_); }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  cublasLtMatrixLayout_t get() const { return matrix_; }

 private:
  cublasLtMatrixLayout_t matrix_ = nullptr;
};

// The epilogue besides rounding to the output type.
struct Epilogue {
  bool scale_vectors = false;  // weight scales [n] and token scales [m], float32
  int bias_type = -1;          // cudaDataType of a bias [n]; -1: no bias
  bool fast_accumulation = false;
};

// A GEMM with its types, epilogue and, after `Choose`, its algorithm.
class Plan {
 public:
  Plan(std::shared_ptr<Handle> handle, std::int64_t n, std::int64_t k, std::int64_t m,
       int operand_type, int output_type, int compute_type, int scale_type, Epilogue epilogue,
       Layout layout, std::string what)
      : handle_(std::move(handle)),
        what_(std::move(what)),
        epilogue_(epilogue),
        integer_scale_(scale_type == CUDA_R_32I) {
    const auto operand = static_cast<cudaDataType>(operand_type);
    weight_ = layout.weight_k ? std::make_unique<Matrix>(k, n, operand, true, what_)
                              : std::make_unique<Matrix>(n, k, operand, true, what_);
    activations_ = layout.activations_k ? std::make_unique<Matrix>(k, m, operand, true, what_)
                                        : std::make_unique<Matrix>(m, k, operand, true, what_);
    out_ = std::make_unique<Matrix>(n, m, static_cast<cudaDataType>(output_type), layout.output_n,
                                    what_);
    SLIDESPARSE_CALL(what_, cublasLtMatmulDescCreate, &matmul_,
                     static_cast<cublasComputeType_t>(compute_type),
                     static_cast<cudaDataType>(scale_type));
    try {
      Set(CUBLASLT_MATMUL_DESC_TRANSA, layout.weight_k ? CUBLAS_OP_T : CUBLAS_OP_N);
      Set(CUBLASLT_MATMUL_DESC_TRANSB, layout.activations_k ? CUBLAS_OP_N : CUBLAS_OP_T);
      if (epilogue_.fast_accumulation) Set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, std::int8_t{1});
      if (epilogue_.scale_vectors) {
        Set(kScaleModeWeight, kOuterVector);
        Set(kScaleModeActivations, kOuterVector);
        const void* anything = this;  // heuristics only test whether the pointer is null
        Set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, anything);
        Set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, anything);
      }
      if (epilogue_.bias_type >= 0) {
        Set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        Set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<std::int32_t>(epilogue_.bias_type));
        const void* anything = this;
        Set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, anything);
      }
    } catch (...) {
      api.cublasLtMatmulDescDestroy(matmul_);
      throw;
    }
  }
  ~Plan() { api.cublasLtMatmulDescDestroy(matmul_); }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Returns at most `most` algorithms that need no more than `workspace_limit` bytes, best first.
  std::vector<py::bytes> Heuristics(int most, std::size_t workspace_limit) const {
    std::vector<cublasLtMatmulHeuristicResult_t> results(most);
    cublasLtMatmulPreference_t preference = nullptr;
    SLIDESPARSE_CALL(what_, cublasLtMatmulPreferenceCreate, &preference);
    int found = 0;
    const char* call = "cublasLtMatmulPreferenceSetAttribute";
    auto status = api.cublasLtMatmulPreferenceSetAttribute(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_limit,
        sizeof(workspace_limit));
    if (status == CUBLAS_STATUS_SUCCESS) {
      call = "cublasLtMatmulAlgoGetHeuristic";
      status = api.cublasLtMatmulAlgoGetHeuristic(handle_->get(), matmul_, weight_->get(),
                                                  activations_->get(), out_->get(), out_->get(),
                                                  preference, most, results.data(), &found);
    }
    api.cublasLtMatmulPreferenceDestroy(preference);
    Check(status, call, what_);
    std::vector<py::bytes> algorithms;
    for (int i = 0; i < found; ++i) {
      if (results[i].state != CUBLAS_STATUS_SUCCESS) continue;
      algorithms.emplace_back(reinterpret_cast<const char*>(&results[i].algo),
                              sizeof(results[i].algo));
    }
    return algorithms;
  }

  // Chooses an algorithm that `Heuristics` returned for the same problem, of this plan or another.
  void Choose(const std::string& algorithm) {
    if (algorithm.size() != sizeof(algorithm_)) {
      std::ostringstream message;
      message << "a cuBLASLt algorithm has " << sizeof(algorithm_) << " bytes, found "
              << algorithm.size() << "; " << what_;
      throw std::runtime_error(message.str());
    }
    cublasLtMatmulAlgo_t asked;
    std::memcpy(&asked, algorithm.data(), sizeof(asked));
    cublasLtMatmulHeuristicResult_t result;
    SLIDESPARSE_CALL(what_, cublasLtMatmulAlgoCheck, handle_->get(), matmul_, weight_->get(),
                     activations_->get(), out_->get(), out_->get(), &asked, &result);
    algorithm_ = asked;
    workspace_ = result.workspaceSize;
    chosen_ = true;
  }

  std::size_t workspace() const { return workspace_; }

  // Launches on `stream`.  Pass 0 for what the epilogue does not use.
  void Run(std::uintptr_t activations, std::uintptr_t weight, std::uintptr_t out,
           std::uintptr_t workspace, std::uintptr_t stream, std::uintptr_t weight_scales,
           std::uintptr_t token_scales, std::uintptr_t bias) {
    if (!chosen_) throw std::runtime_error("this plan has no algorithm yet; " + what_);
    if (epilogue_.scale_vectors != (weight_scales != 0) ||
        epilogue_.scale_vectors != (token_scales != 0) ||
        (epilogue_.bias_type >= 0) != (bias != 0)) {
      throw std::runtime_error("the scales or the bias given are not those of the plan; " + what_);
    }
    if (epilogue_.scale_vectors) {
      Set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(Pointer(weight_scales)));
      Set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(Pointer(token_scales)));
    }
    if (bias != 0) Set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(Pointer(bias)));
    const float one = 1.0f, zero = 0.0f;
    const std::int32_t integer_one = 1, integer_zero = 0;
    const void* alpha = integer_scale_ ? static_cast<const void*>(&integer_one) : &one;
    const void* beta = integer_scale_ ? static_cast<const void*>(&integer_zero) : &zero;
    SLIDESPARSE_CALL(what_, cublasLtMatmul, handle_->get(), matmul_, alpha, Pointer(weight),
                     weight_->get(), Pointer(activations), activations_->get(), beta, Pointer(out),
                     out_->get(), Pointer(out), out_->get(), &algorithm_, Pointer(workspace),
                     workspace_, static_cast<cudaStream_t>(Pointer(stream)));
  }

 private:
  template <typename Value>
  void Set(cublasLtMatmulDescAttributes_t attribute, Value value) {
    SLIDESPARSE_CALL(what_, cublasLtMatmulDescSetAttribute, matmul_, attribute, &value,
                     sizeof(value));
  }

  std::shared_ptr<Handle> handle_;
  std::string what_;
  Epilogue epilogue_;
  bool integer_scale_;
  std::unique_ptr<Matrix> weight_, activations_, out_;
  cublasLtMatmulDesc_t matmul_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_{};
  bool chosen_ = false;
  std::size_t workspace_ = 0;
};

}  // namespace
}  // namespace slidesparse

PYBIND11_MODULE(SLIDESPARSE_MODULE, module) {
  using namespace slidesparse;
  module.doc() = "cuBLASLt on raw pointers";
  DefineCommon(module, CUBLAS_COMPUTE_32I, CUBLAS_COMPUTE_32F);
  module.def("load", &Load, py::arg("path"), "Open the library; RuntimeError when it cannot be.");
  module.def("version", &Version, "Version of the loaded library; 130100 is 13.1.0.");
  py::class_<Handle, std::shared_ptr<Handle>>(module, "Handle",
                                              "A handle of the current device, for one thread.")
      .def(py::init<>());
  py::class_<Epilogue>(module, "Epilogue", py::module_local())
      .def(py::init<bool, int, bool>(), py::arg("scale_vectors"), py::arg("bias_type"),
           py::arg("fast_accumulation"));
  py::class_<Plan>(module, "Plan")
      .def(py::init<std::shared_ptr<Handle>, std::int64_t, std::int64_t, std::int64_t, int, int,
                    int, int, Epilogue, Layout, std::string>(),
           py::arg("handle").none(false), py::arg("n"), py::arg("k"), py::arg("m"),
           py::arg("operand_type"), py::arg("output_type"), py::arg("compute_type"),
           py::arg("scale_type"), py::arg("epilogue"), py::arg("layout"), py::arg("what"))
      .def("heuristics", &Plan::Heuristics, py::arg("most"), py::arg("workspace_limit"))
      .def("choose", &Plan::Choose, py::arg("algorithm"))
      .def_property_readonly("workspace", &Plan::workspace)
      .def("run", &Plan::Run, py::arg("activations"), py::arg("weight"), py::arg("out"),
           py::arg("workspace"), py::arg("stream"), py::arg("weight_scales"),
           py::arg("token_scales"), py::arg("bias"), py::call_guard<py::gil_scoped_release>());
}
