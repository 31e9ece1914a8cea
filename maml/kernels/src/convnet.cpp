// A small convolutional network: its features, the way back from them, the derivative of that, and all of it with a
// mean cross-entropy: the C interface.
//
// The network is L x [convolution -> batch norm -> (leaky) ReLU -> 2x2 max-pool or none] -> spatial mean or flatten, and
// where there is a head -> linear -> mean cross-entropy.  One call handles B tasks, each with n images of its own and,
// unless their stride is 0, with parameters of its own.  A team of threads computes a task together (team.h).  Channels
// are the vector axis everywhere, hence C_out % lanes == 0.
//
// From the ground up: team.h, vectors.h, products.h, geometry.h, then convolution.h, norm.h (norm_tangent.h), features.h
// and head.h, then memory.h, then the passes gradient.h, tangent.h, loss.h and outputs.h.  This is the only file that is
// compiled: the headers' functions are in an unnamed namespace, so that the compiler may inline what is called once.
// docs/kernels.md has the mathematics, the layouts, and how to check a change.

#include "loss.h"
#include "outputs.h"

namespace {

constexpr int64_t kDone = 0, kNoMemory = -1;

// Calls f, whose teams are of so many threads; returns whether there was memory enough.
template <class F> int64_t attempt(int team, F f) {
  team_size = team;
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

}  // namespace

extern "C" {

// How many elements of so many bytes a vector holds.
int lanes(int element_size) { return kVectorBytes / element_size; }

// `spec` is 8 numbers a layer: height, width, channels in and out, kernel, stride, padding, pooling (0 or 1).
// All layers pool, and then have stride 1, or none does.  `mean`: the features are the mean over pixels, else all pixels.
// `leak`: the activation's slope below zero.  `ways` 0: there is no head, and `gradient` and `hessian_vector` may not be
// called.
// A plan is read only from then on: several threads may use it at once.
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

// The passes, once for each type of number: see gradient.h, tangent.h, loss.h and outputs.h.  Parameters are the address of
// each one's first element in the first task, by slot, and by slot the elements from a task's to the next one's.  They
// return kDone, or kNoMemory where working memory could not be had, or (`gradient`, before it computes anything)
// `wrong_label`.
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
