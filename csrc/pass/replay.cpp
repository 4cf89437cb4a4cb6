#include "pass/replay.h"

#include <algorithm>

#include "core/exchange.h"
#include "kernels/layer/add_bias.h"
#include "kernels/ranks/rank_sum.h"

namespace cpmcu {
namespace {

class Replay {
 public:
  Replay(const Context& ctx, const Step& step, const std::vector<Op>& ops)
      : ctx_(ctx), step_(step), ops_(ops), all_{.first = 0, .count = step.tokens.num_tokens} {}

  const Rows& all() const { return all_; }
  const Op& op(int place) const { return ops_[static_cast<size_t>(place)]; }
  // The op whose section is the launch's.
  const Op& main_op(const Launch& launch) const {
    return op(launch.op >= 0 ? launch.op : launch.stages.front().linear);
  }

  void run(const Launch& launch, const Rows& rows) {
    if (!launch.stages.empty()) return run_fused(launch, rows);
    std::visit([&](const auto& what) { run(launch, what, rows); }, op(launch.op).what);
  }

 private:
  template <typename Kind>
  const Kind& get(int place) const {
    return std::get<Kind>(op(place).what);
  }

  RmsNormParams norm_params(int place, const Rows& rows) const {
    const NormOp& norm = get<NormOp>(place);
    RmsNormParams params = norm.params;
    params.out = rows(norm.out);
    params.x = rows(norm.x);
    return params;
  }

  RotaryKvParams rotary_params(const RotaryOp& rotary, const Rows& rows) const {
    RotaryKvParams params = rotary.params;
    params.qkv = rows(rotary.qkv);
    params.tokens = step_.tokens;
    params.tokens.page_table = rotary.params.tokens.page_table;
    return params;
  }

  // ---- launches of one op

  void run(const Launch& launch, const LinearOp& linear, const Rows& rows) const {
    const Tensor x = rows(linear.x);
    if (linear.gated) {
      return linear.method->forward_gated(ctx_, step_.phase, rows(linear.y), rows(linear.gate_up),
                                          x);
    }
    if (launch.sum < 0) {
      return linear.method->forward(ctx_, step_.phase, rows(linear.y), x, linear.alpha, 0);
    }
    const SumOp& sum = get<SumOp>(launch.sum);
    linear.method->forward(ctx_, step_.phase, rows(sum.hidden), x, linear.alpha, 1);
    if (!sum.bias.empty()) add_bias(ctx_, {.y = rows(sum.hidden), .bias = sum.bias});
  }

  void run(const Launch&, const SumOp&, const Rows&) const {
    CHECK_STATE(false, "a sum is a launch of its own, expected a part of one");
  }

  void run(const Launch& launch, const NormOp&, const Rows& rows) const {
    rms_norm(ctx_, norm_params(launch.op, rows));
  }

  void run(const Launch&, const RotaryOp& rotary, const Rows& rows) const {
    rotary_kv(ctx_, rotary_params(rotary, rows));
  }

  void run(const Launch& launch, const AttentionOp& attention, const Rows& rows) {
    RotaryKvParams rotary;
    if (launch.rotary >= 0) rotary = rotary_params(get<RotaryOp>(launch.rotary), rows);
    const AttentionParams rest = attention.begin(ctx_, step_, rows, rotary, launch.leaves_combine);
    if (launch.leaves_combine) {
      rest_ = rest;
    } else if (!rest.out.empty()) {
      attention_combine(ctx_, rest);
    }
  }

  void run(const Launch& launch, const RouterOp& router, const Rows& rows) const {
    MoeRouterParams params = router.params;
    params.x = rows(router.x);
    params.logits = params.logits.rows(0, rows.count);
    if (launch.norm >= 0 && rows.first == 0) {  // the first group norms all rows
      const bool in_group = op(launch.norm).section == op(launch.op).section;
      params.norm = norm_params(launch.norm, in_group ? rows : all_);
    }
    moe_router(ctx_, params);
  }

  void run(const Launch& launch, const CombineOp& combine, const Rows& rows) const {
    MoeCombineParams params = combine.params;
    params.hidden = rows(launch.sum < 0 ? combine.y : get<SumOp>(launch.sum).hidden);
    params.y = params.y.rows(0, rows.count * params.routing.top_k);
    if (combine.is_part && ctx_.exchange->rank > 0) params.bias = {};
    if (!params.shared.empty()) {
      params.shared = params.shared.rows(0, rows.count);
      params.shared_gate = params.shared_gate.rows(0, rows.count);
    }
    const bool is_whole = rows.count == all_.count;
    if (launch.norm >= 0 && is_whole) params.norm = norm_params(launch.norm, rows);
    moe_combine(ctx_, params);
    if (launch.norm < 0 || is_whole || rows.first + rows.count < all_.count) return;
    rms_norm(ctx_, norm_params(launch.norm, all_));  // after the last group
  }

  void run(const Launch& launch, const CompressOp& compress, const Rows&) const {
    CompressKeysParams params{
        .layers = {},
        .accepted_counts = compress.accepted ? step_.accepted.counts : nullptr,
        .tokens = step_.tokens};
    for (const int place : launch.ops) params.layers.push_back(get<CompressOp>(place).keys);
    compress_keys(ctx_, params);
  }

  void run(const Launch&, const LayerInputOp& input, const Rows& rows) const {
    input.copy(ctx_, step_, rows);
  }

  void run(const Launch&, const CallOp& call, const Rows& rows) const {
    call.run(ctx_, step_, rows);
  }

  void run(const Launch& launch, const RankSumOp& sum, const Rows& rows) const {
    RankSumParams params{.hidden = rows(sum.hidden), .part = rows(sum.part), .adds = sum.adds};
    if (launch.norm >= 0) params.norm = norm_params(launch.norm, rows);
    rank_sum(ctx_, params);
  }

  // ---- fused layers

  static void set_sum(FusedGemm& gemm, const Op& op, const Rows& rows) {
    if (const RankSumOp* sum = op.as<RankSumOp>()) {
      gemm.y = rows(sum->hidden), gemm.part = rows(sum->part);
      gemm.beta = sum->adds ? 1 : 0;
    } else {
      const SumOp& plain = std::get<SumOp>(op.what);
      gemm.y = rows(plain.hidden), gemm.bias = plain.bias;
      gemm.beta = 1;
    }
  }

  FusedGemm gemm_of(const FusedStage& stage, const FusedForm& weight, const Rows& rows) const {
    const LinearOp& linear = get<LinearOp>(stage.linear);
    FusedGemm gemm{.y = {},
                   .x = rows(linear.x),
                   .packed = weight.packed,
                   .w = weight.w,
                   .gated = linear.gated && !weight.w.empty(),
                   .alpha = linear.alpha,
                   .scratch = weight.scratch};
    if (gemm.gated) gemm.scratch = rows(linear.gate_up);
    stage.sum < 0 ? static_cast<void>(gemm.y = rows(linear.y)) : set_sum(gemm, op(stage.sum), rows);
    if (stage.norm < 0) return gemm;
    const NormOp& norm = get<NormOp>(stage.norm);
    gemm.normed = rows(norm.out);
    gemm.norm_weight = norm.params.weight;
    gemm.norm_eps = norm.params.eps;
    gemm.norm_offset = norm.params.weight_offset;
    return gemm;
  }

  void run_fused(const Launch& launch, const Rows& rows) {
    FusedLayerParams params{.gemms = {}, .following = launch.following, .memory = {}};
    params.gemms.reserve(launch.stages.size());
    for (const FusedStage& stage : launch.stages) {
      const FusedForm weight = *get<LinearOp>(stage.linear).method->fused_form();
      params.gemms.push_back(gemm_of(stage, weight, rows));
      params.memory = weight.memory;
    }
    if (launch.attention >= 0) params.attention = std::exchange(rest_, {});
    if (launch.rotary >= 0) params.rotary = rotary_params(get<RotaryOp>(launch.rotary), rows);
    fused_layer(ctx_, params);
  }

  const Context& ctx_;
  const Step& step_;
  const std::vector<Op>& ops_;
  const Rows all_;
  AttentionParams rest_;  // its splits are combined by the next fused layer; out empty: none
};

}  // namespace

void Schedule::replay(const Context& ctx, const Step& step) const {
  Replay replay(ctx, step, ops_.ops());
  for (auto launch = launches_.begin(); launch != launches_.end();) {
    const Op& op = replay.main_op(*launch);
    if (op.section == 0) {
      replay.run(*launch++, replay.all());
      continue;
    }
    const auto end = std::find_if(launch, launches_.end(), [&](const Launch& other) {
      return replay.main_op(other).section != op.section;
    });
    for (int64_t first = 0; first < replay.all().count; first += op.group_rows) {
      const Rows rows{.first = first, .count = std::min(op.group_rows, replay.all().count - first)};
      for (auto each = launch; each != end; ++each) replay.run(*each, rows);
    }
    launch = end;
  }
}

}  // namespace cpmcu
