// Errors are exceptions whose text is a sentence: what was found, what was expected, where.
//
// CHECK is for anything a caller can get wrong; the message names the values. In a .cu or in
// device.cpp, CHECK_CUDA and CHECK_LAUNCH (core/device.h) turn CUDA status codes into the same
// type.
#pragma once

#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

namespace cpmcu {

// How an error reaches Python: ValueError, MemoryError, RuntimeError.
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

// Replaces each "{}" in turn. (std::format needs g++ 13; we build with 12.)
template <typename... Args>
std::string format(std::string_view text, const Args&... args) {
  std::ostringstream out;
  detail::format_rest(out, text, args...);
  return out.str();
}

}  // namespace cpmcu

// A wrong argument, file or shape: ValueError in Python.
#define CHECK(condition, ...)                                                           \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      throw ::cpmcu::Error(::cpmcu::ErrorKind::kInvalid, ::cpmcu::format(__VA_ARGS__)); \
    }                                                                                   \
  } while (false)

// A broken promise between parts of the engine, or a failing device: RuntimeError in Python.
#define CHECK_STATE(condition, ...)                                                              \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      throw ::cpmcu::Error(::cpmcu::ErrorKind::kRuntime,                                         \
                           ::cpmcu::format(__VA_ARGS__) +                                        \
                               ::cpmcu::format(" ({}:{}: {})", __FILE__, __LINE__, #condition)); \
    }                                                                                            \
  } while (false)
