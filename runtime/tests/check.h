#pragma once

// A test framework of three macros: TEST, CHECK and CHECK_THROWS.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <utility>
#include <vector>

namespace check {

using Test = std::pair<const char*, void (*)()>;

inline std::vector<Test>& tests() {
  static std::vector<Test> tests;
  return tests;
}

inline void require(bool is_met, const char* what, const char* file, int line) {
  if (!is_met) {
    std::fprintf(stderr, "%s:%d: not met: %s\n", file, line, what);
    std::exit(1);
  }
}

inline int run_all() {
  for (const auto& [name, test] : tests()) {
    std::fprintf(stderr, "%s\n", name);
    try {
      test();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s: unexpected exception: %s\n", name, error.what());
      return 1;
    }
  }
  return 0;
}

}  // namespace check

#define TEST(name)                                                                       \
  static void name();                                                                    \
  static const bool name##_is_added = (check::tests().emplace_back(#name, &name), true); \
  static void name()

#define CHECK(condition) check::require((condition), #condition, __FILE__, __LINE__)

#define CHECK_THROWS(exception, statement)                                            \
  do {                                                                                \
    bool has_thrown = false;                                                          \
    try {                                                                             \
      statement;                                                                      \
    } catch (const exception&) {                                                      \
      has_thrown = true;                                                              \
    }                                                                                 \
    check::require(has_thrown, #statement " throws " #exception, __FILE__, __LINE__); \
  } while (false)
