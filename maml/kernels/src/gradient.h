// The loss and its gradient, task by task; and the features alone, with the way back from them.
#pragma once

#include "convolution.h"
#include "head.h"
#include "memory.h"

namespace {

// The way forward of task `b`: writes all maps that the way back reads, and `task.features`.
template <class T>
void forward(const Plan& plan, int b, int n, const T* images, Parameters<const T> params, const Residuals<T>& task) {
  const Layer& first = plan.layers[0];
  enter_images(first, n, images + int64_t(b) * n * first.cin * first.h * first.w, task.x);
  for (size_t k = 0; k < plan.layers.size(); ++k) {
    const Layer& l = plan.layers[k];
    const Saved<T>& s = task.layers[k];
    const T *gamma = params(b, l.slot.gamma), *beta = params(b, l.slot.beta);
    int64_t before = 0;
    convolve<T>(l, n, {{k ? task.layers[k - 1].y : task.x, params(b, l.slot.weight)}}, s.z, [&](const Band& band) {
      observe(l, band, gamma, before, s);
      before += int64_t(band.rows) * l.ow;
    });
    clear_border(s.y, n, l.qh, l.qw, l.cout, l.yborder);
    activate(l, n, gamma, beta, T(plan.eps), s);
  }
  pool_features(plan, n, task.layers.back().y, task.features);
}

// Its way back, from the gradient by the features [n, F].  `turned` holds the largest layer's weights.
template <class T>
void backward(const Plan& plan, int b, int n, const T* gfeatures, Parameters<const T> params,
              const Residuals<T>& task, T* turned, Parameters<T> grads) {
  const int L = int(plan.layers.size());
  spread_features(plan, n, gfeatures, task.layers[L - 1].gq);
  for (int k = L - 1; k >= 0; --k) {
    const Layer& l = plan.layers[k];
    const Saved<T>& s = task.layers[k];
    const T *x = k ? task.layers[k - 1].y : task.x, *gamma = params(b, l.slot.gamma);
    T* gweight = grads.cleared(b, l.slot.weight, l.weights());
    norm_sums(l, n, s, grads.cleared(b, l.slot.gamma, l.cout), grads.cleared(b, l.slot.beta, l.cout));
    clear_border(s.gz, n, l.oh, l.ow, l.cout, l.zborder);
    l.each_band(n, [&](const Band& band) {
      norm_backward(l, band, gamma, s);
      convolve_weight(l, n, band, x, s.gz, gweight);
    });
    if (k == 0) break;  // nobody asks for the images' gradient
    transpose(l, params(b, l.slot.weight), turned);
    convolve_input<T>(l, n, {{s.gz, turned}}, task.layers[k - 1].gq);
  }
}

inline int64_t largest_weights(const Plan& plan) {
  return largest(plan, [](const Layer& l) { return l.weights(); });
}

// images [tasks, n, C, H, W], labels [tasks, n] -> losses [tasks], logits [tasks, n, ways], gradients, and where asked
// for (not null) the residuals, `Residuals::size` for each task.
//
// A task is finished before the next one starts, so that its maps stay in the second-level cache.
template <class T>
void gradient(const Plan& plan, int tasks, int n, const T* images, const int64_t* labels, Parameters<const T> params,
              T* losses, T* logits, Parameters<T> grads, T* residuals) {
  const int F = plan.features;
  const int64_t saved = Residuals<T>::size(plan, n);
  T *turned, *gfeatures, *first_gz, *own;
  arena.deal<T>([&](Buffers<T>& from) {
    turned = from.take(largest_weights(plan));
    gfeatures = from.take(int64_t(n) * F);
    first_gz = from.take(plan.layers[0].gz_size(n));
    own = residuals ? nullptr : from.take(saved);
  });

  Residuals<T> task;
  for (int b = 0; b < tasks; ++b) {
    Buffers<T> of_task(residuals ? residuals + b * saved : own, saved);
    task.take(plan, n, of_task);
    task.layers[0].gz = first_gz;
    forward(plan, b, n, images, params, task);

    const T *weight = params(b, plan.head_slot.weight), *bias = params(b, plan.head_slot.bias);
    T* out = logits + int64_t(b) * n * plan.ways;
    head(plan, n, task.features, weight, bias, out);
    losses[b] = cross_entropy(plan, n, out, labels + int64_t(b) * n, task.probabilities, task.gl);
    head_backward(plan, n, task.features, weight, task.gl,
                  grads.cleared(b, plan.head_slot.weight, int64_t(plan.ways) * F),
                  grads.cleared(b, plan.head_slot.bias, plan.ways), gfeatures);
    backward(plan, b, n, gfeatures, params, task, turned, grads);
  }
}

// Of a network without a head: images -> features [tasks, n, F] and the residuals, for any loss of the features.
template <class T>
void features(const Plan& plan, int tasks, int n, const T* images, Parameters<const T> params, T* out, T* residuals) {
  const int64_t saved = Residuals<T>::size(plan, n);
  Residuals<T> task;
  for (int b = 0; b < tasks; ++b) {
    Buffers<T> of_task(residuals + b * saved, saved);
    task.take(plan, n, of_task);
    task.features = out + int64_t(b) * n * plan.features;
    forward(plan, b, n, images, params, task);
  }
}

// The loss's gradient by them [tasks, n, F] -> that by the parameters.  The residuals are then used up.
template <class T>
void pull_back(const Plan& plan, int tasks, int n, Parameters<const T> params, T* residuals, const T* gfeatures,
               Parameters<T> grads) {
  const int64_t saved = Residuals<T>::size(plan, n);
  T *turned, *first_gz;
  arena.deal<T>([&](Buffers<T>& from) {
    turned = from.take(largest_weights(plan));
    first_gz = from.take(plan.layers[0].gz_size(n));
  });
  Residuals<T> task;
  for (int b = 0; b < tasks; ++b) {
    Buffers<T> of_task(residuals + b * saved, saved);
    task.take(plan, n, of_task);
    task.layers[0].gz = first_gz;
    backward(plan, b, n, gfeatures + int64_t(b) * n * plan.features, params, task, turned, grads);
  }
}

}  // namespace
