#include "apollo/waits.h"

#include "check.h"

using apollo::Launch;
using apollo::plan_waits;
using apollo::Program;
using apollo::Record;
using apollo::Release;
using apollo::Wait;
using apollo::Waits;

namespace {

const std::vector<std::vector<int>> kCores{{}, {4}, {5}};

Launch launch(int segment) { return Launch{segment, segment, {}, {}}; }

Program program(std::vector<std::vector<apollo::Instruction>> lanes, int num_events) {
  Program result;
  result.lanes = std::move(lanes);
  result.num_events = num_events;
  return result;
}

}  // namespace

TEST(the_waits_of_the_caller_up_to_its_next_launch_are_one_pause) {
  const Waits waits = plan_waits(program({{launch(0), Record{0}, Wait{1}, Release{0}, Wait{2}, launch(3)},
                                          {Wait{0}, launch(1), Record{1}},
                                          {Wait{0}, launch(2), Record{2}}},
                                         3),
                                 kCores);
  CHECK(waits.pauses.size() == 1);
  const apollo::Pause& pause = waits.pauses[0];
  CHECK(pause.begin == 1 && pause.first_wait == 2 && pause.end == 5 && pause.num_arrivals == 2);
  CHECK(waits.arrivals[0].pause == -1);
  CHECK(waits.arrivals[1].pause == 0 && waits.arrivals[1].left == std::vector<int>{4});
  CHECK(waits.arrivals[2].pause == 0 && waits.arrivals[2].left == std::vector<int>{5});
}

TEST(a_record_behind_a_wait_begins_another_pause) {
  // Lane 2 waits for event 1, which the caller records when it has waited for event 0: one join of both would hang.
  const Waits waits = plan_waits(
      program({{Wait{0}, Record{1}, Wait{2}, launch(2)}, {launch(0), Record{0}}, {Wait{1}, launch(1), Record{2}}}, 3),
      kCores);
  CHECK(waits.pauses.size() == 2);
  CHECK(waits.pauses[0].begin == 0 && waits.pauses[0].end == 1);
  CHECK(waits.pauses[1].begin == 1 && waits.pauses[1].first_wait == 2 && waits.pauses[1].end == 3);
}

TEST(a_lane_that_goes_on_before_the_pause_ends_does_not_leave_its_cores) {
  const Waits waits = plan_waits(
      program({{Wait{0}, Wait{1}, launch(3)}, {launch(0), Record{0}, launch(1), Record{1}}, {launch(2)}}, 2), kCores);
  CHECK(waits.arrivals[0].pause == 0 && waits.arrivals[0].left.empty());
  CHECK(waits.arrivals[1].pause == 0 && waits.arrivals[1].left == std::vector<int>{4});
}

TEST(cores_on_which_another_lane_goes_on_are_not_left) {
  const std::vector<std::vector<int>> cores{{}, {4}, {4, 5}};  // lanes of two splits
  const Waits waits = plan_waits(
      program({{Wait{0}, Wait{1}, launch(2)}, {launch(0), Record{0}, Record{2}}, {Wait{2}, launch(1), Record{1}}}, 3),
      cores);
  CHECK(waits.arrivals[0].pause == 0 && waits.arrivals[0].left.empty());
  CHECK((waits.arrivals[1].left == std::vector<int>{4, 5}));
}

TEST(the_end_of_a_lane_is_awaited_unless_a_pause_covers_it) {
  const Waits waits = plan_waits(
      program({{Wait{0}, launch(2)}, {launch(0), Record{0}}, {launch(1), Record{1}, Release{0}}}, 2), kCores);
  CHECK(!waits.ends[0].is_awaited);
  CHECK(!waits.ends[1].is_awaited);
  CHECK(waits.ends[2].is_awaited && waits.ends[2].left == std::vector<int>{5});
}

TEST(a_lane_whose_cores_another_one_uses_after_it_leaves_none_at_its_end) {
  const std::vector<std::vector<int>> cores{{}, {4}, {4, 5}};  // lanes of two splits
  const Waits waits = plan_waits(program({{launch(0)}, {launch(1), Record{0}}, {Wait{0}, launch(2)}}, 1), cores);
  CHECK(waits.ends[1].is_awaited && waits.ends[1].left.empty());
  CHECK((waits.ends[2].is_awaited && waits.ends[2].left == std::vector<int>{4, 5}));
}

TEST(cores_of_lanes_without_work_are_idle_during_a_pause) {
  const Waits waits = plan_waits(program({{launch(0), Record{0}, Wait{1}, launch(2), Record{2}, Wait{3}, launch(4)},
                                          {Wait{0}, launch(1), Record{1}},
                                          {Wait{2}, launch(3), Record{3}}},
                                         4),
                                 kCores);
  CHECK(waits.pauses.size() == 2);
  CHECK(waits.pauses[0].idle == std::vector<int>{5});
  CHECK(waits.pauses[1].idle == std::vector<int>{4});
  CHECK((waits.idle_at_end == std::vector<int>{4, 5}));
}

TEST(a_lane_spins_long_only_where_nobody_else_works_on_its_cores) {
  const std::chrono::microseconds brief{20};
  const Waits waits = plan_waits(
      program({{launch(0), Record{0}}, {Wait{0}, launch(1), Wait{1}, launch(3)}, {launch(2), Record{1}}}, 2), kCores);
  CHECK(waits.patience[1][0] == brief);  // the caller works, on every core
  CHECK(waits.patience[1][2] > brief);   // lane 2 works, on core 5
}

TEST(a_lane_that_handed_its_cores_to_the_caller_does_not_spin_on_them) {
  const Waits waits = plan_waits(program({{Wait{0}, launch(1), Record{1}, Wait{2}, launch(3)},
                                          {launch(0), Record{0}, Wait{1}, launch(2), Record{2}},
                                          {}},
                                         3),
                                 kCores);
  CHECK(waits.arrivals[0].left == std::vector<int>{4});
  CHECK(waits.patience[1][2] == std::chrono::microseconds{0});
}

int main() { return check::run_all(); }
