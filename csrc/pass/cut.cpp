#include "pass/cut.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

namespace cpmcu {
namespace {

class Cutter {
 public:
  Cutter(const OpList& list, const CutTarget& target)
      : ops_(list.ops()),
        prefetches_(target.prefetches),
        joins_ranks_(target.fused == FusedForms::kAll),
        forms_(list.phase() == Phase::kDecode ? target.fused : FusedForms::kNone) {}

  std::vector<Launch> run() {
    while (next_ < num_ops()) {
      const int op = next_++;
      std::visit([&](const auto& what) { add(op, what); }, ops_[static_cast<size_t>(op)].what);
    }
    flush();
    if (prefetches_) set_following();
    return std::move(launches_);
  }

 private:
  int num_ops() const { return static_cast<int>(ops_.size()); }
  const Op& op(int place) const { return ops_[static_cast<size_t>(place)]; }
  template <typename Kind>
  const Kind& get(int place) const {
    return std::get<Kind>(op(place).what);
  }

  // ---- one function for each kind of op; the op is number `place` of the list

  void add(int place, const LinearOp& linear) {
    const int sum = take_sum(place, linear.y);
    const Value& y = sum < 0 ? linear.y : get<SumOp>(sum).hidden;
    const auto weight = fused_form(linear, y);
    if (!weight) return emit_alone(place, sum);
    if (!may_join(place, linear, *weight, sum >= 0)) flush();
    if (norm_ >= 0) stages_.back().norm = std::exchange(norm_, -1);
    if (stages_.empty()) weight_ = *weight;
    stages_.push_back({.linear = place, .sum = sum});
  }

  void add(int place, const SumOp&) {
    CHECK_STATE(false, "op {} of a pass, {}, adds a value that the op before it does not write",
                place, op(place).name);
  }

  void add(int place, const NormOp& norm) {
    if (combine_ >= 0 && combined() == norm.x) {
      combine_norm_ = place;
      return flush();
    }
    const bool follows = !stages_.empty() && norm_ < 0 && rotary_ < 0 &&
                         stages_.size() < kMaxFusedGemms && written(stages_.back()) == norm.x &&
                         !get<LinearOp>(stages_.back().linear).gated;
    follows ? static_cast<void>(norm_ = place) : emit_alone(place);
  }

  void add(int place, const RotaryOp& rotary) {
    const bool follows = !stages_.empty() && norm_ < 0 && rotary_ < 0 && stages_.back().sum < 0 &&
                         !get<LinearOp>(stages_.back().linear).gated &&
                         written(stages_.back()) == rotary.qkv && can_follow(rotary.params);
    if (!follows && attention_rotates(rotary)) {
      flush();
      rotated_ = place;
    } else {
      follows ? static_cast<void>(rotary_ = place) : emit_alone(place);
    }
  }

  void add(int place, const AttentionOp& attention) {
    const int rotary = std::exchange(rotated_, -1);
    flush();
    launches_.push_back({.op = place, .ops = present({rotary, place}), .rotary = rotary});
    if (forms_ != FusedForms::kNone && attention.splits)
      attention_ = static_cast<int>(launches_.size()) - 1;
  }

  void add(int place, const RouterOp& router) {
    int norm = -1;
    const bool is_free = norm_ >= 0 && !is_sum_alone();
    if (is_free && get<NormOp>(norm_).out == router.x) norm = std::exchange(norm_, -1);
    flush();
    launches_.push_back({.op = place, .ops = present({norm, place}), .norm = norm});
  }

  void add(int place, const CombineOp& combine) {
    const int sum = take_sum(place, combine.y);
    flush();
    combine_ = place, combine_sum_ = sum;
    if (forms_ == FusedForms::kNone) flush();
  }

  void add(int place, const CompressOp& compress) {
    flush();
    if (!launches_.empty() && op(place).section == 0) {
      Launch& last = launches_.back();
      const CompressOp* before = last.op < 0 ? nullptr : op(last.op).as<CompressOp>();
      if (before != nullptr && before->accepted == compress.accepted &&
          alike(before->keys.k_cache, compress.keys.k_cache)) {
        return last.ops.push_back(place);
      }
    }
    launches_.push_back({.op = place, .ops = {place}});
  }

  // A copy waits for the launch that writes its source.
  void add(int place, const LayerInputOp&) {
    copies_.push_back(place);
    if (stages_.empty() && combine_ < 0) emit_copies();
  }

  void add(int place, const CallOp&) { emit_alone(place); }

  void add(int place, const RankSumOp& sum) {
    // A copy reads the residual stream before the sum changes it.
    const bool joins = joins_ranks_ && !stages_.empty() && norm_ < 0 && rotary_ < 0 &&
                       copies_.empty() && stages_.back().sum < 0 &&
                       written(stages_.back()) == sum.part &&
                       op(place).section == op(stages_.back().linear).section;
    if (joins) {
      stages_.back().sum = place;
      return;
    }
    flush();
    combine_ = place;
  }

  // ---- parts

  // Whether the next op is an attention that can apply this rotary_kv.
  bool attention_rotates(const RotaryOp& rotary) const {
    const AttentionOp* next = next_ < num_ops() ? op(next_).as<AttentionOp>() : nullptr;
    return forms_ == FusedForms::kAll && next != nullptr && next->rotates &&
           next->qkv == rotary.qkv && can_rotate(rotary.params);
  }

  // The sum after the op at `place`, if it adds y.
  int take_sum(int place, const Value& y) {
    const SumOp* sum = next_ < num_ops() ? op(next_).as<SumOp>() : nullptr;
    const bool is_part = sum != nullptr && sum->y == y;
    CHECK_STATE(is_part || !y.buffer.empty(),
                "no sum follows op {} of a pass, {}, whose result has no memory", place,
                op(place).name);
    return is_part ? next_++ : -1;
  }

  // The value that a stage writes.
  const Value& written(const FusedStage& stage) const {
    if (stage.sum < 0) return get<LinearOp>(stage.linear).y;
    const RankSumOp* of_ranks = op(stage.sum).as<RankSumOp>();
    return of_ranks != nullptr ? of_ranks->hidden : get<SumOp>(stage.sum).hidden;
  }
  // Whether the only stage ends in a sum over ranks. That is then a launch of its own, which may
  // have a norm.
  bool is_sum_alone() const {
    return stages_.size() == 1 && stages_.front().sum >= 0 &&
           op(stages_.front().sum).as<RankSumOp>() != nullptr;
  }
  const Value& combined() const {
    if (const RankSumOp* sum = op(combine_).as<RankSumOp>()) return sum->hidden;
    return combine_sum_ < 0 ? get<CombineOp>(combine_).y : get<SumOp>(combine_sum_).hidden;
  }

  static bool alike(const Tensor& a, const Tensor& b) {
    return a.dtype() == b.dtype() && a.shape_text() == b.shape_text();
  }

  // The weights of an op that writes y, if the fused layer kernel can read them.
  std::optional<FusedForm> fused_form(const LinearOp& linear, const Value& y) const {
    auto weight = linear.method->fused_form();
    if (!weight || y.buffer.dtype() != linear.x.buffer.dtype()) return {};
    const bool fits = weight->w.empty() ? fuses(forms_, weight->packed.layout)
                                        : forms_ == FusedForms::kAll &&
                                              (!linear.gated || weight->w.size(0) % 16 == 0);
    return fits ? weight : std::nullopt;
  }

  // Whether a linear op can be the next stage of the collected launch. `adds`: it has a sum.
  bool may_join(int place, const LinearOp& linear, const FusedForm& weight, bool adds) const {
    if (combine_ >= 0 || rotary_ >= 0) return false;
    if (norm_ >= 0) {
      // The kernel does not write the rows of a norm.
      const Value& normed = get<NormOp>(norm_).out;
      if (normed != linear.x || is_read_after(place, normed)) return false;
      // The kernel does not add a bias before a norm.
      const int place_of_sum = stages_.back().sum;
      const SumOp* sum = place_of_sum < 0 ? nullptr : op(place_of_sum).as<SumOp>();
      if (sum != nullptr && !sum->bias.empty()) return false;
    }
    if (stages_.empty()) {
      return attention_ < 0 || attended() == linear.x;
    }
    const bool same_form =
        weight.w.empty() == weight_.w.empty() &&
        weight.packed.layout.unpacks_like(weight_.packed.layout) &&
        linear.x.buffer.dtype() == get<LinearOp>(stages_.front().linear).x.buffer.dtype();
    // A copy reads the residual stream before the sum changes it.
    return same_form && op(place).section == op(stages_.front().linear).section &&
           stages_.size() < kMaxFusedGemms && !(adds && !copies_.empty());
  }

  const Value& attended() const {
    return get<AttentionOp>(launches_[static_cast<size_t>(attention_)].op).out;
  }

  static std::vector<int> present(std::initializer_list<int> places) {
    std::vector<int> all;
    for (const int place : places) {
      if (place >= 0) all.push_back(place);
    }
    return all;
  }

  bool is_read_after(int place, const Value& value) const {
    for (int i = place + 1; i < num_ops(); ++i) {
      if (op(i).reads(value)) return true;
      if (op(i).writes(value)) return false;
    }
    return false;
  }

  // ---- launches

  void emit_alone(int place, int sum = -1) {
    flush();
    launches_.push_back({.op = place, .ops = present({place, sum}), .sum = sum});
  }

  void emit_copies() {
    for (const int place : std::exchange(copies_, {})) {
      if (get<LayerInputOp>(place).copy) launches_.push_back({.op = place, .ops = {place}});
    }
  }

  // Launches the collected ops.
  void flush() {
    if (combine_ >= 0) {
      Launch launch{.op = std::exchange(combine_, -1),
                    .sum = std::exchange(combine_sum_, -1),
                    .norm = std::exchange(combine_norm_, -1)};
      launch.ops = present({launch.op, launch.sum, launch.norm});
      launches_.push_back(std::move(launch));
    } else if (!stages_.empty()) {
      const int sum = is_sum_alone() ? std::exchange(stages_.front().sum, -1) : -1;
      emit_stages();
      const int norm = std::exchange(norm_, -1);
      if (sum >= 0) {
        launches_.push_back({.op = sum, .ops = present({sum, norm}), .norm = norm});
      } else if (norm >= 0) {
        launches_.push_back({.op = norm, .ops = {norm}});
      }
    }
    attention_ = -1;
    emit_copies();
  }

  void emit_stages() {
    Launch launch{.stages = std::exchange(stages_, {}), .rotary = std::exchange(rotary_, -1)};
    const FusedStage& first = launch.stages.front();
    const int number = static_cast<int>(launches_.size());
    for (const FusedStage& stage : launch.stages) {
      const auto weight = get<LinearOp>(stage.linear).method->fused_form();
      if (weight->w.empty()) packed_.push_back({number, weight->packed});
    }
    // A single packed linear op runs as packed_gemm, which is faster. It adds in another order, so
    // this choice must not depend on the rows of a step.
    if (launch.stages.size() == 1 && weight_.w.empty() && launch.rotary < 0) {
      launches_.push_back(
          {.op = first.linear, .ops = present({first.linear, first.sum}), .sum = first.sum});
      return;
    }
    if (attention_ >= 0) {
      Launch& attention = launches_[static_cast<size_t>(attention_)];
      attention.leaves_combine = true;
      launch.attention = attention.op;
    }
    launch.ops = present({launch.attention});
    for (const FusedStage& stage : launch.stages) {
      for (const int place : present({stage.linear, stage.sum, stage.norm})) {
        launch.ops.push_back(place);
      }
    }
    if (launch.rotary >= 0) launch.ops.push_back(launch.rotary);
    launches_.push_back(std::move(launch));
  }

  void set_following() {
    for (size_t i = 0; i < launches_.size(); ++i) {
      for (const auto& [number, weight] : packed_) {
        std::vector<PackedWeight>& following = launches_[i].following;
        const bool is_later = static_cast<size_t>(number) > i;
        if (launches_[i].stages.empty() || following.size() == kMaxFollowing) break;
        if (is_later) following.push_back(weight);
      }
    }
  }

  const std::vector<Op>& ops_;
  const bool prefetches_, joins_ranks_;
  const FusedForms forms_;
  int next_ = 0;  // place of the next op
  std::vector<Launch> launches_;
  // (number of a launch, a packed weight that it reads), in order.
  std::vector<std::pair<int, PackedWeight>> packed_;

  // The ops that are collected and not launched yet: a combine or a sum over ranks, or stages. -1:
  // none.
  int combine_ = -1, combine_sum_ = -1, combine_norm_ = -1;
  std::vector<FusedStage> stages_;
  FusedForm weight_;         // weight of the first stage
  int norm_ = -1;            // number of the norm after the last stage; -1: none
  int rotary_ = -1;          // number of the rotary_kv after the last stage; -1: none
  int rotated_ = -1;         // number of the rotary_kv that the next op, an attention, applies
  int attention_ = -1;       // the launch of attention whose splits the first stage combines
  std::vector<int> copies_;  // copies to launch after this launch
};

constexpr std::array kKinds{"linear",  "sum",      "norm", "rotary_kv", "attention",     "router",
                            "combine", "compress", "copy", "call",      "sum over ranks"};
static_assert(kKinds.size() == std::variant_size_v<decltype(Op::what)>);

}  // namespace

std::vector<Launch> cut(const OpList& list, const CutTarget& target) {
  return Cutter(list, target).run();
}

std::vector<LaunchRow> launch_rows(const OpList& list, const CutTarget& target) {
  std::vector<LaunchRow> rows;
  for (const Launch& launch : cut(list, target)) {
    const auto at = [&](int place) -> const Op& { return list.ops()[static_cast<size_t>(place)]; };
    const bool fused = !launch.stages.empty();
    const Op& main = at(fused ? launch.stages.front().linear : launch.op);
    LaunchRow row{.layer = main.layer,
                  .kind = fused ? "fused layer" : kKinds[main.what.index()],
                  .parts = {},
                  .weight_bytes = 0};
    for (const int place : launch.ops) {
      const bool is_rest = fused && place == launch.attention;
      const std::string name =
          at(place).layer == main.layer ? at(place).name : "next " + at(place).name;
      row.parts.push_back(is_rest                                       ? "combine splits"
                          : launch.leaves_combine && place == launch.op ? name + " (splits)"
                                                                        : name);
      row.weight_bytes += is_rest ? 0 : at(place).weight_bytes;
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace cpmcu
