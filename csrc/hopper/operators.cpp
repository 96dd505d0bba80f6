// torch's operators for whole layers, torch.ops.slidesparse.{linear, rms_norm_linear,
// add_rms_norm_linear, silu_mul_linear}, without Python: a call looks its layer's plan up in the
// kernels' library, allocates the outputs and launches.  A call that has no plan, is for another
// backend or has unusual arguments falls back to the operator NAME_by_python, which also reports
// errors.
//
// A C++ compiler compiles this against the stable headers of torch 2.10 or later, of which it uses
// those that 2.10 has.  Operators are boxed by hand and tensors are handles, because TORCH_BOX and
// torch::stable::Tensor cost the host 0.4 us more a call and in torch 2.11 leak the text of each
// string.

#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 10) << 48))

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "interface.cuh"

// Tests compile it for another namespace and for CPUs.
#ifndef SLIDESPARSE_NAMESPACE
#define SLIDESPARSE_NAMESPACE slidesparse
#define SLIDESPARSE_KEY CUDA
#endif

namespace {

namespace stable = torch::stable::detail;

// Functions of the kernels' library, null until `slidesparse_operators_load`.
struct Kernels {
  decltype(&slidesparse_hopper_find) find;
  decltype(&slidesparse_hopper_device) device;
  decltype(&slidesparse_hopper_scratch_bytes) scratch_bytes;
  decltype(&slidesparse_hopper_linear) linear;
};
Kernels kernels = {};
std::atomic<bool> enabled{false};

// aoti_torch_get_current_cuda_stream of torch, null if torch was built without CUDA.
using GetStream = AOTITorchError (*)(std::int32_t device, void** stream);
const GetStream get_stream = [] {
  void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  return library ? reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"))
                 : nullptr;
}();

thread_local std::string failure;  // the message of the last exception in Python's operator

// ---- tensors ----

struct DeleteTensor {
  void operator()(AtenTensorHandle tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using Owned = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

// torch's numbers of dtypes and of the device type CUDA.
struct Numbers {
  std::int32_t bfloat16 = aoti_torch_dtype_bfloat16(), float16 = aoti_torch_dtype_float16();
  std::int32_t float32 = aoti_torch_dtype_float32(), uint8 = aoti_torch_dtype_uint8();
  std::int32_t int8 = aoti_torch_dtype_int8(), fp8 = aoti_torch_dtype_float8_e4m3fn();
  std::int32_t cuda = aoti_torch_device_type_cuda();
};
const Numbers numbers;

// Returns the SlidesparseType of a dtype.
std::int32_t TypeOf(std::int32_t number) {
  return number == numbers.bfloat16  ? SLIDESPARSE_BFLOAT16
         : number == numbers.float16 ? SLIDESPARSE_FLOAT16
         : number == numbers.float32 ? SLIDESPARSE_FLOAT32
                                     : SLIDESPARSE_NONE;
}

// The properties of a tensor that a call needs.
struct View {
  std::int64_t dim, *sizes, *strides;
  std::int32_t type, device, device_type;
  void* data;

  explicit View(AtenTensorHandle tensor) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &device));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device_type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &data));
  }

  bool IsOn(const View& other) const {
    return device == other.device && device_type == other.device_type;
  }
  // [rows, columns] with contiguous rows.
  bool IsMatrix() const { return dim == 2 && (sizes[1] < 2 || strides[1] == 1); }
  // [size] or [size, 1], contiguous.
  bool IsVector(std::int64_t size) const {
    return (dim == 1 || (dim == 2 && sizes[1] == 1)) && sizes[0] == size &&
           (size < 2 || strides[0] == 1);
  }
};

// Allocates an uninitialized tensor [rows, columns] on the device of `like`; `data` is its memory.
Owned Empty(std::int64_t rows, std::int64_t columns, std::int32_t type, const View& like,
            void** data) {
  const std::int64_t sizes[2] = {rows, columns}, strides[2] = {columns, 1};
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(2, sizes, strides, type, like.device_type, like.device, &made));
  Owned owned(made);
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(made, data));
  return owned;
}

// Finds torch's current stream on x's device.  False if this thread cannot launch kernels there,
// because another device is current.
bool FindStream(const View& x, void** stream) {
  *stream = nullptr;
  if (x.device_type != numbers.cuda) return true;
  if (get_stream == nullptr || kernels.device() != x.device) return false;
  TORCH_ERROR_CODE_CHECK(get_stream(x.device, stream));
  return true;
}

// ---- layers ----

// The arguments of an operator, borrowed from torch's stack; null if absent.
struct Arguments {
  AtenTensorHandle x, residual = nullptr, gain = nullptr;
  double eps = 0.0;
  AtenTensorHandle weight, scale_w, bias;
  std::int64_t length, phase, columns;
  std::int32_t dtype, out_dtype;  // torch's numbers
  StringHandle backend;
  const StableIValue* bias_word;  // where the bias is on the stack

  Arguments(std::int32_t prologue, const StableIValue* next) {
    using stable::to;
    x = to<AtenTensorHandle>(*next++);
    if (prologue == SLIDESPARSE_ADD_RMS_NORM) residual = to<AtenTensorHandle>(*next++);
    if (prologue == SLIDESPARSE_RMS_NORM || prologue == SLIDESPARSE_ADD_RMS_NORM) {
      gain = to<AtenTensorHandle>(*next++);
      eps = to<double>(*next++);
    }
    weight = to<AtenTensorHandle>(*next++);
    scale_w = to<AtenTensorHandle>(*next++);
    bias_word = next++;
    const auto* found = to<const StableIValue*>(*bias_word);  // an optional one is on the heap
    bias = found ? to<AtenTensorHandle>(*found) : nullptr;
    length = to<std::int64_t>(*next++);
    phase = to<std::int64_t>(*next++);
    dtype = to<std::int32_t>(*next++);
    columns = to<std::int64_t>(*next++);
    out_dtype = to<std::int32_t>(*next++);
    backend = to<StringHandle>(*next++);
  }

  // Deletes what the stack owns, as an operator must that consumes its arguments.
  void Delete() const {
    stable::to<std::optional<StableIValue>>(*bias_word);  // deletes what is on the heap
    for (AtenTensorHandle tensor : {x, residual, gain, weight, scale_w, bias}) {
      const Owned deleted(tensor);
    }
    TORCH_ERROR_CODE_CHECK(torch_delete_string(backend));
  }
};

struct Outputs {
  Owned y, total;
};

// Runs a layer if it has a plan and all arguments are valid; false otherwise.
bool Run(std::int32_t prologue, const Arguments& arguments, Outputs* outputs) {
  const View x(arguments.x), scale_w(arguments.scale_w);
  if (!x.IsMatrix() || x.sizes[0] < 1 || scale_w.dim < 1) return false;
  const bool silu = prologue == SLIDESPARSE_SILU_MUL, fp8 = arguments.dtype == numbers.fp8;
  const std::int64_t m = x.sizes[0], k = silu ? x.sizes[1] / 2 : x.sizes[1], n = scale_w.sizes[0];
  const std::int32_t type = TypeOf(x.type), out_type = TypeOf(arguments.out_dtype);
  if ((silu && x.sizes[1] % 2 != 0) || type == SLIDESPARSE_NONE ||
      (!fp8 && arguments.dtype != numbers.int8) ||
      (out_type != SLIDESPARSE_BFLOAT16 && out_type != SLIDESPARSE_FLOAT16) ||
      // one of them is negative or has more than 31 bits
      (n | k | arguments.length | arguments.phase | arguments.columns) >> 31 != 0 ||
      !scale_w.IsOn(x) || !scale_w.IsVector(n) || scale_w.type != numbers.float32) {
    return false;
  }
  const SlidesparseHopperPlan* plan = kernels.find(
      x.device, static_cast<std::int32_t>(n), static_cast<std::int32_t>(k),
      static_cast<std::int32_t>(arguments.length), static_cast<std::int32_t>(arguments.phase), fp8,
      static_cast<std::int32_t>(arguments.columns));
  if (plan == nullptr) return false;
  const View weight(arguments.weight);
  if (!weight.IsOn(x) || weight.dim != 1 || !weight.IsVector(weight.sizes[0])) return false;
  std::int32_t bias_type = SLIDESPARSE_NONE;
  const void *bias = nullptr, *gain = nullptr, *residual = nullptr;
  std::int64_t residual_stride = 0;
  if (arguments.bias) {
    const View found(arguments.bias);
    bias_type = TypeOf(found.type);
    if (bias_type == SLIDESPARSE_NONE || !found.IsOn(x) || !found.IsVector(n)) return false;
    bias = found.data;
  }
  if (arguments.gain) {
    const View found(arguments.gain);
    if (found.type != x.type || !found.IsOn(x) || !found.IsVector(k)) return false;
    gain = found.data;
  }
  if (arguments.residual) {
    const View found(arguments.residual);
    if (found.type != x.type || !found.IsOn(x) || !found.IsMatrix() || found.sizes[0] != m ||
        found.sizes[1] != k) {
      return false;
    }
    residual = found.data;
    residual_stride = found.strides[0];
  }
  void *stream, *y, *scratch, *total = nullptr;
  if (!FindStream(x, &stream)) return false;
  outputs->y = Empty(m, n, arguments.out_dtype, x, &y);
  if (residual) outputs->total = Empty(m, k, x.type, x, &total);
  const Owned held = Empty(1, kernels.scratch_bytes(plan, m), numbers.uint8, x, &scratch);
  return kernels.linear(plan, m, x.data, type, x.strides[0], prologue, arguments.eps, gain,
                        residual, residual_stride, total, weight.data, weight.sizes[0],
                        scale_w.data, bias, bias_type, y, out_type, scratch, stream) == nullptr;
}

// Runs a layer if these operators are enabled and the backend is this one; false otherwise.
bool TryRun(std::int32_t prologue, const Arguments& arguments, Outputs* outputs) {
  try {
    const char* backend;
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(arguments.backend, &backend));
    return enabled && std::strcmp(backend, "hopper") == 0 && Run(prologue, arguments, outputs);
  } catch (const std::runtime_error&) {  // torch's, as for memory: Python will raise it in full
    return false;
  }
}

const char* const kNames[] = {"linear", "rms_norm_linear", "add_rms_norm_linear",
                              "silu_mul_linear"};  // by prologue

template <std::int32_t kPrologue>
void Operator(StableIValue* stack, std::uint64_t, std::uint64_t) {
  static const std::string by_python =
      std::string(C10_STRINGIZE(SLIDESPARSE_NAMESPACE) "::") + kNames[kPrologue] + "_by_python";
  const Arguments arguments(kPrologue, stack);
  Outputs outputs;
  if (TryRun(kPrologue, arguments, &outputs)) {
    arguments.Delete();
    stack[0] = reinterpret_cast<StableIValue>(outputs.y.release());
    if (outputs.total) stack[1] = reinterpret_cast<StableIValue>(outputs.total.release());
    return;
  }
  outputs = {};  // frees memory that Python's operator may need
  failure.clear();
  if (torch_call_dispatcher(by_python.c_str(), "", stack, TORCH_ABI_VERSION) != TORCH_SUCCESS) {
    throw std::runtime_error(failure.empty() ? by_python + " failed" : failure);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(SLIDESPARSE_NAMESPACE, SLIDESPARSE_KEY, library) {
  library.impl(kNames[0], Operator<SLIDESPARSE_NO_PROLOGUE>);
  library.impl(kNames[1], Operator<SLIDESPARSE_RMS_NORM>);
  library.impl(kNames[2], Operator<SLIDESPARSE_ADD_RMS_NORM>);
  library.impl(kNames[3], Operator<SLIDESPARSE_SILU_MUL>);
}

extern "C" {

// Looks up the functions of the kernels' library at `path`, which Python has loaded, and enables
// the operators; until then every call falls back to Python.  Returns null, or an error message.
SLIDESPARSE_EXPORT const char* slidesparse_operators_load(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
  Kernels found = {};
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  if (!find(found.find, "slidesparse_hopper_find") ||
      !find(found.device, "slidesparse_hopper_device") ||
      !find(found.scratch_bytes, "slidesparse_hopper_scratch_bytes") ||
      !find(found.linear, "slidesparse_hopper_linear")) {
    return "the kernels' library is not of this version";
  }
  kernels = found;
  enabled = true;
  return nullptr;
}

// Enables or disables the operators; if disabled, calls fall back to Python, which can time their
// parts.
SLIDESPARSE_EXPORT void slidesparse_operators_enable(std::int32_t enable) {
  enabled = enable != 0 && kernels.find != nullptr;
}

// Records the message of the exception that Python's operator is about to raise.
SLIDESPARSE_EXPORT void slidesparse_operators_failed(const char* text) { failure = text; }

}  // extern "C"
