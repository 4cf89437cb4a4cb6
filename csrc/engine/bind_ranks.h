// Functions of Python's Engine and Pages, made from methods of C++'s Engine and Pages.
#pragma once

#include <functional>
#include <optional>
#include <type_traits>
#include <vector>

#include "engine/ranks.h"

namespace cpmcu {

inline Ranks& ranks_of(Ranks& ranks) { return ranks; }
inline Ranks& ranks_of(const RankPages& pages) { return pages.ranks; }

template <typename Class>
Class& part_of_rank(Engine& engine) {
  if constexpr (std::is_same_v<Class, Pages>) {
    return engine.pages();
  } else {
    return engine;
  }
}

template <auto method>
struct Method;

template <typename Class, typename Result, typename... Args, Result (Class::*method)(Args...)>
struct Method<method> {
  using Self = std::conditional_t<std::is_same_v<Class, Pages>, const RankPages&, Ranks&>;

  // Calls the method on every rank. The results must be equal.
  static Result on_each(Self self, Args... args) {
    Ranks& ranks = ranks_of(self);
    if constexpr (std::is_void_v<Result>) {
      ranks.each([&](Engine& e, int) { (part_of_rank<Class>(e).*method)(args...); });
    } else {
      std::vector<std::optional<Result>> results(static_cast<size_t>(ranks.size()));
      ranks.each([&](Engine& e, int rank) {
        results[static_cast<size_t>(rank)] = (part_of_rank<Class>(e).*method)(args...);
      });
      for (const auto& other : results) {
        CHECK_STATE(*other == *results[0], "two ranks give different results");
      }
      return *results[0];
    }
  }
};

template <typename Class, typename Result, typename... Args, Result (Class::*method)(Args...) const>
struct Method<method> {
  using Self = std::conditional_t<std::is_same_v<Class, Pages>, const RankPages&, Ranks&>;

  // Calls the method on the first rank. The others have the same answer.
  static Result of_first(Self self, Args... args) {
    return (part_of_rank<Class>(ranks_of(self).first()).*method)(args...);
  }
};

template <auto method>
constexpr auto on_each = &Method<method>::on_each;
template <auto method>
constexpr auto of_first = &Method<method>::of_first;

}  // namespace cpmcu
