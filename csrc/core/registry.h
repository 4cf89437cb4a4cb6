// Registries by name. Each linear method, block and drafter registers itself in its own file.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"

namespace cpmcu {

// Maps names to factories, which create a `Base` from `Args...`.
template <typename Base, typename... Args>
class Registry {
 public:
  using Factory = std::function<std::unique_ptr<Base>(Args...)>;
  struct Entry {
    Factory factory;
    std::string file;
  };

  // Function-local, so the order in which files register does not matter.
  static Registry& instance() {
    static Registry registry;
    return registry;
  }

  bool add(const std::string& name, Factory factory, const std::string& file) {
    CHECK_STATE(!entries_.contains(name), "\"{}\" is registered twice: in {} and in {}", name,
                entries_[name].file, file);
    entries_[name] = {std::move(factory), file};
    return true;
  }

  std::unique_ptr<Base> create(const std::string& kind, const std::string& name,
                               Args... args) const {
    auto it = entries_.find(name);
    CHECK(it != entries_.end(), "{} \"{}\" is not known; known are {}", kind, name, keys_text());
    return it->second.factory(std::forward<Args>(args)...);
  }

  const std::map<std::string, Entry>& entries() const { return entries_; }
  std::string keys_text() const {
    std::string text;
    for (const auto& [name, entry] : entries_) text += (text.empty() ? "\"" : ", \"") + name + "\"";
    return text;
  }

 private:
  std::map<std::string, Entry> entries_;
};

}  // namespace cpmcu
