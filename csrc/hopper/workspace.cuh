// The global memory through which CTAs of the stream-K kernel exchange partial sums.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace slidesparse::hopper {

constexpr std::int64_t kWorkspaceBytes = 48 << 20;  // more than any configuration of 132 SMs needs

// Finds the workspace of a stream of the current device `device`, allocating it on first use.  Its
// flags are zero, as every launch leaves them.  It is never moved or freed, because CUDA graphs
// hold its address.  Returns null, or an error message.
const char* FindWorkspace(int device, cudaStream_t stream, void** workspace);

}  // namespace slidesparse::hopper
