// Errors are exceptions. The message is a sentence that names the value found and the value
// expected.
//
// CHECK tests input of a caller, CHECK_STATE an invariant of the engine. CHECK_CUDA and
// CHECK_LAUNCH (core/device.h) convert CUDA status codes to the same exception type.
#pragma once

#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

namespace cpmcu {

// The exception type in Python: ValueError, MemoryError, RuntimeError.
enum class ErrorKind { kInvalid, kMemory, kRuntime };

class Error : public std::exception {
 public:
  Error(ErrorKind kind, std::string message) : kind_(kind), message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
  std::string message_;
};

namespace detail {

inline void format_rest(std::ostringstream& out, std::string_view text) { out << text; }

template <typename T, typename... Rest>
void format_rest(std::ostringstream& out, std::string_view text, const T& value,
                 const Rest&... rest) {
  const size_t hole = text.find("{}");
  if (hole == std::string_view::npos) {
    out << text;
    return;
  }
  out << text.substr(0, hole) << value;
  format_rest(out, text.substr(hole + 2), rest...);
}

}  // namespace detail

// Replaces each "{}" by the next argument. It is not named `format`: from g++ 13 on an argument of
// type std::string makes the call ambiguous with std::format. (g++ 12 has no std::format.)
template <typename... Args>
std::string format_text(std::string_view text, const Args&... args) {
  std::ostringstream out;
  detail::format_rest(out, text, args...);
  return out.str();
}

}  // namespace cpmcu

// For a wrong argument, file or shape. ValueError in Python.
#define CHECK(condition, ...)                                                                \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      throw ::cpmcu::Error(::cpmcu::ErrorKind::kInvalid, ::cpmcu::format_text(__VA_ARGS__)); \
    }                                                                                        \
  } while (false)

// For a violated invariant of the engine, or a device failure. RuntimeError in Python.
#define CHECK_STATE(condition, ...)                                                  \
  do {                                                                               \
    if (!(condition)) {                                                              \
      throw ::cpmcu::Error(                                                          \
          ::cpmcu::ErrorKind::kRuntime,                                              \
          ::cpmcu::format_text(__VA_ARGS__) +                                        \
              ::cpmcu::format_text(" ({}:{}: {})", __FILE__, __LINE__, #condition)); \
    }                                                                                \
  } while (false)
