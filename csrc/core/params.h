// Named parameters of a block or a drafter, beyond the fields that all kinds share.
//
// A kind reads its parameters by name and type, with defaults. `check_known` rejects unknown names,
// so a misspelt name is an error.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace cpmcu {

using ParamValue =
    std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>>;

class Params {
 public:
  Params() = default;
  explicit Params(std::map<std::string, ParamValue> values) : values_(std::move(values)) {}

  // Each throws Error(kInvalid) if the value has another type.
  bool flag(const std::string& name, bool or_else) const;
  int integer(const std::string& name, int or_else) const;
  float number(const std::string& name, float or_else) const;
  std::string text(const std::string& name, const std::string& or_else) const;
  std::vector<int> integers(const std::string& name) const;  // an absent name: an empty list
  std::vector<float> numbers(const std::string& name, const std::vector<float>& or_else) const;

  void set(const std::string& name, ParamValue value) { values_[name] = std::move(value); }
  const std::map<std::string, ParamValue>& values() const { return values_; }

  // Throws Error(kInvalid) that names `owner`, the first name that is not in `known`, and `known`.
  void check_known(const std::string& owner, std::initializer_list<const char*> known) const;

 private:
  const ParamValue* find(const std::string& name) const;

  std::map<std::string, ParamValue> values_;
};

}  // namespace cpmcu
