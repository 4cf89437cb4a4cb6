// The list that the blocks of a model append their ops to, once for each phase, after all memory
// has its address. cut.h cuts the list into launches.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "pass/op.h"

namespace cpmcu {

class OpList {
 public:
  explicit OpList(Phase phase) : phase_(phase) {}

  Phase phase() const { return phase_; }
  const std::vector<Op>& ops() const { return ops_; }

  // A value by its name. Values of one name are one buffer, as in MemoryPlan. `buffer` has the rows
  // of the largest step, or of the largest group between begin_groups and end_groups.
  Value value(const std::string& name, const Tensor& buffer);

  // The following ops belong to `layer`; `prefix` is left out of their names.
  void begin_layer(int layer, const std::string& prefix);
  // The ops up to end_groups run on groups of at most `rows` rows, one group after another.
  void begin_groups(int64_t rows);
  void end_groups() { group_rows_ = 0; }

  // For a model that is divided among GPUs. After this call, add_linear writes its result to `part`
  // [T, H]. An op of its own sums the parts of all ranks. An empty value ends this.
  void sum_over_ranks(const Value& part) { part_ = part; }
  bool sums_over_ranks() const { return part_.id >= 0; }
  const Value& part() const { return part_; }
  // hidden += the sum of all ranks' parts, for a block that writes to `part` itself. Without `adds`
  // hidden is overwritten.
  void add_parts(const Value& hidden, bool adds);

  // y = alpha * method(x).
  void linear(const std::string& name, const LinearMethod& method, const Value& y, const Value& x,
              float alpha = 1);
  // out = method(x) of a gated method; `gate_up` is scratch.
  void gated(const std::string& name, const LinearMethod& method, const Value& out,
             const Value& gate_up, const Value& x);
  // hidden += alpha * method(x) + bias, as two ops. `bias` [1, H]; empty: none. Without `adds`
  // hidden is overwritten, and a sum over ranks and the bias are ops of their own.
  void add_linear(const std::string& name, const LinearMethod& method, const Value& hidden,
                  const Value& x, float alpha, bool adds, const Tensor& bias = {});
  // value += alpha * method(x) + bias, also if `value` is the part of this rank.
  void accumulate(const std::string& name, const LinearMethod& method, const Value& value,
                  const Value& x, float alpha, const Tensor& bias = {});
  void norm(const std::string& name, const Value& out, const Value& x, const RmsNormParams& params);
  void rotary(const std::string& name, const Value& qkv, const RotaryKvParams& params);
  void attention(const std::string& name, AttentionOp op);
  void router(const std::string& name, const Value& x, const MoeRouterParams& params);
  // As add_linear. Without `adds` the values of `hidden` are 0 before.
  void combine(const std::string& name, const Value& hidden, const MoeCombineParams& params,
               bool adds);
  void compress(const std::string& name, const LayerKeys& keys, bool accepted);
  void layer_input(const Value& hidden, RunOp copy);
  // Any function that reads and writes these values, and reads `weight_bytes` of weights.
  void call(const std::string& name, std::vector<Value> reads, std::vector<Value> writes, RunOp run,
            int64_t weight_bytes = 0);

  // The last norm that writes x; null: none.
  const NormOp* norm_of(const Value& x) const;

 private:
  template <typename Kind>
  void append(const std::string& name, Kind op, int64_t weight_bytes = 0);
  Value term();  // makes a value without memory

  Phase phase_;
  int layer_ = -1, num_sections_ = 0;
  int64_t group_rows_ = 0;
  std::string prefix_;
  Value part_{};                    // target of sum_over_ranks; id -1: there is one rank
  std::vector<std::string> names_;  // name of each value, by id
  std::vector<Op> ops_;
};

}  // namespace cpmcu
