// Batch norm, (leaky) ReLU and max-pooling in one pass over a layer's maps: forward and backward.
//
// The statistics are collected band by band, as the convolution writes the bands.  Normalisation is monotonic in a
// channel, so the pooling can choose a window's pixel before the statistics are known: the largest pixel; if gamma < 0
// the smallest; if gamma is 0 the first.  Only the chosen pixels are then normalised.
#pragma once

#include <cmath>
#include "geometry.h"

namespace {

// The activation, or its derivative, below zero: x times the slope.  If the slope is 0, the result is 0 for every x.
template <class T> inline V<T> below_zero(T leak, V<T> x) { return leak == 0 ? V<T>{} : leak * x; }

// The data of the gradient pass that the tangent pass needs, for one layer of one task.
template <class T> struct Saved {
  T *z, *gz;               // the convolution's output [n, P, C], and its gradient
  T *zq, *index;           // [n, Q, C]: z of the pixels that the pooling took, and their places in the window, 0 to 3
  T *y, *gq;               // output, with the next layer's border; gradient by y, after `norm_sums` by u [n, Q, C]
  T *mean, *inv;           // [C]: z's mean; z's sum of squared distances, from `activate` on 1 / sqrt(variance + eps)
  T *mean_gu, *mean_gux;   // [C] means over all pixels of gq and of gq * normalised z
};

// Adjacent windows: offsets of the first window's elements, in the arrays of each shape.
struct Line { int64_t z, gz, q, y; int windows; };

// Calls f(line) over the windows of a band.  Without pooling, each window is one pixel.
template <class F> inline void each_line(const Layer& l, const Band& band, F f) {
  const int C = l.cout;
  if (!l.pool && !l.zborder && !l.yborder) {
    const int64_t at = l.z_at(band, band.row);
    return f(Line{at, l.gz_at(band, band.row), at, at, band.rows * l.ow});
  }
  const int unit = l.pool ? 2 : 1;
  for (int row = band.row; row + unit <= band.row + band.rows; row += unit) {
    const int64_t y = l.y_at(band.image, row / unit);
    f(Line{l.z_at(band, row), l.gz_at(band, row),
           l.passing ? y : (int64_t(band.image) * l.qh + row / unit) * l.qw * C, y, l.qw});
  }
}

// Calls f(offset in z, offset in gz) over the pixels of a band outside all windows, at an odd edge.
template <class F> inline void each_edge(const Layer& l, const Band& band, F f) {
  if (!l.pool) return;
  const int C = l.cout;
  for (int row = band.row; row < band.row + band.rows; ++row)
    for (int x = row < 2 * l.qh ? 2 * l.qw : 0; x < l.ow; ++x)
      f(l.z_at(band, row) + int64_t(x) * C, l.gz_at(band, row) + int64_t(x) * C);
}

// Offsets of a window's pixels.
template <int K> struct Corners {
  int64_t of[K];
  Corners(int width, int C) {
    for (int k = 0; k < K; ++k) of[k] = (int64_t(k / 2) * width + k % 2) * C;
  }
};

// Calls f(integral_constant<NV>, integral_constant<pixels of a window>, first channel).
template <class T, class F> inline void each_norm_block(const Layer& l, F f) {
  each_block<T>(l.cout, [&](auto nv, int c) {
    if (l.pool) f(nv, std::integral_constant<int, 4>(), c);
    else f(nv, std::integral_constant<int, 1>(), c);
  });
}

// Pools a band of z, and adds it to the statistics: the mean in s.mean, the sum of squared distances in s.inv.
// `before`: the number of pixels that were added before (Chan, Golub and LeVeque, 1979).
// `Keep`: store which pixel the pooling took, for a backward pass.
template <class T, bool Keep = true>
void observe(const Layer& l, const Band& band, const T* gamma, int64_t before, const Saved<T>& s) {
  constexpr int lanes = Simd<T>::kLanes;
  const int C = l.cout;
  const int64_t pixels = int64_t(band.rows) * l.ow;
  each_norm_block<T>(l, [&](auto nv, auto window, int c0) {
    constexpr int NV = nv(), K = window();
    const Corners<K> corner(l.ow, C);
    V<T> centre[NV] = {}, squares[NV] = {}, sum[NV] = {}, square[NV] = {}, sign[NV];
    if (before) {
      for (int j = 0; j < NV; ++j) centre[j] = at(s.mean + c0 + j * lanes), squares[j] = at(s.inv + c0 + j * lanes);
    } else {
      const T* z = s.z + l.z_at(band, band.row) + c0;
      for (int64_t p = 0; p < pixels; ++p)
        for (int j = 0; j < NV; ++j) centre[j] += at(z + p * C + j * lanes);
      for (int j = 0; j < NV; ++j) centre[j] /= T(pixels);
    }
    const auto add = [&](V<T> z, int j) {
      const V<T> d = z - centre[j];
      sum[j] += d, square[j] += d * d;
    };
    for (int j = 0; j < NV; ++j) {
      const V<T> g = at(gamma + c0 + j * lanes);
      sign[j] = g > 0 ? V<T>{} + 1 : (g < 0 ? V<T>{} - 1 : V<T>{});
    }
    each_line(l, band, [&](const Line& line) {
      for (int i = 0; i < line.windows; ++i)
        for (int j = 0; j < NV; ++j) {
          const T* z = s.z + line.z + int64_t(i) * (K == 4 ? 2 : 1) * C + c0 + j * lanes;
          const V<T> top = at(z);
          add(top, j);
          if constexpr (K > 1) {
            V<T> which = {}, u = top * sign[j];
            for (int k = 1; k < K; ++k) {
              const V<T> v = at(z + corner.of[k]), other = v * sign[j];
              add(v, j);
              which = other > u ? V<T>{} + T(k) : which;
              u = other > u ? other : u;
            }
            const int64_t q = line.q + int64_t(i) * C + c0 + j * lanes;
            at(s.zq + q) = sign[j] == 0 ? top : u * sign[j];
            if constexpr (Keep) at(s.index + q) = which;
          }
        }
    });
    each_edge(l, band, [&](int64_t z, int64_t) {
      for (int j = 0; j < NV; ++j) add(at(s.z + z + c0 + j * lanes), j);
    });
    const T total = T(before + pixels);
    for (int j = 0; j < NV; ++j) {
      const V<T> shift = sum[j] / T(pixels);
      squares[j] += square[j] - sum[j] * shift + shift * shift * (T(pixels) * (T(before) / total));
      at(s.mean + c0 + j * lanes) = centre[j] + sum[j] / total;
      at(s.inv + c0 + j * lanes) = squares[j];
    }
  });
}

// Calls f(band) for each image, or for all images as one band if their maps are contiguous.
template <class F> inline void each_image(const Layer& l, int n, F f) {
  if (!l.pool && !l.zborder && !l.yborder) return f(Band{0, 0, n * l.oh});
  for (int i = 0; i < n; ++i) f(Band{i, 0, l.oh});
}

// zq -> y, after `observe` was called for all bands.
template <class T> void activate(const Layer& l, int n, const T* gamma, const T* beta, T eps, const Saved<T>& s) {
  constexpr int lanes = Simd<T>::kLanes;
  const T leak = T(l.leak);
  const T pixels = T(int64_t(n) * l.P());
  each_block<T>(l.cout, [&](auto nv, int c0) {
    constexpr int NV = nv();
    V<T> mean[NV], scale[NV], shift[NV];
    for (int j = 0; j < NV; ++j) {
      const int c = c0 + j * lanes;
      V<T> inv = at(s.inv + c);
      for (int k = 0; k < lanes; ++k) inv[k] = T(1) / std::sqrt(inv[k] / pixels + eps);
      at(s.inv + c) = inv;
      mean[j] = at(s.mean + c), scale[j] = inv * at(gamma + c), shift[j] = at(beta + c);
    }
    each_image(l, n, [&](const Band& band) {
      each_line(l, band, [&](const Line& line) {
        for (int64_t i = 0, at0 = c0; i < line.windows; ++i, at0 += l.cout)
          for (int j = 0; j < NV; ++j) {
            const V<T> u = (at(s.zq + line.q + at0 + j * lanes) - mean[j]) * scale[j] + shift[j];
            at(s.y + line.y + at0 + j * lanes) = u < 0 ? below_zero<T>(leak, u) : u;  // NaN stays NaN
          }
      });
    });
  });
}

// z -> y for a band, by given statistics: all pixels of a window are normalised, then pooled.
template <class T>
void activate_given(const Layer& l, const Band& band, const T* gamma, const T* beta, T eps, const T* given_mean,
                    const T* given_variance, const Saved<T>& s) {
  constexpr int lanes = Simd<T>::kLanes;
  const T leak = T(l.leak);
  const int C = l.cout;
  each_norm_block<T>(l, [&](auto nv, auto window, int c0) {
    constexpr int NV = nv(), K = window();
    const Corners<K> corner(l.ow, C);
    V<T> mean[NV], scale[NV], shift[NV];
    for (int j = 0; j < NV; ++j) {
      const int c = c0 + j * lanes;
      V<T> inv = at(given_variance + c);
      for (int k = 0; k < lanes; ++k) inv[k] = T(1) / std::sqrt(inv[k] + eps);
      mean[j] = at(given_mean + c), scale[j] = inv * at(gamma + c), shift[j] = at(beta + c);
    }
    each_line(l, band, [&](const Line& line) {
      for (int i = 0; i < line.windows; ++i)
        for (int j = 0; j < NV; ++j) {
          const T* from = s.z + line.z + int64_t(i) * (K == 4 ? 2 : 1) * C + c0 + j * lanes;
          V<T> top = (at(from) - mean[j]) * scale[j] + shift[j];
          for (int k = 1; k < K; ++k) {
            const V<T> u = (at(from + corner.of[k]) - mean[j]) * scale[j] + shift[j];
            top = (u > top) | (u != u) ? u : top;  // NaN stays NaN
          }
          at(s.y + line.y + int64_t(i) * C + c0 + j * lanes) = top < 0 ? below_zero<T>(leak, top) : top;
        }
    });
  });
}

// Takes gq back through the activation; stores its means, and adds the gradients of gamma and beta.
template <class T> void norm_sums(const Layer& l, int n, const Saved<T>& s, T* ggamma, T* gbeta) {
  constexpr int lanes = Simd<T>::kLanes;
  const T leak = T(l.leak);
  const T pixels = T(int64_t(n) * l.P());
  each_block<T>(l.cout, [&](auto nv, int c0) {
    constexpr int NV = nv();
    V<T> sum[NV] = {}, sumx[NV] = {}, mean[NV];
    for (int j = 0; j < NV; ++j) mean[j] = at(s.mean + c0 + j * lanes);
    each_image(l, n, [&](const Band& band) {
      each_line(l, band, [&](const Line& line) {
        for (int64_t i = 0, at0 = c0; i < line.windows; ++i, at0 += l.cout)
          for (int j = 0; j < NV; ++j) {
            const int64_t q = line.q + at0 + j * lanes;
            const V<T> gy = at(s.gq + q), g = at(s.y + line.y + at0 + j * lanes) > 0 ? gy : below_zero<T>(leak, gy);
            at(s.gq + q) = g;
            sum[j] += g, sumx[j] += g * (at(s.zq + q) - mean[j]);
          }
      });
    });
    for (int j = 0; j < NV; ++j) {
      const int c = c0 + j * lanes;
      sumx[j] *= at(s.inv + c);
      at(gbeta + c) += sum[j], at(ggamma + c) += sumx[j];
      at(s.mean_gu + c) = sum[j] / pixels, at(s.mean_gux + c) = sumx[j] / pixels;
    }
  });
}

// gq -> gz, for a band; plus `other` [n, P, C], if it is not null.
template <class T>
void norm_backward(const Layer& l, const Band& band, const T* gamma, const Saved<T>& s, const T* other) {
  constexpr int lanes = Simd<T>::kLanes;
  const int C = l.cout;
  each_norm_block<T>(l, [&](auto nv, auto window, int c0) {
    constexpr int NV = nv(), K = window();
    const Corners<K> corner(l.ow, C), gcorner(l.gw(), C);
    V<T> mean[NV], scale[NV], constant[NV], slope[NV];
    for (int j = 0; j < NV; ++j) {
      const int c = c0 + j * lanes;
      mean[j] = at(s.mean + c), scale[j] = at(s.inv + c) * at(gamma + c);
      constant[j] = -scale[j] * at(s.mean_gu + c), slope[j] = -scale[j] * at(s.mean_gux + c) * at(s.inv + c);
    }
    each_line(l, band, [&](const Line& line) {
      for (int i = 0; i < line.windows; ++i)
        for (int j = 0; j < NV; ++j) {
          const int64_t step = int64_t(i) * (K == 4 ? 2 : 1) * C + c0 + j * lanes;
          const int64_t q = line.q + int64_t(i) * C + c0 + j * lanes;
          const V<T> g = scale[j] * at(s.gq + q);
          for (int k = 0; k < K; ++k) {
            V<T> gz = (at(s.z + line.z + step + corner.of[k]) - mean[j]) * slope[j] + constant[j];
            if constexpr (K > 1) gz += at(s.index + q) == T(k) ? g : V<T>{};
            else gz += g;
            if (other) gz += at(other + line.z + step + corner.of[k]);
            at(s.gz + line.gz + step + gcorner.of[k]) = gz;
          }
        }
    });
    each_edge(l, band, [&](int64_t z, int64_t gz) {
      for (int j = 0; j < NV; ++j) {
        V<T> g = (at(s.z + z + c0 + j * lanes) - mean[j]) * slope[j] + constant[j];
        if (other) g += at(other + z + c0 + j * lanes);
        at(s.gz + gz + c0 + j * lanes) = g;
      }
    });
  });
}

}  // namespace
