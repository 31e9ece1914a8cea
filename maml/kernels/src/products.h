// Matrix products that find their rows by tables.  A convolution consists of such products.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace {

// How many rows a kernel keeps in registers at once, with kMaxVecs vectors for each row: 6 x 4 accumulators in the 32
// registers of AVX-512, or 6 x 2 accumulators in 16 registers.
constexpr int kMaxRows = 6;
constexpr int kNarrowRows = 8;         // the same with fewer than kMaxVecs vectors
constexpr int kOuterRows = 9;          // the same for an outer product: a kernel row of the first layer at once
constexpr int kOuterBytes = 32 << 10;  // bytes of an outer product's two operands: both fit in the first-level cache

// A row that is read and the row that it is added to.
struct Pair { int32_t in, out; };

// One operand of a product, addressed by row: `side` is the half of a pair that holds the row number.
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
  each_even(count, std::max(1, kOuterBytes / int(sizeof(T) * (a.width + g.width))), [&](int first, int length) {
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

}  // namespace
