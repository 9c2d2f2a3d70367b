#include "apollo/cpu_lane.h"

#include <pthread.h>
#include <sched.h>

#include <string>
#include <system_error>
#include <utility>

#include "apollo/error.h"
#include "apollo/machine.h"

namespace apollo {

namespace {

// A task's end may be known before its thread has returned from it, which takes a moment at most.
constexpr std::chrono::microseconds kPatience{20};

std::string list(const std::vector<int>& cores) {
  std::string text;
  for (const int core : cores) {
    text += (text.empty() ? "" : ", ") + std::to_string(core);
  }
  return "[" + text + "]";
}

}  // namespace

CpuLane::CpuLane(int id, std::vector<int> cores, const Task& on_start)
    : id_(id), cores_(std::move(cores)), thread_(start_thread([this, &on_start] { work(on_start); })) {
  finished_.sleep(epoch_);
  if (start_failure_) {
    thread_.join();
    std::rethrow_exception(std::exchange(start_failure_, nullptr));
  }
}

CpuLane::~CpuLane() {
  finished_.sleep(epoch_);
  task_ = nullptr;
  started_.record(++epoch_);
  thread_.join();
}

void CpuLane::start(std::shared_ptr<const Task> task) {
  finished_.wait(epoch_, kPatience);
  task_ = std::move(task);
  started_.record(++epoch_);
}

void CpuLane::work(const Task& on_start) {
  std::uint32_t epoch = 1;
  try {
    pin();
    on_start();
  } catch (...) {
    start_failure_ = std::current_exception();
  }
  const bool has_failed = start_failure_ != nullptr;  // the constructor may take the exception once it is woken
  finished_.record(epoch);
  if (has_failed) {
    return;
  }
  for (;;) {
    started_.sleep(++epoch);
    if (task_ == nullptr) {
      return;
    }
    (*task_)();
    finished_.record(epoch);
  }
}

void CpuLane::pin() const {
  // First of all: memory that the thread touches and OpenMP workers that it creates follow its affinity.
  pthread_setname_np(pthread_self(), ("apollo-lane-" + std::to_string(id_)).substr(0, 15).c_str());
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores_) {
    CPU_SET(static_cast<std::size_t>(core), &set);
  }
  if (const int code = pthread_setaffinity_np(pthread_self(), sizeof(set), &set); code != 0) {
    throw Error("cannot pin lane " + std::to_string(id_) + " to cores " + list(cores_) + ": " +
                std::generic_category().message(code) + "; choose from the cores on which the process may run");
  }
}

}  // namespace apollo
