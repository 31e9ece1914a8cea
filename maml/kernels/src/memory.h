// Working memory, what a pass keeps for the next, and where a task's parameters are.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "norm.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

// In a build with the address sanitizer, what lies between two buffers may not be touched.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace {

// Deals out one block of memory, buffer by buffer, each on cache lines of its own.  Without a block it only counts: one
// function then says both how much a block must hold and what lies where in it, and the two cannot disagree.
template <class T> class Buffers {
 public:
  Buffers() = default;
  Buffers(T* base, int64_t size) : base_(base) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(base, size * sizeof(T));  // it may have been dealt out otherwise before
#endif
    (void)size;
  }
  T* take(int64_t count) {
    T* buffer = base_ ? base_ + used_ : nullptr;
    const int64_t size = (count * int64_t(sizeof(T)) + 63) / 64 * 64 / int64_t(sizeof(T)) + kGuard;
#if defined(__SANITIZE_ADDRESS__)
    if (base_) ASAN_POISON_MEMORY_REGION(buffer + count, (size - count) * sizeof(T));
#endif
    used_ += size;
    return buffer;
  }
  int64_t used() const { return used_; }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int64_t kGuard = 256 / sizeof(T);
#else
  static constexpr int64_t kGuard = 0;
#endif
  T* base_ = nullptr;
  int64_t used_ = 0;
};

// A block of memory that a thread keeps from call to call: fresh pages cost as much as the arithmetic.
class Arena {
 public:
  ~Arena() { std::free(base_); }
  // Lets `take_all` take its buffers twice: first to count, then in earnest.  Throws std::bad_alloc.
  template <class T, class F> void deal(F take_all) {
    Buffers<T> counting;
    take_all(counting);
    reserve(size_t(counting.used()) * sizeof(T));
    Buffers<T> buffers(reinterpret_cast<T*>(base_), counting.used());
    take_all(buffers);
  }

 private:
  static constexpr size_t kPage = 2 << 20;  // of huge pages, where the system has them
  void reserve(size_t bytes) {
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
  char* base_ = nullptr;
  size_t size_ = 0;
};
thread_local Arena arena;

// Blocks of one size, one a task, to be dealt out; or none.
template <class T> class Block {
 public:
  Block(T* base, int64_t size) : base_(base), size_(size) {}
  explicit operator bool() const { return base_; }
  Buffers<T> of(int task) const { return {base_ + task * size_, size_}; }

 private:
  T* base_;
  int64_t size_;
};

// What one task's way forward keeps for its ways back, and a way back for its tangent: each in a block of its own, as
// there may be several ways back from one point.
template <class T> struct Kept {
  T* x;  // images, with the first layer's border
  std::vector<Saved<T>> layers;

  template <class From> void take(const Plan& plan, int n, From&& from) {
    x = from.take(plan.layers[0].x_size(n));
    layers.clear();
    for (const Layer& l : plan.layers) {
      Saved<T> s{};
      s.z = from.take(l.z_size(n)), s.y = from.take(l.y_size(n));
      s.zq = l.pool ? from.take(l.q_size(n)) : s.z, s.index = l.pool ? from.take(l.q_size(n)) : nullptr;
      s.mean = from.take(l.cout), s.inv = from.take(l.cout);
      layers.push_back(s);
    }
  }
  // `take` goes before.  The first layer's gz is not read again.
  template <class From> void take_back(const Plan& plan, int n, From&& from) {
    for (size_t k = 0; k < layers.size(); ++k) {
      const Layer& l = plan.layers[k];
      Saved<T>& s = layers[k];
      s.gq = from.take(l.q_size(n)), s.gz = l.first ? nullptr : from.take(l.gz_size(n));
      s.mean_gu = from.take(l.cout), s.mean_gux = from.take(l.cout);
    }
  }
  // Elements of a task's block.
  static int64_t size(const Plan& plan, int n, bool back) {
    Buffers<T> forward, backward;
    Kept<T> kept;
    kept.take(plan, n, forward);
    if (!back) return forward.used();
    kept.take_back(plan, n, backward);
    return backward.used();
  }
};

// What comes into one task's way back beside the gradient by the features: a gradient by each layer's z and by its y, but
// for the last y, which is the features' matter.
template <class T> struct Injected {
  struct Maps { T *z, *y; };
  std::vector<Maps> layers;

  template <class From> void take(const Plan& plan, int n, From&& from) {
    layers.clear();
    for (const Layer& l : plan.layers) {
      const bool last = &l == &plan.layers.back();
      T* z = from.take(l.z_size(n));
      layers.push_back({z, last ? nullptr : from.take(l.q_size(n))});
    }
  }
  // Elements of a task's.
  static int64_t size(const Plan& plan, int n) {
    Buffers<T> counting;
    Injected<T>().take(plan, n, counting);
    return counting.used();
  }
};

// The parameters of every task, or something of their shape: a gradient, a vector.  A slot is one parameter, see `Plan`.
template <class T> struct Parameters {
  T* const* bases;         // of the first task, by slot
  const int64_t* strides;  // elements from one task's to the next one's, by slot; 0 where tasks share it
  T* operator()(int task, int slot) const { return bases[slot] + task * strides[slot]; }
  // As an output [rows, channels]: a task's own is made zero here, just before it is added to; one that tasks share, by
  // the caller.
  T* cleared(int task, int slot, int64_t rows, int channels) const {
    if (strides[slot]) start_sums((*this)(task, slot), rows, channels);
    return (*this)(task, slot);
  }
};

}  // namespace
