// What both extensions share: loading a CUDA library at run time, errors that name the problem, and
// Python definitions.
//
// The extensions are host code.  They take device pointers, sizes and a stream as integers, and
// link against neither torch nor CUDA: one build serves any torch, and a machine without the
// library can still import the extension.

#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace slidesparse {

// A shared library, opened once and never closed, because plans call it until the process ends.
class SharedLibrary {
 public:
  void Open(const std::string& path) {
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) {
      const char* why = dlerror();
      throw std::runtime_error("cannot load " + path + ": " +
                               (why != nullptr ? why : "unknown error"));
    }
    path_ = path;
  }

  // Looks up the function called `name`.  Throws when this version of the library has none.
  template <typename Function>
  void Find(const char* name, Function* function) const {
    void* symbol = dlsym(handle_, name);
    if (symbol == nullptr) {
      throw std::runtime_error(path_ + " has no function " + name + ": it is too old");
    }
    *function = reinterpret_cast<Function>(symbol);
  }

  bool loaded() const { return handle_ != nullptr; }
  const std::string& path() const { return path_; }

 private:
  void* handle_ = nullptr;
  std::string path_;
};

// Opens the library at `path` and looks up its functions, once.  `Api` has a member `library` and a
// member per function, which `find` fills.
template <typename Api, typename Find>
void LoadOnce(Api* api, const char* name, const std::string& path, Find find) {
  if (api->library.loaded()) {
    if (path != api->library.path()) {
      throw std::runtime_error(std::string(name) + " is already loaded from " +
                               api->library.path() + ", not from " + path);
    }
    return;
  }
  Api found;
  found.library.Open(path);
  find(&found);
  *api = found;
}

// Throws an error that names the call, the status and `what`, the problem.
[[noreturn]] inline void Fail(const char* call, const char* name, const char* description,
                              const std::string& what) {
  throw std::runtime_error(std::string(call) + " failed: " + name + " (" + description + "); " +
                           what);
}

// Which dimension of each matrix is contiguous: if true, K of the weight and of the activations and
// N of the output; if false, the other one.  Serving uses true for all.
struct Layout {
  bool weight_k = true;
  bool activations_k = true;
  bool output_n = true;
};

inline void* Pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// Defines Layout and the numbers of data types and compute types by the names that Python uses.
inline void DefineCommon(pybind11::module_& module, int compute_int32, int compute_fp32) {
  namespace py = pybind11;
  using py::literals::operator""_a;
  module.attr("TYPES") = py::dict("int8"_a = int{CUDA_R_8I}, "int32"_a = int{CUDA_R_32I},
                                  "fp8"_a = int{CUDA_R_8F_E4M3}, "fp16"_a = int{CUDA_R_16F},
                                  "bf16"_a = int{CUDA_R_16BF}, "fp32"_a = int{CUDA_R_32F});
  module.attr("COMPUTE") = py::dict("int8"_a = compute_int32, "fp8"_a = compute_fp32,
                                    "fp16"_a = compute_fp32, "bf16"_a = compute_fp32);
  py::class_<Layout>(module, "Layout", py::module_local())
      .def(py::init<bool, bool, bool>(), "weight_k"_a, "activations_k"_a, "output_n"_a);
}

}  // namespace slidesparse
