#include "apollo/program.h"

#include <limits>
#include <string>

#include "apollo/error.h"

namespace apollo {

namespace {

std::string place(std::size_t lane, std::size_t instruction) {
  return "lane " + std::to_string(lane) + ", instruction " + std::to_string(instruction);
}

/// Takes numbers from the front of the encoded instructions of a lane.
class Reader {
 public:
  Reader(std::span<const std::int64_t> code, int lane) : code_(code), lane_(lane) {}

  bool is_at_end() const { return position_ == code_.size(); }

  std::int64_t next(const char* what) {
    if (is_at_end()) {
      fail(std::string("ends where ") + what + " should follow");
    }
    return code_[position_++];
  }

  int next_id(const char* what) {
    const std::int64_t id = next(what);
    if (id < 0 || id > std::numeric_limits<int>::max()) {
      fail(std::string("has ") + std::to_string(id) + " as " + what + ", which cannot be one");
    }
    return static_cast<int>(id);
  }

  /// Reads a count of items that take `width` numbers each.
  std::size_t next_count(const char* what, std::size_t width) {
    const auto count = static_cast<std::size_t>(next_id(what));
    if (count > (code_.size() - position_) / width) {
      fail("has " + std::to_string(count) + " as " + what + ", more than the code has room for");
    }
    return count;
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw InvalidProgramError("cannot decode the instructions of lane " + std::to_string(lane_) + ": the code " + why +
                              " (at number " + std::to_string(position_) + " of " + std::to_string(code_.size()) + ")");
  }

 private:
  std::span<const std::int64_t> code_;
  int lane_;
  std::size_t position_ = 0;
};

Launch decode_launch(Reader& reader) {
  Launch launch{};
  launch.segment = reader.next_id("a segment");
  launch.body = reader.next_id("a body");
  launch.inputs.resize(reader.next_count("the number of inputs", 2));
  for (LaunchInput& input : launch.inputs) {
    input.buffer = reader.next_id("a buffer");
    input.takes = reader.next("whether the buffer is taken") != 0;
  }
  launch.outputs.resize(reader.next_count("the number of outputs", 1));
  for (int& output : launch.outputs) {
    output = reader.next_id("a buffer");
  }
  return launch;
}

/// Counts what a program does with its ids; visits one instruction after the other.
class Checker {
 public:
  Checker(const Program& program, int num_bodies)
      : program_(program),
        num_bodies_(num_bodies),
        num_launches_(static_cast<std::size_t>(program.num_segments())),
        num_writes_(static_cast<std::size_t>(program.num_buffers)),
        num_departures_(static_cast<std::size_t>(program.num_buffers)),
        num_records_(static_cast<std::size_t>(program.num_events)),
        is_awaited_(static_cast<std::size_t>(program.num_events)) {}

  void check() {
    where_ = "the inputs of the program";
    for (const int buffer : program_.inputs) {
      write(buffer);
    }
    for (std::size_t lane = 0; lane < program_.lanes.size(); ++lane) {
      for (std::size_t i = 0; i < program_.lanes[lane].size(); ++i) {
        where_ = place(lane, i);
        std::visit([this](const auto& instruction) { visit(instruction); }, program_.lanes[lane][i]);
      }
    }
    where_ = "the outputs of the program";
    for (const int buffer : program_.outputs) {
      if (buffer == kNoBuffer) {
        continue;
      }
      at(num_writes_, buffer, "buffer");
      require(num_writes_[static_cast<std::size_t>(buffer)] == 1, name("buffer", buffer) + " is never written");
      require(num_departures_[static_cast<std::size_t>(buffer)] == 0,
              name("buffer", buffer) + " is taken or released before the run is over; outputs must stay");
    }
    where_ = "the lanes together";
    for (std::size_t event = 0; event < num_records_.size(); ++event) {
      require(!is_awaited_[event] || num_records_[event] == 1,
              name("event", static_cast<int>(event)) + " is waited for but never recorded");
    }
  }

 private:
  void visit(const Launch& launch) {
    require(++at(num_launches_, launch.segment, "segment") == 1,
            name("segment", launch.segment) + " is launched twice");
    require(launch.body < num_bodies_,
            name("body", launch.body) + " is out of range: there are " + std::to_string(num_bodies_) + " bodies");
    for (const LaunchInput& input : launch.inputs) {
      at(num_writes_, input.buffer, "buffer");
      if (input.takes) {
        depart(input.buffer);
      }
    }
    for (const int buffer : launch.outputs) {
      write(buffer);
    }
  }

  void visit(const Record& record) {
    require(++at(num_records_, record.event, "event") == 1, name("event", record.event) + " is recorded twice");
  }

  void visit(const Wait& wait) {
    at(num_records_, wait.event, "event");
    is_awaited_[static_cast<std::size_t>(wait.event)] = true;
  }

  void visit(const Release& release) { depart(release.buffer); }

  void write(int buffer) {
    require(++at(num_writes_, buffer, "buffer") == 1, name("buffer", buffer) + " is written twice");
  }

  void depart(int buffer) {
    require(++at(num_departures_, buffer, "buffer") == 1, name("buffer", buffer) + " is taken or released twice");
  }

  int& at(std::vector<int>& counts, int id, const char* what) {
    require(id >= 0 && static_cast<std::size_t>(id) < counts.size(),
            name(what, id) + " is out of range: the program has " + std::to_string(counts.size()) + " " + what + "s");
    return counts[static_cast<std::size_t>(id)];
  }

  void require(bool is_met, const std::string& why) const {
    if (!is_met) {
      throw InvalidProgramError("cannot execute the program: " + why + " (" + where_ + ")");
    }
  }

  static std::string name(const char* what, int id) { return std::string(what) + " " + std::to_string(id); }

  const Program& program_;
  const int num_bodies_;
  std::vector<int> num_launches_;
  std::vector<int> num_writes_;
  std::vector<int> num_departures_;
  std::vector<int> num_records_;
  std::vector<bool> is_awaited_;
  std::string where_;
};

/// Runs the lanes round-robin without bodies: if they deadlock here, they deadlock with any timing.
void check_progress(const Program& program) {
  std::vector<std::size_t> next(program.lanes.size());
  std::vector<bool> is_recorded(static_cast<std::size_t>(program.num_events));
  for (bool has_advanced = true; has_advanced;) {
    has_advanced = false;
    for (std::size_t lane = 0; lane < program.lanes.size(); ++lane) {
      for (const auto& code = program.lanes[lane]; next[lane] < code.size(); ++next[lane], has_advanced = true) {
        const Instruction& instruction = code[next[lane]];
        if (const Wait* wait = std::get_if<Wait>(&instruction)) {
          if (!is_recorded[static_cast<std::size_t>(wait->event)]) {
            break;
          }
        } else if (const Record* record = std::get_if<Record>(&instruction)) {
          is_recorded[static_cast<std::size_t>(record->event)] = true;
        }
      }
    }
  }
  for (std::size_t lane = 0; lane < program.lanes.size(); ++lane) {
    if (next[lane] < program.lanes[lane].size()) {
      const int event = std::get<Wait>(program.lanes[lane][next[lane]]).event;
      throw InvalidProgramError(
          "cannot execute the program: its lanes wait for each other in a circle; one of the waits is for event " +
          std::to_string(event) + " (" + place(lane, next[lane]) + ")");
    }
  }
}

}  // namespace

int Program::num_segments() const {
  int count = 0;
  for (const auto& lane : lanes) {
    for (const Instruction& instruction : lane) {
      count += std::holds_alternative<Launch>(instruction) ? 1 : 0;
    }
  }
  return count;
}

std::vector<Instruction> decode_instructions(std::span<const std::int64_t> code, int lane) {
  std::vector<Instruction> instructions;
  for (Reader reader(code, lane); !reader.is_at_end();) {
    const std::int64_t opcode = reader.next("an opcode");
    switch (static_cast<Opcode>(opcode)) {
      case Opcode::kLaunch:
        instructions.emplace_back(decode_launch(reader));
        continue;
      case Opcode::kRecord:
        instructions.emplace_back(Record{reader.next_id("an event")});
        continue;
      case Opcode::kWait:
        instructions.emplace_back(Wait{reader.next_id("an event")});
        continue;
      case Opcode::kRelease:
        instructions.emplace_back(Release{reader.next_id("a buffer")});
        continue;
    }
    reader.fail("has the unknown opcode " + std::to_string(opcode));
  }
  return instructions;
}

void check_program(const Program& program, int num_lanes, int num_bodies) {
  if (program.lanes.size() != static_cast<std::size_t>(num_lanes)) {
    throw InvalidProgramError("cannot execute the program: it has instructions for " +
                              std::to_string(program.lanes.size()) + " lanes, but there are " +
                              std::to_string(num_lanes));
  }
  if (program.num_buffers < 0 || program.num_events < 0) {
    throw InvalidProgramError("cannot execute the program: it has " + std::to_string(program.num_buffers) +
                              " buffers and " + std::to_string(program.num_events) +
                              " events; neither can be negative");
  }
  Checker(program, num_bodies).check();
  check_progress(program);
}

}  // namespace apollo
