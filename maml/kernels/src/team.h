// OpenMP threads that compute one task together.
//
// Each thread has a share of the channels of every map, in whole vectors, and writes only these channels.  The order
// of sums is the same for any number of threads, so the results are the same.  Threads meet before one reads results of
// others.  If a comment does not mention threads, each thread runs the function for its own channels.
#pragma once

#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace {

// This thread's place in its team.  A thread without a team is a team of one.
struct Member { int index = 0, size = 1; };
thread_local Member member;
thread_local int team_size = 1;  // the most threads in a team that this thread makes

struct Range { int first, last; };

// This thread's part of `total` things.
inline Range share(int total) {
  return {int(int64_t(total) * member.index / member.size), int(int64_t(total) * (member.index + 1) / member.size)};
}

// Waits until all threads of the team have arrived.
inline void meet() {
  if (member.size == 1) return;
#pragma omp barrier
}

// Calls f in one thread, as a team of one, between two meetings.
template <class F> void by_one(F f) {
  const Member own = member;
  meet();
  if (own.index == 0) member = {}, f(), member = own;
  meet();
}

// Calls f in each thread of a team, including this thread.  f may not throw.
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
