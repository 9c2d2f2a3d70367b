#include "fakes.h"

#include <string>

using apollo::InvalidProgramError;
using apollo::Launch;
using apollo::Program;
using apollo::Record;
using apollo::Release;
using apollo::Wait;

namespace {

/// One lane that computes buffer 1 from buffer 0, with a spare buffer and a spare event.
Program small_program() {
  Program program;
  program.lanes = {{Launch{0, 0, {{0, false}}, {1}}}};
  program.num_buffers = 3;
  program.num_events = 1;
  program.inputs = {0};
  program.outputs = {1};
  return program;
}

bool is_refused(const Program& program, const std::string& why) {
  try {
    apollo::check_program(program, static_cast<int>(program.lanes.size()), 1);
  } catch (const InvalidProgramError& error) {
    return std::string(error.what()).find(why) != std::string::npos;
  }
  return false;
}

/// Returns why code of lane 3 cannot be decoded.
std::string complaint_about(const std::vector<std::int64_t>& code) {
  try {
    apollo::decode_instructions(code, 3);
  } catch (const InvalidProgramError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST(instructions_are_decoded_in_order) {
  const std::vector<std::int64_t> code = {0, 7, 8, 2, 1, 0, 2, 1, 1, 3, 1, 4, 2, 5, 3, 6};
  const auto instructions = apollo::decode_instructions(code, 0);
  CHECK(instructions.size() == 4);
  const auto& launch = std::get<Launch>(instructions[0]);
  CHECK(launch.segment == 7 && launch.body == 8);
  CHECK(launch.inputs.size() == 2 && launch.inputs[1].buffer == 2 && launch.inputs[1].takes && !launch.inputs[0].takes);
  CHECK(launch.outputs == std::vector<int>{3});
  CHECK(std::get<Record>(instructions[1]).event == 4);
  CHECK(std::get<Wait>(instructions[2]).event == 5);
  CHECK(std::get<Release>(instructions[3]).buffer == 6);
}

TEST(broken_code_is_refused) {
  const std::string prefix = "cannot decode the instructions of lane 3: the code ";
  CHECK(complaint_about({4, 0}) == prefix + "has the unknown opcode 4 (at number 1 of 2)");
  CHECK(complaint_about({1}) == prefix + "ends where an event should follow (at number 1 of 1)");
  CHECK(complaint_about({1, -1}) == prefix + "has -1 as an event, which cannot be one (at number 2 of 2)");
  CHECK(complaint_about({0, 0, 0, 1000000000000}).find("has 1000000000000 as ") != std::string::npos);
  CHECK(complaint_about({0, 0, 0, 3, 0, 0}).find(", more than the code has room for (at number 4") !=
        std::string::npos);
}

TEST(a_good_program_is_accepted) { apollo::check_program(small_program(), 1, 1); }

TEST(wrong_numbers_of_lanes_are_refused) {
  CHECK_THROWS(InvalidProgramError, apollo::check_program(small_program(), 2, 1));
}

TEST(ids_out_of_range_are_refused) {
  Program program = small_program();
  program.inputs = {3};
  CHECK(is_refused(program, "buffer 3 is out of range"));
  program = small_program();
  program.outputs = {-2};
  CHECK(is_refused(program, "buffer -2 is out of range"));
  program = small_program();
  program.lanes[0].push_back(Record{1});
  CHECK(is_refused(program, "event 1 is out of range"));
  program = small_program();
  program.lanes[0] = {Launch{1, 0, {}, {1}}};
  CHECK(is_refused(program, "segment 1 is out of range"));
  program = small_program();
  program.lanes[0] = {Launch{0, 1, {}, {1}}};
  CHECK(is_refused(program, "body 1 is out of range"));
}

TEST(doing_a_thing_twice_is_refused) {
  Program program = small_program();
  program.lanes[0].push_back(Launch{0, 0, {}, {2}});
  CHECK(is_refused(program, "segment 0 is launched twice"));
  program = small_program();
  program.lanes[0].push_back(Launch{1, 0, {}, {1}});
  CHECK(is_refused(program, "buffer 1 is written twice"));
  program = small_program();
  program.lanes[0].insert(program.lanes[0].end(), {Record{0}, Record{0}});
  CHECK(is_refused(program, "event 0 is recorded twice"));
  program = small_program();
  program.lanes[0].insert(program.lanes[0].end(), {Release{0}, Release{0}});
  CHECK(is_refused(program, "buffer 0 is taken or released twice"));
}

TEST(outputs_must_be_written_and_stay) {
  Program program = small_program();
  program.outputs = {2};
  CHECK(is_refused(program, "buffer 2 is never written"));
  program = small_program();
  program.lanes[0].push_back(Release{1});
  CHECK(is_refused(program, "buffer 1 is taken or released before the run is over"));
}

TEST(waits_that_cannot_end_are_refused) {
  Program program = small_program();
  program.lanes[0].push_back(Wait{0});
  CHECK(is_refused(program, "event 0 is waited for but never recorded"));
  program = small_program();
  program.num_events = 2;
  program.lanes[0].insert(program.lanes[0].end(), {Wait{0}, Record{1}});
  program.lanes.push_back({Wait{1}, Record{0}});
  CHECK(is_refused(program, "in a circle"));
}

int main() { return check::run_all(); }
