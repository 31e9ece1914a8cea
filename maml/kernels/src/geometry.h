// The network's description: shapes, where maps lie in memory, and tables of rows for the products.
//
// Images and activations are [n, H, W, C]; a "row" is the C channels of one pixel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>
#include "products.h"

namespace {

constexpr int kTableRows = 256;        // one table covers at least so many output rows; more rows reuse it
constexpr int kBandBytes = 24 << 10;   // bytes of a convolution's output that stay in the first-level cache

// Some lines of a convolution's output: of one image, or of all images if their lines are contiguous.
struct Band { int image, row, rows; };

// One [convolution -> norm -> (leaky) ReLU -> pooling].  All files use these names of maps: x, the input; z, the
// convolution's output; u, the norm's output; y, the layer's output and the next layer's x.  A q marks maps
// [n, qh, qw, C] without a border.  A g before a name means the gradient by the map, a d means the map's tangent.
//
// A layer is convolved in one of two ways.
//   Banded (the first layer, and layers that pool, which have stride 1): the input has a border of zeros, so the taps
//   of a kernel row are one run of kernel * C_in numbers.  A few lines of the output are computed at a time, and the
//   next operations follow while these lines are in the first-level cache.
//   By tap: the input has no border, and each tap of the kernel is a separate product over the pixels that it meets.
//   This suits small maps, because their border would be most of the work.
struct Layer {
  struct { int weight, gamma, beta; } slot;  // indices of the layer's parameters: see `Plan`
  int h, w, cin, cout, kernel, stride, pad, pool;  // as the caller gives them; h and w are the input's
  int oh, ow, qh, qw;                              // after the convolution, and after the pooling
  bool first, banded;
  double leak;                                     // the activation's slope below zero, at least 0 and below 1
  bool passing = false;                            // for `outputs`: a pooled z is only one band, and y holds zq
  int border, zborder, yborder;                    // zeros around the input, around gz, and around the output
  int band;                                        // rows of a band, at most
  std::vector<Pair> forward, input, weight;        // banded: tables for one band
  std::vector<std::vector<Pair>> pairs;            // by tap: per tap, sorted by image, for `group` images
  int group, taps;
  int P() const { return oh * ow; }                // pixels of z, and of y
  int Q() const { return qh * qw; }
  int weight_rows() const { return taps * cin; }
  int64_t weights() const { return int64_t(weight_rows()) * cout; }
  // Pixels from a line to the next: of x, gz and y.
  int wb() const { return w + 2 * border; }
  int gw() const { return ow + 2 * zborder; }
  int yw() const { return qw + 2 * yborder; }
  // Elements of the maps of n images.
  int64_t x_size(int n) const { return int64_t(n) * (h + 2 * border) * wb() * cin; }
  int64_t z_size(int n) const { return int64_t(n) * P() * cout; }
  int64_t q_size(int n) const { return int64_t(n) * Q() * cout; }
  int64_t y_size(int n) const { return int64_t(n) * (qh + 2 * yborder) * yw() * cout; }
  int64_t gz_size(int n) const {  // the first layer needs gz for one band only
    return first ? int64_t(band + 1) * ow * cout : int64_t(n) * (oh + 2 * zborder) * gw() * cout;
  }
  // Offset of a line's first pixel.
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
      for (int y = 0; y < band + 1; ++y) {  // one row more, because the last row of an odd map joins a band
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
  // Calls f(band) for bands that cover all output rows.  No band cuts a window of the pooling.
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

// A network.  The slots number its parameters: each layer's convolution, gamma and beta; then the head's weight and
// bias if there is a head.
struct Plan {
  std::vector<Layer> layers, passing;  // for the derivatives, and for `outputs`
  int ways, features;  // `ways` 0: there is no head
  bool mean;  // the features are the mean over pixels; else all pixels of all channels
  double eps;
  struct { int weight, bias; } head_slot;
  int64_t statistics() const { return 2 * int64_t(layers.size()) * layers[0].cout; }  // numbers of a task
};

// The largest of f(layer).
template <class F> int64_t largest(const Plan& plan, F f) {
  int64_t size = 0;
  for (const Layer& l : plan.layers) size = std::max(size, int64_t(f(l)));
  return size;
}

}  // namespace
