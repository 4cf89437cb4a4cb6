#include "core/params.h"

#include <algorithm>
#include <limits>

#include "core/check.h"

namespace cpmcu {
namespace {

[[noreturn]] void refuse(const std::string& name, const char* expected) {
  throw Error(ErrorKind::kInvalid,
              format_text("parameter \"{}\" has another type, expected {}", name, expected));
}

int to_int(const std::string& name, int64_t value) {
  CHECK(value >= std::numeric_limits<int>::min() && value <= std::numeric_limits<int>::max(),
        "parameter \"{}\" is {}, expected a 32-bit integer", name, value);
  return static_cast<int>(value);
}

}  // namespace

const ParamValue* Params::find(const std::string& name) const {
  const auto it = values_.find(name);
  return it == values_.end() ? nullptr : &it->second;
}

bool Params::flag(const std::string& name, bool or_else) const {
  const ParamValue* value = find(name);
  if (value == nullptr) return or_else;
  if (const bool* flag = std::get_if<bool>(value)) return *flag;
  refuse(name, "true or false");
}

int Params::integer(const std::string& name, int or_else) const {
  const ParamValue* value = find(name);
  if (value == nullptr) return or_else;
  if (const int64_t* integer = std::get_if<int64_t>(value)) return to_int(name, *integer);
  refuse(name, "an integer");
}

float Params::number(const std::string& name, float or_else) const {
  const ParamValue* value = find(name);
  if (value == nullptr) return or_else;
  if (const double* number = std::get_if<double>(value)) return static_cast<float>(*number);
  if (const int64_t* integer = std::get_if<int64_t>(value)) return static_cast<float>(*integer);
  refuse(name, "a number");
}

std::string Params::text(const std::string& name, const std::string& or_else) const {
  const ParamValue* value = find(name);
  if (value == nullptr) return or_else;
  if (const std::string* text = std::get_if<std::string>(value)) return *text;
  refuse(name, "a string");
}

std::vector<int> Params::integers(const std::string& name) const {
  const ParamValue* value = find(name);
  if (value == nullptr) return {};
  const auto* integers = std::get_if<std::vector<int64_t>>(value);
  if (integers == nullptr) refuse(name, "a list of integers");
  std::vector<int> result;
  for (int64_t integer : *integers) result.push_back(to_int(name, integer));
  return result;
}

std::vector<float> Params::numbers(const std::string& name,
                                   const std::vector<float>& or_else) const {
  const ParamValue* value = find(name);
  if (value == nullptr) return or_else;
  if (const auto* numbers = std::get_if<std::vector<double>>(value)) {
    return {numbers->begin(), numbers->end()};
  }
  if (const auto* integers = std::get_if<std::vector<int64_t>>(value)) {
    return {integers->begin(), integers->end()};
  }
  refuse(name, "a list of numbers");
}

void Params::check_known(const std::string& owner, std::initializer_list<const char*> known) const {
  for (const auto& [name, value] : values_) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    std::string all;
    for (const char* each : known) all += (all.empty() ? "" : ", ") + std::string(each);
    throw Error(ErrorKind::kInvalid, format_text("{} has no parameter \"{}\", expected {}", owner,
                                                 name, all.empty() ? "none" : all));
  }
}

}  // namespace cpmcu
