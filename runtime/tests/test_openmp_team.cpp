#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "apollo/event.h"
#include "apollo/openmp_team.h"
#include "fakes.h"
#include "random_program.h"

// With the argument `openmp` the test loads the library first, as torch does. That is left out under a sanitizer that
// sees no synchronization in libraries it did not compile.

namespace {

bool is_openmp_loaded = false;

int (*in_parallel)() = nullptr;

void nothing() {}

}  // namespace

TEST(a_team_is_found_where_the_library_is_loaded) {
  CHECK(apollo::OpenMpTeam(true).is_found() == is_openmp_loaded);
  CHECK(!apollo::OpenMpTeam(false).is_found());
}

TEST(the_caller_itself_waits_inside_a_region) {
  const apollo::OpenMpTeam team(true);
  for (int repeat = 0; repeat < 100; ++repeat) {
    apollo::Event over;
    std::atomic<int> num_asleep = 0;
    const auto wait = [&, caller = std::this_thread::get_id()] {
      CHECK(std::this_thread::get_id() == caller);
      CHECK((in_parallel != nullptr && in_parallel() != 0) == is_openmp_loaded);
      over.record(1);
    };
    team.park(wait, [&] {
      ++num_asleep;
      over.sleep(1);
    });
    CHECK(over.is_recorded(1));
    CHECK(num_asleep == (is_openmp_loaded ? 1 : 0));
  }
}

TEST(parking_inside_a_region_only_waits) {
  const apollo::OpenMpTeam team(true);
  int depth = 0;
  team.park([&] { team.park([&] { depth = 2; }, nothing); }, nothing);
  CHECK(depth == 2);
}

TEST(exceptions_pass_around_the_region) {
  const apollo::OpenMpTeam team(true);
  CHECK_THROWS(std::out_of_range, team.park([] { throw std::out_of_range("wait"); }, nothing));
}

TEST(programs_compute_the_same_while_the_team_is_parked) {
  const auto lanes = fakes::lanes(2, true);
  CHECK(lanes->is_team_found() == is_openmp_loaded);
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto expected = fakes::random_program(random, 3, 20);
    apollo::Executor executor(lanes, fakes::kApi, expected.program, expected.bodies);
    for (int repeat = 0; repeat < 10; ++repeat) {
      std::vector<apollo::Tensor> inputs;
      for (const std::uint64_t value : expected.inputs) {
        inputs.push_back(fakes::tensor(value));
      }
      const auto outputs = executor.run(std::move(inputs));
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        CHECK(!outputs[i] || fakes::value_of(outputs[i]) == expected.outputs[i]);
      }
    }
  }
}

TEST(a_forked_child_does_not_wait_for_the_team_of_its_parent) {
  const apollo::OpenMpTeam team(true);
  team.park(nothing, nothing);
  const pid_t child = fork();
  if (child == 0) {
    team.park(nothing, nothing);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "openmp") == 0) {
    setenv("OMP_NUM_THREADS", "2", 1);
    void* library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
      std::fprintf(stderr, "skipped: %s\n", dlerror());
      return 77;
    }
    in_parallel = reinterpret_cast<int (*)()>(dlsym(library, "omp_in_parallel"));
    is_openmp_loaded = true;
  }
  return check::run_all();
}
