// The C interface of a small convolutional network: its features, their backward pass, the derivative of the backward
// pass, and the same with a mean cross-entropy.
//
// The network is L x [convolution -> batch norm -> (leaky) ReLU -> 2x2 max-pool or none] -> spatial mean or flatten.  A
// network with a head adds -> linear -> mean cross-entropy.  One call handles B tasks.  Each task has its own n images,
// and its own parameters unless their stride is 0.  A team of threads computes a task together (team.h).  Channels are
// the vector axis everywhere, so C_out % lanes == 0.
//
// Read the headers in this order: team.h, vectors.h, products.h, geometry.h, convolution.h, norm.h (norm_tangent.h),
// features.h, head.h, memory.h; then the passes gradient.h, tangent.h, loss.h, outputs.h.  Only this file is compiled.
// The headers' functions are in an unnamed namespace, so the compiler may inline a function that is called once.
// docs/kernels.md has the mathematics, the layouts, and how to check a change.

#include "loss.h"
#include "outputs.h"

namespace {

constexpr int64_t kDone = 0, kNoMemory = -1;

// Calls f with teams of `team` threads; returns kDone, or kNoMemory if the memory did not suffice.
template <class F> int64_t attempt(int team, F f) {
  team_size = team;
  try {
    f();
    return kDone;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

// Returns 1 + the position of the first label outside 0 .. ways - 1, or kDone.
int64_t wrong_label(const int64_t* labels, int64_t count, int ways) {
  for (int64_t i = 0; i < count; ++i)
    if (labels[i] < 0 || labels[i] >= ways) return i + 1;
  return kDone;
}

}  // namespace

extern "C" {

// Returns how many elements of `element_size` bytes a vector holds.
int lanes(int element_size) { return kVectorBytes / element_size; }

// `spec` has 8 numbers for each layer: height, width, channels in and out, kernel, stride, padding, pooling (0 or 1).
// Either all layers pool and have stride 1, or no layer pools.  `mean` 1: the features are the mean over pixels; 0: all
// pixels.  `leak`: the activation's slope below zero.  `ways` 0: the network has no head, so the caller may not call
// `gradient` and `hessian_vector`.
// Nothing changes a plan after this call, so several threads may use it at once.
void* plan_new(int layers, const int64_t* spec, int ways, int mean, double eps, double leak) {
  Plan* plan = new Plan();
  plan->layers.resize(layers);
  for (int k = 0; k < layers; ++k, spec += 8) {
    Layer& l = plan->layers[k];
    l.h = spec[0], l.w = spec[1], l.cin = spec[2], l.cout = spec[3];
    l.kernel = spec[4], l.stride = spec[5], l.pad = spec[6], l.pool = spec[7], l.first = k == 0, l.leak = leak;
    l.build();
    l.slot = {3 * k, 3 * k + 1, 3 * k + 2};
    l.yborder = 0;
    if (k) plan->layers[k - 1].yborder = l.border;
  }
  const Layer& last = plan->layers.back();
  plan->ways = ways, plan->mean = mean != 0, plan->eps = eps;
  plan->features = plan->mean ? last.cout : last.cout * last.Q();
  plan->head_slot = {3 * layers, 3 * layers + 1};
  plan->passing = plan->layers;
  for (Layer& l : plan->passing) l.passing = true;
  return plan;
}

// The passes, once for each type of number: see gradient.h, tangent.h, loss.h and outputs.h.  By slot, `params` holds
// the address of each parameter's first element in the first task, and `params_strides` the elements from one task to
// the next.  A pass returns kDone, or kNoMemory if it gets no working memory.  `gradient` first checks the labels, and
// returns `wrong_label` if one is wrong.
#define FOR_TYPE(T, suffix)                                                                                            \
  int64_t kept_size_##suffix(const void* plan, int n, int back) {                                                      \
    return Kept<T>::size(*static_cast<const Plan*>(plan), n, back != 0);                                               \
  }                                                                                                                    \
  int64_t kept_loss_size_##suffix(const void* plan, int n) {                                                           \
    return KeptLoss<T>::size(*static_cast<const Plan*>(plan), n);                                                      \
  }                                                                                                                    \
  int64_t injected_size_##suffix(const void* plan, int n) {                                                            \
    return Injected<T>::size(*static_cast<const Plan*>(plan), n);                                                      \
  }                                                                                                                    \
  int64_t features_##suffix(const void* plan, int tasks, int n, int team, const T* images, const T* const* params,     \
                            const int64_t* params_strides, T* out, T* used, T* kept) {                                 \
    return attempt(team, [&] {                                                                                         \
      features<T>(*static_cast<const Plan*>(plan), tasks, n, images, {params, params_strides}, out, used, kept);       \
    });                                                                                                                \
  }                                                                                                                    \
  int64_t pull_back_##suffix(const void* plan, int tasks, int n, int team, const T* const* params,                     \
                             const int64_t* params_strides, T* kept, const T* gfeatures, T* injected,                  \
                             int64_t injected_stride, T* const* grads, const int64_t* grads_strides, T* kept_back) {   \
    return attempt(team, [&] {                                                                                         \
      pull_back<T>(*static_cast<const Plan*>(plan), tasks, n, {params, params_strides}, kept, gfeatures,               \
                   {injected, injected_stride}, {grads, grads_strides}, kept_back);                                    \
    });                                                                                                                \
  }                                                                                                                    \
  int64_t along_##suffix(const void* plan, int tasks, int n, int team, const T* const* params,                         \
                         const int64_t* params_strides, T* kept, T* kept_back, const T* const* v,                      \
                         const int64_t* v_strides, T* of_gfeatures, T* injected, int64_t injected_stride,              \
                         T* const* direct, const int64_t* direct_strides) {                                            \
    return attempt(team, [&] {                                                                                         \
      along<T>(*static_cast<const Plan*>(plan), tasks, n, {params, params_strides}, kept, kept_back, {v, v_strides},   \
               of_gfeatures, {injected, injected_stride}, {direct, direct_strides});                                   \
    });                                                                                                                \
  }                                                                                                                    \
  int64_t gradient_##suffix(const void* plan, int tasks, int n, int team, const T* images, const int64_t* labels,      \
                            const T* const* params, const int64_t* params_strides, T* losses, T* logits,               \
                            T* const* grads, const int64_t* grads_strides, T* kept) {                                  \
    const Plan& network = *static_cast<const Plan*>(plan);                                                             \
    if (const int64_t wrong = wrong_label(labels, int64_t(tasks) * n, network.ways)) return wrong;                     \
    return attempt(team, [&] {                                                                                         \
      gradient<T>(network, tasks, n, images, labels, {params, params_strides}, losses, logits,                         \
                  {grads, grads_strides}, kept);                                                                       \
    });                                                                                                                \
  }                                                                                                                    \
  int64_t hessian_vector_##suffix(const void* plan, int tasks, int n, int team, const T* const* params,                \
                                  const int64_t* params_strides, T* kept, const T* const* v, const int64_t* v_strides, \
                                  T* const* products, const int64_t* products_strides) {                               \
    return attempt(team, [&] {                                                                                         \
      hessian_vector<T>(*static_cast<const Plan*>(plan), tasks, n, {params, params_strides}, kept, {v, v_strides},     \
                        {products, products_strides});                                                                 \
    });                                                                                                                \
  }                                                                                                                    \
  int64_t outputs_##suffix(const void* plan, int tasks, int n, int team, const T* images, const T* const* params,      \
                           const int64_t* params_strides, const T* given, T* out, T* used) {                           \
    return attempt(team, [&] {                                                                                         \
      outputs<T>(*static_cast<const Plan*>(plan), tasks, n, images, {params, params_strides}, given, out, used);       \
    });                                                                                                                \
  }

FOR_TYPE(float, f32)
FOR_TYPE(double, f64)
}
