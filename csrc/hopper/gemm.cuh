// The host side of the GEMM kernels: fitting a configuration to a device, and launching it.

#pragma once

#include "common.cuh"
#include "configuration.cuh"
#include "runtime.cuh"

namespace slidesparse::hopper {

// A compiled kernel; its function is null if none was compiled.
struct GemmKernel {
  void (*function)(GemmArguments);
  int threads;
  int (*shared_bytes)(int stages, int splits);
};

// The kernel for tiles of `strips` strips by kTokens tokens.  Defined in instance.cu, compiled once
// for each type and kTokens.
template <class Type, int kTokens>
GemmKernel FindGemm(const Configuration& configuration, Blocks blocks);

// A configuration that was fitted to a device and a weight: all that a launch needs except the
// tensors and the number of tokens.
struct Gemm {
  Configuration configuration;
  std::string text;  // the configuration, for messages
  GemmKernel kernel;
  Fit fit;
  int flags;                    // that stream-K needs: one for each CTA
  std::int64_t exchange_bytes;  // of the flags and the partial sums that stream-K exchanges
  GemmArguments arguments;
};

// The tensors of a launch.
struct GemmTensors {
  const void* q;  // [m, q_columns]
  std::int64_t q_columns;
  const void* scale_x;
  const void* weight;
  const void* scale_w;
  const void* bias;
  Float bias_type;
  void* out;
  Float out_type;
  void* exchange;  // exchange_bytes, aligned to 128 bytes, with flags that are zero
};

// The experts of a grouped launch.
struct Experts {
  const std::int32_t *offsets, *order;  // [count + 1] and [m] on the device
  const float* slot_scale;              // by slot, or null
  int count;
  std::int64_t weight_bytes;  // of one
};

// Fits a configuration to the current device.
// Occupancy is queried once and cached.  Returns null, or why the configuration cannot run.
const char* FitGemm(const Configuration& configuration, bool fp8, Blocks blocks, Gemm* gemm);

// The same for mixed and coded weights.  Their stages are larger; if a configuration does not fit,
// fewer CTAs are resident on an SM.
const char* FitLarger(Configuration configuration, bool fp8, Blocks blocks, Gemm* gemm);

// Sets the shape [n, columns] of the weight, after FitGemm.
void SetWeight(int n, int columns, Gemm* gemm);

// Enqueues the product of `m` tokens.  Returns null, or an error message.
const char* LaunchGemm(const Gemm& gemm, std::int64_t m, const GemmTensors& tensors,
                       cudaStream_t stream);

// The same for `m` rows of experts, by a grouped configuration.
const char* LaunchGrouped(const Gemm& gemm, std::int64_t m, const GemmTensors& tensors,
                          const Experts& experts, cudaStream_t stream);

}  // namespace slidesparse::hopper
