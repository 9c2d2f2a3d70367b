#include "apollo/executor.h"

#include <sched.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "apollo/error.h"

namespace apollo {

namespace {

constexpr int kNoLane = -1;
constexpr Span kNoSpan{-1, kNoLane, 0, 0, -1};

// A hand-over takes a few microseconds when the waiting lane spins, and a wake-up from sleep ten times that. A lane
// that spins while another one may work on the same cores does so at its cost; one that has its cores to itself does
// not.
constexpr std::chrono::microseconds kPatienceOnSharedCores{20};
constexpr std::chrono::microseconds kPatienceOnOwnCores{2000};

std::size_t index(int id) { return static_cast<std::size_t>(id); }

std::size_t largest_launch(const std::vector<Instruction>& instructions) {
  std::size_t largest = 0;
  for (const Instruction& instruction : instructions) {
    if (const Launch* launch = std::get_if<Launch>(&instruction)) {
      largest = std::max(largest, launch->inputs.size() + launch->outputs.size());
    }
  }
  return largest;
}

/// Returns whether two lanes may use the same core; the caller's lane, which has no cores of its own, may use any.
bool share_cores(const std::vector<int>& first, const std::vector<int>& second) {
  return first.empty() || second.empty() || std::any_of(first.begin(), first.end(), [&](int core) {
           return std::find(second.begin(), second.end(), core) != second.end();
         });
}

/// Returns for every instruction of every lane how long it may spin if it is a wait.
///
/// Launches are counted per lane, and every point of a lane has a clock: how many launches of each lane have surely
/// ended there. What a lane waits for between two of its launches is what the clocks of these two differ by. Where that
/// has no launch of another lane on the same cores, nothing else can run on them meanwhile, provided that the program
/// orders launches that share cores. Behind the last launch of a lane there is no such order.
std::vector<std::vector<std::chrono::microseconds>> patience(const Program& program,
                                                             const std::vector<std::vector<int>>& cores) {
  using Clock = std::vector<int>;
  const std::size_t num_lanes = program.lanes.size();
  std::vector<Clock> now(num_lanes, Clock(num_lanes, 0));  // per lane, at its next instruction
  std::vector<Clock> at_launch = now;                      // per lane, behind its latest launch
  std::vector<Clock> recorded(index(program.num_events));
  std::vector<std::size_t> next(num_lanes, 0);
  std::vector<std::vector<std::size_t>> open(num_lanes);  // waits since the latest launch
  std::vector<std::vector<std::chrono::microseconds>> result;
  for (const std::vector<Instruction>& instructions : program.lanes) {
    result.emplace_back(instructions.size(), kPatienceOnSharedCores);
  }

  const auto has_cores_alone = [&](std::size_t lane) {
    for (std::size_t other = 0; other < num_lanes; ++other) {
      const bool has_worked = now[lane][other] > at_launch[lane][other];
      if (other != lane && has_worked && share_cores(cores[lane], cores[other])) {
        return false;
      }
    }
    return true;
  };
  // Returns whether the instruction could be passed: a wait cannot before its event was recorded.
  const auto pass = [&](std::size_t lane) {
    const std::size_t position = next[lane];
    const Instruction& instruction = program.lanes[lane][position];
    if (const Wait* wait = std::get_if<Wait>(&instruction)) {
      const Clock& other = recorded[index(wait->event)];
      if (other.empty()) {
        return false;
      }
      for (std::size_t i = 0; i < num_lanes; ++i) {
        now[lane][i] = std::max(now[lane][i], other[i]);
      }
      open[lane].push_back(position);
    } else if (const Record* record = std::get_if<Record>(&instruction)) {
      recorded[index(record->event)] = now[lane];
    } else if (std::holds_alternative<Launch>(instruction)) {
      if (!cores[lane].empty() && has_cores_alone(lane)) {
        for (const std::size_t wait : open[lane]) {
          result[lane][wait] = kPatienceOnOwnCores;
        }
      }
      open[lane].clear();
      ++now[lane][lane];
      at_launch[lane] = now[lane];
    }
    ++next[lane];
    return true;
  };

  for (bool has_passed = true; has_passed;) {  // ends: a checked program has no lanes that wait in a circle
    has_passed = false;
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      while (next[lane] < program.lanes[lane].size() && pass(lane)) {
        has_passed = true;
      }
    }
  }
  return result;
}

}  // namespace

Executor::Executor(std::shared_ptr<LaneSet> lanes, TensorApi api, Program program,
                   std::vector<std::shared_ptr<Body>> bodies)
    : lanes_(std::move(lanes)),
      api_(api),
      program_(std::move(program)),
      bodies_(std::move(bodies)),
      events_(std::make_unique<Event[]>(index(std::max(program_.num_events, 0)))) {
  check_program(program_, lanes_->num_lanes(), static_cast<int>(bodies_.size()));
  patience_ = patience(program_, lanes_->cores());
  for (auto output = program_.outputs.begin(); output != program_.outputs.end(); ++output) {
    is_last_.push_back(std::find(output + 1, program_.outputs.end(), *output) == program_.outputs.end());
  }
  slots_.resize(index(program_.num_buffers));
  spans_.resize(index(program_.num_segments()), kNoSpan);
  for (int lane = 0; lane < lanes_->num_lanes(); ++lane) {
    tasks_.emplace_back([this, lane] { execute(lane, nullptr, nullptr); });
    scratch_.emplace_back(largest_launch(program_.lanes[index(lane)]));
  }
}

std::vector<Tensor> Executor::run(std::vector<Tensor> inputs, const Poll& poll) {
  if (inputs.size() != program_.inputs.size()) {
    throw std::invalid_argument("cannot run the program: it takes " + std::to_string(program_.inputs.size()) +
                                " inputs and got " + std::to_string(inputs.size()));
  }
  const LaneSet::Turn turn = lanes_->take_turn(poll);
  const std::lock_guard lock(run_mutex_);

  start_ = std::chrono::steady_clock::now();
  ++epoch_;
  failure_.clear();
  std::fill(spans_.begin(), spans_.end(), kNoSpan);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    slots_[index(program_.inputs[i])] = std::move(inputs[i]);
  }

  int caller_lane = kNoLane;
  for (int lane = 0; lane < lanes_->num_lanes(); ++lane) {
    if (program_.lanes[index(lane)].empty()) {
      continue;
    }
    if (CpuLane* thread = turn.lane(lane)) {
      thread->start(tasks_[index(lane)]);
    } else {
      caller_lane = lane;
    }
  }
  if (caller_lane != kNoLane) {
    execute(caller_lane, &turn, &poll);
  }
  for (int lane = 0; lane < lanes_->num_lanes(); ++lane) {
    CpuLane* thread = turn.lane(lane);
    if (thread != nullptr && !program_.lanes[index(lane)].empty()) {
      wait_as_caller(turn, thread->finished(), thread->epoch(), poll);
    }
  }

  std::vector<Tensor> outputs;
  if (!failure_.is_set()) {
    try {
      outputs = take_outputs();
    } catch (...) {
      failure_.set(std::current_exception(), std::nullopt);
    }
  }
  for (Tensor& slot : slots_) {
    slot.reset();
  }
  duration_ns_ = now_ns();
  failure_.rethrow();
  return outputs;
}

void Executor::execute(int lane, const LaneSet::Turn* caller, const Poll* poll) {
  const std::vector<Instruction>& instructions = program_.lanes[index(lane)];
  for (std::size_t position = 0; position < instructions.size(); ++position) {
    const Instruction& instruction = instructions[position];
    // A run that has failed only records: lanes that sleep must wake, and what others still hold must not be touched.
    if (const Record* record = std::get_if<Record>(&instruction)) {
      events_[index(record->event)].record(epoch_);
    } else if (failure_.is_set()) {
      continue;
    } else if (const Launch* start = std::get_if<Launch>(&instruction)) {
      try {
        launch(*start, lane);
      } catch (...) {
        failure_.set(std::current_exception(), start->segment);
      }
    } else if (const Wait* wait = std::get_if<Wait>(&instruction)) {
      Event& event = events_[index(wait->event)];
      if (caller != nullptr) {
        wait_as_caller(*caller, event, epoch_, *poll);
      } else {
        event.wait(epoch_, patience_[index(lane)][position]);
      }
    } else {
      slots_[index(std::get<Release>(instruction).buffer)].reset();
    }
  }
}

void Executor::launch(const Launch& launch, int lane) {
  Span& span = spans_[index(launch.segment)];
  const std::int64_t start_ns = now_ns();
  const std::span<void*> scratch(scratch_[index(lane)]);
  const std::span<void*> inputs = scratch.first(launch.inputs.size());
  const std::span<void*> outputs = scratch.subspan(launch.inputs.size(), launch.outputs.size());
  std::fill(inputs.begin(), inputs.end(), nullptr);
  std::fill(outputs.begin(), outputs.end(), nullptr);
  gather_inputs(launch, inputs);
  bodies_[index(launch.body)]->run(inputs, outputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    slots_[index(launch.outputs[i])] = Tensor(api_, outputs[i]);
  }
  span = Span{launch.segment, lane, start_ns, now_ns(), sched_getcpu()};
}

void Executor::gather_inputs(const Launch& launch, std::span<void*> inputs) {
  // Lent buffers first: a segment may read a buffer twice and take it once.
  try {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Tensor& slot = slots_[index(launch.inputs[i].buffer)];
      if (!slot) {
        throw Error("cannot launch segment " + std::to_string(launch.segment) + ": buffer " +
                    std::to_string(launch.inputs[i].buffer) +
                    " is empty; its writer left it so, or the program does not order them");
      }
      if (!launch.inputs[i].takes) {
        inputs[i] = slot.clone().release();
      }
    }
  } catch (...) {
    for (void* input : inputs) {
      Tensor(api_, input).reset();
    }
    throw;
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (launch.inputs[i].takes) {
      inputs[i] = slots_[index(launch.inputs[i].buffer)].release();
    }
  }
}

void Executor::wait_as_caller(const LaneSet::Turn& turn, Event& event, std::uint32_t epoch, const Poll& poll) {
  const Poll poll_once = [this, &poll] {
    if (!poll || failure_.is_set()) {
      return;
    }
    try {
      poll();
    } catch (...) {
      failure_.set(std::current_exception(), std::nullopt);
    }
  };
  turn.wait(event, epoch, poll_once);
}

std::vector<Tensor> Executor::take_outputs() {
  std::vector<Tensor> outputs;
  outputs.reserve(program_.outputs.size());
  for (std::size_t i = 0; i < program_.outputs.size(); ++i) {
    const int buffer = program_.outputs[i];
    if (buffer == kNoBuffer) {
      outputs.emplace_back();
      continue;
    }
    Tensor& slot = slots_[index(buffer)];
    if (!slot) {
      throw Error("cannot return buffer " + std::to_string(buffer) + ": its writer left it empty");
    }
    // Of a buffer that is returned more than once the last place takes the handle.
    outputs.push_back(is_last_[i] ? std::move(slot) : slot.clone());
  }
  return outputs;
}

std::vector<Span> Executor::spans() const {
  std::vector<Span> spans;
  {
    const std::lock_guard lock(run_mutex_);
    std::copy_if(spans_.begin(), spans_.end(), std::back_inserter(spans),
                 [](const Span& span) { return span.lane != kNoLane; });
  }
  std::stable_sort(spans.begin(), spans.end(),
                   [](const Span& left, const Span& right) { return left.start_ns < right.start_ns; });
  return spans;
}

std::int64_t Executor::duration_ns() const {
  const std::lock_guard lock(run_mutex_);
  return duration_ns_;
}

std::int64_t Executor::now_ns() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_).count();
}

}  // namespace apollo
