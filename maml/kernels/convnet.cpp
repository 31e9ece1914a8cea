// Loss, gradient and Hessian-vector product of a small convolutional classifier, task by task.
//
// The network is L x [convolution -> batch norm (statistics of the batch) -> leaky ReLU -> 2x2 max-pool
// or none] -> spatial mean or flatten -> linear -> mean cross-entropy.  One call handles B tasks, each
// with its own n images and, unless a stride is 0, its own parameters.  A task is finished before the
// next one starts, so that its activations stay in the second-level cache.
//
// Layouts: images and activations are [n, H, W, C]; convolution weights [kh, kw, C_in, C_out]; a "row" is
// the C channels of one pixel.  Channels are the vector axis everywhere, hence C_out % lanes == 0.
// The three products of a convolution (forward, input gradient, weight gradient) read the same table: for
// each tap of the kernel, the pairs (input row, output row) it connects.  Pixels of the padding are in no
// pair and cost nothing, and no patch matrix is ever built.
//
// A convolution's bias is absent: batch norm subtracts it, and its gradient is exactly zero.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64, kMaxVecs = 4, kMaxRows = 6;  // 24 accumulators of 32 registers
#else
constexpr int kBytes = 32, kMaxVecs = 2, kMaxRows = 6;  // 12 accumulators of 16 registers
#endif
constexpr int kNarrowRows = 8;    // rows at a time where there are fewer vectors than kMaxVecs
constexpr int kPairChunk = 64;    // pairs whose two operands fit in the first-level cache together
constexpr int kTableRows = 256;   // output rows one table covers, at least; more repeat it

template <class T> struct Simd {
  typedef T V __attribute__((vector_size(kBytes), aligned(alignof(T)), may_alias));
  static constexpr int kLanes = kBytes / sizeof(T);
};
template <class T> using V = typename Simd<T>::V;
template <class T> inline V<T>& at(T* p) { return *reinterpret_cast<V<T>*>(p); }
template <class T> inline const V<T>& at(const T* p) { return *reinterpret_cast<const V<T>*>(p); }

// Calls f(integral_constant<NV>, first channel) over blocks of NV vectors that cover `channels`.
template <class T, class F> inline void each_block(int channels, F f) {
  constexpr int lanes = Simd<T>::kLanes;
  int c = 0;
  if constexpr (kMaxVecs >= 4)
    for (; c + 4 * lanes <= channels; c += 4 * lanes) f(std::integral_constant<int, 4>(), c);
  for (; c + 2 * lanes <= channels; c += 2 * lanes) f(std::integral_constant<int, 2>(), c);
  for (; c + lanes <= channels; c += lanes) f(std::integral_constant<int, 1>(), c);
}

// Splits `total` into nearly equal blocks of at most `most`, and calls f(start, size).
template <class F> inline void each_even(int total, int most, F f) {
  for (int start = 0, blocks = (total + most - 1) / most; blocks > 0; --blocks) {
    const int size = (total - start + blocks - 1) / blocks;
    f(start, size);
    start += size;
  }
}

struct Pair { int32_t in, out; };

// One operand of a product, addressed by row: `side` says which half of a pair is its row number.
template <class T> struct Rows {
  T* base;
  int width;  // elements from a row to the next
  int32_t Pair::*side;
  T* operator()(const Pair& p) const { return base + int64_t(p.*side) * width; }
};

// c(pair) += a(pair) . b for R pairs: b is [segments * depth, ldb]; a's row is `segments` runs of `depth`.
template <class T, int R, int NV>
void rows_kernel(Rows<const T> a, Rows<T> c, const Pair* pairs, const T* b, int ldb, int depth, int segments,
                 int64_t jump, int column) {
  constexpr int lanes = Simd<T>::kLanes;
  const T* ap[R];
  V<T> acc[R][NV];
  for (int r = 0; r < R; ++r) {
    ap[r] = a(pairs[r]);
    for (int j = 0; j < NV; ++j) acc[r][j] = at(c(pairs[r]) + column + j * lanes);
  }
  b += column;
  for (int s = 0; s < segments; ++s) {
    for (int k = 0; k < depth; ++k, b += ldb) {
      V<T> bv[NV];
      for (int j = 0; j < NV; ++j) bv[j] = at(b + j * lanes);
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < NV; ++j) acc[r][j] += ap[r][k] * bv[j];
    }
    for (int r = 0; r < R; ++r) ap[r] += jump;
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < NV; ++j) at(c(pairs[r]) + column + j * lanes) = acc[r][j];
}

// w[i, :] += sum over pairs of a(pair)[i] * g(pair)[:] for R values of i, starting at `row`.
template <class T, int R, int NV>
void outer_kernel(Rows<const T> a, Rows<const T> g, const Pair* pairs, int count, T* w, int ldw, int row, int column) {
  constexpr int lanes = Simd<T>::kLanes;
  V<T> acc[R][NV];
  w += int64_t(row) * ldw + column;
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < NV; ++j) acc[r][j] = at(w + r * ldw + j * lanes);
  for (int i = 0; i < count; ++i) {
    const T* ap = a(pairs[i]) + row;
    const T* gp = g(pairs[i]) + column;
    V<T> gv[NV];
    for (int j = 0; j < NV; ++j) gv[j] = at(gp + j * lanes);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < NV; ++j) acc[r][j] += ap[r] * gv[j];
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < NV; ++j) at(w + r * ldw + j * lanes) = acc[r][j];
}

// Turns a run-time number of rows into a template argument.
template <int R, class F> inline void with_rows(int rows, F f) {
  if (rows == R) f(std::integral_constant<int, R>());
  else if constexpr (R > 1) with_rows<R - 1>(rows, f);
}

template <class T>
void rows_product(Rows<const T> a, Rows<T> c, const Pair* pairs, int count, const T* b, int ldb, int depth,
                  int segments = 1, int64_t jump = 0) {
  each_block<T>(ldb, [&](auto nv, int column) {
    constexpr int most = nv() == kMaxVecs ? kMaxRows : kNarrowRows;
    each_even(count, most, [&](int start, int size) {
      with_rows<most>(size, [&](auto r) {
        rows_kernel<T, r(), nv()>(a, c, pairs + start, b, ldb, depth, segments, jump, column);
      });
    });
  });
}

template <class T>
void outer_product(Rows<const T> a, Rows<const T> g, const Pair* pairs, int count, T* w, int rows, int ldw) {
  each_even(count, kPairChunk, [&](int first, int length) {
    each_block<T>(ldw, [&](auto nv, int column) {
      constexpr int most = nv() == kMaxVecs ? kMaxRows : kNarrowRows;
      each_even(rows, most, [&](int row, int size) {
        with_rows<most>(size, [&](auto r) {
          outer_kernel<T, r(), nv()>(a, g, pairs + first, length, w, ldw, row, column);
        });
      });
    });
  });
}

// ---------------------------------------------------------------------------------------------------- geometry

struct Layer {
  int h, w, cin, cout, kernel, stride, pad, pool;  // as the caller gives them; h and w are the input's
  int oh, ow, qh, qw;                              // after the convolution, and after the pooling
  bool first;                                      // reads a padded copy: few channels, so taps are merged along x
  int hp, wp, taps, group;
  std::vector<std::vector<Pair>> pairs;  // per tap, sorted by image, for `group` images
  int P() const { return oh * ow; }
  int Q() const { return qh * qw; }
  int64_t weights() const { return int64_t(kernel) * kernel * cin * cout; }

  void build() {
    oh = (h + 2 * pad - kernel) / stride + 1, ow = (w + 2 * pad - kernel) / stride + 1;
    qh = pool ? oh / 2 : oh, qw = pool ? ow / 2 : ow;
    hp = h + 2 * pad, wp = w + 2 * pad;
    group = std::max(1, kTableRows / P());
    taps = first ? kernel : kernel * kernel;
    pairs.resize(taps);
    for (int t = 0; t < taps; ++t)
      for (int i = 0; i < group; ++i)
        for (int y = 0; y < oh; ++y)
          for (int x = 0; x < ow; ++x) {
            const int32_t out = (i * oh + y) * ow + x;
            if (first) {
              pairs[t].push_back({(i * hp + y * stride + t) * wp + x * stride, out});
              continue;
            }
            const int iy = y * stride - pad + t / kernel, ix = x * stride - pad + t % kernel;
            if (iy >= 0 && iy < h && ix >= 0 && ix < w) pairs[t].push_back({(i * h + iy) * w + ix, out});
          }
  }
  // Calls f(tap, pairs, count, offset of the input rows, offset of the output rows).
  template <class F> void each_tap(int n, F f) const {
    for (int i = 0; i < n; i += group)
      for (int t = 0; t < taps; ++t) {
        const int count = int(pairs[t].size() / group) * std::min(group, n - i);
        f(t, pairs[t].data(), count, int64_t(i) * (first ? hp * wp : h * w), int64_t(i) * P());
      }
  }
};

struct Plan {
  std::vector<Layer> layers;
  int ways, features;
  bool mean;
  double slope, eps;
};

template <class T> void convolve(const Layer& l, int n, const T* x, const T* w, T* z) {
  const int depth = l.first ? l.kernel * l.cin : l.cin;
  l.each_tap(n, [&](int t, const Pair* pairs, int count, int64_t in, int64_t out) {
    if (l.first && t > 0) return;  // the first layer's kernel walks down the rows of the padded input itself
    rows_product<T>({x + in * l.cin, l.cin, &Pair::in}, {z + out * l.cout, l.cout, &Pair::out}, pairs, count,
                    w + int64_t(t) * depth * l.cout, l.cout, depth, l.first ? l.kernel : 1, int64_t(l.wp) * l.cin);
  });
}

// gx += the input gradient; wt is [tap, C_out, C_in].
template <class T> void convolve_input(const Layer& l, int n, const T* gz, const T* wt, T* gx) {
  l.each_tap(n, [&](int t, const Pair* pairs, int count, int64_t in, int64_t out) {
    rows_product<T>({gz + out * l.cout, l.cout, &Pair::out}, {gx + in * l.cin, l.cin, &Pair::in}, pairs, count,
                    wt + int64_t(t) * l.cin * l.cout, l.cin, l.cout);
  });
}

template <class T> void convolve_weight(const Layer& l, int n, const T* x, const T* gz, T* gw) {
  const int depth = l.first ? l.kernel * l.cin : l.cin;
  l.each_tap(n, [&](int t, const Pair* pairs, int count, int64_t in, int64_t out) {
    outer_product<T>({x + in * l.cin, l.cin, &Pair::in}, {gz + out * l.cout, l.cout, &Pair::out}, pairs, count,
                     gw + int64_t(t) * depth * l.cout, depth, l.cout);
  });
}

// wt[tap, col, row] = w[tap, row, col], in square blocks of vectors where they fit.
template <class T> void transpose(const T* w, T* wt, int taps, int rows, int cols) {
  using Index = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  constexpr int lanes = Simd<T>::kLanes;
  const bool whole = rows % lanes == 0 && cols % lanes == 0;
  for (int t = 0; t < taps; ++t, w += rows * cols, wt += rows * cols) {
    if (!whole) {
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < cols; ++c) wt[c * rows + r] = w[r * cols + c];
      continue;
    }
    for (int r = 0; r < rows; r += lanes)
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

// -------------------------------------------------------------------------------------- norm, activation, pooling

// What the tangent pass needs of the gradient pass, for one layer of one task.
template <class T> struct Saved {
  T *y, *index;            // [n, Q, C] output; which of the four pixels the pooling took
  T *xhat, *gu, *gz;       // [n, P, C] normalised; gradients before and after the norm
  T *inv, *mean_gu, *mean_gux;  // [C] 1 / sqrt(variance + eps); means of gu and of gu * xhat
};

// Calls f(output row, pixel row of the top left) over a layer's outputs.
template <class F> inline void each_output(const Layer& l, int n, F f) {
  if (!l.pool) {
    for (int64_t q = 0, end = int64_t(n) * l.P(); q < end; ++q) f(q, q);
    return;
  }
  int64_t q = 0;
  for (int i = 0; i < n; ++i)
    for (int y = 0; y < l.qh; ++y)
      for (int x = 0; x < l.qw; ++x) f(q++, (int64_t(i) * l.oh + 2 * y) * l.ow + 2 * x);
}

template <class T>
void norm_forward(const Layer& l, int n, const T* gamma, const T* beta, T slope, T eps, const Saved<T>& s) {
  constexpr int lanes = Simd<T>::kLanes;
  const int C = l.cout;
  const int64_t P = int64_t(n) * l.P();
  const int64_t corner[4] = {0, C, int64_t(l.ow) * C, int64_t(l.ow + 1) * C};
  each_block<T>(C, [&](auto nv, int c0) {
    constexpr int NV = nv();
    V<T> mean[NV] = {}, var[NV] = {}, inv[NV], scale[NV], shift[NV];
    T* z = s.xhat + c0;
    for (int64_t p = 0; p < P; ++p)
      for (int j = 0; j < NV; ++j) mean[j] += at(z + p * C + j * lanes);
    for (int j = 0; j < NV; ++j) mean[j] /= T(P);
    for (int64_t p = 0; p < P; ++p)
      for (int j = 0; j < NV; ++j) {
        const V<T> d = at(z + p * C + j * lanes) - mean[j];
        var[j] += d * d;
      }
    for (int j = 0; j < NV; ++j) {
      for (int k = 0; k < lanes; ++k) inv[j][k] = T(1) / std::sqrt(var[j][k] / T(P) + eps);
      at(s.inv + c0 + j * lanes) = inv[j];
      scale[j] = at(gamma + c0 + j * lanes), shift[j] = at(beta + c0 + j * lanes);
    }
    if (l.pool)
      for (int64_t p = 0; p < P; ++p)
        for (int j = 0; j < NV; ++j) {
          V<T>& v = at(z + p * C + j * lanes);
          v = (v - mean[j]) * inv[j];
        }
    each_output(l, n, [&](int64_t q, int64_t p) {
      for (int j = 0; j < NV; ++j) {
        T* v = z + p * C + j * lanes;
        const int64_t o = q * C + c0 + j * lanes;
        V<T> u;
        if (l.pool) {
          V<T> which = {};
          u = at(v) * scale[j] + shift[j];
          for (int k = 1; k < 4; ++k) {
            const V<T> other = at(v + corner[k]) * scale[j] + shift[j];
            which = other > u ? V<T>{} + T(k) : which;
            u = other > u ? other : u;
          }
          at(s.index + o) = which;
        } else {
          at(v) = (at(v) - mean[j]) * inv[j];
          u = at(v) * scale[j] + shift[j];
        }
        at(s.y + o) = u > 0 ? u : u * slope;
      }
    });
  });
}

// gy -> gz, and the gradients of gamma and beta (added).  Saves gu and the two means.
template <class T>
void norm_backward(const Layer& l, int n, const T* gamma, T slope, const T* gy, const Saved<T>& s, T* ggamma, T* gbeta) {
  constexpr int lanes = Simd<T>::kLanes;
  const int C = l.cout;
  const int64_t P = int64_t(n) * l.P();
  const int64_t corner[4] = {0, C, int64_t(l.ow) * C, int64_t(l.ow + 1) * C};
  if (l.pool && (l.oh % 2 || l.ow % 2)) std::memset(s.gu, 0, sizeof(T) * P * C);  // an odd edge is in no window
  each_block<T>(C, [&](auto nv, int c0) {
    constexpr int NV = nv();
    V<T> sum[NV] = {}, sumx[NV] = {}, scale[NV];
    each_output(l, n, [&](int64_t q, int64_t p) {
      for (int j = 0; j < NV; ++j) {
        const int64_t o = q * C + c0 + j * lanes, v = p * C + c0 + j * lanes;
        const V<T> g = at(s.y + o) > 0 ? at(gy + o) : at(gy + o) * slope;
        sum[j] += g;
        if (l.pool)
          for (int k = 0; k < 4; ++k) {
            const V<T> part = at(s.index + o) == T(k) ? g : V<T>{};
            at(s.gu + v + corner[k]) = part;
            sumx[j] += part * at(s.xhat + v + corner[k]);
          }
        else {
          at(s.gu + v) = g;
          sumx[j] += g * at(s.xhat + v);
        }
      }
    });
    for (int j = 0; j < NV; ++j) {
      const int c = c0 + j * lanes;
      at(gbeta + c) += sum[j], at(ggamma + c) += sumx[j];
      at(s.mean_gu + c) = sum[j] /= T(P), at(s.mean_gux + c) = sumx[j] /= T(P);
      scale[j] = at(s.inv + c) * at(gamma + c);
    }
    for (int64_t p = 0; p < P; ++p)
      for (int j = 0; j < NV; ++j) {
        const int64_t v = p * C + c0 + j * lanes;
        at(s.gz + v) = scale[j] * (at(s.gu + v) - sum[j] - at(s.xhat + v) * sumx[j]);
      }
  });
}

// dz -> dxhat (in place) and dy; keeps mean(xhat * dz) in `mean_xdz`.
template <class T>
void norm_forward_tangent(const Layer& l, int n, const T* gamma, const T* dgamma, const T* dbeta, T slope,
                          const Saved<T>& s, T* dz, T* dy, T* mean_xdz) {
  constexpr int lanes = Simd<T>::kLanes;
  const int C = l.cout;
  const int64_t P = int64_t(n) * l.P();
  const int64_t corner[4] = {0, C, int64_t(l.ow) * C, int64_t(l.ow + 1) * C};
  each_block<T>(C, [&](auto nv, int c0) {
    constexpr int NV = nv();
    V<T> m[NV] = {}, mx[NV] = {}, g[NV], dg[NV], db[NV], inv[NV];
    for (int64_t p = 0; p < P; ++p)
      for (int j = 0; j < NV; ++j) {
        const int64_t v = p * C + c0 + j * lanes;
        m[j] += at(dz + v);
        mx[j] += at(dz + v) * at(s.xhat + v);
      }
    for (int j = 0; j < NV; ++j) {
      const int c = c0 + j * lanes;
      m[j] /= T(P), at(mean_xdz + c) = mx[j] /= T(P);
      g[j] = at(gamma + c), dg[j] = at(dgamma + c), db[j] = at(dbeta + c), inv[j] = at(s.inv + c);
    }
    const auto normalise = [&](int64_t v, int j) {
      return at(dz + v) = inv[j] * (at(dz + v) - m[j] - at(s.xhat + v) * mx[j]);
    };
    if (l.pool)
      for (int64_t p = 0; p < P; ++p)
        for (int j = 0; j < NV; ++j) normalise(p * C + c0 + j * lanes, j);
    each_output(l, n, [&](int64_t q, int64_t p) {
      for (int j = 0; j < NV; ++j) {
        const int64_t o = q * C + c0 + j * lanes, v = p * C + c0 + j * lanes;
        V<T> x = at(s.xhat + v), dx;
        if (l.pool) {
          dx = at(dz + v);
          for (int k = 1; k < 4; ++k) {
            x = at(s.index + o) == T(k) ? at(s.xhat + v + corner[k]) : x;
            dx = at(s.index + o) == T(k) ? at(dz + v + corner[k]) : dx;
          }
        } else {
          dx = normalise(v, j);
        }
        const V<T> du = dg[j] * x + g[j] * dx + db[j];
        at(dy + o) = at(s.y + o) > 0 ? du : du * slope;
      }
    });
  });
}

// dgy -> dgz (in place of dxhat), and the tangents of the gradients of gamma and beta (added).
template <class T>
void norm_backward_tangent(const Layer& l, int n, const T* gamma, const T* dgamma, T slope, const Saved<T>& s,
                           const T* dgy, const T* mean_xdz, T* dgu, T* dxhat, T* dggamma, T* dgbeta) {
  constexpr int lanes = Simd<T>::kLanes;
  const int C = l.cout;
  const int64_t P = int64_t(n) * l.P();
  const int64_t corner[4] = {0, C, int64_t(l.ow) * C, int64_t(l.ow + 1) * C};
  if (l.pool && (l.oh % 2 || l.ow % 2)) std::memset(dgu, 0, sizeof(T) * P * C);
  each_block<T>(C, [&](auto nv, int c0) {
    constexpr int NV = nv();
    V<T> sum[NV] = {}, sumx[NV] = {}, a[NV], b[NV], gu[NV], gux[NV];
    each_output(l, n, [&](int64_t q, int64_t p) {
      for (int j = 0; j < NV; ++j) {
        const int64_t o = q * C + c0 + j * lanes, v = p * C + c0 + j * lanes;
        const V<T> g = at(s.y + o) > 0 ? at(dgy + o) : at(dgy + o) * slope;
        sum[j] += g;
        if (l.pool)
          for (int k = 0; k < 4; ++k) {
            const int64_t vk = v + corner[k];
            const V<T> part = at(s.index + o) == T(k) ? g : V<T>{};
            at(dgu + vk) = part;
            sumx[j] += part * at(s.xhat + vk) + at(s.gu + vk) * at(dxhat + vk);
          }
        else {
          at(dgu + v) = g;
          sumx[j] += g * at(s.xhat + v) + at(s.gu + v) * at(dxhat + v);
        }
      }
    });
    for (int j = 0; j < NV; ++j) {
      const int c = c0 + j * lanes;
      at(dgbeta + c) += sum[j], at(dggamma + c) += sumx[j];
      sum[j] /= T(P), sumx[j] /= T(P);
      gu[j] = at(s.mean_gu + c), gux[j] = at(s.mean_gux + c);
      b[j] = at(s.inv + c) * at(gamma + c);
      a[j] = at(s.inv + c) * (at(dgamma + c) - b[j] * at(mean_xdz + c));  // the tangent of b
    }
    for (int64_t p = 0; p < P; ++p)
      for (int j = 0; j < NV; ++j) {
        const int64_t v = p * C + c0 + j * lanes;
        const V<T> x = at(s.xhat + v);
        at(dxhat + v) = a[j] * (at(s.gu + v) - gu[j] - x * gux[j]) +
                        b[j] * (at(dgu + v) - sum[j] - at(dxhat + v) * gux[j] - x * sumx[j]);
      }
  });
}

// ------------------------------------------------------------------------------------------------- linear head

template <class T> T dot(const T* a, const T* b, int count) {
  V<T> sum = {};
  int i = 0;
  for (; i + Simd<T>::kLanes <= count; i += Simd<T>::kLanes) sum += at(a + i) * at(b + i);
  T total = 0;
  for (int k = 0; k < Simd<T>::kLanes; ++k) total += sum[k];
  for (; i < count; ++i) total += a[i] * b[i];
  return total;
}
template <class T> void axpy(T scale, const T* a, T* b, int count) {
  for (int i = 0; i < count; ++i) b[i] += scale * a[i];
}

// Between the last activations [n, Q, C] and the features [n, F]: their mean, or all in (C, Q) order.
template <class T> void pool_features(const Plan& plan, int n, const T* y, T* f) {
  const Layer& l = plan.layers.back();
  const int Q = l.Q(), C = l.cout;
  std::memset(f, 0, sizeof(T) * n * plan.features);
  for (int i = 0; i < n; ++i, f += plan.features)
    for (int q = 0; q < Q; ++q, y += C) {
      if (plan.mean) axpy(T(1) / Q, y, f, C);
      else for (int c = 0; c < C; ++c) f[c * Q + q] = y[c];
    }
}
template <class T> void spread_features(const Plan& plan, int n, const T* gf, T* gy) {
  const Layer& l = plan.layers.back();
  const int Q = l.Q(), C = l.cout;
  for (int i = 0; i < n; ++i, gf += plan.features)
    for (int q = 0; q < Q; ++q, gy += C)
      for (int c = 0; c < C; ++c) gy[c] = plan.mean ? gf[c] / Q : gf[c * Q + q];
}

// ------------------------------------------------------------------------------------------------------- tasks

// A stack of aligned buffers that a thread keeps from call to call: fresh pages cost as much as the arithmetic.
class Arena {
 public:
  ~Arena() { std::free(base_); }
  void reserve(size_t bytes) {
    used_ = 0;
    if (bytes <= size_) return;
    std::free(base_);
    size_ = (bytes + kPage - 1) / kPage * kPage;
    base_ = static_cast<char*>(std::aligned_alloc(kPage, size_));
#if defined(__linux__)
    madvise(base_, size_, MADV_HUGEPAGE);
#endif
  }
  void* take(size_t bytes) {
    char* p = base_ + used_;
    used_ += (bytes + 63) / 64 * 64;
    return p;
  }

 private:
  static constexpr size_t kPage = 2 << 20;  // of huge pages, where the system has them
  char* base_ = nullptr;
  size_t size_ = 0, used_ = 0;
};
thread_local Arena arena;

template <class T> int64_t padded(int64_t count) { return (count * sizeof(T) + 63) / 64 * 64 / sizeof(T); }

template <class T> struct Task {
  T *x, *features, *probabilities, *ghead;  // padded images, [n, F], [n, ways], [n, ways]
  std::vector<Saved<T>> layers;
};

// Lays a task's residuals out from `base`; returns the number of elements.
template <class T> int64_t lay_out(const Plan& plan, int n, T* base, Task<T>& task) {
  int64_t used = 0;
  const auto take = [&](int64_t count) {
    T* p = base + used;
    used += padded<T>(count);
    return p;
  };
  const Layer& first = plan.layers[0];
  task.x = take(int64_t(n) * first.hp * first.wp * first.cin);
  task.features = take(int64_t(n) * plan.features);
  task.probabilities = take(int64_t(n) * plan.ways);
  task.ghead = take(int64_t(n) * plan.ways);
  task.layers.clear();
  for (const Layer& l : plan.layers) {
    Saved<T> s;
    const int64_t P = int64_t(n) * l.P() * l.cout, Q = int64_t(n) * l.Q() * l.cout;
    s.y = take(Q), s.index = l.pool ? take(Q) : nullptr;
    s.xhat = take(P), s.gu = take(P), s.gz = l.first ? nullptr : take(P);  // the first layer's gz is not read again
    s.inv = take(l.cout), s.mean_gu = take(l.cout), s.mean_gux = take(l.cout);
    task.layers.push_back(s);
  }
  return used;
}

// Per-task parameters: 3 a layer (weight, gamma, beta), then the head's weight and bias.
template <class T> struct Parameters {
  T* const* base;
  const int64_t* stride;
  T* operator()(int task, int index) const { return base[index] + task * stride[index]; }
  bool shared(int index) const { return stride[index] == 0; }
  // As an output: one task's own is made zero here, just before it is added to; one that tasks share, by the caller.
  T* cleared(int task, int index, int64_t count) const {
    if (!shared(index)) std::memset((*this)(task, index), 0, sizeof(T) * count);
    return (*this)(task, index);
  }
};

template <class T> int64_t largest_weight(const Plan& plan) {
  int64_t size = 0;
  for (const Layer& l : plan.layers) size = std::max(size, l.first ? 0 : l.weights());
  return size;
}
template <class T> int64_t largest_output(const Plan& plan, int n, bool only_pooled = false) {
  int64_t size = 0;
  for (const Layer& l : plan.layers)
    if (l.pool || !only_pooled) size = std::max(size, int64_t(n) * l.Q() * l.cout);
  return size;
}

template <class T>
void gradient(const Plan& plan, int tasks, int n, const T* images, const int64_t* labels, Parameters<const T> params,
              T* losses, T* logits, Parameters<T> grads, T* residuals) {
  const int L = int(plan.layers.size()), F = plan.features, ways = plan.ways;
  const T slope = T(plan.slope), eps = T(plan.eps);
  Task<T> task;
  const int64_t saved = lay_out<T>(plan, n, nullptr, task);
  const int64_t weight = largest_weight<T>(plan), pooled = largest_output<T>(plan, n, true);
  const int64_t first_gz = int64_t(n) * plan.layers[0].P() * plan.layers[0].cout;
  arena.reserve(sizeof(T) * (padded<T>(weight) + padded<T>(pooled) + padded<T>(n * F) +
                             padded<T>(first_gz) + (residuals ? 0 : saved)));
  const auto take = [](int64_t count) { return static_cast<T*>(arena.take(sizeof(T) * count)); };
  T *wt = take(weight), *gy = take(pooled), *gf = take(n * F), *gz0 = take(first_gz);
  T* own = residuals ? nullptr : take(saved);

  for (int b = 0; b < tasks; ++b) {
    lay_out(plan, n, residuals ? residuals + b * saved : own, task);
    task.layers[0].gz = gz0;
    const Layer& first = plan.layers[0];
    std::memset(task.x, 0, sizeof(T) * n * first.hp * first.wp * first.cin);
    const int64_t line = int64_t(first.w) * first.cin;
    for (int i = 0; i < n; ++i)
      for (int y = 0; y < first.h; ++y)
        std::memcpy(task.x + ((int64_t(i) * first.hp + y + first.pad) * first.wp + first.pad) * first.cin,
                    images + ((int64_t(b) * n + i) * first.h + y) * line, sizeof(T) * line);

    for (int k = 0; k < L; ++k) {
      const Layer& l = plan.layers[k];
      const Saved<T>& s = task.layers[k];
      std::memset(s.xhat, 0, sizeof(T) * n * l.P() * l.cout);
      convolve<T>(l, n, k ? task.layers[k - 1].y : task.x, params(b, 3 * k), s.xhat);
      norm_forward<T>(l, n, params(b, 3 * k + 1), params(b, 3 * k + 2), slope, eps, s);
    }

    const T *hw = params(b, 3 * L), *hb = params(b, 3 * L + 1);
    T *ghw = grads.cleared(b, 3 * L, int64_t(ways) * F), *ghb = grads.cleared(b, 3 * L + 1, ways);
    pool_features(plan, n, task.layers[L - 1].y, task.features);
    std::memset(gf, 0, sizeof(T) * n * F);
    T loss = 0;
    for (int i = 0; i < n; ++i) {
      T *out = logits + (int64_t(b) * n + i) * ways, *p = task.probabilities + i * ways, *g = task.ghead + i * ways;
      const T* f = task.features + int64_t(i) * F;
      const int label = int(labels[int64_t(b) * n + i]);
      for (int c = 0; c < ways; ++c) out[c] = hb[c] + dot(f, hw + int64_t(c) * F, F);
      const T top = *std::max_element(out, out + ways);
      T total = 0;
      for (int c = 0; c < ways; ++c) total += p[c] = std::exp(out[c] - top);
      loss += std::log(total) + top - out[label];
      for (int c = 0; c < ways; ++c) {
        p[c] /= total;
        g[c] = (p[c] - T(c == label)) / T(n);
        ghb[c] += g[c];
        axpy(g[c], f, ghw + int64_t(c) * F, F);
        axpy(g[c], hw + int64_t(c) * F, gf + int64_t(i) * F, F);
      }
    }
    losses[b] = loss / T(n);
    // Without pooling the gradient of a layer's output is masked where it lies.
    const auto incoming = [&](int k) { return plan.layers[k].pool ? gy : task.layers[k].gu; };
    spread_features(plan, n, gf, incoming(L - 1));

    for (int k = L - 1; k >= 0; --k) {
      const Layer& l = plan.layers[k];
      const Saved<T>& s = task.layers[k];
      norm_backward<T>(l, n, params(b, 3 * k + 1), slope, incoming(k), s, grads.cleared(b, 3 * k + 1, l.cout),
                       grads.cleared(b, 3 * k + 2, l.cout));
      convolve_weight<T>(l, n, k ? task.layers[k - 1].y : task.x, s.gz,
                         grads.cleared(b, 3 * k, l.weights()));
      if (k == 0) break;
      transpose(params(b, 3 * k), wt, l.taps, l.cin, l.cout);
      std::memset(incoming(k - 1), 0, sizeof(T) * n * l.h * l.w * l.cin);
      convolve_input<T>(l, n, s.gz, wt, incoming(k - 1));
    }
  }
}

// The tangent of `gradient` along `v`, at the point its residuals describe: a Hessian-vector product.
template <class T>
void hessian_vector(const Plan& plan, int tasks, int n, Parameters<const T> params, T* residuals,
                    Parameters<const T> v, Parameters<T> outs) {
  const int L = int(plan.layers.size()), F = plan.features, ways = plan.ways;
  const T slope = T(plan.slope);
  Task<T> task;
  const int64_t saved = lay_out<T>(plan, n, nullptr, task);
  const int64_t weight = largest_weight<T>(plan), output = largest_output<T>(plan, n);
  int64_t total = 0, full = 0;
  for (const Layer& l : plan.layers) {
    const int64_t P = int64_t(n) * l.P() * l.cout;
    if (l.pool) full = std::max(full, P);
    total += padded<T>(P) + padded<T>(l.cout);
  }
  arena.reserve(sizeof(T) * (total + padded<T>(weight) + 2 * padded<T>(output) + padded<T>(full) +
                             2 * padded<T>(n * F) + padded<T>(ways)));
  const auto take = [](int64_t count) { return static_cast<T*>(arena.take(sizeof(T) * count)); };
  T *wt = take(weight), *dy = take(output), *dgy = take(output), *dgu = take(full);
  T *df = take(n * F), *dgf = take(n * F), *dl = take(ways);
  std::vector<T*> dx(L), mean(L);  // tangents of xhat (later of gz); means of xhat * dz
  for (int k = 0; k < L; ++k) {
    const Layer& l = plan.layers[k];
    dx[k] = take(int64_t(n) * l.P() * l.cout), mean[k] = take(l.cout);
  }

  for (int b = 0; b < tasks; ++b) {
    lay_out(plan, n, residuals + b * saved, task);
    for (int k = 0; k < L; ++k) {
      const Layer& l = plan.layers[k];
      std::memset(dx[k], 0, sizeof(T) * n * l.P() * l.cout);
      convolve<T>(l, n, k ? task.layers[k - 1].y : task.x, v(b, 3 * k), dx[k]);
      T* out = outs.cleared(b, 3 * k, l.weights());
      if (k) {
        convolve<T>(l, n, dy, params(b, 3 * k), dx[k]);
        convolve_weight<T>(l, n, dy, task.layers[k].gz, out);  // here, while the tangent of the input is at hand
      }
      norm_forward_tangent<T>(l, n, params(b, 3 * k + 1), v(b, 3 * k + 1), v(b, 3 * k + 2), slope, task.layers[k],
                              dx[k], dy, mean[k]);
    }

    const T *hw = params(b, 3 * L), *vw = v(b, 3 * L), *vb = v(b, 3 * L + 1);
    T *ow = outs.cleared(b, 3 * L, int64_t(ways) * F), *ob = outs.cleared(b, 3 * L + 1, ways);
    pool_features(plan, n, dy, df);
    std::memset(dgf, 0, sizeof(T) * n * F);
    for (int i = 0; i < n; ++i) {
      const T *f = task.features + int64_t(i) * F, *di = df + int64_t(i) * F;
      const T *p = task.probabilities + i * ways, *g = task.ghead + i * ways;
      T mean_dl = 0;
      for (int c = 0; c < ways; ++c) {
        dl[c] = vb[c] + dot(di, hw + int64_t(c) * F, F) + dot(f, vw + int64_t(c) * F, F);
        mean_dl += p[c] * dl[c];
      }
      for (int c = 0; c < ways; ++c) {
        const T dg = p[c] * (dl[c] - mean_dl) / T(n);
        ob[c] += dg;
        axpy(dg, f, ow + int64_t(c) * F, F);
        axpy(g[c], di, ow + int64_t(c) * F, F);
        axpy(dg, hw + int64_t(c) * F, dgf + int64_t(i) * F, F);
        axpy(g[c], vw + int64_t(c) * F, dgf + int64_t(i) * F, F);
      }
    }
    spread_features(plan, n, dgf, dgy);

    for (int k = L - 1; k >= 0; --k) {
      const Layer& l = plan.layers[k];
      const Saved<T>& s = task.layers[k];
      norm_backward_tangent<T>(l, n, params(b, 3 * k + 1), v(b, 3 * k + 1), slope, s, dgy, mean[k],
                               l.pool ? dgu : dgy, dx[k],
                               outs.cleared(b, 3 * k + 1, l.cout), outs.cleared(b, 3 * k + 2, l.cout));
      convolve_weight<T>(l, n, k ? task.layers[k - 1].y : task.x, dx[k], outs(b, 3 * k));
      if (k == 0) break;
      std::memset(dgy, 0, sizeof(T) * n * l.h * l.w * l.cin);
      transpose(params(b, 3 * k), wt, l.taps, l.cin, l.cout);
      convolve_input<T>(l, n, dx[k], wt, dgy);
      transpose(v(b, 3 * k), wt, l.taps, l.cin, l.cout);
      convolve_input<T>(l, n, s.gz, wt, dgy);
    }
  }
}

}  // namespace

extern "C" {

int lanes(int element_size) { return kBytes / element_size; }

// `spec` is 8 numbers a layer: height, width, channels in and out, kernel, stride, padding, pooling (0 or 1).
void* plan_new(int layers, const int64_t* spec, int ways, int mean, double slope, double eps) {
  Plan* plan = new Plan();
  plan->layers.resize(layers);
  for (int k = 0; k < layers; ++k, spec += 8) {
    Layer& l = plan->layers[k];
    l.h = spec[0], l.w = spec[1], l.cin = spec[2], l.cout = spec[3];
    l.kernel = spec[4], l.stride = spec[5], l.pad = spec[6], l.pool = spec[7], l.first = k == 0;
    l.build();
  }
  const Layer& last = plan->layers.back();
  plan->ways = ways, plan->mean = mean != 0, plan->slope = slope, plan->eps = eps;
  plan->features = plan->mean ? last.cout : last.cout * last.Q();
  return plan;
}

void plan_delete(void* plan) { delete static_cast<Plan*>(plan); }

#define FOR_TYPE(T, suffix)                                                                                       \
  int64_t residual_size_##suffix(const void* plan, int n) {                                                       \
    Task<T> task;                                                                                                 \
    return lay_out<T>(*static_cast<const Plan*>(plan), n, nullptr, task);                                         \
  }                                                                                                               \
  void gradient_##suffix(const void* plan, int tasks, int n, const T* images, const int64_t* labels,              \
                         const T* const* params, const int64_t* param_strides, T* losses, T* logits,              \
                         T* const* grads, const int64_t* grad_strides, T* residuals) {                            \
    gradient<T>(*static_cast<const Plan*>(plan), tasks, n, images, labels, {params, param_strides}, losses, logits, \
                {grads, grad_strides}, residuals);                                                                \
  }                                                                                                               \
  void hessian_vector_##suffix(const void* plan, int tasks, int n, const T* const* params,                        \
                               const int64_t* param_strides, T* residuals, const T* const* v,                     \
                               const int64_t* v_strides, T* const* outs, const int64_t* out_strides) {            \
    hessian_vector<T>(*static_cast<const Plan*>(plan), tasks, n, {params, param_strides}, residuals, {v, v_strides}, \
                      {outs, out_strides});                                                                       \
  }

FOR_TYPE(float, f32)
FOR_TYPE(double, f64)
}
