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

Waits plan_checked_waits(const Program& program, const LaneSet& lanes, std::size_t num_bodies) {
  check_program(program, lanes.num_lanes(), static_cast<int>(num_bodies));
  return plan_waits(program, lanes.cores());
}

}  // namespace

Executor::Executor(std::shared_ptr<LaneSet> lanes, TensorApi api, Program program,
                   std::vector<std::shared_ptr<Body>> bodies)
    : lanes_(std::move(lanes)),
      api_(api),
      program_(std::move(program)),
      bodies_(std::move(bodies)),
      waits_(plan_checked_waits(program_, *lanes_, bodies_.size())),
      events_(std::make_unique<Event[]>(index(program_.num_events))),
      joins_(new Join[waits_.pauses.size() + 1]) {
  for (auto output = program_.outputs.begin(); output != program_.outputs.end(); ++output) {
    is_last_.push_back(std::find(output + 1, program_.outputs.end(), *output) == program_.outputs.end());
  }
  slots_.resize(index(program_.num_buffers));
  spans_.resize(index(program_.num_segments()), kNoSpan);
  last_spans_ = spans_;
  for (int lane = 0; lane < lanes_->num_lanes(); ++lane) {
    tasks_.push_back(std::make_shared<CpuLane::Task>([this, lane, joins = joins_] {
      // After the last arrival the run may end and the executor be destroyed: the task keeps the joins alive.
      const bool is_awaited = waits_.ends[index(lane)].is_awaited;
      {
        const Participation participation(profile_);
        execute(lane, 0, program_.lanes[index(lane)].size());
      }
      if (is_awaited) {
        joins[waits_.pauses.size()].arrive(epoch_, waits_.ends[index(lane)].left);
      }
    }));
    scratch_.emplace_back(largest_launch(program_.lanes[index(lane)]));
  }
}

std::vector<Tensor> Executor::run(std::vector<Tensor> inputs, const Poll& poll, const Ranges* ranges) {
  if (inputs.size() != program_.inputs.size()) {
    throw std::invalid_argument("cannot run the program: it takes " + std::to_string(program_.inputs.size()) +
                                " inputs and got " + std::to_string(inputs.size()));
  }
  if (ranges != nullptr && static_cast<int>(ranges->names.size()) != program_.num_segments()) {
    throw std::invalid_argument("cannot run the program with " + std::to_string(ranges->names.size()) +
                                " names: it has " + std::to_string(program_.num_segments()) + " segments");
  }
  const LaneSet::Turn turn = lanes_->take_turn(poll);
  const std::lock_guard lock(run_mutex_);

  start_ = std::chrono::steady_clock::now();
  profile_ = Profile(ranges);
  ++epoch_;
  failure_.clear();
  std::fill(spans_.begin(), spans_.end(), kNoSpan);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    slots_[index(program_.inputs[i])] = std::move(inputs[i]);
  }

  work_as_caller(turn, poll);

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
  profile_ = Profile();
  {
    const std::lock_guard last_lock(last_mutex_);
    last_spans_ = spans_;
    last_duration_ns_ = now_ns();
  }
  failure_.rethrow();
  return outputs;
}

void Executor::work_as_caller(const LaneSet::Turn& turn, const Poll& poll) {
  std::vector<int> asleep;  // lanes whose threads have not been started yet
  int caller = kNoLane;
  for (int lane = 0; lane < lanes_->num_lanes(); ++lane) {
    if (turn.lane(lane) == nullptr) {
      caller = lane;
    } else if (!program_.lanes[index(lane)].empty()) {
      asleep.push_back(lane);
    }
  }
  for (std::size_t i = 0; i < waits_.pauses.size(); ++i) {
    joins_[i].expect(waits_.pauses[i].num_arrivals, waits_.pauses[i].idle);
  }
  Join& end = joins_[waits_.pauses.size()];
  const auto num_ends =
      std::count_if(waits_.ends.begin(), waits_.ends.end(), [](const End& each) { return each.is_awaited; });
  end.expect(static_cast<int>(num_ends), waits_.idle_at_end);

  const auto start = [&](int lane) { turn.lane(lane)->start(tasks_[index(lane)]); };
  const auto start_all = [&] {
    // The lane on this thread's core is started last: once awake, it may take the core from this thread.
    const std::vector<std::vector<int>>& cores = lanes_->cores();
    const auto is_elsewhere = [&, here = sched_getcpu()](int lane) {
      return std::find(cores[index(lane)].begin(), cores[index(lane)].end(), here) == cores[index(lane)].end();
    };
    std::stable_partition(asleep.begin(), asleep.end(), is_elsewhere);
    std::for_each(asleep.begin(), asleep.end(), start);
    asleep.clear();
  };
  const Poll poll_once = [&] {
    if (!poll || failure_.is_set()) {
      return;
    }
    try {
      poll();
    } catch (...) {
      failure_.set(std::current_exception(), std::nullopt);
    }
  };

  std::size_t position = 0;
  const std::vector<Instruction> nothing;
  const std::vector<Instruction>& instructions = caller == kNoLane ? nothing : program_.lanes[index(caller)];
  if (!instructions.empty() && std::holds_alternative<Launch>(instructions.front())) {
    // Lanes that begin with a wait have nothing to do yet: the caller starts them in its first pause.
    const auto waiting = std::partition(asleep.begin(), asleep.end(), [&](int lane) {
      return !std::holds_alternative<Wait>(program_.lanes[index(lane)].front());
    });
    std::for_each(asleep.begin(), waiting, start);
    asleep.erase(asleep.begin(), waiting);
  }
  for (std::size_t i = 0; i < waits_.pauses.size(); ++i) {
    const Pause& pause = waits_.pauses[i];
    execute(caller, position, pause.begin);
    const auto hand_over = [&] {
      start_all();
      execute(caller, pause.begin, pause.first_wait);
    };
    turn.wait(joins_[i], epoch_, hand_over, poll_once);  // after a failure too: lanes must have left the run
    position = pause.first_wait;
  }
  execute(caller, position, instructions.size());
  if (num_ends > 0) {
    turn.wait(end, epoch_, start_all, poll_once);
  }
}

void Executor::execute(int lane, std::size_t begin, std::size_t end) {
  for (std::size_t position = begin; position < end; ++position) {
    const Instruction& instruction = program_.lanes[index(lane)][position];
    // A failed run only records events: sleeping lanes must wake, and buffers that other lanes use must not be touched.
    if (const Record* record = std::get_if<Record>(&instruction)) {
      events_[index(record->event)].record(epoch_);
      if (const Arrival& arrival = waits_.arrivals[index(record->event)]; arrival.pause >= 0) {
        joins_[index(arrival.pause)].arrive(epoch_, arrival.left);
      }
    } else if (failure_.is_set()) {
      continue;
    } else if (const Launch* start = std::get_if<Launch>(&instruction)) {
      try {
        launch(*start, lane);
      } catch (...) {
        failure_.set(std::current_exception(), start->segment);
      }
    } else if (const Wait* wait = std::get_if<Wait>(&instruction)) {
      events_[index(wait->event)].wait(epoch_, waits_.patience[index(lane)][position]);
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
  {
    const Range range(profile_, launch.segment);
    bodies_[index(launch.body)]->run(inputs, outputs);
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    slots_[index(launch.outputs[i])] = Tensor(api_, outputs[i]);
  }
  span = Span{launch.segment, lane, start_ns, now_ns(), sched_getcpu()};
}

void Executor::gather_inputs(const Launch& launch, std::span<void*> inputs) {
  // Borrowed buffers first: a segment may read a buffer twice and take it once.
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
    // If a buffer is returned more than once, the last output takes the handle.
    outputs.push_back(is_last_[i] ? std::move(slot) : slot.clone());
  }
  return outputs;
}

std::vector<Span> Executor::spans() const {
  std::vector<Span> spans;
  {
    const std::lock_guard lock(last_mutex_);
    std::copy_if(last_spans_.begin(), last_spans_.end(), std::back_inserter(spans),
                 [](const Span& span) { return span.lane != kNoLane; });
  }
  std::stable_sort(spans.begin(), spans.end(),
                   [](const Span& left, const Span& right) { return left.start_ns < right.start_ns; });
  return spans;
}

std::int64_t Executor::duration_ns() const {
  const std::lock_guard lock(last_mutex_);
  return last_duration_ns_;
}

std::int64_t Executor::now_ns() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_).count();
}

}  // namespace apollo
