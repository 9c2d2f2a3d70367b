#include "apollo/waits.h"

#include <algorithm>
#include <set>
#include <variant>

namespace apollo {

namespace {

// A hand-over takes a few microseconds if the waiting lane spins, and ten times that if it sleeps. A lane that spins
// slows another lane that may run on the same cores; one that has its cores to itself does not.
constexpr std::chrono::microseconds kPatienceOnSharedCores{20};
constexpr std::chrono::microseconds kPatienceOnOwnCores{2000};
constexpr std::chrono::microseconds kNoPatience{0};  // on cores that were just handed to another thread

using Clock = std::vector<int>;

std::size_t index(int id) { return static_cast<std::size_t>(id); }

bool is_wait(const Instruction& instruction) { return std::holds_alternative<Wait>(instruction); }
bool is_record(const Instruction& instruction) { return std::holds_alternative<Record>(instruction); }
bool is_launch(const Instruction& instruction) { return std::holds_alternative<Launch>(instruction); }

/// Returns whether two lanes may use the same core; the caller's lane, which has no cores of its own, may use any.
bool share_cores(const std::vector<int>& first, const std::vector<int>& second) {
  return first.empty() || second.empty() || std::any_of(first.begin(), first.end(), [&](int core) {
           return std::find(second.begin(), second.end(), core) != second.end();
         });
}

/// Walks through a program as if it were executed.
///
/// Launches are counted per lane, and every point of a lane has a vector clock: how many launches of each lane are
/// known to have ended there. The difference of the clocks of two successive launches of a lane is what the lane waits
/// for in between. If it has no launch of another lane on the same cores, nothing else can run on them meanwhile,
/// provided that the program orders launches that share cores. After the last launch of a lane there is no such order.
class Walk {
 public:
  Walk(const Program& program, const std::vector<std::vector<int>>& cores)
      : program_(program),
        cores_(cores),
        now_(program.lanes.size(), Clock(program.lanes.size(), 0)),
        at_launch_(now_),
        recorded_(index(program.num_events)),
        writers_(index(program.num_events), 0),
        next_(program.lanes.size(), 0),
        open_(program.lanes.size()) {
    result_.arrivals.resize(index(program.num_events));
    for (const std::vector<Instruction>& instructions : program.lanes) {
      result_.patience.emplace_back(instructions.size(), kPatienceOnSharedCores);
    }
  }

  Waits run() {
    for (bool has_passed = true; has_passed;) {  // terminates: lanes of a checked program do not deadlock
      has_passed = false;
      for (std::size_t lane = 0; lane < program_.lanes.size(); ++lane) {
        while (next_[lane] < program_.lanes[lane].size() && pass(lane)) {
          has_passed = true;
        }
      }
    }
    Clock clock(now_.size(), 0);
    for (std::size_t lane = 0; lane < program_.lanes.size(); ++lane) {
      if (cores_[lane].empty()) {
        find_pauses(lane, clock);
      }
    }
    for (std::size_t lane = 0; lane < program_.lanes.size(); ++lane) {
      leave_given_cores(lane);
    }
    Clock end(now_.size(), 0);
    for (std::size_t lane = 0; lane < program_.lanes.size(); ++lane) {
      end[lane] = now_[lane][lane];
    }
    result_.idle_at_end = idle_cores(clock, end);
    for (std::size_t lane = 0; lane < program_.lanes.size(); ++lane) {
      result_.ends.push_back(find_end(lane, clock, end));
    }
    return std::move(result_);
  }

 private:
  /// Passes the next instruction of a lane; returns false for a wait whose event is not recorded yet.
  bool pass(std::size_t lane) {
    const std::size_t position = next_[lane];
    const Instruction& instruction = program_.lanes[lane][position];
    if (const Wait* wait = std::get_if<Wait>(&instruction)) {
      const Clock& other = recorded_[index(wait->event)];
      if (other.empty()) {
        return false;
      }
      for (std::size_t i = 0; i < other.size(); ++i) {
        now_[lane][i] = std::max(now_[lane][i], other[i]);
      }
      open_[lane].push_back(position);
    } else if (const Record* record = std::get_if<Record>(&instruction)) {
      recorded_[index(record->event)] = now_[lane];
      writers_[index(record->event)] = lane;
    } else if (is_launch(instruction)) {
      if (!cores_[lane].empty() && has_cores_alone(lane)) {
        for (const std::size_t wait : open_[lane]) {
          result_.patience[lane][wait] = kPatienceOnOwnCores;
        }
      }
      open_[lane].clear();
      ++now_[lane][lane];
      at_launch_[lane] = now_[lane];
    }
    ++next_[lane];
    return true;
  }

  bool has_cores_alone(std::size_t lane) const {
    for (std::size_t other = 0; other < now_.size(); ++other) {
      const bool has_worked = now_[lane][other] > at_launch_[lane][other];
      if (other != lane && has_worked && share_cores(cores_[lane], cores_[other])) {
        return false;
      }
    }
    return true;
  }

  /// Finds the pauses of the caller's lane; `clock` is its clock at the start, and after the last pause on return.
  void find_pauses(std::size_t caller, Clock& clock) {
    const std::vector<Instruction>& instructions = program_.lanes[caller];
    for (std::size_t begin = 0; begin < instructions.size();) {
      if (is_launch(instructions[begin])) {
        ++begin;
        continue;
      }
      const auto from = [&](std::size_t position) {
        return instructions.begin() + static_cast<std::ptrdiff_t>(position);
      };
      const auto first_wait = std::find_if(from(begin), instructions.end(),
                                           [](const auto& each) { return is_wait(each) || is_launch(each); });
      const auto end = std::find_if(first_wait, instructions.end(),
                                    [](const auto& each) { return is_record(each) || is_launch(each); });
      Pause pause{begin,
                  static_cast<std::size_t>(first_wait - instructions.begin()),
                  static_cast<std::size_t>(end - instructions.begin()),
                  0,
                  {}};
      add_arrivals(instructions, pause, clock);
      if (pause.num_arrivals > 0) {
        result_.pauses.push_back(pause);
      }
      begin = pause.end;
    }
  }

  /// Counts the arrivals in a pause; `clock` is that of the caller's lane before it, and after it on return.
  void add_arrivals(const std::vector<Instruction>& instructions, Pause& pause, Clock& clock) {
    std::vector<int> events;
    const Clock before = clock;
    for (std::size_t position = pause.first_wait; position < pause.end; ++position) {
      const Wait* wait = std::get_if<Wait>(&instructions[position]);
      if (wait == nullptr || result_.arrivals[index(wait->event)].pause >= 0) {
        continue;
      }
      for (std::size_t i = 0; i < clock.size(); ++i) {
        clock[i] = std::max(clock[i], recorded_[index(wait->event)][i]);
      }
      if (!cores_[writers_[index(wait->event)]].empty()) {
        events.push_back(wait->event);
        result_.arrivals[index(wait->event)].pause = static_cast<int>(result_.pauses.size());
      }
    }
    for (const int event : events) {
      if (leaves_cores(event, clock)) {
        result_.arrivals[index(event)].left = cores_[writers_[index(event)]];
      }
    }
    pause.num_arrivals = static_cast<int>(events.size());
    pause.idle = idle_cores(before, clock);
  }

  /// Returns the cores of lanes on which no lane runs between two points.
  std::vector<int> idle_cores(const Clock& before, const Clock& after) const {
    std::set<int> idle;
    for (const std::vector<int>& cores : cores_) {
      idle.insert(cores.begin(), cores.end());
    }
    for (std::size_t lane = 0; lane < cores_.size(); ++lane) {
      if (before[lane] < after[lane]) {
        for (const int core : cores_[lane]) {
          idle.erase(core);
        }
      }
    }
    return {idle.begin(), idle.end()};
  }

  /// Lets a lane sleep without spinning in a wait after a record that handed its cores over: spinning would slow the
  /// thread that has them now.
  void leave_given_cores(std::size_t lane) {
    bool has_given = false;
    for (std::size_t position = 0; position < program_.lanes[lane].size(); ++position) {
      const Instruction& instruction = program_.lanes[lane][position];
      if (const Record* record = std::get_if<Record>(&instruction)) {
        has_given = has_given || !result_.arrivals[index(record->event)].left.empty();
      } else if (is_launch(instruction)) {
        has_given = false;
      } else if (has_given && is_wait(instruction)) {
        result_.patience[lane][position] = kNoPatience;
      }
    }
  }

  /// Returns the end of a lane; `clock` is that of the caller after its pauses, `end` that of all lanes at their ends.
  End find_end(std::size_t lane, const Clock& clock, const Clock& end) const {
    const std::vector<Instruction>& instructions = program_.lanes[lane];
    if (cores_[lane].empty() || instructions.empty()) {
      return {false, {}};
    }
    const Record* last = std::get_if<Record>(&instructions.back());
    if (last != nullptr && result_.arrivals[index(last->event)].pause >= 0) {
      return {false, {}};
    }
    for (std::size_t other = 0; other < cores_.size(); ++other) {
      const bool works = std::max(now_[lane][other], clock[other]) < end[other];
      if (works && !cores_[other].empty() && share_cores(cores_[lane], cores_[other])) {
        return {true, {}};
      }
    }
    return {true, cores_[lane]};
  }

  /// Returns whether no lane runs on the cores of the event's lane between its record and `clock`.
  bool leaves_cores(int event, const Clock& clock) const {
    const std::vector<int>& cores = cores_[writers_[index(event)]];
    for (std::size_t lane = 0; lane < cores_.size(); ++lane) {
      const bool works = recorded_[index(event)][lane] < clock[lane];
      if (works && !cores_[lane].empty() && share_cores(cores, cores_[lane])) {
        return false;
      }
    }
    return true;
  }

  const Program& program_;
  const std::vector<std::vector<int>>& cores_;
  std::vector<Clock> now_;        // per lane, at its next instruction
  std::vector<Clock> at_launch_;  // per lane, after its latest launch
  std::vector<Clock> recorded_;   // per event
  std::vector<std::size_t> writers_;
  std::vector<std::size_t> next_;
  std::vector<std::vector<std::size_t>> open_;  // per lane: waits since the latest launch
  Waits result_;
};

}  // namespace

Waits plan_waits(const Program& program, const std::vector<std::vector<int>>& cores) {
  return Walk(program, cores).run();
}

}  // namespace apollo
