#pragma once

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "apollo/event.h"

namespace apollo {

// Note [Handing cores back to the team]
// While all lanes are busy, the caller and its OpenMP team have no cores and sleep. Waking them when the last lane has
// ended takes 50 to 200 us: cores that went idle have to be woken first, and the scheduler may put two threads of the
// team on one core and correct that only milliseconds later. So every lane that has finished with its cores hands each
// of them to one thread of the team, which wakes up there while other lanes are still busy, and spins until the join is
// complete.

/// A barrier where the threads of the caller's team wait until a number of lanes have arrived, once per epoch.
class Join {
 public:
  Join() = default;
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  /// Begins an epoch that is complete after `num_arrivals`; no thread may be waiting or arriving.
  ///
  /// `idle`: cores on which no lane runs before the join is complete.
  void expect(int num_arrivals, const std::vector<int>& idle);

  /// Counts one arrival; `left`: cores on which no lane runs any more before the join is complete.
  void arrive(std::uint32_t epoch, const std::vector<int>& left);

  /// Waits until the join is complete and calls `poll`, if there is one, every `interval` while this thread sleeps.
  ///
  /// The thread may be pinned to a core that was left; its previous affinity is restored at the end.
  void wait(std::uint32_t epoch, const std::function<void()>& poll, std::chrono::nanoseconds interval);

  bool is_complete(std::uint32_t epoch) const { return complete_.is_recorded(epoch); }

 private:
  struct Seat {
    pthread_t thread;
    cpu_set_t cores;          // affinity of the thread before the wait
    std::optional<int> core;  // published by has_core: the core that the thread has to itself
    Event has_core;
  };

  /// The core that a waiting thread gets; none when all lanes have arrived and any core will do.
  struct Gift {
    Seat* seat;
    std::optional<int> core;
  };

  Seat* take_seat(std::uint32_t epoch);
  std::vector<Gift> give_cores();
  static void hand_over(const std::vector<Gift>& gifts, std::uint32_t epoch);

  std::mutex mutex_;
  int num_missing_ = 0;          // guarded by mutex_, like the following members
  std::deque<Seat> seats_;       // kept from epoch to epoch; a thread waits on its own seat without the mutex
  std::size_t num_waiting_ = 0;  // seats taken in this epoch
  std::size_t num_served_ = 0;   // of these, the first ones, which have a core
  std::vector<int> left_;        // cores that no thread has
  Event complete_;
};

}  // namespace apollo
