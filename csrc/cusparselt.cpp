// cuSPARSELt's 2:4 GEMM as a Python extension: out [M, N] = activations [M, K] @ weight [N, K].T.
//
// The library wants the structured matrix on the left, so it computes
//
//     out.T [N, M] = weight [N, K] @ activations.T [K, M]
//
// and the column-major out.T is the row-major out [M, N].
//
// This is host code, which takes addresses, sizes and a stream as integers and links against
// neither torch nor CUDA: the library is opened at run time, so that one build serves all its
// versions, and a machine without it can import the extension.  The functions are declared here
// as in cusparseLt.h of 0.8 to 0.10, which wheels of torch do not always bring.

#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>

namespace py = pybind11;

namespace slidesparse {
namespace {

struct alignas(16) Opaque {  // of a handle, a descriptor, a selection or a plan
  std::uint8_t data[512];
};

constexpr std::uint32_t kAlignment = 16;                      // of every pointer, in bytes
constexpr int kColumnMajor = 1, kRowMajor = 2;                // cusparseOrder_t
constexpr int kPlain = 0, kTransposed = 1;                    // cusparseOperation_t
constexpr int kHalfOfTheElements = 0, kDefaultAlgorithm = 0;  // of their only values
constexpr int kAlgorithmId = 0, kLargestId = 1;               // cusparseLtMatmulAlgAttribute_t

using Address = std::uintptr_t;

// The library's functions: result, name, arguments.
#define SLIDESPARSE_FUNCTIONS(X)                                                                  \
  X(int, cusparseLtInit, (Opaque * handle))                                                       \
  X(int, cusparseLtDestroy, (const Opaque* handle))                                               \
  X(int, cusparseLtGetProperty, (int which, int* value))                                          \
  X(const char*, cusparseLtGetErrorName, (int status))                                            \
  X(const char*, cusparseLtGetErrorString, (int status))                                          \
  X(int, cusparseLtDenseDescriptorInit,                                                           \
    (const Opaque* handle, Opaque* matrix, std::int64_t rows, std::int64_t cols,                  \
     std::int64_t leading, std::uint32_t alignment, int type, int order))                         \
  X(int, cusparseLtStructuredDescriptorInit,                                                      \
    (const Opaque* handle, Opaque* matrix, std::int64_t rows, std::int64_t cols,                  \
     std::int64_t leading, std::uint32_t alignment, int type, int order, int sparsity))           \
  X(int, cusparseLtMatDescriptorDestroy, (const Opaque* matrix))                                  \
  X(int, cusparseLtMatmulDescriptorInit,                                                          \
    (const Opaque* handle, Opaque* product, int of_a, int of_b, const Opaque* a, const Opaque* b, \
     const Opaque* c, const Opaque* d, int compute_type))                                         \
  X(int, cusparseLtMatmulAlgSelectionInit,                                                        \
    (const Opaque* handle, Opaque* selection, const Opaque* product, int algorithm))              \
  X(int, cusparseLtMatmulAlgSelectionDestroy, (const Opaque* selection))                          \
  X(int, cusparseLtMatmulAlgSetAttribute,                                                         \
    (const Opaque* handle, Opaque* selection, int attribute, const void* value,                   \
     std::size_t bytes))                                                                          \
  X(int, cusparseLtMatmulAlgGetAttribute,                                                         \
    (const Opaque* handle, const Opaque* selection, int attribute, void* value,                   \
     std::size_t bytes))                                                                          \
  X(int, cusparseLtMatmulPlanInit,                                                                \
    (const Opaque* handle, Opaque* plan, const Opaque* product, const Opaque* selection))         \
  X(int, cusparseLtMatmulPlanDestroy, (const Opaque* plan))                                       \
  X(int, cusparseLtMatmulGetWorkspace,                                                            \
    (const Opaque* handle, const Opaque* plan, std::size_t* bytes))                               \
  X(int, cusparseLtMatmul,                                                                        \
    (const Opaque* handle, const Opaque* plan, const void* alpha, const void* a, const void* b,   \
     const void* beta, const void* c, void* d, void* workspace, void** streams,                   \
     std::int32_t count))                                                                         \
  X(int, cusparseLtSpMMACompressedSize,                                                           \
    (const Opaque* handle, const Opaque* plan, std::size_t* bytes, std::size_t* buffer))          \
  X(int, cusparseLtSpMMACompress,                                                                 \
    (const Opaque* handle, const Opaque* plan, const void* dense, void* compressed, void* buffer, \
     void* stream))

struct Api {
#define SLIDESPARSE_DECLARE(result, name, arguments) result(*name) arguments;
  SLIDESPARSE_FUNCTIONS(SLIDESPARSE_DECLARE)
#undef SLIDESPARSE_DECLARE
};

// Null until `Load`.  What it points to lives until the process ends, because plans call it.
const Api* api = nullptr;

void Load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    throw std::runtime_error("cannot load " + path + ": " + (why ? why : "unknown error"));
  }
  auto found = std::make_unique<Api>();
  const auto find = [&](const char* name, auto* function) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) {
      throw std::runtime_error(path + " has no function " + name + ": it is too old");
    }
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(symbol);
  };
#define SLIDESPARSE_FIND(result, name, arguments) find(#name, &found->name);
  SLIDESPARSE_FUNCTIONS(SLIDESPARSE_FIND)
#undef SLIDESPARSE_FIND
  api = found.release();
}

void Check(int status, const char* call, const std::string& what) {
  if (status == 0) return;
  throw std::runtime_error(std::string(call) + " failed: " + api->cusparseLtGetErrorName(status) +
                           " (" + api->cusparseLtGetErrorString(status) + "); " + what);
}
#define SLIDESPARSE_CALL(what, name, ...) Check(api->name(__VA_ARGS__), #name, what)

void RequireLoaded() {
  if (api == nullptr) throw std::runtime_error("cuSPARSELt is not loaded: call load first");
}

std::tuple<int, int, int> Version() {
  RequireLoaded();
  int part[3] = {0, 0, 0};
  for (int i = 0; i < 3; ++i) {
    SLIDESPARSE_CALL("asking for the version", cusparseLtGetProperty, i, &part[i]);
  }
  return {part[0], part[1], part[2]};
}

// A handle of the device that is current at construction, for one thread.
class Handle {
 public:
  Handle() {
    RequireLoaded();
    SLIDESPARSE_CALL("making a handle", cusparseLtInit, &handle_);
  }
  ~Handle() { api->cusparseLtDestroy(&handle_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const Opaque* get() const { return &handle_; }

 private:
  Opaque handle_{};
};

// One of the library's objects, destroyed with this one.
class Owned {
 public:
  Opaque* get() { return &object_; }
  // To be called once the object is made.
  void DestroyLater(int (*destroy)(const Opaque*)) { destroy_ = destroy; }

  Owned() = default;
  ~Owned() {
    if (destroy_ != nullptr) destroy_(&object_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

 private:
  Opaque object_{};
  int (*destroy_)(const Opaque*) = nullptr;
};

template <typename Type = void>
Type* Pointer(Address address) {
  return reinterpret_cast<Type*>(address);
}

// A GEMM with its types and its algorithm (-1: of the library's choice), ready to run.
class Plan {
 public:
  Plan(std::shared_ptr<Handle> handle, std::int64_t n, std::int64_t k, std::int64_t m,
       int operand_type, int out_type, int compute_type, int algorithm, std::string what)
      : handle_(std::move(handle)), what_(std::move(what)) {
    Dense(&activations_, m, k, operand_type, kRowMajor);
    Dense(&out_, n, m, out_type, kColumnMajor);
    SLIDESPARSE_CALL(what_, cusparseLtStructuredDescriptorInit, handle_->get(), weight_.get(), n, k,
                     k, kAlignment, operand_type, kRowMajor, kHalfOfTheElements);
    SLIDESPARSE_CALL(what_, cusparseLtMatmulDescriptorInit, handle_->get(), &product_, kPlain,
                     kTransposed, weight_.get(), activations_.get(), out_.get(), out_.get(),
                     compute_type);
    // Not before: 0.8.0 crashes on destroying a weight that no product uses.
    weight_.DestroyLater(api->cusparseLtMatDescriptorDestroy);
    SLIDESPARSE_CALL(what_, cusparseLtMatmulAlgSelectionInit, handle_->get(), selection_.get(),
                     &product_, kDefaultAlgorithm);
    selection_.DestroyLater(api->cusparseLtMatmulAlgSelectionDestroy);
    SLIDESPARSE_CALL(what_, cusparseLtMatmulAlgGetAttribute, handle_->get(), selection_.get(),
                     kLargestId, &algorithms_, sizeof(algorithms_));
    if (algorithm >= 0) {
      SLIDESPARSE_CALL(what_, cusparseLtMatmulAlgSetAttribute, handle_->get(), selection_.get(),
                       kAlgorithmId, &algorithm, sizeof(algorithm));
    }
    SLIDESPARSE_CALL(what_, cusparseLtMatmulPlanInit, handle_->get(), plan_.get(), &product_,
                     selection_.get());
    plan_.DestroyLater(api->cusparseLtMatmulPlanDestroy);
    SLIDESPARSE_CALL(what_, cusparseLtMatmulGetWorkspace, handle_->get(), plan_.get(), &workspace_);
  }

  std::size_t workspace() const { return workspace_; }
  int algorithms() const { return algorithms_; }

  // Returns the bytes of a compressed weight, and of the temporary buffer for `Compress`.
  std::tuple<std::size_t, std::size_t> CompressedSize() {
    std::size_t bytes = 0, buffer = 0;
    SLIDESPARSE_CALL(what_, cusparseLtSpMMACompressedSize, handle_->get(), plan_.get(), &bytes,
                     &buffer);
    return {bytes, buffer};
  }

  void Compress(Address dense, Address compressed, Address buffer, Address stream) {
    SLIDESPARSE_CALL(what_, cusparseLtSpMMACompress, handle_->get(), plan_.get(), Pointer(dense),
                     Pointer(compressed), Pointer(buffer), Pointer(stream));
  }

  void Run(Address activations, Address weight, Address out, Address workspace, Address stream) {
    const float one = 1.0f, zero = 0.0f;
    void* on_stream = Pointer(stream);
    SLIDESPARSE_CALL(what_, cusparseLtMatmul, handle_->get(), plan_.get(), &one, Pointer(weight),
                     Pointer(activations), &zero, Pointer(out), Pointer(out), Pointer(workspace),
                     &on_stream, 1);
  }

 private:
  void Dense(Owned* matrix, std::int64_t rows, std::int64_t cols, int type, int order) {
    SLIDESPARSE_CALL(what_, cusparseLtDenseDescriptorInit, handle_->get(), matrix->get(), rows,
                     cols, order == kColumnMajor ? rows : cols, kAlignment, type, order);
    matrix->DestroyLater(api->cusparseLtMatDescriptorDestroy);
  }

  std::shared_ptr<Handle> handle_;  // destroyed last
  std::string what_;
  Owned activations_, out_, weight_;
  Opaque product_{};  // has no function that destroys it
  Owned selection_, plan_;
  int algorithms_ = 0;
  std::size_t workspace_ = 0;
};

}  // namespace
}  // namespace slidesparse

PYBIND11_MODULE(_cusparselt, module) {
  using namespace slidesparse;
  module.doc() = "cuSPARSELt's 2:4 GEMM on addresses; every error is a RuntimeError.";
  module.def("load", &Load, py::arg("path"), "Open the library.");
  module.def("version", &Version, "Return (major, minor, patch level) of the library.");
  py::class_<Handle, std::shared_ptr<Handle>>(
      module, "Handle", "A handle of the library on the current device, for one thread.")
      .def(py::init<>());
  py::class_<Plan>(module, "Plan", "A GEMM with its types and its algorithm.")
      .def(py::init<std::shared_ptr<Handle>, std::int64_t, std::int64_t, std::int64_t, int, int,
                    int, int, std::string>(),
           py::arg("handle").none(false), py::arg("n"), py::arg("k"), py::arg("m"),
           py::arg("operand_type"), py::arg("out_type"), py::arg("compute_type"),
           py::arg("algorithm"), py::arg("what"),
           "Plan out [m, n]; types are of cudaDataType and cusparseComputeType, algorithm -1 is "
           "the library's choice, and errors end with `what`.")
      .def_property_readonly("workspace", &Plan::workspace, "Bytes of workspace that `run` needs.")
      .def_property_readonly("algorithms", &Plan::algorithms,
                             "The number of algorithms; they count from 0.")
      .def("compressed_size", &Plan::CompressedSize,
           "Return the bytes of a compressed weight, and of the buffer for `compress`.")
      .def("compress", &Plan::Compress, py::arg("dense"), py::arg("compressed"), py::arg("buffer"),
           py::arg("stream"), "Compress a 2:4 weight [n, k].",
           py::call_guard<py::gil_scoped_release>())
      .def("run", &Plan::Run, py::arg("activations"), py::arg("weight"), py::arg("out"),
           py::arg("workspace"), py::arg("stream"), "Launch on a stream.",
           py::call_guard<py::gil_scoped_release>());
}
