// The product of the loss's Hessian with a vector, task by task: the tangent of gradient.h.
#pragma once

#include "convolution.h"
#include "head.h"
#include "memory.h"
#include "norm_tangent.h"

namespace {

// Follows `gradient` line by line, each line replaced by its derivative when the parameters move along `v`; see
// docs/kernels.md.  `residuals` are what `gradient` left at the same parameters.
template <class T>
void hessian_vector(const Plan& plan, int tasks, int n, Parameters<const T> params, T* residuals,
                    Parameters<const T> v, Parameters<T> products) {
  const int L = int(plan.layers.size()), F = plan.features;
  const int64_t saved = Residuals<T>::size(plan, n);
  T *turned, *turned_v, *dy, *dgq, *dgz, *dfeatures, *dgfeatures, *dl;
  std::vector<Tangent<T>> tangents(L);
  arena.deal<T>([&](Buffers<T>& from) {
    turned = from.take(largest(plan, [](const Layer& l) { return l.weights(); }));
    turned_v = from.take(largest(plan, [](const Layer& l) { return l.weights(); }));
    dy = from.take(largest(plan, [n](const Layer& l) { return l.y_size(n); }));
    dgq = from.take(largest(plan, [n](const Layer& l) { return l.q_size(n); }));
    dgz = from.take(largest(plan, [n](const Layer& l) { return l.gz_size(n); }));
    dfeatures = from.take(int64_t(n) * F);
    dgfeatures = from.take(int64_t(n) * F);
    dl = from.take(plan.ways);
    for (int k = 0; k < L; ++k) {
      const Layer& l = plan.layers[k];
      Tangent<T>& d = tangents[k];
      d.dz = from.take(l.z_size(n)), d.dzq = l.pool ? from.take(l.q_size(n)) : d.dz;
      d.mean_dz = from.take(l.cout), d.mean_xdz = from.take(l.cout), d.means = from.take(2 * l.cout);
    }
  });

  Residuals<T> task;
  for (int b = 0; b < tasks; ++b) {
    Buffers<T> of_task(residuals + b * saved, saved);
    task.take(plan, n, of_task);
    for (int k = 0; k < L; ++k) {
      const Layer& l = plan.layers[k];
      const Saved<T>& s = task.layers[k];
      const Tangent<T>& d = tangents[k];
      T* product = products.cleared(b, l.slot.weight, l.weights());
      std::memset(d.mean_dz, 0, sizeof(T) * l.cout), std::memset(d.mean_xdz, 0, sizeof(T) * l.cout);
      const auto after = [&](const Band& band) {
        observe_tangent(l, band, s, d);
        // Half of the weight gradient's tangent, here, while dy is still that of this layer's input.
        if (k) convolve_weight(l, n, band, dy, s.gz, product);
      };
      const Factors<T> along_v{k ? task.layers[k - 1].y : task.x, v(b, l.slot.weight)};
      if (k) convolve<T>(l, n, {along_v, {dy, params(b, l.slot.weight)}}, d.dz, after);
      else convolve<T>(l, n, {along_v}, d.dz, after);  // images do not move
      clear_border(dy, n, l.qh, l.qw, l.cout, l.yborder);
      activate_tangent(l, n, params(b, l.slot.gamma), v(b, l.slot.gamma), v(b, l.slot.beta), s, d, dy);
    }

    pool_features(plan, n, dy, dfeatures);
    head_tangent(plan, n, task.features, task.probabilities, task.gl, params(b, plan.head_slot.weight), dfeatures,
                 v(b, plan.head_slot.weight), v(b, plan.head_slot.bias), dl,
                 products.cleared(b, plan.head_slot.weight, int64_t(plan.ways) * F),
                 products.cleared(b, plan.head_slot.bias, plan.ways), dgfeatures);
    spread_features(plan, n, dgfeatures, dgq);

    for (int k = L - 1; k >= 0; --k) {
      const Layer& l = plan.layers[k];
      const Saved<T>& s = task.layers[k];
      const Tangent<T>& d = tangents[k];
      const T *x = k ? task.layers[k - 1].y : task.x, *gamma = params(b, l.slot.gamma), *dgamma = v(b, l.slot.gamma);
      T* product = products(b, l.slot.weight);
      norm_sums_tangent(l, n, s, d, dgq, products.cleared(b, l.slot.gamma, l.cout),
                        products.cleared(b, l.slot.beta, l.cout));
      clear_border(dgz, n, l.oh, l.ow, l.cout, l.zborder);
      l.each_band(n, [&](const Band& band) {
        norm_backward_tangent(l, band, gamma, dgamma, s, d, dgq, dgz);
        convolve_weight(l, n, band, x, dgz, product);
      });
      if (k == 0) break;
      transpose(l, params(b, l.slot.weight), turned);
      transpose(l, v(b, l.slot.weight), turned_v);
      convolve_input<T>(l, n, {{dgz, turned}, {s.gz, turned_v}}, dgq);
    }
  }
}

}  // namespace
