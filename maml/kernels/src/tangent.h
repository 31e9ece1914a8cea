// The derivative of `backward` along a vector of the parameters, task by task.
#pragma once

#include "gradient.h"
#include "norm_tangent.h"

namespace {

// The working memory of one task's derivative.
template <class T> struct Along {
  T *turned, *dy;
  Tangent<T> d;

  void take(const Plan& plan, int n, Buffers<T>& from) {
    turned = from.take(largest_weights(plan));
    dy = from.take(largest(plan, [n](const Layer& l) { return l.y_size(n); }));
    d.dz = from.take(largest(plan, [n](const Layer& l) { return l.z_size(n); }));
    d.dzq = plan.layers[0].pool ? from.take(largest(plan, [n](const Layer& l) { return l.q_size(n); })) : d.dz;
    const int64_t channels = largest(plan, [](const Layer& l) { return l.cout; });
    d.mean_dz = from.take(channels), d.mean_xdz = from.take(channels);
  }
};

// Differentiates <g, v>, where g is the result of `backward` and v has the parameters' shape, by all that `backward`
// reads: by the gradient of the features [n, F] into `of_gfeatures`, directly by the parameters into `direct`, and by
// the maps of `forward` into `injected`.  A later call of `backward` reads `injected`.  See docs/kernels.md.
template <class T>
void along(const Plan& plan, int b, int n, Parameters<const T> params, const Kept<T>& task, Parameters<const T> v,
           const Along<T>& own, T* of_gfeatures, const Injected<T>& injected, Parameters<T> direct) {
  const int L = int(plan.layers.size());
  const Tangent<T>& d = own.d;
  for (int k = 0; k < L; ++k) {
    const Layer& l = plan.layers[k];
    const Saved<T>& s = task.layers[k];
    const T *gamma = params(b, l.slot.gamma), *dgamma = v(b, l.slot.gamma), *dweight = v(b, l.slot.weight);
    T* of_weight = direct.cleared(b, l.slot.weight, l.weight_rows(), l.cout);
    start_sums(d.mean_dz, 1, l.cout), start_sums(d.mean_xdz, 1, l.cout);
    const auto after = [&](const Band& band) {
      observe_tangent(l, band, s, d);
      if (k) convolve_weight(l, n, band, own.dy, s.gz, of_weight);
    };
    const Factors<T> along_v{k ? task.layers[k - 1].y : task.x, dweight};
    if (k) convolve<T>(l, n, {along_v, {own.dy, params(b, l.slot.weight)}}, d.dz, after);
    else convolve<T>(l, n, {along_v}, d.dz, after);  // images do not move
    meet();  // all threads have read the last dy
    clear_border(own.dy, n, l.qh, l.qw, l.cout, l.yborder);
    activate_tangent(l, n, gamma, dgamma, v(b, l.slot.beta), s, d, own.dy);
    direct.cleared(b, l.slot.beta, 1, l.cout);
    inject(l, n, gamma, dgamma, s, d, direct.cleared(b, l.slot.gamma, 1, l.cout), injected.layers[k].z);
    if (k) {
      transpose(l, dweight, own.turned);
      convolve_input<T>(l, n, {s.gz, own.turned}, injected.layers[k - 1].y);
    }
    meet();
  }
  pool_features(plan, n, own.dy, of_gfeatures);
}

// The same for all tasks.  `kept` comes from `features`, `kept_back` from `pull_back`, at the same parameters.
template <class T>
void along(const Plan& plan, int tasks, int n, Parameters<const T> params, T* kept, T* kept_back,
           Parameters<const T> v, T* of_gfeatures, Block<T> injected, Parameters<T> direct) {
  Along<T> own;
  arena.deal<T>([&](Buffers<T>& from) { own.take(plan, n, from); });
  Block<T> blocks(kept, Kept<T>::size(plan, n, false)), back(kept_back, Kept<T>::size(plan, n, true));
  Kept<T> task;
  Injected<T> beside;
  for (int b = 0; b < tasks; ++b) {
    task.take(plan, n, blocks.of(b)), task.take_back(plan, n, back.of(b)), beside.take(plan, n, injected.of(b));
    together([&] {
      along(plan, b, n, params, task, v, own, of_gfeatures + int64_t(b) * n * plan.features, beside, direct);
    });
  }
}

}  // namespace
