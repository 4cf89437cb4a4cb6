// Cuts an op list into launches: the only place that decides which ops are fused.
//
// A decode pass on a device that runs the fused layer kernel (kernels/gemm/fused_layer.h), for the
// forms of weights that it reads there:
//
//   launch          ops
//   fused layer     up to four linear ops that follow one another and have one form of weights; on
//                   Hopper, a sum over ranks after one of them; a norm between two of them; before
//                   the first one, the combination of the attention splits that it reads; after the
//                   last one, rotary_kv of its output
//   router          with the norm before it, if that follows a linear op
//   sum of experts  with the norm after it
//   attention       on Hopper, with the rotary_kv before it, if that is not part of a fused layer
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
  FusedForms fused = FusedForms::kNone;  // the forms of weights that the fused layer kernel reads
  bool prefetches = true;  // a fused layer kernel may prefetch the next launch's weights to L2

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
  int op = -1;              // the op of a launch that is not fused
  std::vector<int> ops{};   // all ops of the launch, in order
  int sum = -1, norm = -1;  // a sum and a norm that are part of the launch of `op`
  // Only for attention: the next fused layer kernel combines the splits.
  bool leaves_combine = false;

  // The linear ops of a fused layer; empty: the launch is not fused.
  std::vector<FusedStage> stages{};
  int attention = -1;  // the attention whose splits are combined before the first stage
  // The rotary_kv that runs after the last stage; of a launch of attention: before it.
  int rotary = -1;
  std::vector<PackedWeight> following{};  // FusedLayerParams::following
};

std::vector<Launch> cut(const OpList& list, const CutTarget& target);

// A launch as `cpmcu plan --launches` prints it.
struct LaunchRow {
  int layer;                       // layer of the first op; -1: the ops are before the first layer
  std::string kind;                // "fused layer", "linear", "norm", …, "call"
  std::vector<std::string> parts;  // names of the launch's ops
  int64_t weight_bytes;  // bytes of weights that are read for one token; 0: none, or unknown
};

std::vector<LaunchRow> launch_rows(const OpList& list, const CutTarget& target);

}  // namespace cpmcu
