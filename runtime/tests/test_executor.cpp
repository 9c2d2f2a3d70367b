#include <dirent.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <semaphore>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "apollo/native_body.h"
#include "fakes.h"
#include "random_program.h"

using apollo::Executor;
using apollo::Launch;
using apollo::Program;
using apollo::Record;
using apollo::Wait;

namespace {

int num_threads() {
  DIR* directory = opendir("/proc/self/task");
  CHECK(directory != nullptr);
  int count = 0;
  while (const dirent* entry = readdir(directory)) {
    count += entry->d_name[0] != '.' ? 1 : 0;
  }
  closedir(directory);
  return count;
}

std::vector<apollo::Tensor> make_inputs(const std::vector<std::uint64_t>& values) {
  std::vector<apollo::Tensor> tensors;
  for (const std::uint64_t value : values) {
    tensors.push_back(fakes::tensor(value));
  }
  return tensors;
}

/// Segments 0 and 1 on lanes 1 and 2, both read by segment 2 on the caller lane.
Program join_program() {
  Program program;
  program.lanes = {{Wait{0}, Wait{1}, Launch{2, 2, {{1, true}, {2, true}}, {3}}},
                   {Launch{0, 0, {{0, false}}, {1}}, Record{0}},
                   {Launch{1, 1, {{0, false}}, {2}}, Record{1}}};
  program.num_buffers = 4;
  program.num_events = 2;
  program.inputs = {0};
  program.outputs = {3};
  return program;
}

std::uint64_t add(const std::vector<std::uint64_t>& inputs) {
  std::uint64_t sum = 1;
  for (const std::uint64_t input : inputs) {
    sum += input;
  }
  return sum;
}

void test_random_programs(bool park_team) {
  const auto lanes = fakes::lanes(3, park_team);
  const int num_handles = fakes::num_handles;
  for (unsigned seed = 0; seed < 100; ++seed) {
    std::mt19937 random(seed);
    const auto expected = fakes::random_program(random, 4, 30);
    Executor executor(lanes, fakes::kApi, expected.program, expected.bodies);
    for (int repeat = 0; repeat < 20; ++repeat) {
      const auto outputs = executor.run(make_inputs(expected.inputs));
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        CHECK(outputs[i] ? fakes::value_of(outputs[i]) == expected.outputs[i]
                         : expected.program.outputs[i] == apollo::kNoBuffer);
      }
    }
    CHECK(executor.spans().size() == 30);
  }
  CHECK(fakes::num_handles == num_handles);
}

void identity(void** inputs, void** outputs) {
  outputs[0] = inputs[1];
  fakes::destroy(inputs[0]);
}

void fail(void** inputs, void**) {
  fakes::destroy(inputs[0]);
  throw std::out_of_range("native");
}

/// A profiler that writes the names of ranges to where the callbacks of their thread say.
namespace profiler {

struct Recorder {
  std::mutex mutex;
  std::vector<std::string> names;  // guarded by mutex
};

std::atomic<int> num_open{0};
thread_local bool has_callbacks_here = false;
thread_local std::shared_ptr<void> state_here;

bool has_callbacks() { return has_callbacks_here; }
const void* callbacks() { return &has_callbacks_here; }
void set_callbacks(const void* callbacks) { has_callbacks_here = *static_cast<const bool*>(callbacks); }
void clear_callbacks() { has_callbacks_here = false; }
std::shared_ptr<void> state() { return state_here; }
void set_state(std::shared_ptr<void> state) { state_here = std::move(state); }

std::int32_t begin(const char* name, void*, void* const*, std::uint64_t, void** range) {
  if (!has_callbacks_here) {
    return 1;
  }
  Recorder& recorder = *static_cast<Recorder*>(state_here.get());
  const std::lock_guard lock(recorder.mutex);
  recorder.names.emplace_back(name);
  ++num_open;
  *range = &recorder;
  return 0;
}

std::int32_t end(void* range) {
  CHECK(range == state_here.get());
  --num_open;
  return 0;
}

const apollo::Ranges kRanges{
    {&has_callbacks, &callbacks, &set_callbacks, &clear_callbacks, &state, &set_state, &begin, &end},
    {"left", "right", "sum"}};

/// Records what this thread does as long as it lives.
class Recording {
 public:
  Recording() {
    state_here = recorder_;
    has_callbacks_here = true;
  }
  ~Recording() {
    has_callbacks_here = false;
    state_here = nullptr;
  }

  /// Returns the names of the ranges until now, sorted, and forgets them.
  std::vector<std::string> take_names() {
    CHECK(num_open == 0);
    const std::lock_guard lock(recorder_->mutex);
    std::sort(recorder_->names.begin(), recorder_->names.end());
    return std::exchange(recorder_->names, {});
  }

  bool is_last() const { return recorder_.use_count() == 2; }  // the other one is this thread's

 private:
  std::shared_ptr<Recorder> recorder_ = std::make_shared<Recorder>();
};

}  // namespace profiler

Program single_program() {
  Program program;
  program.lanes = {{Launch{0, 0, {{0, false}}, {1}}}};
  program.num_buffers = 2;
  program.inputs = {0};
  program.outputs = {1};
  return program;
}

}  // namespace

TEST(random_programs_compute_the_same_on_lanes) { test_random_programs(false); }

TEST(random_programs_compute_the_same_with_parking_asked_for) { test_random_programs(true); }

TEST(a_profile_has_a_range_per_segment_and_lanes_leave_it_again) {
  const auto lanes = fakes::lanes(2);
  Executor executor(lanes, fakes::kApi, join_program(), {fakes::body(add), fakes::body(add), fakes::body(add)});
  const auto run = [&](const apollo::Ranges* ranges) {
    CHECK(fakes::value_of(executor.run(fakes::tensors(5), {}, ranges)[0]) == 13);
  };
  using Names = std::vector<std::string>;
  run(&profiler::kRanges);  // nothing records
  for (int repeat = 0; repeat < 20; ++repeat) {
    profiler::Recording recording;
    run(nullptr);
    CHECK(recording.take_names() == Names());
    run(&profiler::kRanges);
    CHECK(recording.take_names() == (Names{"left", "right", "sum"}));
    run(nullptr);  // its lanes have left the run before
    CHECK(recording.take_names() == Names());
    CHECK(recording.is_last());
  }
}

TEST(a_range_ends_where_a_body_fails) {
  Executor executor(fakes::lanes(0), fakes::kApi, single_program(),
                    {fakes::body([](const auto&) -> std::uint64_t { throw std::out_of_range("body"); })});
  apollo::Ranges ranges = profiler::kRanges;
  CHECK_THROWS(std::invalid_argument, executor.run(fakes::tensors(5), {}, &ranges));  // three names, one segment
  ranges.names = {"only"};
  profiler::Recording recording;
  CHECK_THROWS(std::out_of_range, executor.run(fakes::tensors(5), {}, &ranges));
  CHECK(recording.take_names() == std::vector<std::string>{"only"});
}

TEST(spans_name_lane_core_and_order) {
  const auto lanes = fakes::lanes(2);
  Executor executor(lanes, fakes::kApi, join_program(), {fakes::body(add), fakes::body(add), fakes::body(add)});
  CHECK(fakes::value_of(executor.run(fakes::tensors(5))[0]) == 13);
  const auto spans = executor.spans();
  CHECK(spans.size() == 3);
  CHECK(spans[2].segment == 2 && spans[2].lane == 0);
  for (const apollo::Span& span : spans) {
    CHECK(0 <= span.start_ns && span.start_ns <= span.end_ns && span.end_ns <= executor.duration_ns());
    CHECK(span.lane == 0 || span.core == lanes->cores()[static_cast<std::size_t>(span.lane)][0]);
  }
  CHECK(spans[2].start_ns >= spans[0].end_ns && spans[2].start_ns >= spans[1].end_ns);
}

TEST(bodies_run_pinned_to_the_cores_of_their_lane) {
  const auto lanes = fakes::lanes(2);
  std::vector<int> counts(3);
  const auto look = [&](std::size_t lane) {
    return fakes::body([&counts, lane, lanes](const auto&) {
      cpu_set_t set;
      CHECK(sched_getaffinity(0, sizeof(set), &set) == 0);
      counts[lane] = CPU_COUNT(&set);
      CHECK(lane == 0 || CPU_ISSET(static_cast<std::size_t>(lanes->cores()[lane][0]), &set));
      return std::uint64_t{0};
    });
  };
  Executor(lanes, fakes::kApi, join_program(), {look(1), look(2), look(0)}).run(fakes::tensors(5));
  CHECK(counts[1] == 1 && counts[2] == 1);
  CHECK(counts[0] == static_cast<int>(apollo::available_cores().size()));
}

TEST(inputs_and_repeated_outputs_pass_through) {
  Program program;
  program.lanes.resize(1);
  program.num_buffers = 1;
  program.inputs = {0};
  program.outputs = {0, apollo::kNoBuffer, 0};
  const int num_handles = fakes::num_handles;
  {
    Executor executor(fakes::lanes(0), fakes::kApi, program, {});
    const auto outputs = executor.run(fakes::tensors(7));
    CHECK(fakes::value_of(outputs[0]) == 7 && !outputs[1] && fakes::value_of(outputs[2]) == 7);
    CHECK(fakes::num_handles == num_handles + 2);
  }
  CHECK(fakes::num_handles == num_handles);
}

TEST(a_wrong_number_of_inputs_is_refused) {
  Executor executor(fakes::lanes(0), fakes::kApi, single_program(), {fakes::body(add)});
  CHECK_THROWS(std::invalid_argument, executor.run({}));
}

TEST(an_exception_stops_the_run_a_thousand_times_and_leaks_nothing) {
  const auto lanes = fakes::lanes(3);
  const int num_threads_before = num_threads();
  const int num_handles = fakes::num_handles;
  std::mt19937 random(1);
  auto expected = fakes::random_program(random, 4, 30);
  for (int bad = 0; bad < 20; ++bad) {
    auto bodies = expected.bodies;
    const auto segment = static_cast<std::size_t>(bad);
    bodies[segment] = fakes::body([](const auto&) -> std::uint64_t { throw std::out_of_range("body"); });
    Executor executor(lanes, fakes::kApi, expected.program, bodies);
    for (int repeat = 0; repeat < 50; ++repeat) {
      CHECK_THROWS(std::out_of_range, executor.run(make_inputs(expected.inputs)));
      CHECK(executor.last_failure() == bad);
      CHECK(fakes::num_handles == num_handles);
    }
  }
  CHECK(num_threads() == num_threads_before);
}

TEST(an_executor_stays_usable_after_a_failure) {
  bool fails = true;
  const auto moody = fakes::body([&fails](const auto& inputs) {
    if (fails) {
      throw std::runtime_error("moody");
    }
    return add(inputs);
  });
  Executor executor(fakes::lanes(2), fakes::kApi, join_program(), {fakes::body(add), moody, fakes::body(add)});
  CHECK_THROWS(std::runtime_error, executor.run(fakes::tensors(5)));
  CHECK(executor.last_failure() == 1);
  fails = false;
  CHECK(fakes::value_of(executor.run(fakes::tensors(5))[0]) == 13);
  CHECK(!executor.last_failure());
}

TEST(native_bodies_get_their_constants_behind_the_inputs) {
  const int num_handles = fakes::num_handles;
  {
    auto body = std::make_shared<apollo::NativeBody>(&identity, fakes::tensors(9));
    Executor executor(fakes::lanes(0), fakes::kApi, single_program(), {body});
    CHECK(fakes::value_of(executor.run(fakes::tensors(5))[0]) == 9);
    CHECK(fakes::value_of(executor.run(fakes::tensors(5))[0]) == 9);
    CHECK(fakes::num_handles == num_handles + 1);
  }
  CHECK(fakes::num_handles == num_handles);
}

TEST(exceptions_of_native_bodies_come_out_as_themselves) {
  auto body = std::make_shared<apollo::NativeBody>(&fail, std::vector<apollo::Tensor>());
  Executor executor(fakes::lanes(0), fakes::kApi, single_program(), {body});
  const int num_handles = fakes::num_handles;
  CHECK_THROWS(std::out_of_range, executor.run(fakes::tensors(5)));
  CHECK(fakes::num_handles == num_handles);
}

TEST(reading_an_empty_buffer_is_an_error_of_the_run) {
  Program program = single_program();
  program.num_buffers = 3;
  program.lanes[0] = {Launch{0, 0, {{0, false}, {2, false}}, {1}}};
  const int num_handles = fakes::num_handles;
  Executor executor(fakes::lanes(0), fakes::kApi, program, {fakes::body(add)});
  CHECK_THROWS(apollo::Error, executor.run(fakes::tensors(5)));
  CHECK(fakes::num_handles == num_handles);
}

TEST(returning_a_buffer_that_its_writer_left_empty_is_an_error_of_the_run) {
  struct LeavesNothing final : apollo::Body {
    void run(std::span<void*> inputs, std::span<void*>) override {
      for (void* input : inputs) {
        const apollo::Tensor taken(fakes::kApi, input);
      }
    }
  };
  const int num_handles = fakes::num_handles;
  Executor executor(fakes::lanes(0), fakes::kApi, single_program(), {std::make_shared<LeavesNothing>()});
  std::string text;
  try {
    executor.run(fakes::tensors(5));
  } catch (const apollo::Error& error) {
    text = error.what();
  }
  CHECK(text == "cannot return buffer 1: its writer left it empty");
  CHECK(fakes::num_handles == num_handles);
}

TEST(poll_cancels_a_run_while_the_caller_waits) {
  struct Cancelled : std::exception {};
  std::binary_semaphore is_cancelled(0);
  // Ends only because poll was called: the caller polls while it waits for the lane.
  const auto slow = fakes::body([&](const auto& inputs) {
    is_cancelled.acquire();
    return add(inputs);
  });
  const auto never = fakes::body([](const auto&) -> std::uint64_t { std::abort(); });
  const int num_handles = fakes::num_handles;
  Executor executor(fakes::lanes(2), fakes::kApi, join_program(), {slow, fakes::body(add), never});
  const apollo::Poll poll = [&] {
    is_cancelled.release();
    throw Cancelled();
  };
  CHECK_THROWS(Cancelled, executor.run(fakes::tensors(5), poll));
  CHECK(!executor.last_failure());
  CHECK(fakes::num_handles == num_handles);
}

TEST(poll_cancels_the_wait_for_another_run) {
  struct Cancelled : std::exception {};
  const auto lanes = fakes::lanes(2);
  std::binary_semaphore is_running(0);
  std::binary_semaphore may_end(0);
  const auto slow = fakes::body([&](const auto& inputs) {
    is_running.release();
    may_end.acquire();
    return add(inputs);
  });
  Executor first(lanes, fakes::kApi, join_program(), {slow, fakes::body(add), fakes::body(add)});
  Executor second(lanes, fakes::kApi, join_program(), {fakes::body(add), fakes::body(add), fakes::body(add)});
  std::thread thread([&] { CHECK(fakes::value_of(first.run(fakes::tensors(5))[0]) == 13); });
  is_running.acquire();
  CHECK_THROWS(Cancelled, second.run(fakes::tensors(5), [] { throw Cancelled(); }));
  may_end.release();
  thread.join();
}

TEST(threads_that_run_at_once_take_turns) {
  const auto lanes = fakes::lanes(2);
  Executor executor(lanes, fakes::kApi, join_program(), {fakes::body(add), fakes::body(add), fakes::body(add)});
  const auto run = [&](std::uint64_t input) {
    for (int repeat = 0; repeat < 300; ++repeat) {
      CHECK(fakes::value_of(executor.run(fakes::tensors(input))[0]) == 2 * input + 3);
      CHECK(executor.spans().size() == 3);
    }
  };
  std::thread other(run, 5);
  run(6);
  other.join();
}

TEST(a_run_inside_a_run_is_an_error_instead_of_a_hang) {
  const auto lanes = fakes::lanes(2);
  Executor inner(lanes, fakes::kApi, join_program(), {fakes::body(add), fakes::body(add), fakes::body(add)});
  const auto nested = fakes::body([&](const auto&) { return fakes::value_of(inner.run(fakes::tensors(5))[0]); });
  Executor on_lane(lanes, fakes::kApi, join_program(), {nested, fakes::body(add), fakes::body(add)});
  CHECK_THROWS(apollo::Error, on_lane.run(fakes::tensors(5)));
  Executor on_caller(lanes, fakes::kApi, join_program(), {fakes::body(add), fakes::body(add), nested});
  CHECK_THROWS(apollo::Error, on_caller.run(fakes::tensors(5)));
}

int main() { return check::run_all(); }
