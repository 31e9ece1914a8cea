// Only the forward pass, task by task, for evaluation.
#pragma once

#include <utility>

#include "convolution.h"
#include "features.h"
#include "memory.h"

namespace {

constexpr int kChunkBytes = 256 << 10;  // bytes of the largest map, for images that go through all layers together

// images [tasks, n, C, H, W] -> features [tasks, n, F].  The norms use the `given` statistics.  If these are null, they
// use each set's own statistics, and write them to `used`.  Both are [tasks, layers, 2, C]: mean and biased variance.
//
// Nothing is kept for a backward pass.  So two maps take turns as a layer's input and output, a layer that pools stores
// only a band of z, and a norm works in place.  (`Layer::passing` selects this in geometry.h.)
template <class T>
void outputs(const Plan& plan, int tasks, int n, const T* images, Parameters<const T> params, const T* given,
             T* out, T* used) {
  const int L = int(plan.passing.size());
  const Layer& first = plan.passing[0];
  // Elements of an image's largest map, and of the largest band.
  int64_t map = first.x_size(1), band_size = 0;
  for (const Layer& l : plan.passing) {
    map = std::max(map, l.y_size(1));
    if (l.pool) band_size = std::max(band_size, int64_t(l.band + 1) * l.ow * l.cout);
  }
  // With given statistics, images are independent: a few go through all layers while they are in the cache.
  const int chunk = given ? int(std::clamp<int64_t>(kChunkBytes / int64_t(sizeof(T) * map), 1, n)) : n;
  T *one, *other, *band_z;
  Saved<T> s{};
  arena.deal<T>([&](Buffers<T>& from) {
    one = from.take(chunk * map), other = from.take(chunk * map), band_z = from.take(band_size);
    const int64_t channels = largest(plan, [](const Layer& l) { return l.cout; });
    s.mean = from.take(channels), s.inv = from.take(channels);
  });

  const auto of_images = [&](int b, Saved<T> s) {
    each_even(n, chunk, [&](int start, int size) {
      T *x = one, *y = other;
      const int64_t example = int64_t(b) * n + start;
      enter_images(first, size, images + example * first.cin * first.h * first.w, x);
      meet();
      for (int k = 0; k < L; ++k, std::swap(x, y), meet()) {
        const Layer& l = plan.passing[k];
        const T *gamma = params(b, l.slot.gamma), *beta = params(b, l.slot.beta);
        const Factors<T> factors{x, params(b, l.slot.weight)};
        const int64_t statistics = (int64_t(b) * L + k) * 2 * l.cout;
        s.y = s.zq = y, s.z = l.pool ? band_z : y;
        clear_border(y, size, l.qh, l.qw, l.cout, l.yborder);
        if (given) {
          const T *mean = given + statistics, *variance = mean + l.cout;
          convolve<T>(l, size, {factors}, s.z, [&](const Band& band) {
            activate_given(l, band, gamma, beta, T(plan.eps), mean, variance, s);
          });
          continue;
        }
        int64_t pixels = 0;
        convolve<T>(l, size, {factors}, s.z, [&](const Band& band) {
          observe<T, false>(l, band, gamma, pixels, s);
          pixels += int64_t(band.rows) * l.ow;
        });
        T *mean = used + statistics, *variance = mean + l.cout;
        const Range own = own_channels<T>(l.cout);
        for (int c = own.first; c < own.last; ++c) mean[c] = s.mean[c], variance[c] = s.inv[c] / T(pixels);
        activate(l, size, gamma, beta, T(plan.eps), s);
      }
      pool_features(plan, size, x, out + example * plan.features);
      meet();
    });
  };
  for (int b = 0; b < tasks; ++b) together([&] { of_images(b, s); });
}

}  // namespace
