// How a product is divided into blocks of threads.

#pragma once

#include <algorithm>

#include "enqueue.cuh"
#include "gemm.cuh"
#include "stream.cuh"

namespace slidesparse::hopper {

// How a kernel finds room on the current device.
struct Fit {
  int stages;    // of the ring, as many as shared memory holds; 0 when these are too few
  int clusters;  // that live at a time
};

struct ProductLaunch {
  cudaStream_t stream;
  int strips;        // of a block of threads
  int shared_bytes;  // a block's share of shared memory: as many stages as fit
  bool dependent;    // start before the kernel in front has ended
  int grid;          // blocks of threads of the streaming kernel; 0 is the clustered one
  Fit* fit;          // if not null, nothing is launched: how it would fit is told
};

constexpr int kFewestStages = 2;        // a stage is given back while the next one is worked on
constexpr int kTogether = 2048;         // tokens whose tiles are walked together
constexpr int kKeptOutputs = 16 << 20;  // bytes; more would drive weights and activations out of L2

// The largest number of stages, at most `needed`, whose `bytes` fit; 0 when they are too few.
template <class Bytes>
int FitStages(std::int64_t needed, int shared_bytes, Bytes bytes) {
  int stages = needed > 256 ? 256 : needed > 0 ? static_cast<int>(needed) : 1;
  while (stages > 1 && bytes(stages) > shared_bytes) --stages;
  const bool enough = stages >= (needed > 1 ? kFewestStages : 1);
  return enough && bytes(stages) <= shared_bytes ? stages : 0;
}

// Tiles, and how long L2 keeps what they read: a weight that one row of tiles reads need not stay.
// Returns how many tiles there are.
template <int kStrips, int kTokens>
std::int64_t CountTiles(Arguments& arguments) {
  const int strips = kStrips * arguments.sharers;
  arguments.shared_tokens = kTokens / arguments.sharers;
  arguments.across = (arguments.strips + strips - 1) / strips;
  arguments.by_token = (arguments.m + kTokens - 1) / kTokens;
  const int together = std::min(kTogether / kTokens, arguments.by_token);
  const int last = arguments.by_token % together;
  arguments.together = Divisor(together);
  arguments.last = Divisor(last > 0 ? last : together);
  arguments.of_group = Divisor(together * arguments.across);
  arguments.keep_weight = arguments.by_token > 1 ? kEvictNormal : kEvictFirst;
  arguments.keep_tokens = arguments.by_token > 1 ? kEvictNormal : kEvictLast;
  arguments.keep_out = 2ll * arguments.m * arguments.n > kKeptOutputs ? kEvictFirst : kEvictNormal;
  return static_cast<std::int64_t>(arguments.across) * arguments.by_token;
}

inline cudaError_t Submit(void (*kernel)(Arguments), Prepared& prepared, const Arguments& arguments,
                          const Launch& launch, Fit* fit) {
  if (fit == nullptr) return Enqueue(kernel, prepared, arguments, launch);
  fit->stages = arguments.stages;
  return CountClusters(kernel, prepared, launch, fit->clusters);
}

template <class Type, int kStrips, int kTokens>
cudaError_t LaunchSplit(Arguments arguments, const ProductLaunch& launch) {
  using S = SplitShape<kStrips, kTokens>;
  static Prepared prepared;
  const int sharers = arguments.sharers, splits = arguments.splits;
  if (sharers < 1 || splits < 1 || sharers * splits > kMostSplits || kTokens % (8 * sharers) != 0) {
    return cudaErrorInvalidConfiguration;
  }
  const std::int64_t blocks = CountTiles<kStrips, kTokens>(arguments) * sharers * splits;
  const auto bytes = [=](int stages) { return S::SharedBytes(stages, splits); };
  arguments.stages =
      FitStages((arguments.blocks + splits - 1) / splits, launch.shared_bytes, bytes);
  if (arguments.stages == 0 || blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  return Submit(Gemm<Type, kStrips, kTokens>, prepared, arguments,
                {launch.stream, dim3(static_cast<unsigned>(blocks)), S::kThreads,
                 bytes(arguments.stages), sharers * splits, launch.dependent},
                launch.fit);
}

template <class Type, int kStrips, int kTokens>
cudaError_t LaunchStream(Arguments arguments, const ProductLaunch& launch) {
  using S = StreamShape<kStrips, kTokens>;
  static Prepared prepared;
  const int sharers = arguments.sharers;
  if (sharers < 1 || sharers > kMostSplits || kTokens % (8 * sharers) != 0 ||
      launch.grid > kMostStreamBlocks) {
    return cudaErrorInvalidConfiguration;
  }
  const std::int64_t tiles = CountTiles<kStrips, kTokens>(arguments);
  const std::int64_t stages = tiles * arguments.blocks;
  const std::int64_t wanted = launch.grid / sharers;
  const std::int64_t parts = wanted < stages ? wanted : stages;
  if (parts == 0 || stages > INT32_MAX) return cudaErrorInvalidConfiguration;
  arguments.rounds = tiles > parts ? static_cast<int>(tiles / parts - 1) : 0;
  arguments.units =
      static_cast<std::uint32_t>(stages - arguments.rounds * parts * arguments.blocks);
  arguments.seeded = arguments.units / parts >= arguments.blocks;
  arguments.stages = FitStages((stages + parts - 1) / parts, launch.shared_bytes,
                               [](int count) { return S::SharedBytes(count); });
  if (arguments.stages == 0) return cudaErrorInvalidConfiguration;
  return Submit(GemmStream<Type, kStrips, kTokens>, prepared, arguments,
                {launch.stream, dim3(static_cast<unsigned>(parts * sharers)), S::kThreads,
                 S::SharedBytes(arguments.stages), sharers, launch.dependent},
                launch.fit);
}

template <class Type, int kStrips, int kTokens>
cudaError_t LaunchShape(const Arguments& arguments, const ProductLaunch& launch) {
  return launch.grid > 0 ? LaunchStream<Type, kStrips, kTokens>(arguments, launch)
                         : LaunchSplit<Type, kStrips, kTokens>(arguments, launch);
}

// Tiles of kTokens; defined in instance.cu, compiled once for each type and kTokens.
template <class Type, int kTokens>
cudaError_t LaunchTokens(const Arguments& arguments, const ProductLaunch& launch);

}  // namespace slidesparse::hopper
