// Configurations: how a GEMM kernel divides its work, and a performance model to rank them.
//
// The tables of tuned configurations write them as text:
//
//     split:2x64/1x4/2    split-K: a CTA's tile is 2 strips of 64 out-features by 64 tokens,
//                         a cluster is a multicast group of 1 by 4 splits of K',
//                         and 2 CTAs are resident on an SM
//     stream:3x128/2/1    stream-K: 3 strips by 128 tokens, multicast groups of 2, 1 CTA on an SM
//
// This is host code without CUDA, so that tests compile it with a C++ compiler.

#pragma once

#include <functional>
#include <string>
#include <vector>

namespace slidesparse::hopper {

constexpr int kMaxClusterSize = 8;  // that every Hopper GPU supports

struct Configuration {
  bool stream_k;
  int strips, tokens;    // of a CTA's tile
  int multicast;         // CTAs of a multicast group
  int splits;            // of K'; 1 for stream-K
  int resident;          // CTAs on an SM at a time
  bool grouped = false;  // the kernel for experts, which texts do not tell from stream-K

  int Cluster() const { return multicast * splits; }
  int SharedBytes() const;  // shared memory that a CTA may use for so many to be resident
};

std::string ToText(const Configuration& configuration);

// Parses what ToText writes; false for any other text.
bool Parse(const std::string& text, Configuration* configuration);

// How a configuration fits a GPU.
struct Fit {
  int stages;    // of the pipeline, for long rows; 0: no kernel was compiled, or too few fit
  int clusters;  // that are resident at a time
};

struct Candidate {
  double us;  // predicted
  Configuration configuration;
};

// Returns up to `most` configurations for a weight [n, columns] and m tokens, in ascending order of
// the predicted time.  `dense` is the fraction of the weight's blocks that are multiplied as dense
// ones, `block` the mean bytes of a block; `fits` tells how a configuration fits the GPU, which has
// `sms` SMs.
std::vector<Candidate> FindCandidates(int n, int columns, int m, double dense, double block,
                                      int most, int sms,
                                      const std::function<Fit(const Configuration&)>& fits);

}  // namespace slidesparse::hopper
