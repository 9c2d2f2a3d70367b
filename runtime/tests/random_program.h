#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "apollo/program.h"
#include "fakes.h"

namespace fakes {

/// A program over random lanes, and what it must compute.
struct RandomProgram {
  apollo::Program program;
  std::vector<std::shared_ptr<apollo::Body>> bodies;
  std::vector<std::uint64_t> inputs;
  std::vector<std::uint64_t> outputs;
};

inline std::uint64_t mix(std::uint64_t seed, const std::vector<std::uint64_t>& values) {
  for (const std::uint64_t value : values) {
    seed = (seed ^ value) * 0x9E3779B97F4A7C15u;
    seed ^= seed >> 29;
  }
  return seed;
}

/// Makes segments in a topological order on random lanes, with a wait for every dependency between lanes.
///
/// A reader that runs after all other readers takes the buffer, or releases it; buffers without such a reader stay to
/// the end of the run. `reaches[a][b]` says whether the program orders segment a before b.
inline RandomProgram random_program(std::mt19937& random, int num_lanes, int num_segments) {
  const auto pick = [&random](int bound) { return static_cast<int>(random() % static_cast<unsigned>(bound)); };
  const auto at = [](int id) { return static_cast<std::size_t>(id); };
  constexpr int kNumInputs = 2;

  RandomProgram result;
  apollo::Program& program = result.program;
  program.lanes.resize(at(num_lanes));
  std::vector<std::uint64_t> values;
  for (int i = 0; i < kNumInputs; ++i) {
    values.push_back(random());
    program.inputs.push_back(i);
  }
  result.inputs = values;

  // Segment s writes buffer kNumInputs + s.
  std::vector<int> lane_of;
  std::vector<std::vector<int>> reads;
  std::vector<std::vector<bool>> reaches(at(num_segments), std::vector<bool>(at(num_segments)));
  for (int s = 0; s < num_segments; ++s) {
    lane_of.push_back(pick(num_lanes));
    reads.emplace_back();
    for (int count = pick(4); count > 0; --count) {
      reads.back().push_back(pick(kNumInputs + s));
    }
    const auto order_after = [&](int before) {
      reaches[at(before)][at(s)] = true;
      for (int other = 0; other < before; ++other) {
        reaches[at(other)][at(s)] = reaches[at(other)][at(s)] || reaches[at(other)][at(before)];
      }
    };
    for (int other = 0; other < s; ++other) {
      if (lane_of[at(other)] == lane_of[at(s)]) {
        order_after(other);
      }
    }
    for (const int buffer : reads.back()) {
      if (buffer >= kNumInputs) {
        order_after(buffer - kNumInputs);
      }
    }
  }
  program.num_buffers = kNumInputs + num_segments;
  std::vector<bool> is_output(at(program.num_buffers));
  for (int i = 0; i < 3; ++i) {
    program.outputs.push_back(pick(program.num_buffers));
    is_output[at(program.outputs.back())] = true;
  }
  program.outputs.push_back(apollo::kNoBuffer);

  std::vector<std::vector<int>> events_after(at(num_segments));
  std::vector<std::vector<int>> waits_before(at(num_segments));
  for (int s = 0; s < num_segments; ++s) {
    for (const int buffer : reads[at(s)]) {
      const int writer = buffer - kNumInputs;
      if (writer >= 0 && lane_of[at(writer)] != lane_of[at(s)]) {
        events_after[at(writer)].push_back(program.num_events);
        waits_before[at(s)].push_back(program.num_events++);
      }
    }
  }
  for (int s = 0; s < num_segments; ++s) {
    auto& code = program.lanes[at(lane_of[at(s)])];
    for (const int event : waits_before[at(s)]) {
      code.push_back(apollo::Wait{event});
    }
    apollo::Launch launch{s, s, {}, {kNumInputs + s}};
    std::vector<int> releases;
    for (const int buffer : reads[at(s)]) {
      bool is_last = !is_output[at(buffer)];
      for (int other = 0; other < num_segments; ++other) {
        const bool is_reader = std::count(reads[at(other)].begin(), reads[at(other)].end(), buffer) > 0;
        is_last = is_last && (other == s || !is_reader || reaches[at(other)][at(s)]);
      }
      const bool is_repeated = std::count_if(launch.inputs.begin(), launch.inputs.end(),
                                             [&](const auto& input) { return input.buffer == buffer; }) > 0;
      const bool takes = is_last && !is_repeated && pick(2) == 0;
      if (is_last && !is_repeated && !takes) {
        releases.push_back(buffer);
      }
      launch.inputs.push_back({buffer, takes});
    }
    code.push_back(launch);
    for (const int buffer : releases) {
      code.push_back(apollo::Release{buffer});
    }
    for (const int event : events_after[at(s)]) {
      code.push_back(apollo::Record{event});
    }
    std::vector<std::uint64_t> arguments;
    for (const int buffer : reads[at(s)]) {
      arguments.push_back(values[at(buffer)]);
    }
    const auto seed = static_cast<std::uint64_t>(s);
    values.push_back(mix(seed, arguments));
    result.bodies.push_back(body([seed](const auto& inputs) { return mix(seed, inputs); }));
  }
  for (const int buffer : program.outputs) {
    result.outputs.push_back(buffer == apollo::kNoBuffer ? 0 : values[at(buffer)]);
  }
  return result;
}

}  // namespace fakes
