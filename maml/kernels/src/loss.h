// The mean cross-entropy of a network with a head: its gradient, and the product with its Hessian, task by task.
//
// Both combine the passes of gradient.h and tangent.h with the head.  A task's maps stay in the second-level cache from
// one pass to the next.
#pragma once

#include "head.h"
#include "tangent.h"

namespace {

// The data that one task's gradient keeps for the product with the Hessian.
template <class T> struct KeptLoss {
  Kept<T> maps;
  T *features, *probabilities, *gl;  // [n, F]; softmax of the logits, and the loss's gradient by them [n, ways]

  template <class From> void take(const Plan& plan, int n, From&& from) {
    maps.take(plan, n, from), maps.take_back(plan, n, from);
    features = from.take(int64_t(n) * plan.features);
    probabilities = from.take(int64_t(n) * plan.ways);
    gl = from.take(int64_t(n) * plan.ways);
  }
  static int64_t size(const Plan& plan, int n) {
    Buffers<T> counting;
    KeptLoss<T>().take(plan, n, counting);
    return counting.used();
  }
};

// images [tasks, n, C, H, W], labels [tasks, n] -> losses [tasks], logits [tasks, n, ways], gradients, and `kept` (if
// not null), `KeptLoss::size` numbers for each task.
template <class T>
void gradient(const Plan& plan, int tasks, int n, const T* images, const int64_t* labels, Parameters<const T> params,
              T* losses, T* logits, Parameters<T> grads, T* kept) {
  const int F = plan.features;
  const int64_t size = KeptLoss<T>::size(plan, n);
  T *turned, *gfeatures, *first_gz, *own, *used;
  arena.deal<T>([&](Buffers<T>& from) {
    turned = from.take(largest_weights(plan));
    gfeatures = from.take(int64_t(n) * F);
    first_gz = from.take(plan.layers[0].gz_size(n));
    used = from.take(plan.statistics());
    own = kept ? nullptr : from.take(size);
  });
  KeptLoss<T> task;
  for (int b = 0; b < tasks; ++b) {
    task.take(plan, n, Buffers<T>(kept ? kept + b * size : own, size));
    task.maps.layers[0].gz = first_gz;
    together([&] {
      forward(plan, b, n, images, params, task.maps, used);
      pool_features(plan, n, task.maps.layers.back().y, task.features);
      by_one([&] {
        const T *weight = params(b, plan.head_slot.weight), *bias = params(b, plan.head_slot.bias);
        T* out = logits + int64_t(b) * n * plan.ways;
        head(plan, n, task.features, weight, bias, out);
        losses[b] = cross_entropy(plan, n, out, labels + int64_t(b) * n, task.probabilities, task.gl);
        head_backward(plan, n, task.features, weight, task.gl, grads.cleared(b, plan.head_slot.weight, plan.ways, F),
                      grads.cleared(b, plan.head_slot.bias, 1, plan.ways), gfeatures);
      });
      backward<T>(plan, b, n, gfeatures, nullptr, params, task.maps, turned, grads, true);
    });
  }
}

// `kept` comes from `gradient` at the same parameters.
template <class T>
void hessian_vector(const Plan& plan, int tasks, int n, Parameters<const T> params, T* kept, Parameters<const T> v,
                    Parameters<T> products) {
  const int F = plan.features;
  T *dfeatures, *dgfeatures, *dl, *first_gz, *in, *back;
  const int64_t size_in = Injected<T>::size(plan, n), size_back = Kept<T>::size(plan, n, true);
  Along<T> own;
  arena.deal<T>([&](Buffers<T>& from) {
    own.take(plan, n, from);
    dfeatures = from.take(int64_t(n) * F), dgfeatures = from.take(int64_t(n) * F), dl = from.take(plan.ways);
    first_gz = from.take(plan.layers[0].gz_size(n)), in = from.take(size_in);
    back = from.take(size_back);
  });
  Block<T> blocks(kept, KeptLoss<T>::size(plan, n));
  KeptLoss<T> task;
  Injected<T> beside;
  beside.take(plan, n, Buffers<T>(in, size_in));
  for (int b = 0; b < tasks; ++b) {
    task.take(plan, n, blocks.of(b));
    KeptLoss<T> again = task;
    again.maps.take_back(plan, n, Buffers<T>(back, size_back));
    again.maps.layers[0].gz = first_gz;
    together([&] {
      along(plan, b, n, params, task.maps, v, own, dfeatures, beside, products);
      by_one([&] {
        head_tangent(plan, n, task.features, task.probabilities, task.gl, params(b, plan.head_slot.weight), dfeatures,
                     v(b, plan.head_slot.weight), v(b, plan.head_slot.bias), dl,
                     products.cleared(b, plan.head_slot.weight, plan.ways, F),
                     products.cleared(b, plan.head_slot.bias, 1, plan.ways), dgfeatures);
      });
      backward<T>(plan, b, n, dgfeatures, &beside, params, again.maps, own.turned, products, false);
    });
  }
}

}  // namespace
