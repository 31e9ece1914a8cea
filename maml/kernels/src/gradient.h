// The features and their backward pass, task by task.
#pragma once

#include "convolution.h"
#include "features.h"
#include "memory.h"

namespace {

// The forward pass of task `b`: writes all maps that the backward pass reads, and the statistics [layers, 2, C].
template <class T>
void forward(const Plan& plan, int b, int n, const T* images, Parameters<const T> params, const Kept<T>& task, T* used) {
  const Layer& first = plan.layers[0];
  enter_images(first, n, images + int64_t(b) * n * first.cin * first.h * first.w, task.x);
  meet();
  for (size_t k = 0; k < plan.layers.size(); ++k) {
    const Layer& l = plan.layers[k];
    const Saved<T>& s = task.layers[k];
    const T *gamma = params(b, l.slot.gamma), *beta = params(b, l.slot.beta);
    int64_t before = 0;
    convolve<T>(l, n, {{k ? task.layers[k - 1].y : task.x, params(b, l.slot.weight)}}, s.z, [&](const Band& band) {
      observe(l, band, gamma, before, s);
      before += int64_t(band.rows) * l.ow;
    });
    const Range own = own_channels<T>(l.cout);
    for (int c = own.first; c < own.last; ++c) used[c] = s.mean[c], used[l.cout + c] = s.inv[c] / T(before);
    used += 2 * l.cout;
    clear_border(s.y, n, l.qh, l.qw, l.cout, l.yborder);
    activate(l, n, gamma, beta, T(plan.eps), s);
    meet();
  }
}

// The backward pass of task `b`, from the gradient by the features [n, F] and the gradients `injected` (if not null).
// `turned` has room for the largest layer's weights.  `fresh`: a task's own gradient is overwritten, not added to.
template <class T>
void backward(const Plan& plan, int b, int n, const T* gfeatures, const Injected<T>* injected,
              Parameters<const T> params, const Kept<T>& task, T* turned, Parameters<T> grads, bool fresh) {
  const int L = int(plan.layers.size());
  const auto begun = [&](int slot, int64_t rows, int channels) {
    return fresh ? grads.cleared(b, slot, rows, channels) : grads(b, slot);
  };
  spread_features(plan, n, gfeatures, task.layers[L - 1].gq);
  for (int k = L - 1; k >= 0; --k) {
    const Layer& l = plan.layers[k];
    const Saved<T>& s = task.layers[k];
    const T *x = k ? task.layers[k - 1].y : task.x, *gamma = params(b, l.slot.gamma);
    T* gweight = begun(l.slot.weight, l.weight_rows(), l.cout);
    norm_sums(l, n, s, begun(l.slot.gamma, 1, l.cout), begun(l.slot.beta, 1, l.cout));
    clear_border(s.gz, n, l.oh, l.ow, l.cout, l.zborder);
    l.each_band(n, [&](const Band& band) {
      norm_backward<T>(l, band, gamma, s, injected ? injected->layers[k].z : nullptr);
      convolve_weight(l, n, band, x, s.gz, gweight);
    });
    if (k == 0) break;  // the images' gradient is not needed
    meet();
    transpose(l, params(b, l.slot.weight), turned);
    convolve_input<T>(l, n, {s.gz, turned}, task.layers[k - 1].gq, injected ? injected->layers[k - 1].y : nullptr);
  }
}

inline int64_t largest_weights(const Plan& plan) {
  return largest(plan, [](const Layer& l) { return l.weights(); });
}

// images [tasks, n, C, H, W] -> features [tasks, n, F], the statistics `used` [tasks, layers, 2, C], and `kept`,
// `Kept::size` numbers for each task.
//
// A task is finished before the next one starts, so that its maps stay in the second-level cache.
template <class T>
void features(const Plan& plan, int tasks, int n, const T* images, Parameters<const T> params, T* out, T* used,
              T* kept) {
  Block<T> blocks(kept, Kept<T>::size(plan, n, false));
  Kept<T> task;
  for (int b = 0; b < tasks; ++b) {
    task.take(plan, n, blocks.of(b));
    together([&] {
      forward(plan, b, n, images, params, task, used + b * plan.statistics());
      pool_features(plan, n, task.layers.back().y, out + int64_t(b) * n * plan.features);
    });
  }
}

// The gradient by the features [tasks, n, F] -> the gradient by the parameters, and `kept_back` (if not null) for
// `along`.  `injected`: null, or the result of `along`, `Injected::size` numbers for each task.  If it is not null, the
// pass adds to the values in `grads`.
template <class T>
void pull_back(const Plan& plan, int tasks, int n, Parameters<const T> params, T* kept, const T* gfeatures,
               Block<T> injected, Parameters<T> grads, T* kept_back) {
  const int64_t size_back = Kept<T>::size(plan, n, true);
  T *turned, *first_gz, *own;
  arena.deal<T>([&](Buffers<T>& from) {
    turned = from.take(largest_weights(plan));
    first_gz = from.take(plan.layers[0].gz_size(n));
    own = kept_back ? nullptr : from.take(size_back);
  });
  Block<T> blocks(kept, Kept<T>::size(plan, n, false)), back(kept_back, size_back);
  Kept<T> task;
  Injected<T> beside;
  for (int b = 0; b < tasks; ++b) {
    task.take(plan, n, blocks.of(b)), task.take_back(plan, n, kept_back ? back.of(b) : Buffers<T>(own, size_back));
    task.layers[0].gz = first_gz;
    if (injected) beside.take(plan, n, injected.of(b));
    together([&] {
      backward<T>(plan, b, n, gfeatures + int64_t(b) * n * plan.features, injected ? &beside : nullptr, params, task,
                  turned, grads, !injected);
    });
  }
}

}  // namespace
