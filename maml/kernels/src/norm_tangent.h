// The tangents of norm.h: how each of its results changes when the parameters move along a vector.
// docs/kernels.md derives the formulas.
#pragma once

#include "norm.h"

namespace {

// The tangent pass's own data, for one layer of one task.
template <class T> struct Tangent {
  T *dz, *dzq;            // [n, P, C] and [n, Q, C]: tangents of z and zq
  T *mean_dz, *mean_xdz;  // [C] means of dz and of normalised z * dz; until `activate_tangent`, sums
};

template <class T> void observe_tangent(const Layer& l, const Band& band, const Saved<T>& s, const Tangent<T>& d) {
  constexpr int lanes = Simd<T>::kLanes;
  const int C = l.cout;
  each_norm_block<T>(l, [&](auto nv, auto window, int c0) {
    constexpr int NV = nv(), K = window();
    const Corners<K> corner(l.ow, C);
    V<T> mean[NV], sum[NV] = {}, sumx[NV] = {};
    for (int j = 0; j < NV; ++j) mean[j] = at(s.mean + c0 + j * lanes);
    each_line(l, band, [&](const Line& line) {
      for (int i = 0; i < line.windows; ++i)
        for (int j = 0; j < NV; ++j) {
          const int64_t z = line.z + int64_t(i) * (K == 4 ? 2 : 1) * C + c0 + j * lanes;
          V<T> dz = at(d.dz + z);
          sum[j] += dz, sumx[j] += dz * (at(s.z + z) - mean[j]);
          if constexpr (K > 1) {
            const int64_t q = line.q + int64_t(i) * C + c0 + j * lanes;
            const V<T> index = at(s.index + q);
            for (int k = 1; k < K; ++k) {
              const V<T> other = at(d.dz + z + corner.of[k]);
              sum[j] += other, sumx[j] += other * (at(s.z + z + corner.of[k]) - mean[j]);
              dz = index == T(k) ? other : dz;
            }
            at(d.dzq + q) = dz;
          }
        }
    });
    each_edge(l, band, [&](int64_t z, int64_t) {
      for (int j = 0; j < NV; ++j) {
        const V<T> dz = at(d.dz + z + c0 + j * lanes);
        sum[j] += dz, sumx[j] += dz * (at(s.z + z + c0 + j * lanes) - mean[j]);
      }
    });
    for (int j = 0; j < NV; ++j) {
      const int c = c0 + j * lanes;
      at(d.mean_dz + c) += sum[j], at(d.mean_xdz + c) += sumx[j] * at(s.inv + c);
    }
  });
}

// dzq -> dy, after `observe_tangent` was called for all bands.
template <class T>
void activate_tangent(const Layer& l, int n, const T* gamma, const T* dgamma, const T* dbeta, const Saved<T>& s,
                      const Tangent<T>& d, T* dy) {
  constexpr int lanes = Simd<T>::kLanes;
  const T leak = T(l.leak);
  const T pixels = T(int64_t(n) * l.P());
  each_block<T>(l.cout, [&](auto nv, int c0) {
    constexpr int NV = nv();
    V<T> mean[NV], of_z[NV], of_dz[NV], m[NV], constant[NV];
    for (int j = 0; j < NV; ++j) {
      const int c = c0 + j * lanes;
      const V<T> inv = at(s.inv + c), mx = at(d.mean_xdz + c) / pixels;
      at(d.mean_xdz + c) = mx, at(d.mean_dz + c) = m[j] = at(d.mean_dz + c) / pixels;
      mean[j] = at(s.mean + c), of_dz[j] = at(gamma + c) * inv, constant[j] = at(dbeta + c);
      of_z[j] = (at(dgamma + c) - of_dz[j] * mx) * inv;
    }
    each_image(l, n, [&](const Band& band) {
      each_line(l, band, [&](const Line& line) {
        for (int64_t i = 0, at0 = c0; i < line.windows; ++i, at0 += l.cout)
          for (int j = 0; j < NV; ++j) {
            const int64_t q = line.q + at0 + j * lanes, o = line.y + at0 + j * lanes;
            const V<T> du = of_z[j] * (at(s.zq + q) - mean[j]) + of_dz[j] * (at(d.dzq + q) - m[j]) + constant[j];
            at(dy + o) = at(s.y + o) > 0 ? du : below_zero<T>(leak, du);
          }
      });
    });
  });
}

// Writes the derivative of <gz, dz> + <ggamma, dgamma> by z, and adds that by gamma; gq is fixed (docs/kernels.md).
template <class T>
void inject(const Layer& l, int n, const T* gamma, const T* dgamma, const Saved<T>& s, const Tangent<T>& d, T* of_gamma,
            T* of_z) {
  constexpr int lanes = Simd<T>::kLanes;
  const int C = l.cout;
  const T pixels = T(int64_t(n) * l.P());
  each_norm_block<T>(l, [&](auto nv, auto window, int c0) {
    constexpr int NV = nv(), K = window();
    const Corners<K> corner(l.ow, C);
    V<T> mean[NV], m[NV], a[NV], by_z[NV], by_dz[NV], constant[NV], sum[NV] = {};
    for (int j = 0; j < NV; ++j) {
      const int c = c0 + j * lanes;
      mean[j] = at(s.mean + c), m[j] = at(d.mean_dz + c), by_z[j] = at(s.inv + c) * at(d.mean_xdz + c);
    }
    each_image(l, n, [&](const Band& band) {
      each_line(l, band, [&](const Line& line) {
        for (int64_t i = 0, q = line.q + c0; i < line.windows; ++i, q += C)
          for (int j = 0; j < NV; ++j) {
            const V<T> x = at(s.zq + q + j * lanes) - mean[j];
            sum[j] += at(s.gq + q + j * lanes) * (at(d.dzq + q + j * lanes) - m[j] - x * by_z[j]);
          }
      });
    });
    for (int j = 0; j < NV; ++j) {
      const int c = c0 + j * lanes;
      const V<T> inv = at(s.inv + c), gux = at(s.mean_gux + c), b = inv * at(gamma + c), of = sum[j] * inv;
      at(of_gamma + c) += of;
      a[j] = inv * at(dgamma + c) - b * by_z[j];  // the tangent of b
      constant[j] = -a[j] * at(s.mean_gu + c);
      by_z[j] = -inv * (a[j] * gux + b * (of / pixels - by_z[j] * gux));
      by_dz[j] = -inv * b * gux;
    }
    const auto dense = [&](int64_t z, int j) {
      return (at(s.z + z) - mean[j]) * by_z[j] + ((at(d.dz + z) - m[j]) * by_dz[j] + constant[j]);
    };
    each_image(l, n, [&](const Band& band) {
      each_line(l, band, [&](const Line& line) {
        for (int i = 0; i < line.windows; ++i)
          for (int j = 0; j < NV; ++j) {
            const int64_t step = line.z + int64_t(i) * (K == 4 ? 2 : 1) * C + c0 + j * lanes;
            const int64_t q = line.q + int64_t(i) * C + c0 + j * lanes;
            const V<T> g = a[j] * at(s.gq + q);
            for (int k = 0; k < K; ++k) {
              V<T> gz = dense(step + corner.of[k], j);
              if constexpr (K > 1) gz += at(s.index + q) == T(k) ? g : V<T>{};
              else gz += g;
              at(of_z + step + corner.of[k]) = gz;
            }
          }
      });
      each_edge(l, band, [&](int64_t z, int64_t) {
        for (int j = 0; j < NV; ++j) at(of_z + z + c0 + j * lanes) = dense(z + c0 + j * lanes, j);
      });
    });
  });
}

}  // namespace
