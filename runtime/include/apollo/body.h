#pragma once

#include <span>

namespace apollo {

/// The compiled callable of a segment; equal segments share one, so two lanes may run it at the same time.
class Body {
 public:
  Body() = default;
  Body(const Body&) = delete;
  Body& operator=(const Body&) = delete;
  virtual ~Body() = default;

  /// Computes `outputs`, handles that the caller then owns, from `inputs`, handles that the body consumes.
  ///
  /// If a body throws, its inputs are consumed all the same, and `outputs` are undefined.
  virtual void run(std::span<void*> inputs, std::span<void*> outputs) = 0;
};

}  // namespace apollo
