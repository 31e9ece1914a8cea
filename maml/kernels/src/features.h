// From the last maps to the features, and back.
#pragma once

#include <cstring>

#include "geometry.h"

namespace {

// b += scale * a.
template <class T> void axpy(T scale, const T* a, T* b, int count) {
  for (int i = 0; i < count; ++i) b[i] += scale * a[i];
}

// Last activations [n, Q, C] -> features: the mean over Q, or all activations in the order (C, Q), the order of torch's
// flatten.
template <class T> void pool_features(const Plan& plan, int n, const T* y, T* f) {
  const Layer& l = plan.layers.back();
  const int Q = l.Q(), C = l.cout;
  const Range own = own_channels<T>(C);
  if (plan.mean) start_sums(f, n, C);
  for (int i = 0; i < n; ++i, f += plan.features)
    for (int q = 0; q < Q; ++q, y += C) {
      if (plan.mean) axpy(T(1) / Q, y + own.first, f + own.first, own.last - own.first);
      else for (int c = own.first; c < own.last; ++c) f[c * Q + q] = y[c];
    }
}

// Gradient by the features -> gradient by the last activations.
template <class T> void spread_features(const Plan& plan, int n, const T* gf, T* gy) {
  const Layer& l = plan.layers.back();
  const int Q = l.Q(), C = l.cout;
  const Range own = own_channels<T>(C);
  for (int i = 0; i < n; ++i, gf += plan.features)
    for (int q = 0; q < Q; ++q, gy += C)
      for (int c = own.first; c < own.last; ++c) gy[c] = plan.mean ? gf[c] / Q : gf[c * Q + q];
}

}  // namespace
