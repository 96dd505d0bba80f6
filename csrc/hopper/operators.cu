// torch's operators for whole layers, without Python: a call looks up what Python has prepared for
// its shape, allocates and launches.  Python prepares it in the first call of a shape, which comes
// here, finds nothing, and goes on to the operator NAME_by_python, as does everything that is out
// of the ordinary.
//
// torch is reached by its stable C interface alone (torch/csrc/stable/c/shim.h and
// torch/csrc/inductor/aoti_torch/c/shim.h, from 2.10 on), whose functions the caller hands over by
// their addresses.  So the library is compiled without torch and serves any.
//
// An operator gets its arguments as 64-bit words: integers and types as they are, floats by their
// bits, tensors and strings by handles that it owns, and what may be absent by the address of such
// a word or 0.

#include <array>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "interface.cuh"

namespace slidesparse::hopper {
namespace {

using Word = std::uint64_t;
using Tensor = struct OpaqueTensor*;
using Error = std::int32_t;  // 0: none

constexpr Word kAbi = Word{2} << 56 | Word{10} << 48;  // torch 2.10

// Functions of torch, in the order in which slidesparse.gemm.hopper_operators hands them over.
struct Torch {
  Error (*data_ptr)(Tensor, void**);
  Error (*dim)(Tensor, std::int64_t*);
  Error (*sizes)(Tensor, std::int64_t**);
  Error (*strides)(Tensor, std::int64_t**);
  Error (*dtype)(Tensor, std::int32_t*);
  Error (*device_index)(Tensor, std::int32_t*);
  Error (*empty_strided)(std::int64_t, const std::int64_t*, const std::int64_t*, std::int32_t,
                         std::int32_t, std::int32_t, Tensor*);
  Error (*delete_tensor)(Tensor);
  Error (*string_text)(void*, const char**);
  Error (*delete_string)(void*);
  Error (*call_dispatcher)(const char*, const char*, Word*, Word);
  Error (*library)(const char*, const char*, const char*, std::uint32_t, void**);
  Error (*implement)(void*, const char*, void (*)(Word*, Word, Word), Word);
  Error (*current_stream)(std::int32_t, void**);
  std::int32_t (*uint8)();
};

Torch torch;
constexpr std::int32_t kCpu = 0;  // torch's type of device
std::int32_t device_type;         // that operators are for: CUDA's, or in tests the CPU's
std::string by_python[4];         // operators that Python implements, by Before

void Require(Error error) {
  if (error) throw std::runtime_error("a function of torch's stable C interface failed");
}

// What a tensor is, read once.
struct View {
  void* data = nullptr;
  std::int64_t dim = 0;
  const std::int64_t *sizes = nullptr, *strides = nullptr;
  std::int32_t dtype = -1, device = -1;

  explicit View(Tensor tensor) {
    std::int64_t *found_sizes, *found_strides;
    Require(torch.data_ptr(tensor, &data));
    Require(torch.dim(tensor, &dim));
    Require(torch.sizes(tensor, &found_sizes));
    Require(torch.strides(tensor, &found_strides));
    Require(torch.dtype(tensor, &dtype));
    Require(torch.device_index(tensor, &device));
    sizes = found_sizes;
    strides = found_strides;
  }

  bool IsRow(std::int64_t size) const {  // [size] next to each other
    return dim == 1 && sizes[0] == size && (size < 2 || strides[0] == 1);
  }
  bool IsMatrix() const { return dim == 2 && (sizes[1] < 2 || strides[1] == 1); }
};

// What a prepared layer holds for: device, types, sizes and the number of tokens as it is planned.
// The same words as in slidesparse.gemm.hopper_operators.
using Key = std::array<std::int64_t, 13>;

struct Hash {
  std::size_t operator()(const Key& key) const {
    std::uint64_t found = 0xCBF29CE484222325;
    for (std::int64_t word : key) {
      found = (found ^ static_cast<std::uint64_t>(word)) * 0x100000001B3;
      found ^= found >> 29;
    }
    return found;
  }
};

struct Layer {
  SlidesparseHopperLinear call;
  std::int64_t weight_bytes;
};

std::shared_mutex mutex;
std::unordered_map<Key, Layer, Hash> layers;
std::unordered_map<Word, void*> workspaces;  // by device and stream

Word StreamKey(std::int32_t device, void* stream) {
  return reinterpret_cast<Word>(stream) ^ static_cast<Word>(device) << 56;
}

// The number of tokens that a layer of `m` is planned for: slidesparse.gemm.hopper.planned_rows.
std::int64_t PlannedRows(std::int64_t m) {
  int bits = 0;
  while ((m - 1) >> bits) ++bits;
  if (m <= 16) return std::int64_t{1} << bits;
  const std::int64_t step = bits > 9 ? std::int64_t{1} << (bits - 5) : 16;
  return (m + step - 1) / step * step;
}

Tensor Empty(std::int64_t rows, std::int64_t columns, std::int32_t dtype, std::int32_t device) {
  const std::int64_t sizes[2] = {rows, columns}, strides[2] = {columns, 1};
  Tensor found;
  Require(torch.empty_strided(2, sizes, strides, dtype, device_type, device, &found));
  return found;
}

// A tensor that goes when this does, unless it was taken.
class Owned {
 public:
  explicit Owned(Tensor tensor) : tensor_(tensor) {}
  ~Owned() {
    if (tensor_) torch.delete_tensor(tensor_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Tensor get() const { return tensor_; }
  Word Take() {
    const Word word = reinterpret_cast<Word>(tensor_);
    tensor_ = nullptr;
    return word;
  }

 private:
  Tensor tensor_;
};

enum Before { kNone, kNorm, kAddNorm, kSiluMul };

// Where the arguments of an operator stand.
struct Places {
  int norm, eps, layer;  // of the layer: weight, scale_w, bias, length, phase, dtype, columns, ...
  int count;
};
constexpr Places PlacesOf(Before before) {
  const int first = before == kAddNorm ? 4 : before == kNorm ? 3 : 1;
  return {first - 2, first - 1, first, first + 9};
}

Tensor AsTensor(Word word) { return reinterpret_cast<Tensor>(word); }

// Runs a layer if everything is as it was prepared for: then true, and outputs in place of the
// arguments, which stay whose they were.
bool RunPrepared(Before before, const Word* stack, Word* outputs) {
  const Places at = PlacesOf(before);
  const Word* layer = stack + at.layer;
  const View x(AsTensor(stack[0])), scale_w(AsTensor(layer[1]));
  const char* backend;
  Require(torch.string_text(reinterpret_cast<void*>(layer[8]), &backend));
  if (std::strcmp(backend, "hopper") != 0 || !x.IsMatrix() || x.sizes[0] < 1) return false;
  const std::int64_t m = x.sizes[0], k = before == kSiluMul ? x.sizes[1] / 2 : x.sizes[1];
  if ((before == kSiluMul && x.sizes[1] % 2 != 0) || scale_w.dim < 1) return false;
  const std::int64_t n = scale_w.sizes[0];
  const Word* has_bias = reinterpret_cast<const Word*>(layer[2]);
  void* bias = nullptr;
  std::int32_t bias_type = 0;  // one more than torch's, 0 for none
  if (has_bias) {
    const View found(AsTensor(*has_bias));
    if (!found.IsRow(n)) return false;
    bias = found.data;
    bias_type = found.dtype + 1;
  }
  std::int64_t eps_bits = 0;
  if (before == kNorm || before == kAddNorm) std::memcpy(&eps_bits, stack + at.eps, 8);
  const auto word = [&](int index) { return static_cast<std::int64_t>(layer[index]); };
  const auto type = [&](int index) {
    return std::int64_t{static_cast<std::int32_t>(layer[index])};
  };
  const Key key = {x.device, x.dtype, type(7), bias_type, type(5),       k, n, word(6),
                   word(3),  word(4), before,  eps_bits,  PlannedRows(m)};
  SlidesparseHopperLinear call;
  {
    std::shared_lock lock(mutex);
    const auto found = layers.find(key);
    if (found == layers.end()) return false;
    const View weight(AsTensor(layer[0]));
    if (weight.dim != 1 || weight.sizes[0] != found->second.weight_bytes) return false;
    call = found->second.call;
    call.product.weight = weight.data;
  }
  const bool gpu = device_type != kCpu;
  if (gpu && slidesparse_hopper_device() != x.device) return false;
  SlidesparseHopperQuantize& quantize = call.quantize;
  void* stream = nullptr;
  if (gpu) Require(torch.current_stream(x.device, &stream));
  if (call.grid) {
    std::shared_lock lock(mutex);
    const auto found = workspaces.find(StreamKey(x.device, stream));
    if (found == workspaces.end()) return false;
    call.workspace = found->second;
  }
  if (before == kNorm || before == kAddNorm) {
    const View norm(AsTensor(stack[at.norm]));
    if (!norm.IsRow(k) || norm.dtype != x.dtype) return false;
    quantize.gain = norm.data;
  }
  if (before == kAddNorm) {
    const View residual(AsTensor(stack[1]));
    if (!residual.IsMatrix() || residual.sizes[0] != m || residual.sizes[1] != k ||
        residual.dtype != x.dtype) {
      return false;
    }
    quantize.residual = residual.data;
    quantize.residual_stride = residual.strides[0];
  }

  Owned out(Empty(m, n, static_cast<std::int32_t>(type(7)), x.device));
  Owned total(before == kAddNorm ? Empty(m, k, x.dtype, x.device) : nullptr);
  const std::int64_t scales = (4 * m + 127) / 128 * 128;  // codes begin at a multiple of 128 bytes
  Owned scratch(Empty(1, scales + m * quantize.columns, torch.uint8(), x.device));
  const View codes(scratch.get()), result(out.get());
  quantize.x = x.data;
  quantize.stride = x.strides[0];
  quantize.m = static_cast<std::int32_t>(m);
  quantize.stream = stream;
  quantize.scale = codes.data;
  quantize.q = static_cast<char*>(codes.data) + scales;
  if (before == kAddNorm) quantize.total = View(total.get()).data;
  call.product.scale_w = scale_w.data;
  call.product.bias = bias;
  call.product.out = result.data;
  if (slidesparse_hopper_linear(&call)) return false;  // Python says what is wrong
  outputs[0] = out.Take();
  if (before == kAddNorm) outputs[1] = total.Take();
  return true;
}

thread_local std::string failure;  // what Python said

void GoOnInPython(Before before, Word* stack) {
  failure.clear();
  if (torch.call_dispatcher(by_python[before].c_str(), "", stack, kAbi)) {
    throw std::runtime_error(failure.empty() ? by_python[before] + " failed" : failure);
  }
}

template <Before before>
void Run(Word* stack, Word, Word) {
  constexpr Places at = PlacesOf(before);
  Word outputs[2];
  bool done = false;
  try {
    done = RunPrepared(before, stack, outputs);
  } catch (const std::runtime_error&) {  // of torch, such as of memory: Python knows its words
  }
  if (!done) return GoOnInPython(before, stack);
  for (int i = 0; i < at.count; ++i) {
    const int of_layer = i - at.layer;
    const bool tensor = i < at.layer ? before == kNone || before == kSiluMul || i != at.eps
                                     : of_layer == 0 || of_layer == 1;
    if (tensor) {
      torch.delete_tensor(AsTensor(stack[i]));
    } else if (of_layer == 2 && stack[i]) {
      Word* bias = reinterpret_cast<Word*>(stack[i]);
      torch.delete_tensor(AsTensor(*bias));
      delete bias;
    } else if (of_layer == 8) {
      torch.delete_string(reinterpret_cast<void*>(stack[i]));
    }
  }
  stack[0] = outputs[0];
  if (before == kAddNorm) stack[1] = outputs[1];
}

}  // namespace

extern "C" {

// Implements the operators of `space` for a dispatch key, "CUDA", with the functions at `functions`
// in the order of Torch.  Null, or what went wrong.
__attribute__((visibility("default"))) const char* slidesparse_hopper_operators(
    void* const* functions, std::int32_t count, const char* space, const char* key,
    std::int32_t type) {
  static thread_local char message[128];
  static_assert(sizeof(Torch) % sizeof(void*) == 0);
  if (count != static_cast<std::int32_t>(sizeof(Torch) / sizeof(void*))) {
    std::snprintf(message, sizeof(message), "%d functions of torch, %zu are wanted", count,
                  sizeof(Torch) / sizeof(void*));
    return message;
  }
  std::memcpy(&torch, functions, sizeof(Torch));
  device_type = type;
  const struct {
    const char* name;
    void (*run)(Word*, Word, Word);
  } operators[] = {{"linear", Run<kNone>},
                   {"rms_norm_linear", Run<kNorm>},
                   {"add_rms_norm_linear", Run<kAddNorm>},
                   {"silu_mul_linear", Run<kSiluMul>}};
  void* library;  // it is never given back: operators stay as long as the process
  if (torch.library(space, key, __FILE__, __LINE__, &library)) return "torch made no library";
  for (int before = 0; before < 4; ++before) {
    by_python[before] = std::string(space) + "::" + operators[before].name + "_by_python";
    if (torch.implement(library, operators[before].name, operators[before].run, kAbi)) {
      return "torch took no implementation";
    }
  }
  return nullptr;
}

// From now on calls that have `words` as their Key run `call`, all tensors but theirs.
__attribute__((visibility("default"))) void slidesparse_hopper_operators_add(
    const std::int64_t* words, const SlidesparseHopperLinear* call, std::int64_t weight_bytes) {
  Key key;
  std::memcpy(key.data(), words, sizeof(key));
  std::unique_lock lock(mutex);
  layers[key] = {*call, weight_bytes};
}

// The workspace of a stream, as slidesparse_hopper_stream has it.
__attribute__((visibility("default"))) void slidesparse_hopper_operators_workspace(
    std::int32_t device, void* stream, void* workspace) {
  std::unique_lock lock(mutex);
  workspaces[StreamKey(device, stream)] = workspace;
}

// Forgets all that was prepared.
__attribute__((visibility("default"))) void slidesparse_hopper_operators_forget() {
  std::unique_lock lock(mutex);
  layers.clear();
}

// What an operator that Python implements is about to raise.
__attribute__((visibility("default"))) void slidesparse_hopper_operators_failed(const char* text) {
  failure = text;
}

}  // extern "C"
}  // namespace slidesparse::hopper
