// torch's operators for whole layers, torch.ops.slidesparse.{linear, rms_norm_linear,
// add_rms_norm_linear, silu_mul_linear}, and for layers of experts, {route, grouped_linear,
// combine}, without Python: a call checks its tensors, looks its
// layer's plan up in the kernels' library, allocates the outputs and launches.  Python makes the
// plan of a layer that has none.
//
// A C++ compiler compiles this against the stable headers of torch 2.10 or later, of which it uses
// those that 2.10 has.  Operators are boxed by hand and tensors are handles, because TORCH_BOX and
// torch::stable::Tensor cost the host 0.4 us more a call.

#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 10) << 48))

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

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

// Looks up a function of an opened library.  Returns whether it is there.
template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  if (library != nullptr) *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// Functions of the kernels' library and of Python, null until `slidesparse_operators_load`.
struct Kernels {
  decltype(&slidesparse_hopper_find) find;
  decltype(&slidesparse_hopper_device) device;
  decltype(&slidesparse_hopper_scratch_bytes) scratch_bytes;
  decltype(&slidesparse_hopper_linear) linear;
  decltype(&slidesparse_hopper_route) route;
  decltype(&slidesparse_hopper_grouped) grouped;
  decltype(&slidesparse_hopper_combine) combine;
  SlidesparsePlanner plan;
};
Kernels kernels = {};

// Functions of torch, null if it was built without CUDA.
struct TorchCuda {
  AOTITorchError (*get_stream)(std::int32_t device, void** stream) = nullptr;
  AOTITorchError (*create_guard)(std::int32_t device, void** guard) = nullptr;
  AOTITorchError (*delete_guard)(void* guard) = nullptr;

  TorchCuda() {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    Find(library, "aoti_torch_get_current_cuda_stream", &get_stream);
    Find(library, "aoti_torch_create_cuda_guard", &create_guard);
    Find(library, "aoti_torch_delete_cuda_guard", &delete_guard);
  }
};
const TorchCuda torch_cuda;

// ---- tensors ----

struct DeleteTensor {
  void operator()(AtenTensorHandle tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using Owned = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

// torch's numbers of dtypes and of the device type CUDA.
struct Numbers {
  std::int32_t bfloat16 = aoti_torch_dtype_bfloat16(), float16 = aoti_torch_dtype_float16();
  std::int32_t float32 = aoti_torch_dtype_float32(), float64 = aoti_torch_dtype_float64();
  std::int32_t uint8 = aoti_torch_dtype_uint8(), int8 = aoti_torch_dtype_int8();
  std::int32_t int32 = aoti_torch_dtype_int32(), int64 = aoti_torch_dtype_int64();
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

bool Is16Bit(std::int32_t type) {
  return type == SLIDESPARSE_BFLOAT16 || type == SLIDESPARSE_FLOAT16;
}

std::string DtypeText(std::int32_t number) {
  return number == numbers.bfloat16  ? "bfloat16"
         : number == numbers.float16 ? "float16"
         : number == numbers.float32 ? "float32"
         : number == numbers.float64 ? "float64"
         : number == numbers.uint8   ? "uint8"
         : number == numbers.int8    ? "int8"
         : number == numbers.int32   ? "int32"
         : number == numbers.int64   ? "int64"
                                     : "dtype " + std::to_string(number);
}

std::string ListText(const std::int64_t* values, std::int64_t count) {
  std::string text = "[";
  for (std::int64_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

// The properties of a tensor that a call needs.
struct View {
  std::int64_t dim, *sizes, *strides;
  std::int32_t type, device, device_type;
  void* data;

  explicit View(const Owned& tensor) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
  }

  bool IsOn(const View& other) const {
    return device == other.device && device_type == other.device_type;
  }
  bool IsMatrix(std::int64_t columns) const { return dim == 2 && sizes[1] == columns; }
  bool HasContiguousRows() const { return sizes[1] < 2 || strides[1] == 1; }
  // [size] or [size, 1], contiguous.
  bool IsVector(std::int64_t size) const {
    return (dim == 1 || (dim == 2 && sizes[1] == 1)) && sizes[0] == size &&
           (size < 2 || strides[0] == 1);
  }
};

// Raises what was found, and what is allowed.
[[noreturn]] void Refuse(const std::string& name, const View& found, const std::string& allowed) {
  throw std::runtime_error(
      name + " is " + DtypeText(found.type) + " " + ListText(found.sizes, found.dim) +
      " with strides " + ListText(found.strides, found.dim) + " on " +
      (found.device_type == numbers.cuda ? "cuda:" + std::to_string(found.device) : "a CPU") +
      "; it must be " + allowed);
}

// Allocates an uninitialized tensor [rows, columns] on the device of `like`; `data` is its memory.
Owned Empty(std::int64_t rows, std::int64_t columns, std::int32_t type, const View& like,
            void** data, int dim = 2) {
  const std::int64_t sizes[2] = {rows, columns}, strides[2] = {columns, 1};
  AtenTensorHandle made;
  if (aoti_torch_empty_strided(dim, sizes, strides, type, like.device_type, like.device, &made) !=
      TORCH_SUCCESS) {
    throw std::runtime_error("torch could not allocate " + ListText(sizes, 2) + " of " +
                             DtypeText(type) +
                             " for a layer; its message is in the log, such as "
                             "that the GPU is out of memory");
  }
  Owned owned(made);
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(made, data));
  return owned;
}

// Makes x's device the current one, until the object is destroyed.
class DeviceGuard {
 public:
  explicit DeviceGuard(const View& x) {
    if (x.device_type != numbers.cuda || kernels.device() == x.device) return;
    if (torch_cuda.create_guard == nullptr) throw std::runtime_error("torch has no CUDA");
    TORCH_ERROR_CODE_CHECK(torch_cuda.create_guard(x.device, &guard_));
  }
  ~DeviceGuard() {
    if (guard_ != nullptr) torch_cuda.delete_guard(guard_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  void* guard_ = nullptr;
};

// The current stream of a tensor's device; null on a CPU.
void* StreamOf(const View& x) {
  void* stream = nullptr;
  if (x.device_type == numbers.cuda) {
    TORCH_ERROR_CODE_CHECK(torch_cuda.get_stream(x.device, &stream));
  }
  return stream;
}

void Check(const char* error) {
  if (error != nullptr) throw std::runtime_error(error);
}

// ---- layers ----

// Takes a layer from torch's list of its numbers.
SlidesparseLayer LayerOf(StableIValue given) {
  const auto list = stable::to<StableListHandle>(given);
  SlidesparseLayer layer;
  std::int32_t* const fields[] = {&layer.n,     &layer.k,   &layer.length,
                                  &layer.phase, &layer.fp8, &layer.columns};
  constexpr std::size_t kFields = sizeof(fields) / sizeof(fields[0]);
  std::size_t size = 0;
  bool valid = torch_list_size(list, &size) == TORCH_SUCCESS && size == kFields;
  for (std::size_t i = 0; valid && i < kFields; ++i) {
    StableIValue value;
    valid = torch_list_get_item(list, i, &value) == TORCH_SUCCESS &&
            stable::to<std::int64_t>(value) >> 31 == 0;
    if (valid) *fields[i] = static_cast<std::int32_t>(stable::to<std::int64_t>(value));
  }
  torch_delete_list(list);
  if (!valid) throw std::runtime_error("a layer is six numbers from 0 to 2^31 - 1");
  return layer;
}

Owned TakeOptional(StableIValue given) {
  return Owned(stable::to<std::optional<AtenTensorHandle>>(given).value_or(nullptr));
}

// The arguments of an operator, taken from torch's stack; null if absent.
struct Arguments {
  Owned x, residual, gain;
  double eps = 0.0;
  Owned weight, scale_w, bias;
  SlidesparseLayer layer;
  std::int32_t out_dtype;  // torch's number

  Arguments(std::int32_t prologue, const StableIValue* next) {
    const auto take = [&] { return Owned(stable::to<AtenTensorHandle>(*next++)); };
    x = take();
    if (prologue == SLIDESPARSE_ADD_RMS_NORM) residual = take();
    if (prologue == SLIDESPARSE_RMS_NORM || prologue == SLIDESPARSE_ADD_RMS_NORM) {
      gain = take();
      eps = stable::to<double>(*next++);
    }
    weight = take();
    scale_w = take();
    bias = TakeOptional(*next++);
    layer = LayerOf(*next++);
    out_dtype = stable::to<std::int32_t>(*next++);
  }
};

struct Outputs {
  Owned y, total;
};

// Returns the plan of a layer on the current device, which is x's; Python makes it if needed.
const SlidesparseHopperPlan* PlanOf(std::int32_t device, const SlidesparseLayer& layer) {
  const SlidesparseHopperPlan* plan = kernels.find(device, &layer);
  if (plan != nullptr) return plan;
  char message[1024] = "";
  kernels.plan(device, &layer, message, sizeof(message));
  if (message[0] != '\0') throw std::runtime_error(message);
  plan = kernels.find(device, &layer);
  if (plan == nullptr) throw std::runtime_error("making the plan of a layer was interrupted");
  return plan;
}

std::string VectorText(std::int64_t size, const std::string& types) {
  return "[" + std::to_string(size) + "] of " + types + ", contiguous, on x's device";
}

// Runs a layer.  Raises what was found, and what is allowed.
Outputs Run(std::int32_t prologue, const Arguments& arguments) {
  const SlidesparseLayer& layer = arguments.layer;
  const std::int64_t n = layer.n, k = layer.k;
  const std::int64_t width = prologue == SLIDESPARSE_SILU_MUL ? 2 * k : k;
  View x(arguments.x);
  const std::int32_t type = TypeOf(x.type), out_type = TypeOf(arguments.out_dtype);
  if (!Is16Bit(type) || !x.IsMatrix(width)) {
    Refuse("x", x,
           "[M, " + std::to_string(width) + "] of bfloat16 or float16" +
               (width == k ? "" : ", gates before as many values"));
  }
  if (!Is16Bit(out_type)) {
    throw std::runtime_error("the Hopper kernels write bfloat16 or float16, asked for " +
                             DtypeText(arguments.out_dtype) + ": use the backend cusparselt");
  }
  const View weight(arguments.weight), scale_w(arguments.scale_w);
  if (weight.type != numbers.uint8 || weight.dim != 1 || !weight.IsVector(weight.sizes[0]) ||
      !weight.IsOn(x)) {
    Refuse("the weight", weight, "uint8 as the backend hopper packs it, on x's device");
  }
  if (scale_w.type != numbers.float32 || !scale_w.IsVector(n) || !scale_w.IsOn(x)) {
    Refuse("scale_w", scale_w, VectorText(n, "float32"));
  }
  std::int32_t bias_type = SLIDESPARSE_NONE;
  const void *bias = nullptr, *gain = nullptr, *residual = nullptr;
  std::int64_t residual_stride = 0;
  if (arguments.bias) {
    const View found(arguments.bias);
    bias_type = TypeOf(found.type);
    if (bias_type == SLIDESPARSE_NONE || !found.IsVector(n) || !found.IsOn(x)) {
      Refuse("bias", found, VectorText(n, "bfloat16, float16 or float32"));
    }
    bias = found.data;
  }
  if (arguments.gain) {
    const View found(arguments.gain);
    if (found.type != x.type || !found.IsVector(k) || !found.IsOn(x)) {
      Refuse("a norm's weight", found, VectorText(k, "x's type"));
    }
    gain = found.data;
  }
  const std::int64_t m = x.sizes[0];
  if (arguments.residual) {
    const View found(arguments.residual);
    if (found.type != x.type || !found.IsMatrix(k) || found.sizes[0] != m ||
        !found.HasContiguousRows() || !found.IsOn(x)) {
      Refuse("the residual", found, "as x with contiguous rows, on its device");
    }
    residual = found.data;
    residual_stride = found.strides[0];
  }
  Outputs outputs;
  void *y, *scratch, *total = nullptr;
  outputs.y = Empty(m, n, arguments.out_dtype, x, &y);
  if (arguments.residual) outputs.total = Empty(m, k, x.type, x, &total);
  if (m == 0) return outputs;
  const DeviceGuard guard(x);
  const SlidesparseHopperPlan* plan = PlanOf(x.device, layer);
  Owned copy;
  if (!x.HasContiguousRows()) {
    copy = Empty(m, width, x.type, x, &scratch);
    TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copy.get(), arguments.x.get(), 0));
    x = View(copy);
  }
  const Owned held = Empty(1, kernels.scratch_bytes(plan, m), numbers.uint8, x, &scratch);
  Check(kernels.linear(plan, m, x.data, type, x.strides[0], prologue, arguments.eps, gain, residual,
                       residual_stride, total, weight.data, weight.sizes[0], scale_w.data, bias,
                       bias_type, y, out_type, scratch, StreamOf(x)));
  return outputs;
}

template <std::int32_t kPrologue>
void Operator(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const Arguments arguments(kPrologue, stack);
  Outputs outputs = Run(kPrologue, arguments);
  stack[0] = reinterpret_cast<StableIValue>(outputs.y.release());
  if (outputs.total) stack[1] = reinterpret_cast<StableIValue>(outputs.total.release());
}

// ---- experts ----

// A tensor of torch's stack.
struct Given {
  Owned owned;
  View view;

  explicit Given(StableIValue value) : owned(stable::to<AtenTensorHandle>(value)), view(owned) {}
};

// Refuses a tensor unless it is contiguous, of `type` and `dim` dimensions with `size` elements
// together, if that is not negative, and on x's device.
void Require(const char* name, const View& found, std::int32_t type, std::int64_t dim,
             std::int64_t size, const View& x) {
  std::int64_t elements = 1;
  bool valid = found.type == type && found.dim == dim && found.IsOn(x);
  for (std::int64_t i = found.dim; i-- > 0; elements *= found.sizes[i]) {
    valid &= found.sizes[i] < 2 || found.strides[i] == elements;
  }
  if (valid && (size < 0 || elements == size)) return;
  Refuse(name, found,
         DtypeText(type) + " of " + std::to_string(dim) + " dimensions" +
             (size < 0 ? "" : " and " + std::to_string(size) + " elements") +
             ", contiguous, on x's device");
}

// The data of an optional vector; null if it is absent.
const void* OptionalVector(const char* name, const Owned& tensor, std::int32_t type,
                           std::int64_t size, const View& x, std::int64_t* found_size = nullptr) {
  if (!tensor) return nullptr;
  const View found(tensor);
  Require(name, found, type, 1, size, x);
  if (found_size != nullptr) *found_size = found.sizes[0];
  return found.data;
}

// route(Tensor topk_ids, Tensor? expert_map, SymInt experts) -> (Tensor, Tensor, Tensor)
void Route(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const Given given(stack[0]);
  const Owned map = TakeOptional(stack[1]);
  const auto experts = static_cast<std::int32_t>(stable::to<std::int64_t>(stack[2]));
  const View& ids = given.view;
  const bool wide = ids.type == numbers.int64;
  Require("topk_ids", ids, wide ? numbers.int64 : numbers.int32, 2, -1, ids);
  std::int64_t map_size = 0;
  const void* map_data = OptionalVector("expert_map", map, numbers.int32, -1, ids, &map_size);
  const std::int64_t slots = ids.sizes[0] * ids.sizes[1];
  void *order, *rows, *offsets;
  Owned made[] = {Empty(slots, 1, numbers.int32, ids, &order, 1),
                  Empty(slots, 1, numbers.int32, ids, &rows, 1),
                  Empty(experts + 1, 1, numbers.int32, ids, &offsets, 1)};
  const DeviceGuard guard(ids);
  Check(kernels.route(ids.data, wide, slots, map_data, static_cast<std::int32_t>(map_size), experts,
                      order, rows, offsets, StreamOf(ids)));
  for (int i = 0; i < 3; ++i) stack[i] = reinterpret_cast<StableIValue>(made[i].release());
}

// grouped_linear(Tensor x, Tensor order, SymInt top_k, Tensor weight, Tensor scale_w, Tensor
//     offsets, Tensor? slot_scale, bool silu_mul, SymInt[] layer, ScalarType out_dtype) -> Tensor
void GroupedLinear(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const Given given(stack[0]), order(stack[1]), weight(stack[3]), scale_w(stack[4]);
  const Given offsets(stack[5]);
  const auto top_k = static_cast<std::int32_t>(stable::to<std::int64_t>(stack[2]));
  const Owned slot_scale = TakeOptional(stack[6]);
  const bool silu_mul = stable::to<bool>(stack[7]);
  const SlidesparseLayer layer = LayerOf(stack[8]);
  const std::int32_t out_dtype = stable::to<std::int32_t>(stack[9]);
  const View& x = given.view;
  const std::int32_t type = TypeOf(x.type), out_type = TypeOf(out_dtype);
  Require("order", order.view, numbers.int32, 1, -1, x);
  Require("weight", weight.view, numbers.uint8, 2, -1, x);
  const std::int64_t slots = order.view.sizes[0], experts = weight.view.sizes[0];
  const std::int64_t width = silu_mul ? 2 * std::int64_t{layer.k} : layer.k;
  if (!Is16Bit(type) || !x.IsMatrix(width) || !x.HasContiguousRows() || top_k < 1 ||
      x.sizes[0] * (silu_mul ? 1 : top_k) != slots) {
    Refuse("x", x,
           "[M, " + std::to_string(width) + "] of bfloat16 or float16 with contiguous rows, one " +
               (silu_mul ? "" : "of " + std::to_string(top_k) + " ") + "for each of " +
               std::to_string(slots) + " slots");
  }
  if (!Is16Bit(out_type)) {
    throw std::runtime_error("the Hopper kernels write bfloat16 or float16, asked for " +
                             DtypeText(out_dtype));
  }
  Require("scale_w", scale_w.view, numbers.float32, 2, experts * layer.n, x);
  Require("offsets", offsets.view, numbers.int32, 1, experts + 1, x);
  const void* slot_scales = OptionalVector("slot_scale", slot_scale, numbers.float32, slots, x);
  void *y, *scratch;
  Owned out = Empty(slots, layer.n, out_dtype, x, &y);
  if (slots > 0) {
    const DeviceGuard guard(x);
    const SlidesparseHopperPlan* plan = PlanOf(x.device, layer);
    const Owned held = Empty(1, kernels.scratch_bytes(plan, slots), numbers.uint8, x, &scratch);
    Check(kernels.grouped(plan, slots, x.data, type, x.strides[0], silu_mul, order.view.data,
                          silu_mul ? 0 : top_k, slot_scales, static_cast<std::int32_t>(experts),
                          offsets.view.data, weight.view.data, weight.view.sizes[1],
                          scale_w.view.data, y, out_type, nullptr, scratch, StreamOf(x)));
  }
  stack[0] = reinterpret_cast<StableIValue>(out.release());
}

// combine(Tensor y, Tensor rows, SymInt top_k) -> Tensor
void Combine(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const Given given(stack[0]), rows(stack[1]);
  const auto top_k = static_cast<std::int32_t>(stable::to<std::int64_t>(stack[2]));
  const View& y = given.view;
  Require("y", y, y.type == numbers.float16 ? numbers.float16 : numbers.bfloat16, 2, -1, y);
  Require("rows", rows.view, numbers.int32, 1, y.sizes[0], y);
  if (top_k < 1 || y.sizes[0] % top_k != 0) Refuse("y", y, "whole tokens");
  void* out;
  Owned made = Empty(y.sizes[0] / top_k, y.sizes[1], y.type, y, &out);
  const DeviceGuard guard(y);
  Check(kernels.combine(y.data, TypeOf(y.type), y.sizes[0], top_k,
                        static_cast<std::int32_t>(y.sizes[1]), rows.view.data, out, StreamOf(y)));
  stack[0] = reinterpret_cast<StableIValue>(made.release());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(SLIDESPARSE_NAMESPACE, SLIDESPARSE_KEY, library) {
  library.impl("linear", Operator<SLIDESPARSE_NO_PROLOGUE>);
  library.impl("rms_norm_linear", Operator<SLIDESPARSE_RMS_NORM>);
  library.impl("add_rms_norm_linear", Operator<SLIDESPARSE_ADD_RMS_NORM>);
  library.impl("silu_mul_linear", Operator<SLIDESPARSE_SILU_MUL>);
  library.impl("route", Route);
  library.impl("grouped_linear", GroupedLinear);
  library.impl("combine", Combine);
}

// Looks up the functions of the kernels' library at `path`, which Python has loaded, and takes
// Python's function that plans a layer.  Returns null, or an error message.
extern "C" SLIDESPARSE_EXPORT const char* slidesparse_operators_load(const char* path,
                                                                     SlidesparsePlanner planner) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
  Kernels found = {};
  if (!Find(library, "slidesparse_hopper_find", &found.find) ||
      !Find(library, "slidesparse_hopper_device", &found.device) ||
      !Find(library, "slidesparse_hopper_scratch_bytes", &found.scratch_bytes) ||
      !Find(library, "slidesparse_hopper_linear", &found.linear) ||
      !Find(library, "slidesparse_hopper_route", &found.route) ||
      !Find(library, "slidesparse_hopper_grouped", &found.grouped) ||
      !Find(library, "slidesparse_hopper_combine", &found.combine)) {
    return "the kernels' library is not of this version";
  }
  found.plan = planner;
  kernels = found;
  return nullptr;
}
