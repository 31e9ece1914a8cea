// Threads that compute one task together: OpenMP's.
//
// Each has a share of the channels of every map, in whole vectors, and writes these alone: its sums are in the order in
// which one thread has them, so results do not depend on how many there are.  They meet before one reads what others
// have written.  What is said of no thread is computed by each, for its channels.
#pragma once

#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace {

// This thread's place in its team; alone it is all of one.
struct Member { int index = 0, size = 1; };
thread_local Member member;
thread_local int team_size = 1;  // of the teams that this thread makes, at most

struct Range { int first, last; };

// This thread's part of `total` things.
inline Range share(int total) {
  return {int(int64_t(total) * member.index / member.size), int(int64_t(total) * (member.index + 1) / member.size)};
}

// Returns when all of the team have come.
inline void meet() {
  if (member.size == 1) return;
#pragma omp barrier
}

// Calls f in one thread, as if it were alone, between two meetings.
template <class F> void by_one(F f) {
  const Member own = member;
  meet();
  if (own.index == 0) member = {}, f(), member = own;
  meet();
}

// Calls f in each thread of a team, this one among them.  f throws nothing.
template <class F> void together(F f) {
  if (team_size == 1) return f();
#pragma omp parallel num_threads(team_size)
  {
#if defined(_OPENMP)
    member = {omp_get_thread_num(), omp_get_num_threads()};
#endif
    f();
    member = {};
  }
}

}  // namespace
