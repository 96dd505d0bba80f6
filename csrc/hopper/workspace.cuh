// The memory of the stream-K kernel.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace slidesparse::hopper {

constexpr std::int64_t kWorkspaceBytes = 48 << 20;  // more than any configuration of 132 SMs needs

// The workspace of a stream of `device`, the current one, allocated when it is first asked for: all
// zero, as every launch leaves it, and never moved, because graphs hold its address.  Null, or what
// went wrong.
const char* FindWorkspace(int device, cudaStream_t stream, void** workspace);

}  // namespace slidesparse::hopper
