// A convolution's three products (output, gradient of the input, gradient of the weight), and their operands.
//
// Weights are [kernel, kernel, C_in, C_out].  No patch matrix is ever built: the products find their rows by the
// tables of `Layer`.  There is no bias, because batch norm subtracts it and its gradient is exactly zero.
#pragma once

#include <cstring>
#include <initializer_list>
#include "geometry.h"

namespace {

// A convolution's operands: z = x * w.
template <class T> struct Factors { const T *x, *w; };

// Computes z, the sum of convolutions; calls after(band) when a band of z is complete.
template <class T, class F>
void convolve(const Layer& l, int n, std::initializer_list<Factors<T>> sum, T* z, F after) {
  if (!l.banded) start_sums(z, int64_t(n) * l.P(), l.cout);
  l.each_band(n, [&](const Band& band) {
    bool fresh = l.banded;
    for (const Factors<T>& f : sum) {
      if (l.banded)
        rows_product<T>({f.x + (int64_t(band.image) * (l.h + 2 * l.border) + band.row * l.stride) * l.wb() * l.cin,
                         l.cin, &Pair::in},
                        {z + l.z_at(band, band.row), l.cout, &Pair::out}, l.forward.data(), band.rows * l.ow,
                        f.w, l.cout, l.kernel * l.cin, l.kernel, int64_t(l.wb()) * l.cin, fresh);
      else
        l.each_tap(n, [&](int t, const Pair* pairs, int count, int64_t in, int64_t out) {
          rows_product<T>({f.x + in * l.cin, l.cin, &Pair::in}, {z + out * l.cout, l.cout, &Pair::out}, pairs, count,
                          f.w + int64_t(t) * l.cin * l.cout, l.cout, l.cin);
        });
      fresh = false;
    }
    after(band);
  });
}

// Computes gx from gz (f.x) and the weights from `transpose` (f.w); adds `other` if not null.  gx has no border.
template <class T> void convolve_input(const Layer& l, int n, Factors<T> f, T* gx, const T* other = nullptr) {
  if (other || !l.banded) start_sums(gx, int64_t(n) * l.h * l.w, l.cin, other);
  if (!l.banded) {
    l.each_tap(n, [&](int t, const Pair* pairs, int count, int64_t in, int64_t out) {
      rows_product<T>({f.x + out * l.cout, l.cout, &Pair::out}, {gx + in * l.cin, l.cin, &Pair::in}, pairs, count,
                      f.w + int64_t(t) * l.cin * l.cout, l.cin, l.cout);
    });
    return;
  }
  const int64_t line = int64_t(l.gw()) * l.cout;
  for (int i = 0; i < n; ++i)
    each_even(l.h, l.band, [&](int row, int rows) {
      rows_product<T>({f.x + (int64_t(i) * (l.oh + 2 * l.zborder) + row) * line, l.cout, &Pair::in},
                      {gx + (int64_t(i) * l.h + row) * l.w * l.cin, l.cin, &Pair::out}, l.input.data(), rows * l.w,
                      f.w, l.cin, l.kernel * l.cout, l.kernel, line, !other);
    });
}

// gw += a band's share of the weight gradient.
template <class T> void convolve_weight(const Layer& l, int n, const Band& band, const T* x, const T* gz, T* gw) {
  if (!l.banded)
    return l.each_tap(n, [&](int t, const Pair* pairs, int count, int64_t in, int64_t out) {
      outer_product<T>({x + in * l.cin, l.cin, &Pair::in}, {gz + out * l.cout, l.cout, &Pair::out}, pairs, count,
                       gw + int64_t(t) * l.cin * l.cout, l.cin, l.cout);
    });
  x += (int64_t(band.image) * (l.h + 2 * l.border) + band.row * l.stride) * l.wb() * l.cin;
  for (int t = 0; t < l.kernel; ++t)
    outer_product<T>({x + int64_t(t) * l.wb() * l.cin, l.cin, &Pair::in},
                     {gz + l.gz_at(band, band.row), l.cout, &Pair::out}, l.weight.data(), band.rows * l.ow,
                     gw + int64_t(t) * l.kernel * l.cin * l.cout, l.kernel * l.cin, l.cout);
}

// wt[tap, col, row] = w[tap, row, col], in square blocks of vectors where they fit.  Banded: the taps are reversed.
// Each thread has a share of the rows, which are the result's channels.
template <class T> void transpose(const Layer& l, const T* w, T* wt) {
  const int rows = l.cin, cols = l.cout, size = rows * cols;
  const int step = l.banded ? -size : size;
  if (l.banded) wt += int64_t(l.taps - 1) * size;
  using Index = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  constexpr int lanes = Simd<T>::kLanes;
  const bool whole = rows % lanes == 0 && cols % lanes == 0;
  const Range own = own_channels<T>(rows);
  for (int t = 0; t < l.taps; ++t, w += size, wt += step) {
    if (!whole) {
      for (int r = own.first; r < own.last; ++r)
        for (int c = 0; c < cols; ++c) wt[c * rows + r] = w[r * cols + c];
      continue;
    }
    for (int r = own.first; r < own.last; r += lanes)
      for (int c = 0; c < cols; c += lanes) {
        V<T> block[lanes];
        for (int i = 0; i < lanes; ++i) block[i] = at(w + (r + i) * cols + c);
        // Exchange the off-diagonal quarters of ever larger squares.
#pragma GCC unroll 4
        for (int s = 1; s < lanes; s *= 2) {
          typename Simd<Index>::V low, high;
          for (int j = 0; j < lanes; ++j) low[j] = j & s ? j - s + lanes : j, high[j] = j & s ? j + lanes : j + s;
#pragma GCC unroll 16
          for (int i = 0; i < lanes; ++i)
            if (!(i & s)) {
              const V<T> a = block[i], b = block[i + s];
              block[i] = __builtin_shuffle(a, b, low), block[i + s] = __builtin_shuffle(a, b, high);
            }
        }
        for (int i = 0; i < lanes; ++i) at(wt + (c + i) * rows + r) = block[i];
      }
  }
}

// Images [n, C, H, W] -> [n, H + 2, W + 2, C] with a border of zeros.  Each thread has a share of the images.
template <class T> void enter_images(const Layer& l, int n, const T* images, T* x) {
  const Range own = share(n);
  std::memset(x + l.x_size(own.first), 0, sizeof(T) * l.x_size(own.last - own.first));
  for (int i = own.first; i < own.last; ++i)
    for (int y = 0; y < l.h; ++y) {
      T* line = x + ((int64_t(i) * (l.h + 2 * l.border) + y + l.border) * l.wb() + l.border) * l.cin;
      for (int c = 0; c < l.cin; ++c) {
        const T* from = images + ((int64_t(i) * l.cin + c) * l.h + y) * l.w;
        for (int k = 0; k < l.w; ++k) line[k * l.cin + c] = from[k];
      }
    }
}

// Writes zeros around n maps of [h, w, C].  Each thread has a share of the maps.
template <class T> void clear_border(T* map, int n, int h, int w, int C, int border) {
  if (!border) return;
  const int64_t line = int64_t(w + 2 * border) * C, side = int64_t(border) * C;
  const auto clear = [&](T* from, int64_t count) { std::memset(from, 0, sizeof(T) * count); };
  const Range own = share(n);
  map += own.first * (h + 2 * border) * line;
  for (int i = own.first; i < own.last; ++i) {
    clear(map, border * line + side);
    map += border * line;
    // The end of a line and the start of the next.
    for (int y = 0; y < h; ++y, map += line) clear(map + line - side, 2 * side);
    clear(map, border * line);
    map += border * line;
  }
}

}  // namespace
