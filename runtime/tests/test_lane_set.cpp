#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>

#include "fakes.h"

namespace {

std::vector<int> cores_of_this_thread() {
  cpu_set_t set;
  CHECK(sched_getaffinity(0, sizeof(set), &set) == 0);
  std::vector<int> cores;
  for (const int core : apollo::available_cores()) {
    if (CPU_ISSET(static_cast<std::size_t>(core), &set)) {
      cores.push_back(core);
    }
  }
  CHECK(static_cast<int>(cores.size()) == CPU_COUNT(&set));
  return cores;
}

std::vector<apollo::Tensor> run_empty(const std::shared_ptr<apollo::LaneSet>& lanes) {
  apollo::Program program;
  program.lanes.resize(static_cast<std::size_t>(lanes->num_lanes()));
  return apollo::Executor(lanes, fakes::kApi, program, {}).run({});
}

}  // namespace

TEST(lanes_are_pinned_when_on_start_runs) {
  const auto cores = fakes::lane_cores(3);
  std::vector<std::vector<int>> seen(cores.size());
  apollo::LaneSet lanes(cores, [&](int lane) { seen[static_cast<std::size_t>(lane)] = cores_of_this_thread(); }, false);
  CHECK(seen == cores);
  CHECK(lanes.num_threads() == 3);
}

TEST(what_on_start_throws_comes_out_of_the_constructor) {
  const auto fail = [](int lane) {
    if (lane == 2) {
      throw std::runtime_error("no");
    }
  };
  CHECK_THROWS(std::runtime_error, apollo::LaneSet(fakes::lane_cores(3), fail, false));
}

TEST(cores_that_the_process_lacks_are_refused) {
  CHECK_THROWS(std::invalid_argument, apollo::LaneSet({{100000}}, nullptr, false));
  CHECK_THROWS(std::invalid_argument, apollo::LaneSet({{-1}}, nullptr, false));
}

TEST(only_one_lane_is_the_callers) { CHECK_THROWS(std::invalid_argument, apollo::LaneSet({{}, {}}, nullptr, false)); }

TEST(closed_lanes_refuse_to_run) {
  const auto lanes = fakes::lanes(2);
  run_empty(lanes);
  lanes->close();
  lanes->close();
  CHECK_THROWS(apollo::ClosedError, run_empty(lanes));
}

TEST(a_forked_child_gets_an_error_and_does_not_hang) {
  auto lanes = fakes::lanes(2);
  run_empty(lanes);
  const pid_t child = fork();
  if (child == 0) {
    int code = 1;
    try {
      run_empty(lanes);
    } catch (const apollo::ClosedError&) {
      code = 0;
    }
    lanes->close();
    lanes.reset();
    _exit(code);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  run_empty(lanes);
}

int main() { return check::run_all(); }
