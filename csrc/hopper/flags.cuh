// The flags by which CTAs of the stream-K kernel hand over partial sums.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace slidesparse::hopper {

constexpr int kFlagWords = 8;          // one sector of 32 bytes for each CTA
constexpr int kMaxStreamKCtas = 1024;  // of one launch

// Finds the flags of a launch on a stream of the current device `device`, allocated on first use:
// kFlagWords for each of kMaxStreamKCtas CTAs, zero, as every launch leaves them.  Launches that
// may run at the same time have different ones: those of a stream, and those of each CUDA graph
// that is captured on it.  Returns null, or an error message.
const char* FindFlags(int device, cudaStream_t stream, std::uint32_t** flags);

}  // namespace slidesparse::hopper
