// Working memory, the data that a pass keeps for the next pass, and the addresses of a task's parameters.
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

// In a build with the address sanitizer, the gap between two buffers may not be touched.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace {

// Deals out one block of memory, buffer by buffer, each on its own cache lines.  Without a block it only counts.  So
// one function determines the size of a block and the places of its buffers, and the two cannot disagree.
template <class T> class Buffers {
 public:
  Buffers() = default;
  Buffers(T* base, int64_t size) : base_(base) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(base, size * sizeof(T));  // earlier buffers may have had other places
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

// A block of memory that a thread keeps from call to call, because fresh pages cost as much as the arithmetic.
class Arena {
 public:
  ~Arena() { std::free(base_); }
  // Calls `take_all` twice: first to count, then to take the buffers.  Throws std::bad_alloc.
  template <class T, class F> void deal(F take_all) {
    Buffers<T> counting;
    take_all(counting);
    reserve(size_t(counting.used()) * sizeof(T));
    Buffers<T> buffers(reinterpret_cast<T*>(base_), counting.used());
    take_all(buffers);
  }

 private:
  static constexpr size_t kPage = 2 << 20;  // bytes of a huge page, if the system has them
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

// Blocks of equal size, one for each task, to be dealt out.  A null `base` means no blocks.
template <class T> class Block {
 public:
  Block(T* base, int64_t size) : base_(base), size_(size) {}
  explicit operator bool() const { return base_; }
  Buffers<T> of(int task) const { return {base_ + task * size_, size_}; }

 private:
  T* base_;
  int64_t size_;
};

// The data that one task's forward pass keeps for its backward passes, and a backward pass for its tangent.  Each pass
// has a separate block, because several backward passes may follow one forward pass.
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
  // Call `take` first.  No place for the first layer's gz, because no later pass reads it.
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

// The inputs of one task's backward pass in addition to the gradient by the features: a gradient by each layer's z, and
// by each y except the last, because the gradient by the features covers the last y.
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
  // Elements of a task's gradients.
  static int64_t size(const Plan& plan, int n) {
    Buffers<T> counting;
    Injected<T>().take(plan, n, counting);
    return counting.used();
  }
};

// The parameters of every task, or a gradient or a vector of their shape.  A slot is one parameter: see `Plan`.
template <class T> struct Parameters {
  T* const* bases;         // of the first task, by slot
  const int64_t* strides;  // elements from one task to the next, by slot; 0 if tasks share the parameter
  T* operator()(int task, int slot) const { return bases[slot] + task * strides[slot]; }
  // Returns an output [rows, channels], to which a pass adds.  A task's own output is set to zero here, just before the
  // pass adds to it.  The caller sets a shared output to zero.
  T* cleared(int task, int slot, int64_t rows, int channels) const {
    if (strides[slot]) start_sums((*this)(task, slot), rows, channels);
    return (*this)(task, slot);
  }
};

}  // namespace
