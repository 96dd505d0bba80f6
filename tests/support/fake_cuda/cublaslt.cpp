#include <cublasLt.h>

#include "fake.h"

namespace {

constexpr std::uint64_t kMagic = 0xa150;  // first in each algorithm that this library made

}  // namespace

extern "C" {

#define FAKE_DEFINE(name, parameters, ...)                                        \
  cublasStatus_t name parameters {                                                \
    return Called(CUBLAS_STATUS_NOT_SUPPORTED, #name, #__VA_ARGS__, __VA_ARGS__); \
  }
FAKE_FUNCTIONS(FAKE_DEFINE)

// Algorithm i wants a workspace of i MiB, and says so in its second word.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(In handle, In product, In layout_a, In layout_b,
                                              In layout_c, In layout_d, In preference, int most,
                                              cublasLtMatmulHeuristicResult_t* results,
                                              int* found) {
  const auto status =
      Called(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoGetHeuristic",
             "handle,product,layout_a,layout_b,layout_c,layout_d,preference,most,"
             "algorithms",
             handle, product, layout_a, layout_b, layout_c, layout_d, preference, Int{most}, found);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  if (*found > most) *found = most;
  for (int i = 0; i < *found; ++i) {
    const auto word = static_cast<std::uint64_t>(i);
    const bool refused = state.settings.count("refused") != 0 && i == state.settings["refused"];
    results[i] = {{{kMagic, word}}, word << 20, refused ? CUBLAS_STATUS_NOT_SUPPORTED : status};
  }
  return status;
}

cublasStatus_t cublasLtMatmulAlgoCheck(In handle, In product, In layout_a, In layout_b, In layout_c,
                                       In layout_d, const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result) {
  const auto status = Called(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoCheck",
                             "handle,product,layout_a,layout_b,layout_c,layout_d", handle, product,
                             layout_a, layout_b, layout_c, layout_d);
  result->workspaceSize = algorithm->data[1] << 20;
  return algorithm->data[0] == kMagic ? status : CUBLAS_STATUS_NOT_SUPPORTED;
}

Size cublasLtGetVersion() {
  return static_cast<Size>(Call("cublasLtGetVersion", "").Setting("version"));
}
const char* cublasLtGetStatusName(cublasStatus_t) { return "CUBLAS_STATUS_NOT_SUPPORTED"; }
const char* cublasLtGetStatusString(cublasStatus_t) { return "fake words"; }

}  // extern "C"
