#include "apollo/join.h"

#include <atomic>
#include <thread>

#include "apollo/machine.h"
#include "check.h"

using apollo::Join;

namespace {

constexpr std::chrono::milliseconds kInterval{1};

int num_cores_allowed() {
  cpu_set_t set;
  CHECK(sched_getaffinity(0, sizeof(set), &set) == 0);
  return CPU_COUNT(&set);
}

void wait_until_pinned(pthread_t thread, int core) {
  cpu_set_t set;
  do {
    CHECK(pthread_getaffinity_np(thread, sizeof(set), &set) == 0);
  } while (CPU_COUNT(&set) != 1 || !CPU_ISSET(static_cast<std::size_t>(core), &set));
}

}  // namespace

TEST(nobody_passes_before_the_last_arrival) {
  Join join;
  for (std::uint32_t epoch = 1; epoch <= 200; ++epoch) {
    std::atomic<int> num_arrived = 0;
    join.expect(3, {});
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        ++num_arrived;
        join.arrive(epoch, {});
      });
    }
    std::thread other([&] {
      join.wait(epoch, {}, kInterval);
      CHECK(num_arrived == 3);
    });
    join.wait(epoch, {}, kInterval);
    CHECK(num_arrived == 3 && join.is_complete(epoch));
    other.join();
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
}

TEST(threads_that_were_given_cores_may_run_everywhere_again) {
  const std::vector<int> cores = apollo::available_cores();
  const int num_allowed = num_cores_allowed();
  Join join;
  for (std::uint32_t epoch = 1; epoch <= 50; ++epoch) {
    join.expect(2, {});
    std::thread first([&] { join.arrive(epoch, {cores.front()}); });
    std::thread second([&] { join.arrive(epoch, {cores.back()}); });
    join.wait(epoch, {}, kInterval);
    CHECK(num_cores_allowed() == num_allowed);
    first.join();
    second.join();
  }
}

TEST(a_thread_waits_on_the_core_that_it_was_given) {
  const std::vector<int> cores = apollo::available_cores();
  const int core = cores.back();
  Join join;
  join.expect(2, {});
  std::thread lane([&] { join.arrive(1, {core}); });
  // The second arrival comes when the waiter is seen on the core of the first.
  // The process may run everywhere all the same, which others ask while this thread, its first, is there.
  std::vector<int> cores_meanwhile;
  std::thread observer([&, waiter = pthread_self()] {
    wait_until_pinned(waiter, core);
    cores_meanwhile = apollo::available_cores();
    join.arrive(1, {});
  });
  join.wait(1, {}, kInterval);
  CHECK(cores_meanwhile == cores);
  lane.join();
  observer.join();
}

TEST(a_thread_waits_on_an_idle_core_from_the_start) {
  const int core = apollo::available_cores().back();
  Join join;
  join.expect(1, {core});
  std::thread observer([&, waiter = pthread_self()] {
    wait_until_pinned(waiter, core);
    join.arrive(1, {});
  });
  join.wait(1, {}, kInterval);
  observer.join();
}

TEST(a_poll_may_use_all_cores) {
  const std::vector<int> cores = apollo::available_cores();
  Join join;
  join.expect(1, {cores.front()});
  int num_allowed = 0;
  const auto poll = [&] {
    num_allowed = num_cores_allowed();
    join.arrive(1, {});
  };
  join.wait(1, poll, kInterval);
  CHECK(num_allowed == static_cast<int>(cores.size()));
}

TEST(who_comes_after_all_have_arrived_does_not_wait) {
  Join join;
  join.expect(1, {});
  join.arrive(1, {});
  join.wait(1, {}, kInterval);
  CHECK(join.is_complete(1) && !join.is_complete(2));
}

TEST(a_waiter_polls_while_it_sleeps) {
  Join join;
  join.expect(1, {});
  int num_polls = 0;
  const auto poll = [&] {
    if (++num_polls == 3) {
      join.arrive(1, {});
    }
  };
  join.wait(1, poll, kInterval);
  CHECK(num_polls == 3);
}

int main() { return check::run_all(); }
