// The ops of a pass. An op names the values that it reads and writes, and holds the parameters that
// are fixed once the model is loaded. Rows, positions and lengths come with each step (replay.h).
//
// An op that may be fused with others has a type of its own here. Every other op is a CallOp.
#pragma once

#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "core/context.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/sparse.h"
#include "kernels/layer/rms_norm.h"
#include "kernels/layer/rotary_kv.h"
#include "kernels/moe/moe_combine.h"
#include "kernels/moe/moe_router.h"
#include "kernels/step/step.h"
#include "linear/linear.h"

namespace cpmcu {

// A buffer of a pass. Equal ids are the same memory (OpList::value).
struct Value {
  int id = -1;
  Tensor buffer{};  // rows for the largest step; empty: the value has no memory, as y of SumOp
  bool of_group = false;  // it holds the rows of one group of begin_groups, not of a whole step

  bool operator==(const Value& other) const { return id == other.id; }
};

// The rows [first, first + count) of a step that an op runs on.
struct Rows {
  int64_t first = 0, count = 0;

  Tensor operator()(const Value& value) const {
    return value.buffer.rows(value.of_group ? 0 : first, count);
  }
};

using RunOp = std::function<void(const Context&, const Step&, const Rows&)>;

// y = alpha * method(x), or silu(gate) * up of a gated method.
struct LinearOp {
  const LinearMethod* method;
  Value y, x;
  float alpha = 1;
  bool gated = false;
  Value gate_up{};  // gate and up as one tensor, scratch; only if gated
};

// hidden += y + bias. It is part of the launch of the op before it, which writes y. So y has no
// memory.
struct SumOp {
  Value hidden, y;
  Tensor bias{};  // [1, H]; empty: no bias
};

// hidden += the sum of all ranks' parts. Without `adds`, hidden is overwritten.
struct RankSumOp {
  Value hidden, part;
  bool adds = true;
};

struct NormOp {
  Value out, x;
  RmsNormParams params;  // all fields but out and x
};

struct RotaryOp {
  Value qkv;
  RotaryKvParams params;  // all fields but qkv; of `tokens` only the page table
};

struct AttentionOp {
  Value out, qkv;
  // Returns the parameters of attention_combine if that is still to be launched, else no `out`.
  // `rotary`, `leaves_combine`: those of AttentionParams.
  std::function<AttentionParams(const Context&, const Step&, const Rows&,
                                const RotaryKvParams& rotary, bool leaves_combine)>
      begin;
  bool splits = true;    // false: `begin` does all the work, and no attention_combine follows
  bool rotates = false;  // attention may apply the rotary_kv before it
};

struct RouterOp {
  Value x;
  MoeRouterParams params;  // all fields but x and norm; `logits` has rows for the largest group
};

// y += the weighted sum of the experts' results. `is_part`: the parts of all ranks will be added,
// so only rank 0 adds the biases.
struct CombineOp {
  Value y;
  bool is_part = false;
  // All fields but hidden and norm. y, shared and shared_gate have rows for the largest group.
  MoeCombineParams params;
};

struct CompressOp {
  LayerKeys keys;
  // True: the accepted tokens of a decode step; false: all tokens of a prompt.
  bool accepted = false;
};

// The residual stream enters a layer. `copy` keeps it for a drafter; empty: no copy. Ops
// are fused alike with and without a copy.
struct LayerInputOp {
  Value hidden;
  RunOp copy;
};

// Any function. It is a launch of its own, or several.
struct CallOp {
  std::vector<Value> reads, writes;
  RunOp run;
};

struct Op {
  std::string name;  // name within its layer, such as "self_attn.o_proj"
  int layer = -1;    // -1: the op is before the first layer
  int section = 0;   // number of its section of groups (OpList::begin_groups); 0: it is in none
  int64_t group_rows = 0;    // maximum number of rows of a group of that section
  int64_t weight_bytes = 0;  // bytes of weights that are read for one token; 0: unknown or none
  std::variant<LinearOp, SumOp, NormOp, RotaryOp, AttentionOp, RouterOp, CombineOp, CompressOp,
               LayerInputOp, CallOp, RankSumOp>
      what;

  template <typename Kind>
  const Kind* as() const {
    return std::get_if<Kind>(&what);
  }
  bool reads(const Value& value) const;
  bool writes(const Value& value) const;
};

}  // namespace cpmcu
