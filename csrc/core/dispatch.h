// Converts run-time values (dtypes, small integers) to compile-time constants.
#pragma once

#include <string_view>

#include "core/check.h"
#include "core/dtype.h"

namespace cpmcu {

template <int kValue>
struct IntConstant {
  static constexpr int value = kValue;
};

// Calls f(IntConstant<V>) for the V among kValues that equals `value`.
template <int... kValues, typename F>
void dispatch_int(std::string_view what, int value, F&& f) {
  const bool found = ((value == kValues ? (f(IntConstant<kValues>{}), true) : false) || ...);
  if (!found) {
    std::string list;
    ((list += (list.empty() ? "" : ", ") + std::to_string(kValues)), ...);
    throw Error(ErrorKind::kInvalid,
                format_text("{} {} is not supported; supported are {}", what, value, list));
  }
}

}  // namespace cpmcu
