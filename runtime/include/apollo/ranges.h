#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace apollo {

/// Functions of torch by which other threads take part in a profile of this one, and by which it gets ranges.
///
/// What belongs to a thread is passed as pointers to types of torch that this library does not know.
struct ProfilerApi {
  bool (*has_callbacks)() = nullptr;                       ///< whether ranges of this thread are recorded
  const void* (*callbacks)() = nullptr;                    ///< what records them; belongs to this thread
  void (*set_callbacks)(const void* callbacks) = nullptr;  ///< copies that of another thread to this one
  void (*clear_callbacks)() = nullptr;
  std::shared_ptr<void> (*state)() = nullptr;  ///< what the callbacks write to
  void (*set_state)(std::shared_ptr<void> state) = nullptr;
  /// Begins a range on this thread; writes what `end` needs, and returns 0 if it succeeded.
  std::int32_t (*begin)(const char* name, void* kwargs, void* const* inputs, std::uint64_t num_inputs,
                        void** range) = nullptr;
  std::int32_t (*end)(void* range) = nullptr;
};

/// Names of the ranges that a profile has of the segments of a program.
struct Ranges {
  ProfilerApi api;
  std::vector<std::string> names;  ///< by segment
};

/// The profile of the thread that makes it; other threads can join while that thread waits for them.
struct Profile {
  Profile() = default;
  explicit Profile(const Ranges* from);

  const Ranges* ranges = nullptr;  ///< null where nothing is recorded
  const void* callbacks = nullptr;
  std::shared_ptr<void> state;
};

/// Makes this thread part of a profile as long as it lives.
class Participation {
 public:
  explicit Participation(const Profile& profile);
  Participation(const Participation&) = delete;
  Participation& operator=(const Participation&) = delete;
  ~Participation();

 private:
  // Copies, empty without a profile: its owner may be gone by the time that a thread leaves.
  void (*clear_callbacks_)() = nullptr;
  void (*set_state_)(std::shared_ptr<void> state) = nullptr;
};

/// A range of a profile on this thread, named after a segment.
class Range {
 public:
  Range(const Profile& profile, int segment) {
    if (profile.ranges != nullptr) {
      begin(*profile.ranges, segment);
    }
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
  ~Range() {
    if (range_ != nullptr) {
      static_cast<void>(end_(range_));
    }
  }

 private:
  void begin(const Ranges& ranges, int segment);

  void* range_ = nullptr;
  std::int32_t (*end_)(void* range) = nullptr;
};

}  // namespace apollo
