#pragma once

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

namespace apollo {

/// One input of a launch: the body takes the buffer over, so that its slot is empty, or borrows it.
struct LaunchInput {
  int buffer;
  bool takes;
};

/// Run `body` for `segment`.
struct Launch {
  int segment;
  int body;
  std::vector<LaunchInput> inputs;
  std::vector<int> outputs;
};

/// Mark that everything before it on this lane has ended.
struct Record {
  int event;
};

/// Continue only after `event` was recorded in this run.
struct Wait {
  int event;
};

/// Release the buffer.
struct Release {
  int buffer;
};

using Instruction = std::variant<Launch, Record, Wait, Release>;

/// The first number of an encoded instruction; the numbers behind it are
///
///     LAUNCH   segment body num_inputs (buffer takes)* num_outputs (buffer)*
///     RECORD   event
///     WAIT     event
///     RELEASE  buffer
enum class Opcode : std::int64_t { kLaunch = 0, kRecord = 1, kWait = 2, kRelease = 3 };

/// In `Program::outputs`: this output is None.
inline constexpr int kNoBuffer = -1;

/// What the runtime executes: one list of instructions per lane.
struct Program {
  std::vector<std::vector<Instruction>> lanes;
  int num_buffers = 0;
  int num_events = 0;
  std::vector<int> inputs;
  std::vector<int> outputs;

  int num_segments() const;
};

/// Decodes the instructions of `lane`, which the messages name; throws InvalidProgramError.
std::vector<Instruction> decode_instructions(std::span<const std::int64_t> code, int lane);

/// Throws InvalidProgramError unless the program can be executed.
///
/// Ids are in range, segments are numbered from 0 and launched once, buffers are written once and released at most
/// once, outputs are never released, every awaited event is recorded once, and lanes do not deadlock. Whether readers
/// are ordered after writers is not checked here: the compiler proves it, and reading an empty slot is an error of the
/// run.
void check_program(const Program& program, int num_lanes, int num_bodies);

}  // namespace apollo
