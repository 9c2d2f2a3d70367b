#include "apollo/join.h"

#include "apollo/machine.h"

namespace apollo {

namespace {

constexpr std::chrono::microseconds kPatience{2000};

/// Pins `thread` to `core` if `allowed` contains it; returns whether it did.
bool move(pthread_t thread, int core, const cpu_set_t& allowed) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(core), &set);
  return CPU_ISSET(static_cast<std::size_t>(core), &allowed) && pthread_setaffinity_np(thread, sizeof(set), &set) == 0;
}

}  // namespace

void Join::expect(int num_arrivals, const std::vector<int>& idle) {
  const std::lock_guard lock(mutex_);
  num_missing_ = num_arrivals;
  num_waiting_ = 0;
  num_served_ = 0;
  left_ = idle;
}

void Join::arrive(std::uint32_t epoch, const std::vector<int>& left) {
  bool is_complete = false;
  std::vector<Gift> gifts;
  {
    const std::lock_guard lock(mutex_);
    left_.insert(left_.end(), left.begin(), left.end());
    is_complete = --num_missing_ == 0;
    gifts = give_cores();
  }
  // Without the mutex: a thread that wakes up on this core may keep it until all lanes have arrived.
  if (is_complete) {
    complete_.record(epoch);
  }
  hand_over(gifts, epoch);
}

void Join::wait(std::uint32_t epoch, const std::function<void()>& poll, std::chrono::nanoseconds interval) {
  const KeptCores kept;  // before another thread may pin this one to a core
  Seat* seat = take_seat(epoch);
  if (seat == nullptr) {  // all have arrived; the last one is about to record it
    if (!complete_.spin(epoch, kPatience)) {
      while (!complete_.sleep_for(epoch, interval)) {
      }
    }
    return;
  }
  const auto restore = [seat] {
    if (seat->core) {
      static_cast<void>(pthread_setaffinity_np(seat->thread, sizeof(seat->cores), &seat->cores));
    }
  };
  while (!seat->has_core.sleep_for(epoch, interval)) {
    if (poll) {
      poll();
    }
  }
  if (seat->core && complete_.spin(epoch, kPatience)) {  // on another core, spinning could keep a lane from it
    restore();
    return;
  }
  while (!complete_.sleep_for(epoch, interval)) {
    if (poll) {
      restore();  // threads that a signal handler starts inherit this affinity
      poll();
      if (seat->core) {
        move(seat->thread, *seat->core, seat->cores);
      }
    }
  }
  restore();
}

Join::Seat* Join::take_seat(std::uint32_t epoch) {
  std::vector<Gift> gifts;
  Seat* seat = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (num_missing_ == 0) {
      return nullptr;
    }
    if (num_waiting_ == seats_.size()) {
      seats_.emplace_back();
    }
    seat = &seats_[num_waiting_++];
    seat->thread = pthread_self();
    CPU_ZERO(&seat->cores);
    static_cast<void>(pthread_getaffinity_np(seat->thread, sizeof(seat->cores), &seat->cores));
    gifts = give_cores();
  }
  hand_over(gifts, epoch);
  return seat;
}

std::vector<Join::Gift> Join::give_cores() {
  std::vector<Gift> gifts;
  for (; num_served_ < num_waiting_ && (!left_.empty() || num_missing_ == 0); ++num_served_) {
    Gift gift{&seats_[num_served_], std::nullopt};
    if (!left_.empty()) {
      gift.core = left_.back();
      left_.pop_back();
    }
    gifts.push_back(gift);
  }
  return gifts;
}

void Join::hand_over(const std::vector<Gift>& gifts, std::uint32_t epoch) {
  for (const Gift& gift : gifts) {
    const bool is_moved = gift.core && move(gift.seat->thread, *gift.core, gift.seat->cores);
    gift.seat->core = is_moved ? gift.core : std::nullopt;
    gift.seat->has_core.record(epoch);
  }
}

}  // namespace apollo
