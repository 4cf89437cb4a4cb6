#include "pass/op_list.h"

#include <algorithm>
#include <utility>

#include "kernels/layer/add_bias.h"

namespace cpmcu {
namespace {

struct Access {
  std::vector<Value> reads, writes;
};

template <typename... Kinds>
struct Overloaded : Kinds... {
  using Kinds::operator()...;
};

Access access_of(const Op& op) {
  return std::visit(Overloaded{
                        [](const LinearOp& o) { return Access{{o.x}, {o.y, o.gate_up}}; },
                        [](const SumOp& o) { return Access{{o.hidden, o.y}, {o.hidden}}; },
                        [](const NormOp& o) { return Access{{o.x}, {o.out}}; },
                        [](const RotaryOp& o) { return Access{{o.qkv}, {o.qkv}}; },
                        [](const AttentionOp& o) { return Access{{o.qkv}, {o.out}}; },
                        [](const RouterOp& o) { return Access{{o.x}, {}}; },
                        [](const CombineOp& o) { return Access{{o.y}, {o.y}}; },
                        [](const CompressOp&) { return Access{}; },
                        [](const LayerInputOp& o) { return Access{{o.hidden}, {}}; },
                        [](const CallOp& o) { return Access{o.reads, o.writes}; },
                        [](const RankSumOp& o) { return Access{{o.hidden, o.part}, {o.hidden}}; },
                    },
                    op.what);
}

bool contains(const std::vector<Value>& values, const Value& value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

}  // namespace

bool Op::reads(const Value& value) const { return contains(access_of(*this).reads, value); }
bool Op::writes(const Value& value) const { return contains(access_of(*this).writes, value); }

Value OpList::value(const std::string& name, const Tensor& buffer) {
  CHECK_STATE(!buffer.empty(), "the value {} of a pass has no memory", name);
  auto it = std::find(names_.begin(), names_.end(), name);
  if (it == names_.end()) it = names_.insert(it, name);
  return {
      .id = static_cast<int>(it - names_.begin()), .buffer = buffer, .of_group = group_rows_ > 0};
}

Value OpList::term() {
  names_.push_back("");
  return {.id = static_cast<int>(names_.size()) - 1};
}

void OpList::begin_layer(int layer, const std::string& prefix) {
  layer_ = layer;
  prefix_ = prefix;
}

void OpList::begin_groups(int64_t rows) {
  CHECK_STATE(rows >= 1 && group_rows_ == 0, "groups of {} rows within groups of {}", rows,
              group_rows_);
  group_rows_ = rows;
  ++num_sections_;
}

template <typename Kind>
void OpList::append(const std::string& name, Kind op, int64_t weight_bytes) {
  const bool is_below = !prefix_.empty() && name.starts_with(prefix_);
  ops_.push_back({.name = is_below ? name.substr(prefix_.size()) : name,
                  .layer = layer_,
                  .section = group_rows_ > 0 ? num_sections_ : 0,
                  .group_rows = group_rows_,
                  .weight_bytes = weight_bytes,
                  .what = std::move(op)});
}

void OpList::linear(const std::string& name, const LinearMethod& method, const Value& y,
                    const Value& x, float alpha) {
  append(name, LinearOp{.method = &method, .y = y, .x = x, .alpha = alpha}, method.weight_bytes());
}

void OpList::gated(const std::string& name, const LinearMethod& method, const Value& out,
                   const Value& gate_up, const Value& x) {
  append(name, LinearOp{.method = &method, .y = out, .x = x, .gated = true, .gate_up = gate_up},
         method.weight_bytes());
}

void OpList::add_linear(const std::string& name, const LinearMethod& method, const Value& hidden,
                        const Value& x, float alpha, bool adds, const Tensor& bias) {
  if (adds && !sums_over_ranks()) return accumulate(name, method, hidden, x, alpha, bias);
  if (sums_over_ranks()) {
    linear(name, method, part_, x, alpha);
    add_parts(hidden, adds);
  } else {
    linear(name, method, hidden, x, alpha);
  }
  if (bias.empty()) return;
  call(
      name + ".bias", {hidden}, {hidden},
      [=](const Context& ctx, const Step&, const Rows& rows) {
        add_bias(ctx, {.y = rows(hidden), .bias = bias});
      },
      bias.num_bytes());
}

void OpList::accumulate(const std::string& name, const LinearMethod& method, const Value& value,
                        const Value& x, float alpha, const Tensor& bias) {
  const Value y = term();
  linear(name, method, y, x, alpha);
  append("sum", SumOp{value, y, bias}, bias.empty() ? 0 : bias.num_bytes());
}

void OpList::add_parts(const Value& hidden, bool adds) {
  append("sum over ranks", RankSumOp{hidden, part_, adds});
}

void OpList::norm(const std::string& name, const Value& out, const Value& x,
                  const RmsNormParams& params) {
  append(name, NormOp{out, x, params}, params.weight.num_bytes());
}

void OpList::rotary(const std::string& name, const Value& qkv, const RotaryKvParams& params) {
  append(name, RotaryOp{qkv, params});
}

void OpList::attention(const std::string& name, AttentionOp op) { append(name, std::move(op)); }

void OpList::router(const std::string& name, const Value& x, const MoeRouterParams& params) {
  append(name, RouterOp{x, params}, params.w.num_bytes());
}

void OpList::combine(const std::string& name, const Value& hidden, const MoeCombineParams& params,
                     bool adds) {
  if (!adds) return append(name, CombineOp{hidden, sums_over_ranks(), params});
  const Value y = term();
  append(name, CombineOp{y, false, params});
  append("sum", SumOp{hidden, y});
}

void OpList::compress(const std::string& name, const LayerKeys& keys, bool accepted) {
  append(name, CompressOp{keys, accepted});
}

void OpList::layer_input(const Value& hidden, RunOp copy) {
  append("copy of the layer's input", LayerInputOp{hidden, std::move(copy)});
}

void OpList::call(const std::string& name, std::vector<Value> reads, std::vector<Value> writes,
                  RunOp run, int64_t weight_bytes) {
  append(name, CallOp{std::move(reads), std::move(writes), std::move(run)}, weight_bytes);
}

const NormOp* OpList::norm_of(const Value& x) const {
  for (auto op = ops_.rbegin(); op != ops_.rend(); ++op) {
    if (op->writes(x)) return op->as<NormOp>();
  }
  return nullptr;
}

}  // namespace cpmcu
