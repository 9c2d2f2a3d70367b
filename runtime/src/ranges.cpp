#include "apollo/ranges.h"

#include <cstddef>

namespace apollo {

Profile::Profile(const Ranges* from) : ranges(from) {
  if (ranges != nullptr) {
    callbacks = ranges->api.callbacks();
    state = ranges->api.state();
  }
}

Participation::Participation(const Profile& profile) {
  // With callbacks, such as those of a profile of all threads, this thread would be recorded twice.
  if (profile.ranges == nullptr || profile.ranges->api.has_callbacks()) {
    return;
  }
  const ProfilerApi& api = profile.ranges->api;
  api.set_callbacks(profile.callbacks);
  api.set_state(profile.state);
  clear_callbacks_ = api.clear_callbacks;
  set_state_ = api.set_state;
}

Participation::~Participation() {
  if (clear_callbacks_ != nullptr) {
    clear_callbacks_();
    set_state_(nullptr);
  }
}

void Range::begin(const Ranges& ranges, int segment) {
  const std::string& name = ranges.names[static_cast<std::size_t>(segment)];
  if (ranges.api.begin(name.c_str(), nullptr, nullptr, 0, &range_) != 0) {
    range_ = nullptr;
  }
  end_ = ranges.api.end;
}

}  // namespace apollo
