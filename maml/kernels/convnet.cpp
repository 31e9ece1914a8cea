// Loss, gradient and Hessian-vector product of a small convolutional classifier, task by task.
//
// The network is L x [convolution -> batch norm (statistics of the batch) -> ReLU -> 2x2 max-pool
// or none] -> spatial mean or flatten -> linear -> mean cross-entropy.  One call handles B tasks, each
// with its own n images and, unless a stride is 0, its own parameters.  A task is finished before the
// next one starts, so that its activations stay in the second-level cache.
//
// Layouts: images and activations are [n, H, W, C]; convolution weights [kh, kw, C_in, C_out]; a "row" is
// the C channels of one pixel.  Channels are the vector axis everywhere, hence C_out % lanes == 0.
// The three products of a convolution (forward, input gradient, weight gradient) read tables of pairs (input
// row, output row), and no patch matrix is ever built: see `Layer`.
//
// A convolution's bias is absent: batch norm subtracts it, and its gradient is exactly zero.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <new>
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
constexpr int kOuterRows = 9;             // the same of an outer product: a kernel row of the first layer at once
constexpr int kOuterBytes = 32 << 10;     // of its two operands, that fit in the first-level cache together
constexpr int kTableRows = 256;   // output rows one table covers, at least; more repeat it
constexpr int kChunkBytes = 256 << 10;  // of the largest map of images that go through all layers together
constexpr int kBandBytes = 24 << 10;  // of a convolution's output that are at hand in the first-level cache

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
// `fresh`: c is overwritten.
template <class T, int R, int NV>
void rows_kernel(Rows<const T> a, Rows<T> c, const Pair* pairs, const T* b, int ldb, int depth, int segments,
                 int64_t jump, bool fresh, int column) {
  constexpr int lanes = Simd<T>::kLanes;
  const T* ap[R];
  V<T> acc[R][NV];
  for (int r = 0; r < R; ++r) {
    ap[r] = a(pairs[r]);
    for (int j = 0; j < NV; ++j) acc[r][j] = fresh ? V<T>{} : at(c(pairs[r]) + column + j * lanes);
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
                  int segments = 1, int64_t jump = 0, bool fresh = false) {
  each_block<T>(ldb, [&](auto nv, int column) {
    constexpr int most = nv() == kMaxVecs ? kMaxRows : kNarrowRows;
    each_even(count, most, [&](int start, int size) {
      with_rows<most>(size, [&](auto r) {
        rows_kernel<T, r(), nv()>(a, c, pairs + start, b, ldb, depth, segments, jump, fresh, column);
      });
    });
  });
}

template <class T>
void outer_product(Rows<const T> a, Rows<const T> g, const Pair* pairs, int count, T* w, int rows, int ldw) {
  each_even(count, kOuterBytes / int(sizeof(T) * (a.width + g.width)), [&](int first, int length) {
    each_block<T>(ldw, [&](auto nv, int column) {
      constexpr int most = nv() == kMaxVecs ? kMaxRows : kOuterRows;
      each_even(rows, most, [&](int row, int size) {
        with_rows<most>(size, [&](auto r) {
          outer_kernel<T, r(), nv()>(a, g, pairs + first, length, w, ldw, row, column);
        });
      });
    });
  });
}

// ---------------------------------------------------------------------------------------------------- geometry

// Rows of a convolution's output: of one image, or of all images where the rows lie end to end.
struct Band { int image, row, rows; };

// A layer is convolved in one of two ways.
//   Banded (the first layer, and those that pool, whose stride is 1): the map that it reads has a border of
//   zeros, so that a kernel row's taps are one run of kernel * C_in numbers.  A few output rows are computed
//   at a time, and what follows is done while they are in the first-level cache.
//   By tap: the map has no border; small maps, most of whose padding would be multiplied in vain.
struct Layer {
  int h, w, cin, cout, kernel, stride, pad, pool;  // as the caller gives them; h and w are the input's
  int oh, ow, qh, qw;                              // after the convolution, and after the pooling
  bool first, banded;
  bool passing = false;                            // see `outputs`
  int border, zborder, yborder;                    // zeros around the input, around gz, and around the output
  int band;                                        // rows of a band, at most
  std::vector<Pair> forward, input, weight;        // banded: of a band
  std::vector<std::vector<Pair>> pairs;            // by tap: per tap, sorted by image, for `group` images
  int group, taps;
  int P() const { return oh * ow; }
  int Q() const { return qh * qw; }
  int64_t weights() const { return int64_t(taps) * cin * cout; }
  int wb() const { return w + 2 * border; }
  int gw() const { return ow + 2 * zborder; }
  int yw() const { return qw + 2 * yborder; }
  // Elements of a set's maps, and the offset of a line's first pixel.
  int64_t x_size(int n) const { return int64_t(n) * (h + 2 * border) * wb() * cin; }
  int64_t z_size(int n) const { return int64_t(n) * P() * cout; }
  int64_t q_size(int n) const { return int64_t(n) * Q() * cout; }
  int64_t y_size(int n) const { return int64_t(n) * (qh + 2 * yborder) * yw() * cout; }
  int64_t gz_size(int n) const {  // the first layer's is needed for a band only
    return first ? int64_t(band + 1) * ow * cout : int64_t(n) * (oh + 2 * zborder) * gw() * cout;
  }
  int64_t z_at(const Band& band, int row) const {
    if (passing && pool) return int64_t(row - band.row) * ow * cout;
    return (int64_t(band.image) * oh + row) * ow * cout;
  }
  int64_t y_at(int image, int row) const {
    return ((int64_t(image) * (qh + 2 * yborder) + row + yborder) * yw() + yborder) * cout;
  }
  int64_t gz_at(const Band& band, int row) const {
    if (first) return int64_t(row - band.row) * ow * cout;
    return ((int64_t(band.image) * (oh + 2 * zborder) + row + zborder) * gw() + zborder) * cout;
  }

  void build() {
    oh = (h + 2 * pad - kernel) / stride + 1, ow = (w + 2 * pad - kernel) / stride + 1;
    qh = pool ? oh / 2 : oh, qw = pool ? ow / 2 : ow;
    taps = kernel * kernel, banded = first || pool;
    border = banded ? pad : 0, zborder = banded && !first ? kernel - 1 - pad : 0;
    if (banded) {
      band = std::max(1, kBandBytes / int(ow * cout * sizeof(float)));
      if (pool) band = std::max(2, band / 2 * 2);
      for (int y = 0; y < band + 1; ++y) {  // one more where the last row of an odd map joins a band
        for (int x = 0; x < ow; ++x) {
          forward.push_back({y * stride * wb() + x * stride, y * ow + x});
          weight.push_back({y * stride * wb() + x * stride, y * gw() + x});
        }
        for (int x = 0; x < w; ++x) input.push_back({y * gw() + x, y * w + x});
      }
      return;
    }
    group = std::max(1, kTableRows / P());
    pairs.resize(taps);
    for (int t = 0; t < taps; ++t)
      for (int i = 0; i < group; ++i)
        for (int y = 0; y < oh; ++y)
          for (int x = 0; x < ow; ++x) {
            const int iy = y * stride - pad + t / kernel, ix = x * stride - pad + t % kernel;
            if (iy >= 0 && iy < h && ix >= 0 && ix < w)
              pairs[t].push_back({(i * h + iy) * w + ix, (i * oh + y) * ow + x});
          }
  }
  // By tap: calls f(tap, pairs, count, offset of the input rows, offset of the output rows).
  template <class F> void each_tap(int n, F f) const {
    for (int i = 0; i < n; i += group)
      for (int t = 0; t < taps; ++t) {
        const int count = int(pairs[t].size() / group) * std::min(group, n - i);
        f(t, pairs[t].data(), count, int64_t(i) * h * w, int64_t(i) * P());
      }
  }
  // Calls f(band) until all output rows were in one; a window of the pooling is never cut.
  template <class F> void each_band(int n, F f) const {
    if (!banded) return f(Band{0, 0, n * oh});
    const int unit = pool ? 2 : 1;
    for (int i = 0; i < n; ++i)
      each_even(std::max(1, oh / unit), band / unit, [&](int start, int size) {
        const int row = start * unit, end = (start + size) * unit;
        f(Band{i, row, (end + unit > oh ? oh : end) - row});
      });
  }
};

struct Plan {
  std::vector<Layer> layers, passing;  // as the derivatives use them, and as `outputs` does
  int ways, features;
  bool mean;
  double eps;
};

// A convolution's operands: z = x * w.
template <class T> struct Factors { const T *x, *w; };

// z = the sum of convolutions; calls after(band) when a band of z is whole.
template <class T, class F>
void convolve(const Layer& l, int n, std::initializer_list<Factors<T>> sum, T* z, F after) {
  if (!l.banded) std::memset(z, 0, sizeof(T) * l.z_size(n));
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

// gx = the sum of input gradients, x being gz and w turned by `transpose`.
template <class T> void convolve_input(const Layer& l, int n, std::initializer_list<Factors<T>> sum, T* gx) {
  if (!l.banded) {
    std::memset(gx, 0, sizeof(T) * l.x_size(n));
    for (const Factors<T>& f : sum)
      l.each_tap(n, [&](int t, const Pair* pairs, int count, int64_t in, int64_t out) {
        rows_product<T>({f.x + out * l.cout, l.cout, &Pair::out}, {gx + in * l.cin, l.cin, &Pair::in}, pairs, count,
                        f.w + int64_t(t) * l.cin * l.cout, l.cin, l.cout);
      });
    return;
  }
  const int64_t line = int64_t(l.gw()) * l.cout;
  for (int i = 0; i < n; ++i)
    each_even(l.h, l.band, [&](int row, int rows) {
      bool fresh = true;
      for (const Factors<T>& f : sum) {
        rows_product<T>({f.x + (int64_t(i) * (l.oh + 2 * l.zborder) + row) * line, l.cout, &Pair::in},
                        {gx + (int64_t(i) * l.h + row) * l.w * l.cin, l.cin, &Pair::out}, l.input.data(), rows * l.w,
                        f.w, l.cin, l.kernel * l.cout, l.kernel, line, fresh);
        fresh = false;
      }
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

// wt[tap, col, row] = w[tap, row, col], in square blocks of vectors where they fit; banded: taps in reverse order.
template <class T> void transpose(const Layer& l, const T* w, T* wt) {
  const int rows = l.cin, cols = l.cout, size = rows * cols;
  const int step = l.banded ? -size : size;
  if (l.banded) wt += int64_t(l.taps - 1) * size;
  using Index = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  constexpr int lanes = Simd<T>::kLanes;
  const bool whole = rows % lanes == 0 && cols % lanes == 0;
  for (int t = 0; t < l.taps; ++t, w += size, wt += step) {
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

// What the tangent pass needs of the gradient pass, for one layer of one task.  Of a window of the pooling, the
// pixel that it took is known before the statistics are: the largest; where gamma < 0 the smallest, where 0 the first.
template <class T> struct Saved {
  T *z, *gz;               // the convolution's output [n, P, C], and its gradient
  T *zq, *index;           // [n, Q, C] of the pixels that the pooling took: z, and which of the four it was
  T *y, *gq;               // output, with the next layer's border; gradient before the norm [n, Q, C]
  T *mean, *inv;           // [C] of z; 1 / sqrt(variance + eps)
  T *mean_gu, *mean_gux;   // [C] means over all pixels of gq and of gq * normalised z
};

// Windows side by side: offsets of the first one's elements, in the arrays of each shape.
struct Line { int64_t z, gz, q, y; int windows; };

// Calls f(line) over the windows of a band, which is a pixel each without pooling.
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

// Calls f(offset in z, offset in gz) over the pixels of a band that are in no window: those of an odd edge.
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

// Adds a band of z to the statistics, kept in s.mean and, as the sum of squared distances, in s.inv; pools it.
// `before`: how many pixels were added already (Chan, Golub and LeVeque, 1979).
// `Keep`: a backward pass will ask which pixel the pooling took.
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

// Calls f(band of an image) or, where all lies end to end, f(one band): for passes over windows alone.
template <class F> inline void each_image(const Layer& l, int n, F f) {
  if (!l.pool && !l.zborder && !l.yborder) return f(Band{0, 0, n * l.oh});
  for (int i = 0; i < n; ++i) f(Band{i, 0, l.oh});
}

// zq -> y, when all bands were observed.
template <class T> void activate(const Layer& l, int n, const T* gamma, const T* beta, T eps, const Saved<T>& s) {
  constexpr int lanes = Simd<T>::kLanes;
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
            at(s.y + line.y + at0 + j * lanes) = u < 0 ? V<T>{} : u;  // what is not a number stays so
          }
      });
    });
  });
}

// z -> y for a band, by statistics that are known beforehand.
template <class T>
void activate_given(const Layer& l, const Band& band, const T* gamma, const T* beta, T eps, const T* given_mean,
                    const T* given_variance, const T* z, T* y) {
  constexpr int lanes = Simd<T>::kLanes;
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
          const T* from = z + line.z + int64_t(i) * (K == 4 ? 2 : 1) * C + c0 + j * lanes;
          V<T> top = (at(from) - mean[j]) * scale[j] + shift[j];
          for (int k = 1; k < K; ++k) {
            const V<T> u = (at(from + corner.of[k]) - mean[j]) * scale[j] + shift[j];
            top = (u > top) | (u != u) ? u : top;  // what is not a number stays so
          }
          at(y + line.y + int64_t(i) * C + c0 + j * lanes) = top < 0 ? V<T>{} : top;
        }
    });
  });
}

// Masks gq where the activation was zero; keeps its means, and adds the gradients of gamma and beta.
template <class T> void norm_sums(const Layer& l, int n, const Saved<T>& s, T* ggamma, T* gbeta) {
  constexpr int lanes = Simd<T>::kLanes;
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
            const V<T> g = at(s.y + line.y + at0 + j * lanes) > 0 ? at(s.gq + q) : V<T>{};
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

// gq -> gz, for a band.
template <class T> void norm_backward(const Layer& l, const Band& band, const T* gamma, const Saved<T>& s) {
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
            at(s.gz + line.gz + step + gcorner.of[k]) = gz;
          }
        }
    });
    each_edge(l, band, [&](int64_t z, int64_t gz) {
      for (int j = 0; j < NV; ++j)
        at(s.gz + gz + c0 + j * lanes) = (at(s.z + z + c0 + j * lanes) - mean[j]) * slope[j] + constant[j];
    });
  });
}

// The tangent pass's own, for one layer of one task.
template <class T> struct Tangent {
  T *dz, *dzq;            // [n, P, C] and [n, Q, C]: of z and zq
  T *mean_dz, *mean_xdz;  // [C] means of dz and of normalised z * dz; sums until all bands were observed
  T *means;               // [2, C] the tangents of mean_gu and mean_gux
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

// dzq -> dy, when all bands were observed.
template <class T>
void activate_tangent(const Layer& l, int n, const T* gamma, const T* dgamma, const T* dbeta, const Saved<T>& s,
                      const Tangent<T>& d, T* dy) {
  constexpr int lanes = Simd<T>::kLanes;
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
            at(dy + o) = at(s.y + o) > 0 ? du : V<T>{};
          }
      });
    });
  });
}

// Masks dgq; keeps the means' tangents, and adds those of the gradients of gamma and beta.
template <class T>
void norm_sums_tangent(const Layer& l, int n, const Saved<T>& s, const Tangent<T>& d, T* dgq, T* dggamma, T* dgbeta) {
  constexpr int lanes = Simd<T>::kLanes;
  const T pixels = T(int64_t(n) * l.P());
  each_block<T>(l.cout, [&](auto nv, int c0) {
    constexpr int NV = nv();
    V<T> sum[NV] = {}, sumx[NV] = {}, sumd[NV] = {}, mean[NV], of_z[NV], m[NV];
    for (int j = 0; j < NV; ++j) {
      const int c = c0 + j * lanes;
      mean[j] = at(s.mean + c), m[j] = at(d.mean_dz + c), of_z[j] = at(s.inv + c) * at(d.mean_xdz + c);
    }
    each_image(l, n, [&](const Band& band) {
      each_line(l, band, [&](const Line& line) {
        for (int64_t i = 0, at0 = c0; i < line.windows; ++i, at0 += l.cout)
          for (int j = 0; j < NV; ++j) {
            const int64_t q = line.q + at0 + j * lanes;
            const V<T> g = at(s.y + line.y + at0 + j * lanes) > 0 ? at(dgq + q) : V<T>{};
            const V<T> x = at(s.zq + q) - mean[j];
            at(dgq + q) = g;
            sum[j] += g, sumx[j] += g * x;
            sumd[j] += at(s.gq + q) * (at(d.dzq + q) - m[j] - x * of_z[j]);
          }
      });
    });
    for (int j = 0; j < NV; ++j) {
      const int c = c0 + j * lanes;
      sumx[j] = (sumx[j] + sumd[j]) * at(s.inv + c);
      at(dgbeta + c) += sum[j], at(dggamma + c) += sumx[j];
      at(d.means + c) = sum[j] / pixels, at(d.means + l.cout + c) = sumx[j] / pixels;
    }
  });
}

// dgq -> dgz, for a band: the tangent of b (gu - mean_gu - x mean_gux) with b = gamma / sqrt(variance + eps).
template <class T>
void norm_backward_tangent(const Layer& l, const Band& band, const T* gamma, const T* dgamma, const Saved<T>& s,
                           const Tangent<T>& d, const T* dgq, T* dgz) {
  constexpr int lanes = Simd<T>::kLanes;
  const int C = l.cout;
  each_norm_block<T>(l, [&](auto nv, auto window, int c0) {
    constexpr int NV = nv(), K = window();
    const Corners<K> corner(l.ow, C), gcorner(l.gw(), C);
    V<T> a[NV], b[NV], mean[NV], m[NV], constant[NV], of_z[NV], of_dz[NV];
    for (int j = 0; j < NV; ++j) {
      const int c = c0 + j * lanes;
      const V<T> inv = at(s.inv + c), gu = at(s.mean_gu + c), gux = at(s.mean_gux + c), mx = at(d.mean_xdz + c);
      mean[j] = at(s.mean + c), m[j] = at(d.mean_dz + c);
      b[j] = inv * at(gamma + c);
      a[j] = inv * (at(dgamma + c) - b[j] * mx);  // the tangent of b
      constant[j] = -(a[j] * gu + b[j] * at(d.means + c));
      of_z[j] = -inv * (a[j] * gux + b[j] * (at(d.means + C + c) - inv * mx * gux));
      of_dz[j] = -inv * b[j] * gux;
    }
    const auto dense = [&](int64_t z, int j) {
      return (at(s.z + z) - mean[j]) * of_z[j] + ((at(d.dz + z) - m[j]) * of_dz[j] + constant[j]);
    };
    each_line(l, band, [&](const Line& line) {
      for (int i = 0; i < line.windows; ++i)
        for (int j = 0; j < NV; ++j) {
          const int64_t step = int64_t(i) * (K == 4 ? 2 : 1) * C + c0 + j * lanes;
          const int64_t q = line.q + int64_t(i) * C + c0 + j * lanes;
          const V<T> g = a[j] * at(s.gq + q) + b[j] * at(dgq + q);
          for (int k = 0; k < K; ++k) {
            V<T> gz = dense(line.z + step + corner.of[k], j);
            if constexpr (K > 1) gz += at(s.index + q) == T(k) ? g : V<T>{};
            else gz += g;
            at(dgz + line.gz + step + gcorner.of[k]) = gz;
          }
        }
    });
    each_edge(l, band, [&](int64_t z, int64_t gz) {
      for (int j = 0; j < NV; ++j) at(dgz + gz + c0 + j * lanes) = dense(z + c0 + j * lanes, j);
    });
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
    base_ = nullptr, size_ = 0;
    const size_t size = (bytes + kPage - 1) / kPage * kPage;
    base_ = static_cast<char*>(std::aligned_alloc(kPage, size));
    if (!base_) throw std::bad_alloc();
    size_ = size;
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
  task.x = take(first.x_size(n));
  task.features = take(int64_t(n) * plan.features);
  task.probabilities = take(int64_t(n) * plan.ways);
  task.ghead = take(int64_t(n) * plan.ways);
  task.layers.clear();
  for (const Layer& l : plan.layers) {
    Saved<T> s;
    s.z = take(l.z_size(n)), s.y = take(l.y_size(n)), s.gq = take(l.q_size(n));
    s.zq = l.pool ? take(l.q_size(n)) : s.z, s.index = l.pool ? take(l.q_size(n)) : nullptr;
    s.gz = l.first ? nullptr : take(l.gz_size(n));  // the first layer's is not read again
    s.mean = take(l.cout), s.inv = take(l.cout), s.mean_gu = take(l.cout), s.mean_gux = take(l.cout);
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

// The largest of f(layer).
template <class F> int64_t largest(const Plan& plan, F f) {
  int64_t size = 0;
  for (const Layer& l : plan.layers) size = std::max(size, int64_t(f(l)));
  return size;
}

// Images [n, C, H, W] -> [n, H + 2, W + 2, C] with a border of zeros.
template <class T> void enter_images(const Layer& l, int n, const T* images, T* x) {
  std::memset(x, 0, sizeof(T) * l.x_size(n));
  for (int i = 0; i < n; ++i)
    for (int y = 0; y < l.h; ++y) {
      T* line = x + ((int64_t(i) * (l.h + 2 * l.border) + y + l.border) * l.wb() + l.border) * l.cin;
      for (int c = 0; c < l.cin; ++c) {
        const T* from = images + ((int64_t(i) * l.cin + c) * l.h + y) * l.w;
        for (int k = 0; k < l.w; ++k) line[k * l.cin + c] = from[k];
      }
    }
}

// Zeros around n maps of [h, w, C].
template <class T> void clear_border(T* map, int n, int h, int w, int C, int border) {
  if (!border) return;
  const int64_t line = int64_t(w + 2 * border) * C, side = int64_t(border) * C;
  const auto clear = [&](T* from, int64_t count) { std::memset(from, 0, sizeof(T) * count); };
  for (int i = 0; i < n; ++i) {
    clear(map, border * line + side);
    map += border * line;
    // The end of a line and the start of the next.
    for (int y = 0; y < h; ++y, map += line) clear(map + line - side, 2 * side);
    clear(map, border * line);
    map += border * line;
  }
}

template <class T>
void gradient(const Plan& plan, int tasks, int n, const T* images, const int64_t* labels, Parameters<const T> params,
              T* losses, T* logits, Parameters<T> grads, T* residuals) {
  const int L = int(plan.layers.size()), F = plan.features, ways = plan.ways;
  const Layer& first = plan.layers[0];
  Task<T> task;
  const int64_t saved = lay_out<T>(plan, n, nullptr, task);
  const int64_t weight = largest(plan, [](const Layer& l) { return l.weights(); }), first_gz = first.gz_size(n);
  arena.reserve(sizeof(T) * (padded<T>(weight) + padded<T>(int64_t(n) * F) + padded<T>(first_gz) + (residuals ? 0 : saved)));
  const auto take = [](int64_t count) { return static_cast<T*>(arena.take(sizeof(T) * count)); };
  T *wt = take(weight), *gf = take(int64_t(n) * F), *gz0 = take(first_gz);
  T* own = residuals ? nullptr : take(saved);

  for (int b = 0; b < tasks; ++b) {
    lay_out(plan, n, residuals ? residuals + b * saved : own, task);
    task.layers[0].gz = gz0;
    enter_images(first, n, images + int64_t(b) * n * first.cin * first.h * first.w, task.x);

    for (int k = 0; k < L; ++k) {
      const Layer& l = plan.layers[k];
      const Saved<T>& s = task.layers[k];
      const T *gamma = params(b, 3 * k + 1), *beta = params(b, 3 * k + 2);
      int64_t before = 0;
      convolve<T>(l, n, {{k ? task.layers[k - 1].y : task.x, params(b, 3 * k)}}, s.z, [&](const Band& band) {
        observe(l, band, gamma, before, s);
        before += int64_t(band.rows) * l.ow;
      });
      clear_border(s.y, n, l.qh, l.qw, l.cout, l.yborder);
      activate(l, n, gamma, beta, T(plan.eps), s);
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
    spread_features(plan, n, gf, task.layers[L - 1].gq);

    for (int k = L - 1; k >= 0; --k) {
      const Layer& l = plan.layers[k];
      const Saved<T>& s = task.layers[k];
      const T *x = k ? task.layers[k - 1].y : task.x, *gamma = params(b, 3 * k + 1);
      T* gw = grads.cleared(b, 3 * k, l.weights());
      norm_sums(l, n, s, grads.cleared(b, 3 * k + 1, l.cout), grads.cleared(b, 3 * k + 2, l.cout));
      clear_border(s.gz, n, l.oh, l.ow, l.cout, l.zborder);
      l.each_band(n, [&](const Band& band) {
        norm_backward(l, band, gamma, s);
        convolve_weight(l, n, band, x, s.gz, gw);
      });
      if (k == 0) break;
      transpose(l, params(b, 3 * k), wt);
      convolve_input<T>(l, n, {{s.gz, wt}}, task.layers[k - 1].gq);
    }
  }
}

// The logits alone, by the statistics of the set (which are then written to `used`) or by `given` ones; both are
// [tasks, layers, 2, C]: mean and biased variance.  Nothing is kept for a backward pass: a map is overwritten by the
// next but one, a convolution that pools has a band of its output only, and a norm works where its input lies.
template <class T>
void outputs(const Plan& plan, int tasks, int n, const T* images, Parameters<const T> params, const T* given,
             T* logits, T* used) {
  const int L = int(plan.passing.size()), F = plan.features, ways = plan.ways;
  const Layer& first = plan.passing[0];
  int64_t map = first.x_size(1), band_size = 0;  // elements of an image's largest map, and of the largest band
  for (const Layer& l : plan.passing) {
    map = std::max(map, l.y_size(1));
    if (l.pool) band_size = std::max(band_size, int64_t(l.band + 1) * l.ow * l.cout);
  }
  // By given statistics images do not know of each other: a few go through all layers while they are in the cache.
  const int chunk = given ? int(std::clamp<int64_t>(kChunkBytes / (sizeof(T) * map), 1, n)) : n;
  const int64_t channels = largest(plan, [](const Layer& l) { return l.cout; });
  arena.reserve(sizeof(T) * (2 * padded<T>(chunk * map) + padded<T>(band_size) + 2 * padded<T>(channels) +
                             padded<T>(int64_t(chunk) * F)));
  const auto take = [](int64_t count) { return static_cast<T*>(arena.take(sizeof(T) * count)); };
  T *one = take(chunk * map), *other = take(chunk * map), *z = take(band_size), *features = take(int64_t(chunk) * F);
  Saved<T> s{};
  s.mean = take(channels), s.inv = take(channels);

  for (int b = 0; b < tasks; ++b)
    each_even(n, chunk, [&](int start, int size) {
      T *x = one, *y = other;
      enter_images(first, size, images + (int64_t(b) * n + start) * first.cin * first.h * first.w, x);
      for (int k = 0; k < L; ++k, std::swap(x, y)) {
        const Layer& l = plan.passing[k];
        const T *gamma = params(b, 3 * k + 1), *beta = params(b, 3 * k + 2);
        const int64_t at_statistics = (int64_t(b) * L + k) * 2 * l.cout;
        s.y = s.zq = y, s.z = l.pool ? z : y;
        clear_border(y, size, l.qh, l.qw, l.cout, l.yborder);
        if (given) {
          const T* mean = given + at_statistics;
          convolve<T>(l, size, {{x, params(b, 3 * k)}}, s.z, [&](const Band& band) {
            activate_given(l, band, gamma, beta, T(plan.eps), mean, mean + l.cout, s.z, y);
          });
          continue;
        }
        int64_t before = 0;
        convolve<T>(l, size, {{x, params(b, 3 * k)}}, s.z, [&](const Band& band) {
          observe<T, false>(l, band, gamma, before, s);
          before += int64_t(band.rows) * l.ow;
        });
        T* mean = used + at_statistics;
        for (int c = 0; c < l.cout; ++c) mean[c] = s.mean[c], mean[l.cout + c] = s.inv[c] / T(before);
        activate(l, size, gamma, beta, T(plan.eps), s);
      }
      pool_features(plan, size, x, features);
      const T *hw = params(b, 3 * L), *hb = params(b, 3 * L + 1);
      for (int i = 0; i < size; ++i)
        for (int c = 0; c < ways; ++c)
          logits[(int64_t(b) * n + start + i) * ways + c] =
              hb[c] + dot(features + int64_t(i) * F, hw + int64_t(c) * F, F);
    });
}

// Calls f; returns whether there was memory enough.
template <class F> int attempt(F f) {
  try {
    f();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// The tangent of `gradient` along `v`, at the point its residuals describe: a Hessian-vector product.
template <class T>
void hessian_vector(const Plan& plan, int tasks, int n, Parameters<const T> params, T* residuals,
                    Parameters<const T> v, Parameters<T> outs) {
  const int L = int(plan.layers.size()), F = plan.features, ways = plan.ways;
  Task<T> task;
  const int64_t saved = lay_out<T>(plan, n, nullptr, task);
  const int64_t weight = largest(plan, [](const Layer& l) { return l.weights(); });
  const int64_t output = largest(plan, [n](const Layer& l) { return l.y_size(n); });
  const int64_t pooled = largest(plan, [n](const Layer& l) { return l.q_size(n); });
  const int64_t full = largest(plan, [n](const Layer& l) { return l.gz_size(n); });
  int64_t total = 0;
  for (const Layer& l : plan.layers)
    total += padded<T>(l.z_size(n)) + padded<T>(l.q_size(n)) + 4 * padded<T>(l.cout);
  arena.reserve(sizeof(T) * (total + 2 * padded<T>(weight) + padded<T>(output) + padded<T>(pooled) +
                             padded<T>(full) + 2 * padded<T>(int64_t(n) * F) + padded<T>(ways)));
  const auto take = [](int64_t count) { return static_cast<T*>(arena.take(sizeof(T) * count)); };
  T *wt = take(weight), *vt = take(weight), *dy = take(output), *dgq = take(pooled), *dgz = take(full);
  T *df = take(int64_t(n) * F), *dgf = take(int64_t(n) * F), *dl = take(ways);
  std::vector<Tangent<T>> tangents(L);
  for (int k = 0; k < L; ++k) {
    const Layer& l = plan.layers[k];
    Tangent<T>& d = tangents[k];
    d.dz = take(l.z_size(n)), d.dzq = l.pool ? take(l.q_size(n)) : d.dz;
    d.mean_dz = take(l.cout), d.mean_xdz = take(l.cout), d.means = take(2 * l.cout);
  }

  for (int b = 0; b < tasks; ++b) {
    lay_out(plan, n, residuals + b * saved, task);
    for (int k = 0; k < L; ++k) {
      const Layer& l = plan.layers[k];
      const Saved<T>& s = task.layers[k];
      const Tangent<T>& d = tangents[k];
      T* out = outs.cleared(b, 3 * k, l.weights());
      std::memset(d.mean_dz, 0, sizeof(T) * l.cout), std::memset(d.mean_xdz, 0, sizeof(T) * l.cout);
      const auto after = [&](const Band& band) {
        observe_tangent(l, band, s, d);
        if (k) convolve_weight(l, n, band, dy, s.gz, out);  // here, while the tangent of the input is at hand
      };
      const Factors<T> along{k ? task.layers[k - 1].y : task.x, v(b, 3 * k)};
      if (k) convolve<T>(l, n, {along, {dy, params(b, 3 * k)}}, d.dz, after);
      else convolve<T>(l, n, {along}, d.dz, after);
      clear_border(dy, n, l.qh, l.qw, l.cout, l.yborder);
      activate_tangent(l, n, params(b, 3 * k + 1), v(b, 3 * k + 1), v(b, 3 * k + 2), s, d, dy);
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
    spread_features(plan, n, dgf, dgq);

    for (int k = L - 1; k >= 0; --k) {
      const Layer& l = plan.layers[k];
      const Saved<T>& s = task.layers[k];
      const Tangent<T>& d = tangents[k];
      const T *x = k ? task.layers[k - 1].y : task.x, *gamma = params(b, 3 * k + 1), *dgamma = v(b, 3 * k + 1);
      T* out = outs(b, 3 * k);
      norm_sums_tangent(l, n, s, d, dgq, outs.cleared(b, 3 * k + 1, l.cout), outs.cleared(b, 3 * k + 2, l.cout));
      clear_border(dgz, n, l.oh, l.ow, l.cout, l.zborder);
      l.each_band(n, [&](const Band& band) {
        norm_backward_tangent(l, band, gamma, dgamma, s, d, dgq, dgz);
        convolve_weight(l, n, band, x, dgz, out);
      });
      if (k == 0) break;
      transpose(l, params(b, 3 * k), wt);
      transpose(l, v(b, 3 * k), vt);
      convolve_input<T>(l, n, {{dgz, wt}, {s.gz, vt}}, dgq);
    }
  }
}

}  // namespace

extern "C" {

int lanes(int element_size) { return kBytes / element_size; }

// `spec` is 8 numbers a layer: height, width, channels in and out, kernel, stride, padding, pooling (0 or 1).
// All layers pool, and then have stride 1, or none does.
void* plan_new(int layers, const int64_t* spec, int ways, int mean, double eps) {
  Plan* plan = new Plan();
  plan->layers.resize(layers);
  for (int k = 0; k < layers; ++k, spec += 8) {
    Layer& l = plan->layers[k];
    l.h = spec[0], l.w = spec[1], l.cin = spec[2], l.cout = spec[3];
    l.kernel = spec[4], l.stride = spec[5], l.pad = spec[6], l.pool = spec[7], l.first = k == 0;
    l.build();
    l.yborder = 0;
    if (k) plan->layers[k - 1].yborder = l.border;
  }
  plan->passing = plan->layers;
  for (Layer& l : plan->passing) l.passing = true;
  const Layer& last = plan->layers.back();
  plan->ways = ways, plan->mean = mean != 0, plan->eps = eps;
  plan->features = plan->mean ? last.cout : last.cout * last.Q();
  return plan;
}

// `gradient` and `hessian_vector` return 0, or 1 where working memory could not be had.
#define FOR_TYPE(T, suffix)                                                                                       \
  int64_t residual_size_##suffix(const void* plan, int n) {                                                       \
    Task<T> task;                                                                                                 \
    return lay_out<T>(*static_cast<const Plan*>(plan), n, nullptr, task);                                         \
  }                                                                                                               \
  int gradient_##suffix(const void* plan, int tasks, int n, const T* images, const int64_t* labels,               \
                        const T* const* params, const int64_t* param_strides, T* losses, T* logits,               \
                        T* const* grads, const int64_t* grad_strides, T* residuals) {                             \
    return attempt([&] {                                                                                          \
      gradient<T>(*static_cast<const Plan*>(plan), tasks, n, images, labels, {params, param_strides}, losses,     \
                  logits, {grads, grad_strides}, residuals);                                                      \
    });                                                                                                           \
  }                                                                                                               \
  int hessian_vector_##suffix(const void* plan, int tasks, int n, const T* const* params,                         \
                              const int64_t* param_strides, T* residuals, const T* const* v,                      \
                              const int64_t* v_strides, T* const* outs, const int64_t* out_strides) {             \
    return attempt([&] {                                                                                          \
      hessian_vector<T>(*static_cast<const Plan*>(plan), tasks, n, {params, param_strides}, residuals,            \
                        {v, v_strides}, {outs, out_strides});                                                     \
    });                                                                                                           \
  }                                                                                                               \
  int outputs_##suffix(const void* plan, int tasks, int n, const T* images, const T* const* params,               \
                       const int64_t* param_strides, const T* given, T* logits, T* used) {                        \
    return attempt([&] {                                                                                          \
      outputs<T>(*static_cast<const Plan*>(plan), tasks, n, images, {params, param_strides}, given, logits,       \
                 used);                                                                                           \
    });                                                                                                           \
  }

FOR_TYPE(float, f32)
FOR_TYPE(double, f64)
}
