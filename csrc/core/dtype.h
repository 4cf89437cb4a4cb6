// Element types of tensors, and the names that users and checkpoints give them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/check.h"

namespace cpmcu {

enum class DType : uint8_t { kF32, kF16, kBF16, kI8, kU8, kI32, kI64, kU64, kE4M3 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 4;
    case DType::kF16:
      return 2;
    case DType::kBF16:
      return 2;
    case DType::kI8:
      return 1;
    case DType::kU8:
      return 1;
    case DType::kI32:
      return 4;
    case DType::kI64:
      return 8;
    case DType::kU64:
      return 8;
    case DType::kE4M3:
      return 1;
  }
  return 0;
}

constexpr bool is_floating(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kI8:
      return "int8";
    case DType::kU8:
      return "uint8";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kU64:
      return "uint64";
    case DType::kE4M3:
      return "float8_e4m3fn";
  }
  return "?";
}

inline DType parse_dtype(std::string_view name) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kI8, DType::kU8, DType::kI32,
                      DType::kI64, DType::kU64, DType::kE4M3}) {
    if (name_of(dtype) == name) return dtype;
  }
  throw Error(
      ErrorKind::kInvalid,
      format_text("dtype \"{}\" is not known; known are float32, float16, bfloat16, int8, uint8, "
                  "int32, int64, uint64, float8_e4m3fn",
                  name));
}

}  // namespace cpmcu
