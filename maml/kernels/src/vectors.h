// Vectors as large as this machine's registers, and functions that cut loops into blocks of vectors.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "team.h"

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kMaxVecs = 4;  // 32 registers
#else
constexpr int kVectorBytes = 32, kMaxVecs = 2;  // 16 registers
#endif

template <class T> struct Simd {
  typedef T V __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
  static constexpr int kLanes = kVectorBytes / sizeof(T);
};
template <class T> using V = typename Simd<T>::V;
// The vector that begins at p.  p needs only the alignment of T.
template <class T> inline V<T>& at(T* p) { return *reinterpret_cast<V<T>*>(p); }
template <class T> inline const V<T>& at(const T* p) { return *reinterpret_cast<const V<T>*>(p); }

// This thread's share of `channels`, in whole vectors.
template <class T> inline Range own_channels(int channels) {
  constexpr int lanes = Simd<T>::kLanes;
  const Range vectors = share(channels / lanes);
  return {vectors.first * lanes, vectors.last * lanes};
}

// Sets sums [rows, channels], in this thread's share of the channels, to `from`, or to zero if `from` is null.
template <class T> void start_sums(T* sums, int64_t rows, int channels, const T* from = nullptr) {
  const auto start = [&](int64_t first, int64_t count) {
    if (from) std::memcpy(sums + first, from + first, sizeof(T) * count);
    else std::memset(sums + first, 0, sizeof(T) * count);
  };
  if (member.size == 1) return start(0, rows * channels);
  const Range own = own_channels<T>(channels);
  for (int64_t row = 0; row < rows; ++row) start(row * channels + own.first, own.last - own.first);
}

// Calls f(integral_constant<NV>, first channel) over blocks of NV vectors that cover this thread's share of `channels`.
template <class T, class F> inline void each_block(int channels, F f) {
  constexpr int lanes = Simd<T>::kLanes;
  const Range own = own_channels<T>(channels);
  int c = own.first;
  channels = own.last;
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

}  // namespace
