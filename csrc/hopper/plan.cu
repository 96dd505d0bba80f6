// Plans of layers, behind the C interface, which interface.cuh documents.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <tuple>
#include <vector>

#include "gemm.cuh"
#include "interface.cuh"
#include "quantize.cuh"

namespace slidesparse::hopper {

// The key of a registered plan: its device and layer.
using PlanKey = std::tuple<int, int, int, int, int, int, int>;

inline PlanKey KeyOf(int device, const SlidesparseLayer& layer) {
  return {device, layer.n, layer.k, layer.length, layer.phase, layer.fp8, layer.columns};
}

}  // namespace slidesparse::hopper

struct SlidesparseHopperPlan {
  slidesparse::hopper::PlanKey key;
  bool fp8;
  slidesparse::hopper::Blocks blocks;  // if coded, there is one kind of blocks, the first
  slidesparse::hopper::QuantizeArguments quantize;  // all but the tensors
  using Gemms = std::array<slidesparse::hopper::Gemm, SLIDESPARSE_BLOCK_KINDS>;
  // A row of the tuned table: the GEMMs for up to `tokens` tokens, by SlidesparseBlocks.
  struct Tuned {
    std::int64_t tokens;
    Gemms gemms;
  };
  std::vector<Tuned> tuned;

  // The GEMMs for m tokens, of a plan that does not only quantize.
  const Gemms& Choose(std::int64_t m) const {
    const Tuned* found = &tuned.back();
    for (const Tuned& one : tuned) {
      if (m > one.tokens) continue;
      found = &one;
      break;
    }
    return found->gemms;
  }
};

namespace slidesparse::hopper {
namespace {

using Plan = SlidesparseHopperPlan;

constexpr int kSms = 132;                  // an H100's, for a heuristic
constexpr std::int64_t kScaleBytes = 128;  // alignment of the codes, which follow the scales

std::shared_mutex mutex;
std::map<PlanKey, const Plan*> served;

// The blocks of a layer's weight, kSparse if they may be mixed.
Blocks BlocksOf(const SlidesparseLayer& layer) {
  return layer.length == kCodedLength ? Blocks::kCoded : Blocks::kSparse;
}

// The bytes of flags and partial sums that m tokens need, of whichever blocks the weight is.
std::int64_t ExchangeOf(const Plan& plan, std::int64_t m) {
  std::int64_t bytes = 0;
  if (plan.tuned.empty()) return bytes;
  for (const Gemm& gemm : plan.Choose(m)) bytes = std::max(bytes, gemm.exchange_bytes);
  return bytes;
}

std::int64_t ScalesOf(std::int64_t m) { return CeilDiv(4 * m, kScaleBytes) * kScaleBytes; }

bool Is16Bit(int type) { return type == SLIDESPARSE_BFLOAT16 || type == SLIDESPARSE_FLOAT16; }

const char* ParseText(const char* text, Configuration* configuration) {
  if (Parse(text, configuration)) return nullptr;
  return Fail("'%.60s' is no configuration of the Hopper kernels, such as 'split:2x64/1x4/2'",
              text);
}

// Finds the kind of a packed weight from its size.  Returns null, or what is wrong with the size.
const char* FindKind(const Plan& plan, std::int64_t bytes, SlidesparseBlocks* kind) {
  const GemmArguments& a = plan.tuned.front().gemms[0].arguments;
  const std::int64_t blocks = std::int64_t{a.strips} * a.k_blocks;
  if (plan.blocks == Blocks::kCoded) {
    *kind = SLIDESPARSE_ALL_2_4;
    if (bytes == blocks * kCodedBytes) return nullptr;
    return Fail(
        "a packed weight of %lld bytes for %d out-features and %d blocks of 128 columns, coded, "
        "which has %lld; pack it for the backend hopper, from as many in-features",
        static_cast<long long>(bytes), a.n, a.k_blocks,
        static_cast<long long>(blocks * kCodedBytes));
  }
  const std::int64_t table = TableBytes(blocks), sparse = blocks * kPackedBytes;
  const std::int64_t dense = table + blocks * kDenseBytes;
  *kind = bytes == sparse  ? SLIDESPARSE_ALL_2_4
          : bytes == dense ? SLIDESPARSE_ALL_DENSE
                           : SLIDESPARSE_MIXED;
  if (bytes == sparse || (bytes >= table + sparse && bytes <= dense)) return nullptr;
  return Fail(
      "a packed weight of %lld bytes for %d out-features and %d blocks of 128 columns: %lld if all "
      "are 2:4, else %lld to %lld; pack it for the backend hopper, from as many in-features at the "
      "same pattern",
      static_cast<long long>(bytes), a.n, a.k_blocks, static_cast<long long>(sparse),
      static_cast<long long>(table + sparse), static_cast<long long>(dense));
}

// Finds the GEMM for m tokens.  Returns null, or what is wrong with the plan or the tensors.
const char* FindGemm(const Plan& plan, std::int64_t m, const GemmTensors& tensors,
                     std::int64_t weight_bytes, const Gemm** gemm) {
  const int bias_type = static_cast<int>(tensors.bias_type);
  const int out_type = static_cast<int>(tensors.out_type);
  if ((tensors.bias != nullptr) != (Is16Bit(bias_type) || bias_type == SLIDESPARSE_FLOAT32) ||
      !Is16Bit(out_type)) {
    return Fail(
        "a bias at %p of type %d, an output of type %d: a bias is of types 1 to 3, or null of "
        "type 0; an output of 1 or 2",
        tensors.bias, bias_type, out_type);
  }
  if (plan.tuned.empty()) {
    return Fail("a plan without configurations only quantizes: make one with a tuned table");
  }
  SlidesparseBlocks kind;
  if (const char* error = FindKind(plan, weight_bytes, &kind)) {
    return error;
  }
  *gemm = &plan.Choose(m)[kind];
  return nullptr;
}

// The configurations of grouped products, by tokens of a tile; the first is for few experts.
constexpr Configuration kGrouped[] = {{true, 1, 8, 1, 1, 4, true},  {true, 2, 8, 1, 1, 3, true},
                                      {true, 2, 16, 1, 1, 3, true}, {true, 2, 32, 1, 1, 2, true},
                                      {true, 2, 64, 1, 1, 2, true}, {true, 2, 128, 1, 1, 1, true},
                                      {true, 2, 256, 1, 1, 1, true}};

// Chooses the configuration of a grouped product of `slots` rows by weights of `strips` strips.
const Configuration& ChooseGrouped(std::int64_t slots, int experts, int strips) {
  const double mean = static_cast<double>(slots) / experts;
  const double rows = mean + 2 * std::sqrt(mean);  // most experts' fit into one tile
  if (rows <= 8 && std::min<std::int64_t>(slots, experts) * strips < 4 * kSms) return kGrouped[0];
  const Configuration* found = kGrouped + 1;
  while (found < std::end(kGrouped) - 1 && found->tokens < rows) ++found;
  return *found;
}

// Loads all of them at the first call, because later ones may be captured into CUDA graphs.
const char* LoadGrouped(const Plan& plan, Blocks blocks) {
  static std::mutex loading;
  static std::set<std::tuple<int, bool, Blocks>> loaded;
  std::lock_guard lock(loading);
  if (loaded.count({std::get<0>(plan.key), plan.fp8, blocks}) > 0) return nullptr;
  for (const Configuration& one : kGrouped) {
    Gemm gemm;
    if (const char* error = FitLarger(one, plan.fp8, blocks, &gemm)) return error;
  }
  loaded.insert({std::get<0>(plan.key), plan.fp8, blocks});
  return nullptr;
}

// slidesparse_hopper_quantize, which also clears the flags of a GEMM.
const char* Quantize(const Plan& plan, std::int64_t m, const void* x, std::int32_t type,
                     std::int64_t stride, std::int32_t prologue, double eps, const void* gain,
                     const void* residual, std::int64_t residual_stride, void* total, void* q,
                     void* scale_x, void* flags, int flag_count, void* stream,
                     QuantizeArguments arguments) {
  const bool adds = prologue == SLIDESPARSE_ADD_RMS_NORM;
  const bool norm = adds || prologue == SLIDESPARSE_RMS_NORM;
  if (!Is16Bit(type) || prologue < 0 || prologue > SLIDESPARSE_SILU_MUL ||
      norm != (gain != nullptr) || adds != (residual != nullptr) || adds != (total != nullptr)) {
    return Fail(
        "type %d and prologue %d with a gain at %p, a residual at %p and its sum at %p: types are "
        "1 and 2, prologues 0 to 3, norms have a gain, norms of sums all three, the others none",
        type, prologue, gain, residual, total);
  }
  arguments.x = x;
  arguments.stride = stride;
  arguments.eps = static_cast<float>(eps);
  arguments.gain = gain;
  arguments.residual = residual;
  arguments.residual_stride = residual_stride;
  arguments.total = total;
  arguments.q = static_cast<std::uint8_t*>(q);
  arguments.scale = static_cast<float*>(scale_x);
  arguments.flags = static_cast<std::uint32_t*>(flags);
  arguments.flag_count = flag_count;
  return EnqueueQuantize(arguments, m, static_cast<Float>(type), plan.fp8,
                         static_cast<Prologue>(prologue), static_cast<cudaStream_t>(stream));
}

}  // namespace
}  // namespace slidesparse::hopper

using namespace slidesparse::hopper;

extern "C" {

const char* slidesparse_hopper_fit(const char* configuration, std::int32_t fp8,
                                   std::int32_t* stages, std::int32_t* clusters) {
  Gemm gemm = {};
  Configuration parsed;
  const char* error = ParseText(configuration, &parsed);
  if (error == nullptr) error = FitGemm(parsed, fp8 != 0, Blocks::kSparse, &gemm);
  *stages = gemm.fit.stages;
  *clusters = gemm.fit.clusters;
  return error;
}

const char* slidesparse_hopper_candidates(const SlidesparseLayer* layer, std::int32_t m,
                                          std::int32_t blocks, std::int32_t most, char* texts,
                                          double* us, std::int32_t* count) {
  *count = 0;
  if (layer->n < 1 || layer->columns < 1 || m < 1) {
    return Fail("a product [%d, %d] @ [%d, %d].T has no configurations", m, layer->columns,
                layer->n, layer->columns);
  }
  int device, sms;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) {
    return Fail("%s (%s) for the current device", cudaGetErrorName(error),
                cudaGetErrorString(error));
  }
  const Blocks of_layer = BlocksOf(*layer);
  const bool coded = of_layer == Blocks::kCoded;
  const Blocks kinds = coded || blocks == SLIDESPARSE_ALL_2_4 ? of_layer : Blocks::kMixed;
  const auto fits = [=](const Configuration& configuration) {
    Gemm gemm;
    return FitGemm(configuration, layer->fp8 != 0, kinds, &gemm) ? Fit{} : gemm.fit;
  };
  const double dense = coded ? 1.0 : static_cast<double>(blocks) / SLIDESPARSE_ALL_DENSE;
  const double block = coded ? kCodedBytes : kPackedBytes + dense * (kDenseBytes - kPackedBytes);
  for (const Candidate& one :
       FindCandidates(layer->n, layer->columns, m, dense, block, most, sms, fits)) {
    std::strncpy(texts + *count * SLIDESPARSE_TEXT_BYTES, ToText(one.configuration).c_str(),
                 SLIDESPARSE_TEXT_BYTES);
    us[(*count)++] = one.us;
  }
  return nullptr;
}

const char* slidesparse_hopper_plan(const SlidesparseLayer* layer, std::int32_t count,
                                    const std::int32_t* tokens, const char* const* texts,
                                    SlidesparseHopperPlan** made) {
  *made = nullptr;
  auto plan = std::make_unique<Plan>();
  plan->fp8 = layer->fp8 != 0;
  plan->quantize.k = layer->k;
  plan->blocks = BlocksOf(*layer);
  plan->quantize.phase = layer->phase;
  plan->quantize.columns = layer->columns;
  if (count > 0 && (layer->n < 1 || layer->columns < 1)) {
    return Fail("a weight of %d out-features and %d columns: both must be positive", layer->n,
                layer->columns);
  }
  if (const char* error = PrepareQuantize(plan->quantize, layer->length, plan->fp8)) return error;
  for (int i = 0; i < count; ++i) {
    Plan::Tuned tuned = {tokens[i], {}};
    const int kinds = plan->blocks == Blocks::kCoded ? 1 : SLIDESPARSE_BLOCK_KINDS;
    for (int kind = 0; kind < kinds; ++kind) {
      Configuration configuration;
      Gemm* gemm = &tuned.gemms[kind];
      const char* error = ParseText(texts[i * SLIDESPARSE_BLOCK_KINDS + kind], &configuration);
      if (error == nullptr) {
        const Blocks blocks = kind == SLIDESPARSE_ALL_2_4 ? plan->blocks : Blocks::kMixed;
        error = blocks == Blocks::kSparse ? FitGemm(configuration, plan->fp8, blocks, gemm)
                                          : FitLarger(configuration, plan->fp8, blocks, gemm);
      }
      if (error != nullptr) return error;
      SetWeight(layer->n, layer->columns, gemm);
    }
    plan->tuned.push_back(std::move(tuned));
  }
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device)) {
    return Fail("%s (%s) for the current device", cudaGetErrorName(error),
                cudaGetErrorString(error));
  }
  plan->key = KeyOf(device, *layer);
  *made = plan.release();
  return nullptr;
}

void slidesparse_hopper_delete(SlidesparseHopperPlan* plan) { delete plan; }

void slidesparse_hopper_serve(SlidesparseHopperPlan* plan) {
  std::unique_lock lock(mutex);
  served[plan->key] = plan;
}

SlidesparseHopperPlan* slidesparse_hopper_find(std::int32_t device, const SlidesparseLayer* layer) {
  std::shared_lock lock(mutex);
  const auto found = served.find(KeyOf(device, *layer));
  return found == served.end() ? nullptr : const_cast<Plan*>(found->second);
}

void slidesparse_hopper_forget() {
  std::unique_lock lock(mutex);
  served.clear();
}

std::int64_t slidesparse_hopper_scratch_bytes(const SlidesparseHopperPlan* plan, std::int64_t m) {
  return ExchangeOf(*plan, m) + ScalesOf(m) + m * plan->quantize.columns;
}

const char* slidesparse_hopper_quantize(const SlidesparseHopperPlan* plan, std::int64_t m,
                                        const void* x, std::int32_t type, std::int64_t stride,
                                        std::int32_t prologue, double eps, const void* gain,
                                        const void* residual, std::int64_t residual_stride,
                                        void* total, void* q, void* scale_x, void* stream) {
  return Quantize(*plan, m, x, type, stride, prologue, eps, gain, residual, residual_stride, total,
                  q, scale_x, nullptr, 0, stream, plan->quantize);
}

const char* slidesparse_hopper_product(const SlidesparseHopperPlan* plan, std::int64_t m,
                                       const void* q, std::int64_t q_columns, const void* scale_x,
                                       const void* weight, std::int64_t weight_bytes,
                                       const void* scale_w, const void* bias,
                                       std::int32_t bias_type, void* out, std::int32_t out_type,
                                       void* scratch, void* stream) {
  const GemmTensors tensors = {q,
                               q_columns,
                               scale_x,
                               weight,
                               scale_w,
                               bias,
                               static_cast<Float>(bias_type),
                               out,
                               static_cast<Float>(out_type),
                               scratch};
  const Gemm* gemm;
  if (const char* error = FindGemm(*plan, m, tensors, weight_bytes, &gemm)) return error;
  if (m > 0 && gemm->flags > 0) {
    if (cudaError_t error = cudaMemsetAsync(scratch, 0, gemm->flags * kFlagWords * 4,
                                            static_cast<cudaStream_t>(stream))) {
      return Fail("%s (%s) for clearing the flags of a product", cudaGetErrorName(error),
                  cudaGetErrorString(error));
    }
  }
  return LaunchGemm(*gemm, m, tensors, static_cast<cudaStream_t>(stream));
}

const char* slidesparse_hopper_linear(const SlidesparseHopperPlan* plan, std::int64_t m,
                                      const void* x, std::int32_t type, std::int64_t stride,
                                      std::int32_t prologue, double eps, const void* gain,
                                      const void* residual, std::int64_t residual_stride,
                                      void* total, const void* weight, std::int64_t weight_bytes,
                                      const void* scale_w, const void* bias, std::int32_t bias_type,
                                      void* out, std::int32_t out_type, void* scratch,
                                      void* stream) {
  char* scale_x = static_cast<char*>(scratch) + ExchangeOf(*plan, m);
  char* q = scale_x + ScalesOf(m);
  const GemmTensors tensors = {q,
                               plan->quantize.columns,
                               scale_x,
                               weight,
                               scale_w,
                               bias,
                               static_cast<Float>(bias_type),
                               out,
                               static_cast<Float>(out_type),
                               scratch};
  const Gemm* gemm;
  if (const char* error = FindGemm(*plan, m, tensors, weight_bytes, &gemm)) return error;
  if (const char* error =
          Quantize(*plan, m, x, type, stride, prologue, eps, gain, residual, residual_stride, total,
                   q, scale_x, scratch, gemm->flags, stream, plan->quantize)) {
    return error;
  }
  return LaunchGemm(*gemm, m, tensors, static_cast<cudaStream_t>(stream));
}

const char* slidesparse_hopper_grouped(const SlidesparseHopperPlan* plan, std::int64_t slots,
                                       const void* x, std::int32_t type, std::int64_t stride,
                                       std::int32_t silu_mul, const void* order, std::int32_t top_k,
                                       const void* slot_scale, std::int32_t experts,
                                       const void* offsets, const void* weights,
                                       std::int64_t weight_bytes, const void* scale_w, void* out,
                                       std::int32_t out_type, const char* configuration,
                                       void* scratch, void* stream) {
  if (slots == 0) return nullptr;
  if (plan->tuned.empty()) return Fail("a plan without configurations only quantizes");
  const GemmArguments& like = plan->tuned.front().gemms[0].arguments;
  SlidesparseBlocks kind;
  if (const char* error = FindKind(*plan, weight_bytes, &kind)) return error;
  const Blocks blocks = kind == SLIDESPARSE_ALL_2_4 ? plan->blocks : Blocks::kMixed;
  Configuration chosen = ChooseGrouped(slots, experts, like.strips);
  if (configuration != nullptr) {
    if (const char* error = ParseText(configuration, &chosen)) return error;
  }
  chosen.stream_k = chosen.grouped = true;
  chosen.multicast = chosen.splits = 1;
  if (const char* error = LoadGrouped(*plan, blocks)) return error;
  Gemm gemm;
  if (const char* error = FitLarger(chosen, plan->fp8, blocks, &gemm)) return error;
  SetWeight(like.n, like.k_blocks * kBlockColumns, &gemm);
  char* scale_x = static_cast<char*>(scratch);
  char* q = scale_x + ScalesOf(slots);
  QuantizeArguments arguments = plan->quantize;
  arguments.offsets = static_cast<const std::int32_t*>(offsets);
  arguments.order = static_cast<const std::int32_t*>(order);
  arguments.experts = experts;
  arguments.top_k = top_k;
  const int prologue = silu_mul != 0 ? SLIDESPARSE_SILU_MUL : SLIDESPARSE_NO_PROLOGUE;
  if (const char* error = Quantize(*plan, slots, x, type, stride, prologue, 0.0, nullptr, nullptr,
                                   0, nullptr, q, scale_x, nullptr, 0, stream, arguments)) {
    return error;
  }
  const GemmTensors tensors = {
      q,   plan->quantize.columns,       scale_x, weights, scale_w, nullptr, Float::kNone,
      out, static_cast<Float>(out_type), nullptr};
  return LaunchGrouped(gemm, slots, tensors,
                       {arguments.offsets, arguments.order, static_cast<const float*>(slot_scale),
                        experts, weight_bytes},
                       static_cast<cudaStream_t>(stream));
}

}  // extern "C"
