// Replays the launches of a pass for a step.
#pragma once

#include <functional>
#include <vector>

#include "pass/cut.h"

namespace cpmcu {

// An op list and the launches that it is cut into.
class Schedule {
 public:
  explicit Schedule(Phase phase) : ops_(phase) {}

  OpList& ops() { return ops_; }
  const OpList& ops() const { return ops_; }
  void cut(const CutTarget& target) { launches_ = cpmcu::cut(ops_, target); }
  // Graph-safe. The rows are those of the step.
  void replay(const Context& ctx, const Step& step) const;

 private:
  OpList ops_;
  std::vector<Launch> launches_;
};

// The schedules of both phases.
class Pass {
 public:
  // Calls `append` with the list of each phase.
  void append(const std::function<void(OpList&)>& append) {
    append(prefill_.ops());
    append(decode_.ops());
  }
  void cut(const CutTarget& target) {
    prefill_.cut(target);
    decode_.cut(target);
  }
  void replay(const Context& ctx, const Step& step) const { of(step.phase).replay(ctx, step); }
  const Schedule& of(Phase phase) const { return phase == Phase::kPrefill ? prefill_ : decode_; }

 private:
  Schedule prefill_{Phase::kPrefill}, decode_{Phase::kDecode};
};

}  // namespace cpmcu
