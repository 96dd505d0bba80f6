#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "gemm.cuh"
#include "grouped.cuh"

namespace slidesparse::hopper {
namespace {

constexpr int kMinStages = 2;  // one is multiplied while the other is filled
constexpr int kMaxStages = 256;
constexpr int kGroupTokens = 2048;      // whose tiles form a group of the tile scheduler
constexpr int kKeptOutputs = 16 << 20;  // bytes; more would evict weights and activations from L2
constexpr std::int64_t kFlagBytes = kMaxStreamKCtas * kFlagWords * 4;

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Finds cuTensorMapEncodeTiled in the driver, which every process with a CUDA context has loaded.
// Linking against it would keep the library from loading on machines without a driver.
EncodeTiled FindEncodeTiled() {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  return driver ? reinterpret_cast<EncodeTiled>(dlsym(driver, "cuTensorMapEncodeTiled")) : nullptr;
}

// Encodes the tensor map of a row-major matrix [rows, columns] with boxes of `box_rows` x
// `box_columns`, 128 bytes wide, and the 128-byte swizzle.  Returns null, or an error message.
const char* EncodeMatrix(CUtensorMap* map, CUtensorMapDataType type, int element_bytes,
                         const void* data, std::int64_t rows, std::int64_t columns, int box_rows,
                         int box_columns, CUtensorMapL2promotion promotion) {
  static const EncodeTiled encode = FindEncodeTiled();
  if (encode == nullptr) return Fail("libcuda.so.1 has no cuTensorMapEncodeTiled: it is too old");
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * element_bytes};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns),
                             static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult error = encode(map, type, 2, const_cast<void*>(data), sizes, strides, box, steps,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error == CUDA_SUCCESS) return nullptr;
  return Fail("cuTensorMapEncodeTiled refused a matrix [%lld, %lld] at %p: error %d",
              static_cast<long long>(rows), static_cast<long long>(columns), data,
              static_cast<int>(error));
}

template <class Type>
GemmKernel KernelOf(const Configuration& c, Blocks blocks) {
  constexpr std::pair<int, decltype(&FindGemm<Type, 8>)> kByTokens[] = {
      {8, FindGemm<Type, 8>},   {16, FindGemm<Type, 16>},   {32, FindGemm<Type, 32>},
      {64, FindGemm<Type, 64>}, {128, FindGemm<Type, 128>}, {256, FindGemm<Type, 256>}};
  for (const auto& [tokens, find] : kByTokens) {
    if (c.tokens == tokens) return find(c, blocks);
  }
  return {};
}

// Whether a kernel was compiled and accepts the cluster, of which each CTA loads whole swizzle
// atoms of 8 tokens.
bool HasKernel(const Configuration& c, const GemmKernel& kernel) {
  return kernel.function != nullptr && c.Cluster() <= kMaxClusterSize &&
         c.tokens % (8 * c.multicast) == 0;
}

// The most pipeline stages that fit into a CTA's shared memory; 0 if they are too few.
int StagesThatFit(const Configuration& c, const GemmKernel& kernel) {
  int stages = kMaxStages;
  while (stages > 0 && kernel.shared_bytes(stages, c.splits) > c.SharedBytes()) --stages;
  return stages >= kMinStages ? stages : 0;
}

// Computes how a configuration fits the current device, by the runtime's occupancy calculator.
cudaError_t AskFit(const Configuration& c, const GemmKernel& kernel, Fit* fit) {
  fit->stages = StagesThatFit(c, kernel);
  if (fit->stages == 0) return cudaSuccess;
  const auto function = reinterpret_cast<const void*>(kernel.function);
  if (cudaError_t error = LoadKernel(function)) return error;
  Launch launch(nullptr, c.Cluster(), kernel.threads, kernel.shared_bytes(fit->stages, c.splits),
                c.Cluster());
  launch.config.attrs = launch.attributes + 1;  // the cluster's size alone, even if it is one CTA
  launch.config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(&fit->clusters, function, &launch.config);
}

// Divides m tokens into tiles and groups for the tile scheduler; returns the number of tiles.
std::int64_t ScheduleTiles(int m, int tile_tokens, GemmArguments& a) {
  a.m = m;
  a.m_tiles = CeilDiv(m, tile_tokens);
  const int group = std::min(kGroupTokens / tile_tokens, a.m_tiles), last = a.m_tiles % group;
  a.group_m_tiles = Divisor(group);
  a.last_group_m_tiles = Divisor(last > 0 ? last : group);
  a.group_tiles = Divisor(group * a.n_tiles);
  return std::int64_t{a.n_tiles} * a.m_tiles;
}

// Chooses the L2 eviction policies.  With one row of tiles each block of the weight is read once,
// but the activations by all CTAs.
void ChooseL2Policies(GemmArguments& a) {
  a.weight_policy = a.m_tiles > 1 ? kEvictNormal : kEvictFirst;
  a.token_policy = a.m_tiles > 1 ? kEvictNormal : kEvictLast;
  a.output_policy = 2ll * a.m * a.n > kKeptOutputs ? kEvictFirst : kEvictNormal;
}

// Divides the stages of all tiles among the multicast groups of a stream-K launch.  Returns the
// number of groups, or 0 if there are too many stages to count.
int DivideStages(const Gemm& gemm, std::int64_t tiles, GemmArguments& a) {
  const std::int64_t stages = tiles * a.k_blocks;
  if (stages > INT32_MAX) return 0;
  const std::int64_t groups = std::min<std::int64_t>(gemm.fit.clusters, stages);
  a.whole_tiles = tiles > groups ? static_cast<int>(tiles / groups - 1) : 0;
  a.shared_stages = static_cast<std::uint32_t>(stages - a.whole_tiles * groups * a.k_blocks);
  a.two_per_tile = a.shared_stages / groups >= a.k_blocks;
  a.stages = static_cast<int>(std::min<std::int64_t>(gemm.fit.stages, CeilDiv(stages, groups)));
  return static_cast<int>(groups);
}

}  // namespace

const char* FitGemm(const Configuration& c, bool fp8, Blocks blocks, Gemm* gemm) {
  static std::mutex mutex;
  static std::map<std::tuple<int, bool, Blocks, bool, bool, int, int, int, int, int>, Fit> known;
  *gemm = {};
  gemm->configuration = c;
  gemm->text = ToText(c);
  gemm->kernel = fp8 ? KernelOf<Fp8>(c, blocks) : KernelOf<Int8>(c, blocks);
  if (HasKernel(c, gemm->kernel)) {
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device)) {
      return Fail("%s (%s) for the current device", cudaGetErrorName(error),
                  cudaGetErrorString(error));
    }
    std::lock_guard lock(mutex);
    const auto [found, is_new] =
        known.try_emplace({device, fp8, blocks, c.stream_k, c.grouped, c.strips, c.tokens,
                           c.multicast, c.splits, c.resident});
    if (is_new) {
      if (cudaError_t error = AskFit(c, gemm->kernel, &found->second)) {
        known.erase(found);
        return Fail("%s (%s) for configuration %s", cudaGetErrorName(error),
                    cudaGetErrorString(error), gemm->text.c_str());
      }
    }
    gemm->fit = found->second;
  }
  if (gemm->fit.stages == 0 || gemm->fit.clusters == 0) {
    return Fail("no kernel was compiled for configuration %s, or it finds no room",
                gemm->text.c_str());
  }
  if (c.stream_k) {
    const int ctas = gemm->fit.clusters * c.multicast;
    if (ctas > kMaxStreamKCtas) {
      return Fail("configuration %s has %d CTAs; stream-K has flags for %d", gemm->text.c_str(),
                  ctas, kMaxStreamKCtas);
    }
    gemm->flags = ctas;
    gemm->exchange_bytes = kFlagBytes + std::int64_t{ctas} * c.strips * kStripRows * c.tokens * 4;
  }
  return nullptr;
}

const char* FitLarger(Configuration c, bool fp8, Blocks blocks, Gemm* gemm) {
  const char* error = FitGemm(c, fp8, blocks, gemm);
  while (error != nullptr && c.resident > 1) {
    --c.resident;
    error = FitGemm(c, fp8, blocks, gemm);
  }
  return error;
}

void SetWeight(int n, int columns, Gemm* gemm) {
  const Configuration& c = gemm->configuration;
  GemmArguments& a = gemm->arguments = {};
  a.n = n;
  a.strips = StripsOf(n);
  a.k_blocks = BlocksOf(columns);
  a.multicast = c.multicast;
  a.splits = c.splits;
  a.multicast_tokens = c.tokens / c.multicast;
  a.n_tiles = CeilDiv(a.strips, c.strips * c.multicast);
  a.stages = std::clamp(CeilDiv(a.k_blocks, c.splits), 1, gemm->fit.stages);
}

namespace {

// Sets the tensors of a launch.
const char* SetTensors(const Gemm& gemm, std::int64_t m, const GemmTensors& tensors,
                       GemmArguments& a) {
  const int tokens = gemm.configuration.tokens;
  a.weight = static_cast<const std::uint8_t*>(tensors.weight);
  a.y = tensors.out;
  a.scale_w = static_cast<const float*>(tensors.scale_w);
  a.scale_x = static_cast<const float*>(tensors.scale_x);
  a.bias = tensors.bias;
  a.out_type = tensors.out_type;
  a.bias_type = tensors.bias_type;
  a.vector_stores = a.n % 8 == 0 && reinterpret_cast<std::uintptr_t>(tensors.out) % 16 == 0;
  if (gemm.configuration.stream_k) {
    a.flags = static_cast<std::uint32_t*>(tensors.exchange);
    a.partials = reinterpret_cast<uint4*>(static_cast<char*>(tensors.exchange) + kFlagBytes);
    if (a.vector_stores) {
      if (const char* error =
              EncodeMatrix(&a.out, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, a.y, m, a.n,
                           StagedTokens(tokens), kStripRows, CU_TENSOR_MAP_L2_PROMOTION_NONE)) {
        return error;
      }
    }
  }
  return EncodeMatrix(&a.q, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, tensors.q, m, tensors.q_columns,
                      a.multicast_tokens, kBlockColumns, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

// Enqueues the kernel on `ctas` CTAs.
const char* Enqueue(const Gemm& gemm, std::int64_t m, const GemmArguments& a, std::int64_t ctas,
                    cudaStream_t stream) {
  const Configuration& c = gemm.configuration;
  const Launch launch(stream, ctas, gemm.kernel.threads,
                      gemm.kernel.shared_bytes(a.stages, c.splits), c.Cluster());
  const cudaError_t error = cudaLaunchKernelEx(&launch.config, gemm.kernel.function, a);
  if (error == cudaSuccess) return nullptr;
  return Fail("%s (%s) for m %lld, n %d, %d blocks of columns, by configuration %s",
              cudaGetErrorName(error), cudaGetErrorString(error), static_cast<long long>(m), a.n,
              a.k_blocks, gemm.text.c_str());
}

}  // namespace

const char* LaunchGemm(const Gemm& gemm, std::int64_t m, const GemmTensors& tensors,
                       cudaStream_t stream) {
  if (m <= 0) return nullptr;
  const Configuration& c = gemm.configuration;
  GemmArguments a = gemm.arguments;
  if (const char* error = SetTensors(gemm, m, tensors, a)) return error;
  std::int64_t ctas = 0;
  if (m <= INT32_MAX) {
    const std::int64_t tiles = ScheduleTiles(static_cast<int>(m), c.tokens, a);
    ChooseL2Policies(a);
    ctas =
        c.stream_k ? std::int64_t{DivideStages(gemm, tiles, a)} * c.multicast : tiles * c.Cluster();
  }
  if (ctas == 0 || ctas > INT32_MAX) {
    return Fail("%lld tokens are too many for a product of %d out-features by configuration %s",
                static_cast<long long>(m), a.n, gemm.text.c_str());
  }
  return Enqueue(gemm, m, a, ctas, stream);
}

const char* LaunchGrouped(const Gemm& gemm, std::int64_t m, const GemmTensors& tensors,
                          const Experts& experts, cudaStream_t stream) {
  if (m <= 0) return nullptr;
  const int tokens = gemm.configuration.tokens;
  GemmArguments a = gemm.arguments;
  // An expert has at most one tile of tokens that is not full.
  const std::int64_t tiles = (std::min<std::int64_t>(experts.count, m) + m / tokens) * a.n_tiles;
  if (experts.count < 1 || experts.count > kMaxExperts || tiles > INT32_MAX) {
    return Fail("%lld rows of %d experts: 1 to %d experts, at most %d tiles",
                static_cast<long long>(m), experts.count, kMaxExperts, INT32_MAX);
  }
  if (const char* error = SetTensors(gemm, m, tensors, a)) return error;
  a.m = static_cast<int>(m);
  a.stages = gemm.fit.stages;
  a.offsets = experts.offsets;
  a.order = experts.order;
  a.slot_scale = experts.slot_scale;
  a.experts = experts.count;
  a.expert_bytes = experts.weight_bytes;
  a.m_tiles = m > std::int64_t{tokens} * experts.count ? 2 : 1;  // of an expert, about
  ChooseL2Policies(a);
  return Enqueue(gemm, m, a, std::min<std::int64_t>(gemm.fit.clusters, tiles), stream);
}

}  // namespace slidesparse::hopper
