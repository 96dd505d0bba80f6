// The sequential product on a CPU, a reference for performance.

#pragma once

#include "kernels.cuh"

namespace slidesparse::spmm {

inline void Sequential(const Arguments<float>& a) {
  for (int n = 0; n < a.n; ++n) {
    float* out = a.out + n * a.ldo;
    for (int m = 0; m < a.m; ++m) out[m] = 0.0f;
    for (int w = 0; w < a.groups * a.kept; ++w) {
      const int k = w / a.kept * a.group + a.offsets[w * a.ldw + n];
      if (k >= a.k) continue;
      const float weight = a.values[w * a.ldw + n];
      const float* x = a.x + k * a.ldx;
      for (int m = 0; m < a.m; ++m) out[m] += weight * x[m];
    }
  }
}

}  // namespace slidesparse::spmm
