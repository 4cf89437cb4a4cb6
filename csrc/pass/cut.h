// Cuts an op list into launches: the only place that decides which ops are fused.
//
// A decode pass on a device that runs the fused layer kernel (kernels/gemm/fused_layer.h), for the
// forms of weights that it reads there:
//
//   launch          ops
//   fused layer     up to four linear ops that follow one another and have one form of weights; a
//                   sum over ranks after one of them, if the target allows it; a norm between two
//                   of them; before the first one, the combination of the attention splits that it
//                   reads; after the last one, rotary_kv of its output
//   router          with the norm before it, if that follows a linear op
//   sum of experts  with the norm after it
//
// Any other op ends a launch. On other devices, and in a prefill pass, each op is a launch. Three
// rules hold everywhere. A sum is part of the op before it. If a sum over ranks is a launch, the
// norm after it is part of it. If no other op lies between, compressed keys of layers with equal
// shapes are one launch.
//
// The choice depends on the ops and the target, never on the rows of a step.
#pragma once

#include <string>
#include <vector>

#include "kernels/gemm/fused_layer.h"
#include "pass/op_list.h"

namespace cpmcu {

// The device and the settings that launches are cut for.
struct CutTarget {
  FusedForms fused = FusedForms::kNone;  // what the fused layer kernel reads
  bool prefetches = true;                // a fused layer may load weights of the next launch to L2
  // A fused layer may hold sums over ranks. Off: this has not run on two GPUs yet.
  bool sums_over_ranks = false;

  // The target of a device.
  static CutTarget of(const Context& ctx) { return {.fused = fused_forms(ctx)}; }
  // The target of a compute capability, 10 * major + minor; 0: the CPU.
  static CutTarget of_capability(int capability) { return {.fused = fused_forms_of(capability)}; }
};

// A linear op of a fused layer, with the sum (also over ranks) and the norm after it.
struct FusedStage {
  int linear = -1, sum = -1, norm = -1;
};

// Numbers are places in the list; -1: none.
struct Launch {
  int op = -1;                  // not fused: the op that runs
  std::vector<int> ops{};       // all ops of the launch, in order
  int sum = -1, norm = -1;      // parts of `op`
  bool leaves_combine = false;  // of attention: the next fused layer kernel combines the splits

  std::vector<FusedStage> stages{};       // of a fused layer; empty: not fused
  int attention = -1;                     // before the first stage
  int rotary = -1;                        // after the last stage
  std::vector<PackedWeight> following{};  // as in FusedLayerParams
};

std::vector<Launch> cut(const OpList& list, const CutTarget& target);

// A launch as `cpmcu plan --launches` prints it.
struct LaunchRow {
  int layer;                       // of the first op; -1: before the first layer
  std::string kind;                // "fused layer", "linear", "norm", …, "call"
  std::vector<std::string> parts;  // names of the ops
  int64_t weight_bytes;            // read for one token; 0: none, or unknown
};

std::vector<LaunchRow> launch_rows(const OpList& list, const CutTarget& target);

}  // namespace cpmcu
