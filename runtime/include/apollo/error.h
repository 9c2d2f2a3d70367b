#pragma once

#include <stdexcept>
#include <string>

namespace apollo {

/// Base of the exceptions that the runtime throws about itself.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Lanes were used after they were closed, or in a process that does not own them.
class ClosedError : public Error {
 public:
  using Error::Error;
};

/// A program that cannot be executed: an id is out of range, an event is never recorded, or lanes deadlock.
class InvalidProgramError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

}  // namespace apollo
