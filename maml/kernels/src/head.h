// The linear head and the mean cross-entropy: logits = features . weight^T + bias.
//
// Shapes: features and their gradients [n, F], weight [ways, F], logits and their gradients [n, ways].
#pragma once

#include <algorithm>
#include <cmath>

#include "features.h"

namespace {

template <class T> T dot(const T* a, const T* b, int count) {
  V<T> sum = {};
  int i = 0;
  for (; i + Simd<T>::kLanes <= count; i += Simd<T>::kLanes) sum += at(a + i) * at(b + i);
  T total = 0;
  for (int k = 0; k < Simd<T>::kLanes; ++k) total += sum[k];
  for (; i < count; ++i) total += a[i] * b[i];
  return total;
}

template <class T>
void head(const Plan& plan, int n, const T* features, const T* weight, const T* bias, T* logits) {
  const int F = plan.features;
  for (int i = 0; i < n; ++i, features += F, logits += plan.ways)
    for (int c = 0; c < plan.ways; ++c) logits[c] = bias[c] + dot(features, weight + int64_t(c) * F, F);
}

// Returns the mean cross-entropy; writes the softmax `p` of the logits and the loss's gradient `gl` by them.
template <class T>
T cross_entropy(const Plan& plan, int n, const T* logits, const int64_t* labels, T* p, T* gl) {
  const int ways = plan.ways;
  T loss = 0;
  for (int i = 0; i < n; ++i, logits += ways, p += ways, gl += ways) {
    const int label = int(labels[i]);
    const T top = *std::max_element(logits, logits + ways);
    T total = 0;
    for (int c = 0; c < ways; ++c) total += p[c] = std::exp(logits[c] - top);
    loss += std::log(total) + top - logits[label];
    for (int c = 0; c < ways; ++c) {
      p[c] /= total;
      gl[c] = (p[c] - T(c == label)) / T(n);
    }
  }
  return loss / T(n);
}

// Adds the gradients of weight and bias; writes the gradient of the features.
template <class T>
void head_backward(const Plan& plan, int n, const T* features, const T* weight, const T* gl, T* gweight, T* gbias,
                   T* gfeatures) {
  const int F = plan.features;
  std::memset(gfeatures, 0, sizeof(T) * n * F);
  for (int i = 0; i < n; ++i, features += F, gfeatures += F, gl += plan.ways)
    for (int c = 0; c < plan.ways; ++c) {
      gbias[c] += gl[c];
      axpy(gl[c], features, gweight + int64_t(c) * F, F);
      axpy(gl[c], weight + int64_t(c) * F, gfeatures, F);
    }
}

// The tangents of these gradients, when the features move along `dfeatures`, and weight and bias along `vweight` and
// `vbias`.  Adds to `dgweight` and `dgbias`; writes `dgfeatures`.  `dl` is working memory [ways].
template <class T>
void head_tangent(const Plan& plan, int n, const T* features, const T* p, const T* gl, const T* weight,
                  const T* dfeatures, const T* vweight, const T* vbias, T* dl, T* dgweight, T* dgbias,
                  T* dgfeatures) {
  const int F = plan.features, ways = plan.ways;
  std::memset(dgfeatures, 0, sizeof(T) * n * F);
  for (int i = 0; i < n; ++i) {
    T mean_dl = 0;
    for (int c = 0; c < ways; ++c) {
      const int64_t row = int64_t(c) * F;
      dl[c] = vbias[c] + dot(dfeatures, weight + row, F) + dot(features, vweight + row, F);
      mean_dl += p[c] * dl[c];
    }
    for (int c = 0; c < ways; ++c) {
      const int64_t row = int64_t(c) * F;
      const T dgl = p[c] * (dl[c] - mean_dl) / T(n);
      dgbias[c] += dgl;
      axpy(dgl, features, dgweight + row, F);
      axpy(gl[c], dfeatures, dgweight + row, F);
      axpy(dgl, weight + row, dgfeatures, F);
      axpy(gl[c], vweight + row, dgfeatures, F);
    }
    features += F, dfeatures += F, dgfeatures += F, p += ways, gl += ways;
  }
}

}  // namespace
