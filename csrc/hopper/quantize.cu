// Launching the quantizer: how many CTAs share a row, and how many threads and vectors each has.

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "quantize.cuh"

namespace slidesparse::hopper {
namespace {

constexpr int kMaxCodesBytes = 160 << 10;  // codes of a part in shared memory
constexpr int kSms = 132;                  // an H100's; a heuristic, on which no result depends
// If there are few rows, rows of more than kLongVectors are divided among as many SMs as there are,
// as long as a part has more than kMinVectors.
constexpr int kLongVectors = 640, kMinVectors = 128;
// The most vectors of a part if there are many rows: with larger CTAs too few fit on an SM to hide
// the latency of their barriers.  With SiLU fewer parts are faster.
constexpr int kManyVectors = 1024, kManySiluVectors = 2048;

// How a row is divided.
struct Division {
  int parts;    // CTAs that share it
  int vectors;  // that a thread keeps in registers
  int threads;  // of a CTA
};

// The columns of a part, in units of kPartUnit blocks; 0 if its codes do not fit into shared
// memory.
int PartOf(const QuantizeArguments& arguments, int parts) {
  const int unit = (arguments.group < kVectorCodes ? kPartUnit : 1) * arguments.group;
  const int part = CeilDiv(CeilDiv(arguments.padded, unit), parts) * unit;
  return std::min(part, arguments.padded) <= kMaxCodesBytes ? part : 0;
}

// With few rows latency counts: several SMs share a row, and threads have little work each.  With
// many rows throughput counts: several CTAs are resident on an SM, and threads have more work.
Division Divide(const QuantizeArguments& arguments, std::int64_t m, Prologue prologue) {
  const std::int64_t vectors = CeilDiv(arguments.padded, kVectorCodes);
  const bool silu = prologue == Prologue::kSiluMul;
  const bool few = m <= kSms && vectors > kLongVectors;
  const bool many = m > (silu ? 1 : 3) * kSms;
  Division division = {1, 0, 0};
  int& parts = division.parts;
  while (parts < kMaxParts &&
         (PartOf(arguments, parts) == 0 || vectors > parts * 4 * kMaxQuantizeThreads ||
          (few && 2 * parts * m <= kSms && vectors > parts * kMinVectors) ||
          (many && vectors > parts * (silu ? kManySiluVectors : kManyVectors)))) {
    parts *= 2;
  }
  const std::int64_t of_part = CeilDiv<std::int64_t>(vectors, parts);
  const std::int64_t ctas = m * parts;
  int& held = division.vectors;
  held = ctas <= kSms ? 1 : ctas <= 4 * kSms ? 2 : 4;
  while (held < 4 && of_part > held * kMaxQuantizeThreads) held *= 2;
  const std::int64_t warps = CeilDiv<std::int64_t>(CeilDiv<std::int64_t>(of_part, held), 32);
  division.threads =
      static_cast<int>(std::clamp<std::int64_t>(warps * 32, 32, kMaxQuantizeThreads));
  return division;
}

// By Prologue.
constexpr decltype(&FindQuantize<Prologue::kNone>) kFindKernel[] = {
    FindQuantize<Prologue::kNone>, FindQuantize<Prologue::kRmsNorm>,
    FindQuantize<Prologue::kAddRmsNorm>, FindQuantize<Prologue::kSiluMul>};

// Loads all kernels for a type of codes, once for each device, because a kernel cannot be loaded
// while a CUDA graph is captured, where its first call may be.
cudaError_t LoadKernels(bool fp8) {
  static std::mutex mutex;
  static std::set<std::pair<int, bool>> loaded;
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  std::lock_guard lock(mutex);
  if (loaded.count({device, fp8}) > 0) return cudaSuccess;
  for (const auto find : kFindKernel) {
    for (Float input : {Float::kBFloat16, Float::kFloat16}) {
      for (int vectors : {0, 1, 2, 4}) {
        const QuantizeKernel kernel = find(input, fp8, vectors > 0, vectors);
        if (cudaError_t error = LoadKernel(reinterpret_cast<const void*>(kernel))) return error;
      }
    }
  }
  loaded.insert({device, fp8});
  return cudaSuccess;
}

bool IsAligned(const void* pointer) {  // true for null
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

}  // namespace

const char* PrepareQuantize(QuantizeArguments& arguments, int length, bool fp8) {
  if (const char* error = CheckPattern(length, arguments.phase)) return error;
  int& group = arguments.group = length;  // a window, or both of a block of 4:6
  int& codes = arguments.group_codes = length == 6 ? 8 : 4;
  if (length == kCodedLength) group = codes = kCodedColumns;
  const std::int64_t needed =
      CeilDiv<std::int64_t>(std::int64_t{arguments.k} + arguments.phase, group) * codes;
  const int multiple = std::max(codes, kStoreCodes);
  if (arguments.k < 0 || arguments.columns < needed || arguments.columns % multiple != 0) {
    return Fail(
        "rows of %d columns become %lld; codes are asked for in rows of %d, which must hold that "
        "many and be a multiple of %d",
        arguments.k, static_cast<long long>(needed), arguments.columns, multiple);
  }
  // Groups are counted for the padding of q as well.
  const std::int64_t padded = CeilDiv<std::int64_t>(arguments.columns, codes) * group;
  arguments.padded = static_cast<int>(std::min<std::int64_t>(padded, INT32_MAX / 2));
  if (padded > std::int64_t{kMaxParts} * kMaxCodesBytes ||
      (padded > 0 && PartOf(arguments, kMaxParts) == 0)) {
    return Fail("rows of %d columns in blocks of %d are longer than the %d that can be quantized",
                arguments.k, length, kMaxParts * kMaxCodesBytes);
  }
  if (cudaError_t error = LoadKernels(fp8)) {
    return Fail("%s (%s) for the quantizing kernels", cudaGetErrorName(error),
                cudaGetErrorString(error));
  }
  return nullptr;
}

const char* EnqueueQuantize(QuantizeArguments arguments, std::int64_t m, Float input, bool fp8,
                            Prologue prologue, cudaStream_t stream) {
  if (m <= 0) return nullptr;
  if (m > INT32_MAX / kMaxParts || !IsAligned(arguments.q)) {
    return Fail("codes of %lld tokens at %p: at most %d, at a multiple of %d bytes",
                static_cast<long long>(m), static_cast<void*>(arguments.q), INT32_MAX / kMaxParts,
                kStoreCodes);
  }
  const Division division = Divide(arguments, m, prologue);
  arguments.parts = division.parts;
  arguments.part = PartOf(arguments, division.parts);
  arguments.part_codes = arguments.part / arguments.group * arguments.group_codes;
  const bool wide = arguments.phase == 0 && arguments.k % kVectorCodes == 0 &&
                    arguments.stride % kVectorCodes == 0 &&
                    arguments.residual_stride % kVectorCodes == 0 && IsAligned(arguments.x) &&
                    IsAligned(arguments.residual) && IsAligned(arguments.total) &&
                    IsAligned(arguments.gain);
  const int codes = std::min(arguments.part, arguments.padded);
  const Launch launch(stream, m * division.parts, division.threads,
                      CeilDiv(codes, kStoreCodes) * kStoreCodes, division.parts);
  const QuantizeKernel kernel =
      kFindKernel[static_cast<int>(prologue)](input, fp8, wide, division.vectors);
  const cudaError_t error = cudaLaunchKernelEx(&launch.config, kernel, arguments);
  if (error == cudaSuccess) return nullptr;
  return Fail(
      "%s (%s) for quantizing [%lld, %d] of type %d after prologue %d in %d parts by %d threads",
      cudaGetErrorName(error), cudaGetErrorString(error), static_cast<long long>(m), arguments.k,
      static_cast<int>(input), static_cast<int>(prologue), division.parts, division.threads);
}

}  // namespace slidesparse::hopper
