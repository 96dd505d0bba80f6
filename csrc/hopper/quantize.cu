// How a quantization is divided into blocks of threads.

#include <algorithm>

#include "quantize.cuh"

namespace slidesparse::hopper {
namespace {

constexpr int kMostCodesBytes = 160 << 10;  // of a part, in shared memory
constexpr int kMostLength = 1 << 16;
constexpr int kMultiprocessors = 132;  // only for choosing; any number is right
// Few rows of more vectors than the first are dealt to as many multiprocessors as there are, while
// a part has more than the second.
constexpr int kLongVectors = 640, kLeastVectors = 128;
// Vectors of a part at most where blocks of threads are many: more threads of a block wait for each
// other while too few other blocks are there to work.  With an activation fewer parts are faster.
constexpr int kManyVectors = 1024, kManySiluVectors = 2048;

struct Shape {
  int parts, vectors, threads;
};

template <class Integer>
constexpr Integer CeilDiv(Integer a, Integer b) {
  return (a + b - 1) / b;
}

// Parts that hold whole units of blocks; 0 if a part cannot stand in shared memory.
int PartOf(const QuantizeArguments& arguments, int parts) {
  const int unit = kPartUnit * arguments.length;
  const int part = CeilDiv(CeilDiv(arguments.padded, unit), parts) * unit;
  return std::min(part, arguments.padded) <= kMostCodesBytes ? part : 0;
}

// Rows that are few are shared by several multiprocessors, and each of their threads has little to
// do; of many rows several blocks of threads fit on a multiprocessor, with more to do for each.
Shape Choose(const QuantizeCall& call) {
  Shape shape = {call.parts, call.vectors, 0};
  const std::int64_t vectors = CeilDiv(call.arguments.padded, kVectorCodes);
  if (shape.parts == 0) {
    shape.parts = 1;
    const bool silu = call.before == Before::kSiluMul;
    const bool few = call.m <= kMultiprocessors && vectors > kLongVectors;
    const bool many = call.m > (silu ? 1 : 3) * kMultiprocessors;
    while (shape.parts < kMostParts &&
           (PartOf(call.arguments, shape.parts) == 0 ||
            vectors > shape.parts * 4 * kMostQuantizeThreads ||
            (few && 2 * shape.parts * call.m <= kMultiprocessors &&
             vectors > shape.parts * kLeastVectors) ||
            (many && vectors > shape.parts * (silu ? kManySiluVectors : kManyVectors)))) {
      shape.parts *= 2;
    }
  }
  const std::int64_t of_part = CeilDiv<std::int64_t>(vectors, shape.parts);
  if (shape.vectors == 0) {
    const std::int64_t blocks = call.m * shape.parts;
    shape.vectors = blocks <= kMultiprocessors ? 1 : blocks <= 4 * kMultiprocessors ? 2 : 4;
    while (shape.vectors < 4 && of_part > shape.vectors * kMostQuantizeThreads) shape.vectors *= 2;
  }
  const std::int64_t threads = CeilDiv<std::int64_t>(of_part, shape.vectors);
  shape.threads = static_cast<int>(std::min<std::int64_t>(
      kMostQuantizeThreads, std::max<std::int64_t>(1, CeilDiv<std::int64_t>(threads, 32)) * 32));
  return shape;
}

cudaError_t LaunchInstance(Before before, const QuantizeArguments& arguments,
                           const QuantizeLaunch& launch) {
  switch (before) {
    case Before::kNone:
      return LaunchQuantize<Before::kNone>(arguments, launch);
    case Before::kNorm:
      return LaunchQuantize<Before::kNorm>(arguments, launch);
    case Before::kAddNorm:
      return LaunchQuantize<Before::kAddNorm>(arguments, launch);
    case Before::kSiluMul:
      return LaunchQuantize<Before::kSiluMul>(arguments, launch);
    default:
      return cudaErrorInvalidValue;
  }
}

bool IsAligned(const void* pointer) {  // null is
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

}  // namespace

const char* EnqueueQuantize(const QuantizeCall& call, cudaStream_t stream, bool dependent) {
  QuantizeArguments arguments = call.arguments;
  const int length = arguments.length, phase = arguments.phase;
  if (length < 4 || length % 2 != 0 || length > kMostLength || phase < 0 || phase >= length) {
    return Fail("blocks of %d columns at phase %d: an even length of 4 to %d, a phase below it",
                length, phase, kMostLength);
  }
  arguments.windows = length / 2 - 1;
  const std::int64_t blocks = CeilDiv<std::int64_t>(std::int64_t{arguments.k} + phase, length);
  if (arguments.k < 0 || arguments.columns < 0 || arguments.columns % kStoreCodes != 0 ||
      arguments.columns < blocks * arguments.windows * 4 ||
      reinterpret_cast<std::uintptr_t>(arguments.q) % kStoreCodes != 0) {
    return Fail(
        "rows of %d columns become %lld; codes are asked for in rows of %d at %p: they must hold "
        "that many, be a multiple of %d, and begin at a multiple of %d bytes",
        arguments.k, static_cast<long long>(blocks * arguments.windows * 4), arguments.columns,
        static_cast<void*>(arguments.q), kStoreCodes, kStoreCodes);
  }
  if (call.m <= 0) return nullptr;
  // Blocks enough for the padding of q as well.
  const std::int64_t padded =
      CeilDiv<std::int64_t>(arguments.columns / 4, arguments.windows) * length;
  if (padded > std::int64_t{kMostParts} * kMostCodesBytes) {
    return Fail("rows of %d columns are longer than the %d that can be quantized", arguments.k,
                kMostParts * kMostCodesBytes);
  }
  arguments.padded = static_cast<int>(padded);
  arguments.magic = arguments.windows == 1 ? 0
                                           : static_cast<std::uint32_t>(CeilDiv<std::uint64_t>(
                                                 std::uint64_t{1} << 32, arguments.windows));
  const Shape shape =
      Choose({arguments, call.m, call.input, call.fp8, call.before, call.parts, call.vectors});
  arguments.parts = shape.parts;
  arguments.part = shape.parts < 1 || shape.parts > kMostParts ? 0 : PartOf(arguments, shape.parts);
  if ((arguments.part == 0 && padded > 0) || call.m > INT32_MAX / kMostParts) {
    return Fail(
        "%lld rows of %d columns in %d parts, blocks of %d columns: too long for the %d "
        "parts that there can be",
        static_cast<long long>(call.m), arguments.k, shape.parts, length, kMostParts);
  }
  arguments.part_codes = arguments.part / length * arguments.windows * 4;
  const int element = call.input == Float::kFloat32 ? 4 : 2;
  const bool wide =
      phase == 0 && arguments.k % kVectorCodes == 0 && arguments.stride * element % 16 == 0 &&
      arguments.residual_stride * element % 16 == 0 && IsAligned(arguments.x) &&
      IsAligned(arguments.residual) && IsAligned(arguments.total) && IsAligned(arguments.gain);
  const int codes = std::min(arguments.part, arguments.padded);
  const Launch launch = {stream,        dim3(static_cast<unsigned>(call.m * shape.parts)),
                         shape.threads, CeilDiv(codes, kStoreCodes) * kStoreCodes,
                         shape.parts,   dependent};
  const cudaError_t error =
      LaunchInstance(call.before, arguments, {launch, call.input, call.fp8, wide, shape.vectors});
  if (error == cudaSuccess) return nullptr;
  return Fail("%s (%s) for quantizing [%lld, %d] of type %d after %d in %d parts by %d threads",
              cudaGetErrorName(error), cudaGetErrorString(error), static_cast<long long>(call.m),
              arguments.k, static_cast<int>(call.input), static_cast<int>(call.before), shape.parts,
              shape.threads);
}

}  // namespace slidesparse::hopper
