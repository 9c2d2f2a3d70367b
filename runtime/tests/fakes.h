#pragma once

// Tensors that are numbers, and bodies that are lambdas.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "apollo/body.h"
#include "apollo/executor.h"
#include "apollo/lane_set.h"
#include "apollo/machine.h"
#include "apollo/program.h"
#include "apollo/tensor.h"
#include "check.h"

namespace fakes {

/// Number of handles that exist; tests that count them end at the number they began with.
inline std::atomic<int> num_handles{0};

/// What a handle points to. The number is not atomic: a sanitizer sees who reads it before it is ordered.
struct Number {
  std::uint64_t value;
};

struct Handle {
  std::shared_ptr<Number> number;
};

inline void* make_handle(std::shared_ptr<Number> number) {
  ++num_handles;
  return new Handle{std::move(number)};
}

inline void* make_handle(std::uint64_t value) { return make_handle(std::make_shared<Number>(Number{value})); }

inline std::int32_t clone(void* original, void** copy) {
  *copy = make_handle(static_cast<Handle*>(original)->number);
  return 0;
}

inline std::int32_t destroy(void* handle) {
  --num_handles;
  delete static_cast<Handle*>(handle);
  return 0;
}

inline constexpr apollo::TensorApi kApi{&clone, &destroy};

inline std::uint64_t value_of(const apollo::Tensor& tensor) {
  return static_cast<const Handle*>(tensor.get())->number->value;
}

inline apollo::Tensor tensor(std::uint64_t value) { return {kApi, make_handle(value)}; }

template <typename... Values>
std::vector<apollo::Tensor> tensors(Values... values) {
  std::vector<apollo::Tensor> result;
  (result.push_back(tensor(static_cast<std::uint64_t>(values))), ...);
  return result;
}

/// A body that computes every output as the same function of its inputs.
class LambdaBody final : public apollo::Body {
 public:
  using Function = std::function<std::uint64_t(const std::vector<std::uint64_t>& inputs)>;

  explicit LambdaBody(Function function) : function_(std::move(function)) {}

  void run(std::span<void*> inputs, std::span<void*> outputs) override {
    std::vector<std::uint64_t> values;
    for (void* input : inputs) {
      values.push_back(value_of(apollo::Tensor(kApi, input)));
    }
    for (void*& output : outputs) {
      output = make_handle(function_(values));
    }
  }

 private:
  Function function_;
};

inline std::shared_ptr<apollo::Body> body(LambdaBody::Function function) {
  return std::make_shared<LambdaBody>(std::move(function));
}

/// Lanes for tests: the caller and `num_threads` threads, spread over the cores that there are.
inline std::vector<std::vector<int>> lane_cores(int num_threads) {
  const std::vector<int> available = apollo::available_cores();
  std::vector<std::vector<int>> cores{{}};
  for (int i = 0; i < num_threads; ++i) {
    cores.push_back({available[static_cast<std::size_t>(i) % available.size()]});
  }
  return cores;
}

inline std::shared_ptr<apollo::LaneSet> lanes(int num_threads, bool park_team = false) {
  return std::make_shared<apollo::LaneSet>(lane_cores(num_threads), nullptr, park_team);
}

}  // namespace fakes
