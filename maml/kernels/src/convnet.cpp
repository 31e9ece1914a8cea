// Loss, gradient, Hessian-vector product and outputs of a small convolutional classifier: the C interface.
//
// The network is L x [convolution -> batch norm -> (leaky) ReLU -> 2x2 max-pool or none] -> spatial mean or flatten
// -> linear -> mean cross-entropy.  One call handles B tasks, each with n images of its own and, unless their stride is 0, with
// parameters of its own.  Channels are the vector axis everywhere, hence C_out % lanes == 0.
//
// From the ground up: vectors.h, products.h, geometry.h, then convolution.h, norm.h (norm_tangent.h) and head.h, then
// memory.h, then the three passes gradient.h, hessian_vector.h and outputs.h.  This is the only file that is compiled:
// the headers' functions are in an unnamed namespace, so that the compiler may inline what is called once.
// docs/kernels.md has the mathematics, the layouts, and how to check a change.

#include "gradient.h"
#include "hessian_vector.h"
#include "outputs.h"

namespace {

constexpr int64_t kDone = 0, kNoMemory = -1;

// Calls f; returns whether there was memory enough.
template <class F> int64_t attempt(F f) {
  try {
    f();
    return kDone;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

// Returns 1 + the position of the first label that is none of 0 .. ways - 1, or kDone.
int64_t wrong_label(const int64_t* labels, int64_t count, int ways) {
  for (int64_t i = 0; i < count; ++i)
    if (labels[i] < 0 || labels[i] >= ways) return i + 1;
  return kDone;
}

// Where in a task's parameters each one begins.
void find_slots(Plan& plan) {
  int64_t end = 0;
  const auto next = [&](int64_t count) {
    end += count;
    return end - count;
  };
  for (Layer& l : plan.layers) {
    l.slot.weight = next(l.weights());
    l.slot.gamma = next(l.cout), l.slot.beta = next(l.cout);
  }
  plan.head_slot.weight = next(int64_t(plan.ways) * plan.features), plan.head_slot.bias = next(plan.ways);
  plan.parameters = end;
}

}  // namespace

extern "C" {

// How many elements of so many bytes a vector holds.
int lanes(int element_size) { return kVectorBytes / element_size; }

// `spec` is 8 numbers a layer: height, width, channels in and out, kernel, stride, padding, pooling (0 or 1).
// All layers pool, and then have stride 1, or none does.  `mean`: the head sees the mean over pixels, else all pixels.
// `leak`: the activation's slope below zero.  `ways` 0: there is no head, and only `features`, `pull_back` and `outputs`
// may be called.
// A plan is read only from then on: several threads may use it at once.
void* plan_new(int layers, const int64_t* spec, int ways, int mean, double eps, double leak) {
  Plan* plan = new Plan();
  plan->layers.resize(layers);
  for (int k = 0; k < layers; ++k, spec += 8) {
    Layer& l = plan->layers[k];
    l.h = spec[0], l.w = spec[1], l.cin = spec[2], l.cout = spec[3];
    l.kernel = spec[4], l.stride = spec[5], l.pad = spec[6], l.pool = spec[7], l.first = k == 0, l.leak = leak;
    l.build();
    l.yborder = 0;
    if (k) plan->layers[k - 1].yborder = l.border;
  }
  const Layer& last = plan->layers.back();
  plan->ways = ways, plan->mean = mean != 0, plan->eps = eps;
  plan->features = plan->mean ? last.cout : last.cout * last.Q();
  find_slots(*plan);
  plan->passing = plan->layers;
  for (Layer& l : plan->passing) l.passing = true;
  return plan;
}

// Elements of a task's parameters.
int64_t parameter_count(const void* plan) { return static_cast<const Plan*>(plan)->parameters; }

// The passes, once for each type of number: see gradient.h, hessian_vector.h and outputs.h.  They return kDone, or
// kNoMemory where working memory could not be had, or (`gradient`, before it computes anything) `wrong_label`.
#define FOR_TYPE(T, suffix)                                                                                           \
  int64_t residual_size_##suffix(const void* plan, int n) {                                                           \
    return Residuals<T>::size(*static_cast<const Plan*>(plan), n);                                                    \
  }                                                                                                                   \
  int64_t gradient_##suffix(const void* plan, int tasks, int n, const T* images, const int64_t* labels,               \
                            const T* params, int64_t params_stride, T* losses, T* logits, T* grads,                   \
                            int64_t grads_stride, T* residuals) {                                                     \
    const Plan& network = *static_cast<const Plan*>(plan);                                                            \
    if (const int64_t wrong = wrong_label(labels, int64_t(tasks) * n, network.ways)) return wrong;                    \
    return attempt([&] {                                                                                              \
      gradient<T>(network, tasks, n, images, labels, {params, params_stride}, losses, logits, {grads, grads_stride},  \
                  residuals);                                                                                         \
    });                                                                                                               \
  }                                                                                                                   \
  int64_t features_##suffix(const void* plan, int tasks, int n, const T* images, const T* params,                     \
                            int64_t params_stride, T* out, T* residuals) {                                            \
    return attempt([&] {                                                                                              \
      features<T>(*static_cast<const Plan*>(plan), tasks, n, images, {params, params_stride}, out, residuals);        \
    });                                                                                                               \
  }                                                                                                                   \
  int64_t pull_back_##suffix(const void* plan, int tasks, int n, const T* params, int64_t params_stride,              \
                             T* residuals, const T* gfeatures, T* grads, int64_t grads_stride) {                      \
    return attempt([&] {                                                                                              \
      pull_back<T>(*static_cast<const Plan*>(plan), tasks, n, {params, params_stride}, residuals, gfeatures,          \
                   {grads, grads_stride});                                                                            \
    });                                                                                                               \
  }                                                                                                                   \
  int64_t hessian_vector_##suffix(const void* plan, int tasks, int n, const T* params, int64_t params_stride,         \
                                  T* residuals, const T* v, int64_t v_stride, T* products, int64_t products_stride) { \
    return attempt([&] {                                                                                              \
      hessian_vector<T>(*static_cast<const Plan*>(plan), tasks, n, {params, params_stride}, residuals, {v, v_stride}, \
                        {products, products_stride});                                                                 \
    });                                                                                                               \
  }                                                                                                                   \
  int64_t outputs_##suffix(const void* plan, int tasks, int n, const T* images, const T* params,                      \
                           int64_t params_stride, const T* given, T* logits, T* used) {                               \
    return attempt([&] {                                                                                              \
      outputs<T>(*static_cast<const Plan*>(plan), tasks, n, images, {params, params_stride}, given, logits, used);    \
    });                                                                                                               \
  }

FOR_TYPE(float, f32)
FOR_TYPE(double, f64)
}
