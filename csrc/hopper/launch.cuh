// Launching an instance of the kernel.

#pragma once

#include <cuda_runtime.h>

#include "gemm.cuh"
#include "stream.cuh"

namespace slidesparse::hopper {

struct Launch {
  cudaStream_t stream;
  int strips;        // of a block of threads
  int shared_bytes;  // a block's share of shared memory: as many stages as fit
  bool dependent;    // start before the kernel in front has ended
  int grid;          // blocks of threads of the streaming kernel; 0 is the clustered one
};

constexpr int kFewestStages = 2;    // a stage is given back while the next one is worked on
constexpr int kMostBlocks = 65535;  // of a grid's second dimension

inline cudaError_t LaunchKernel(void (*kernel)(Arguments), const Arguments& arguments,
                                const Launch& launch, dim3 grid, int threads, int shared,
                                int cluster) {
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)) {
    return error;
  }
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = cluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  if (launch.dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

// As many stages as fit, at most `needed`; 0 when they are too few.
template <class S>
int FitStages(int needed, int shared_bytes) {
  int stages = needed > 0 ? needed : 1;
  while (stages > 1 && S::SharedBytes(stages) > shared_bytes) --stages;
  const bool enough = stages >= (needed > 1 ? kFewestStages : 1);
  return enough && S::SharedBytes(stages) <= shared_bytes ? stages : 0;
}

template <class Type, int kStrips, int kTokens>
cudaError_t LaunchSplit(Arguments arguments, const Launch& launch) {
  using S = SplitShape<kStrips, kTokens>;
  const int needed = (arguments.blocks + arguments.splits - 1) / arguments.splits;
  arguments.stages = FitStages<S>(needed, launch.shared_bytes);
  const int cluster = arguments.sharers * arguments.splits;
  const int strips = kStrips * arguments.sharers;
  const int tiles = (arguments.m + kTokens - 1) / kTokens;
  if (arguments.stages == 0 || kTokens % (8 * arguments.sharers) != 0 ||
      arguments.splits > kMostSplits || cluster > kMostSplits || tiles > kMostBlocks) {
    return cudaErrorInvalidConfiguration;
  }
  const dim3 grid((arguments.strips + strips - 1) / strips * cluster, tiles);
  return LaunchKernel(Gemm<Type, kStrips, kTokens>, arguments, launch, grid, S::kThreads,
                      S::SharedBytes(arguments.stages), cluster);
}

template <class Type, int kStrips, int kTokens>
cudaError_t LaunchStream(Arguments arguments, const Launch& launch) {
  using S = StreamShape<kStrips, kTokens>;
  const int strips = kStrips * arguments.sharers;
  const std::int64_t tiles = static_cast<std::int64_t>((arguments.strips + strips - 1) / strips) *
                             ((arguments.m + kTokens - 1) / kTokens);
  const std::int64_t units = tiles * arguments.blocks;
  if (arguments.sharers < 1 || arguments.sharers > kMostSplits ||
      kTokens % (8 * arguments.sharers) != 0 || units > INT32_MAX ||
      launch.grid > kMostStreamBlocks) {
    return cudaErrorInvalidConfiguration;
  }
  arguments.units = static_cast<std::uint32_t>(units);
  const std::int64_t wanted = launch.grid / arguments.sharers;
  const std::int64_t parts = wanted < units ? wanted : units;
  if (parts == 0) return cudaErrorInvalidConfiguration;
  arguments.seeded = units / parts >= arguments.blocks;
  const std::int64_t needed = (units + parts - 1) / parts;
  arguments.stages = FitStages<S>(static_cast<int>(needed), launch.shared_bytes);
  if (arguments.stages == 0) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(parts * arguments.sharers));
  return LaunchKernel(GemmStream<Type, kStrips, kTokens>, arguments, launch, grid, S::kThreads,
                      S::SharedBytes(arguments.stages), arguments.sharers);
}

template <class Type, int kStrips, int kTokens>
cudaError_t LaunchShape(const Arguments& arguments, const Launch& launch) {
  return launch.grid == 0 ? LaunchSplit<Type, kStrips, kTokens>(arguments, launch)
                          : LaunchStream<Type, kStrips, kTokens>(arguments, launch);
}

// Tiles of kTokens; defined in instance.cu, compiled once for each type and kTokens.
template <class Type, int kTokens>
cudaError_t LaunchTokens(const Arguments& arguments, const Launch& launch);

}  // namespace slidesparse::hopper
