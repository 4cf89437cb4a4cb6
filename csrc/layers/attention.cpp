// Grouped-query attention with rotary positions over the paged KV cache: "attention", and
// "sparse_attention", which chooses blocks of keys.
#include "kernels/attention/attention.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/half.h"
#include "core/model_limits.h"
#include "kernels/layer/norm_heads.h"
#include "kernels/layer/rotary_kv.h"
#include "kernels/layer/scale_queries.h"
#include "kernels/layer/sigmoid_gate.h"
#include "layers/attention_shape.h"
#include "layers/block.h"
#include "layers/rotary.h"
#include "layers/sparse_keys.h"
#include "linear/linear.h"

namespace cpmcu {
namespace {

class AttentionBlock : public Block {
 public:
  explicit AttentionBlock(const BlockConfig& config) : AttentionBlock(config, {}) {}
  // `sparse`: all attention is dense without it.
  AttentionBlock(const BlockConfig& config, std::optional<SparseKeys> sparse)
      : spec_(config.spec),
        params_(sparse ? SparseKeys::without_rule(config.params) : config.params),
        shape_(spec_, params_),
        prefix_(config.prefix),
        scope_(config.scope),
        phase_(config.phase),
        adds_(config.adds),
        sparse_(std::move(sparse)) {
    CHECK(!sparse_ || shape_.window == 0,
          "a sparse_attention block has a window of {}, expected none", shape_.window);
    CHECK(!sparse_ || !shape_.shares_kv(),
          "a sparse_attention block has kv_layer {}, expected keys of its own", shape_.kv_layer);
    CHECK(!sparse_ || !shape_.sinks, "a sparse_attention block has sinks, expected none");
    CHECK(!spec_.fp8_kv_cache || shape_.head_dim % 16 == 0,
          "head_dim is {}, expected a multiple of 16 for an fp8 KV cache", shape_.head_dim);
    const std::string attn = prefix_ + "self_attn.";
    const int in_features = config.in_features ? config.in_features : spec_.hidden_size;
    std::vector<LinearPart> parts{{attn + "q_proj", shape_.q_rows()}};
    if (!shape_.shares_kv()) {
      parts.push_back({attn + "k_proj", shape_.k_rows()});
      parts.push_back({attn + "v_proj", shape_.kv_size()});
    }
    qkv_ = make_linear(spec_.linear_method_of(attn + "qkv_proj"),
                       {.parts = std::move(parts),
                        .in_features = in_features,
                        .dtype = spec_.dtype,
                        .options = spec_.linear_options_of(attn + "qkv_proj"),
                        .name = attn + "qkv_proj"});
    out_ = make_linear(spec_.linear_method_of(attn + "o_proj"),
                       {.parts = {{attn + "o_proj", spec_.hidden_size}},
                        .in_features = shape_.q_size(),
                        .dtype = spec_.dtype,
                        .options = spec_.linear_options_of(attn + "o_proj")});
    if (!shape_.gate_proj && !shape_.head_gate) return;
    gate_name_ = attn + (shape_.head_gate ? "g_proj" : "gate_proj");
    gate_ = make_linear(spec_.linear_method_of(gate_name_),
                        {.parts = {{gate_name_, shape_.gate_size()}},
                         .in_features = in_features,
                         .dtype = spec_.dtype,
                         .options = spec_.linear_options_of(gate_name_)});
  }

  void plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits) override {
    qkv_->plan(plan, limits);
    out_->plan(plan, limits);
    CHECK(!limits.is_cuda() ||
              std::ranges::find(kCudaHeadDims, shape_.head_dim) != std::end(kCudaHeadDims),
          "{}self_attn has a head_dim of {}, expected 64, 128, 256 or 512 on CUDA; use device cpu",
          prefix_, shape_.head_dim);
    CHECK(!limits.is_cuda() || !shape_.sinks || shape_.head_dim == 64 || shape_.head_dim == 128,
          "{}self_attn has attention sinks and a head_dim of {}, expected 64 or 128 on CUDA; use "
          "device cpu",
          prefix_, shape_.head_dim);
    const int64_t bytes = size_of(spec_.dtype);
    if (gate_ != nullptr) {
      gate_->plan(plan, limits);
      gate_id_ = plan.add_scratch("attention.gate", bytes * limits.max_tokens * shape_.gate_size(),
                                  phase_ + 1, phase_ + 3);
    }
    if (shape_.o_bias) {
      o_bias_id_ =
          plan.add(prefix_ + "self_attn.o_proj.bias", "weights", bytes * spec_.hidden_size);
    }
    if (shape_.sinks) {
      sinks_id_ = plan.add(prefix_ + "self_attn.sinks", "weights", int64_t{4} * shape_.num_heads);
    }
    if (shape_.qkv_bias) {
      bias_id_ =
          plan.add(prefix_ + "self_attn.qkv_proj.bias", "weights", bytes * shape_.qkv_size());
    }
    if (shape_.qk_norm || shape_.joint_qk_norm) {
      q_norm_id_ = plan.add(prefix_ + "self_attn.q_norm", "weights", bytes * q_norm_size());
      k_norm_id_ = plan.add(prefix_ + "self_attn.k_norm", "weights", bytes * k_norm_size());
    }
    const PagedPlane plane{.num_heads = shape_.num_kv_heads,
                           .width = shape_.head_dim,
                           .dtype = spec_.fp8_kv_cache ? DType::kU8 : spec_.dtype};
    const std::string owner = shape_.shares_kv()
                                  ? scope_ + "model.layers." + std::to_string(shape_.kv_layer) + "."
                                  : prefix_;
    const auto paged = [&](const PagedPlane& of, const std::string& name) {
      return shape_.shares_kv() ? state.find_paged(of, shape_.window, owner + name)
                                : state.add_paged(of, shape_.window, owner + name);
    };
    keys_id_ = paged(plane, "keys");
    values_id_ = paged(plane, "values");
    if (spec_.fp8_kv_cache) {
      const PagedPlane scales{.num_heads = shape_.num_kv_heads, .width = 1, .dtype = DType::kF32};
      key_scales_id_ = paged(scales, "key_scales");
      value_scales_id_ = paged(scales, "value_scales");
    }
    if (sparse_) {
      sparse_->plan(plan, state, limits, shape_, spec_.dtype, static_cast<Timeline>(phase_ + 2));
    }
    const std::vector<float> inv_freq = params_.numbers("rope_inv_freq", spec_.rope_inv_freq);
    CHECK(!inv_freq.empty() && static_cast<int>(inv_freq.size()) <= shape_.head_dim / 2,
          "an attention block has {} rotary frequencies, expected 1 to head_dim / 2 = {}",
          inv_freq.size(), shape_.head_dim / 2);
    const bool has_own = params_.values().contains("rope_inv_freq");
    rotary_.plan(plan, (has_own ? prefix_ : scope_) + "rotary.inv_freq", inv_freq);
    qkv_id_ = plan.add_scratch("attention.qkv", bytes * limits.max_tokens * shape_.qkv_size(),
                               phase_ + 1, phase_ + 2);
    out_id_ = plan.add_scratch("attention.out", bytes * limits.max_tokens * shape_.q_size(),
                               phase_ + 2, phase_ + 3);
    if (limits.is_cuda()) {
      partial_floats_ =
          attention_scratch_floats(std::min(limits.max_decode_tokens, kMaxScratchTokens),
                                   shape_.num_heads, shape_.head_dim, limits.max_kv);
      if (sparse_) {
        partial_floats_ =
            std::max(partial_floats_,
                     sparse_->scratch_floats(std::min(limits.max_decode_tokens, kMaxScratchTokens),
                                             shape_.num_heads, shape_.head_dim, limits.max_kv));
      }
    }
    if (spec_.fp8_kv_cache && limits.compute_capability == 90 && shape_.head_dim == 128 &&
        shape_.window == 0 && !shape_.sinks) {
      partial_floats_ = std::max(
          partial_floats_, fp8_prefill_floats(shape_.num_kv_heads, shape_.head_dim, limits.max_kv));
    }
    partial_id_ =
        plan.add_scratch("attention.partials", 4 * partial_floats_, phase_ + 2, phase_ + 2);
    max_tokens_ = limits.max_tokens;
    scales_queries_ = shape_.query_scale_beta != 0 && limits.max_kv > shape_.query_scale_length;
    CHECK(!sparse_ || !scales_queries_,
          "a sparse_attention block scales its queries by position, expected no such scale");
  }

  void bind(const Arena& arena, const ModelState& state) override {
    qkv_->bind(arena);
    out_->bind(arena);
    if (shape_.qkv_bias) bias_ = arena.tensor(bias_id_, spec_.dtype, {shape_.qkv_size()});
    if (shape_.qk_norm || shape_.joint_qk_norm) {
      q_norm_ = arena.tensor(q_norm_id_, spec_.dtype, {q_norm_size()});
      k_norm_ = arena.tensor(k_norm_id_, spec_.dtype, {k_norm_size()});
    }
    if (gate_ != nullptr) {
      gate_->bind(arena);
      gate_buffer_ = arena.tensor(gate_id_, spec_.dtype, {max_tokens_, shape_.gate_size()});
    }
    if (shape_.o_bias) o_bias_ = arena.tensor(o_bias_id_, spec_.dtype, {1, spec_.hidden_size});
    if (shape_.sinks) sinks_ = arena.tensor(sinks_id_, DType::kF32, {shape_.num_heads});
    keys_ = state.paged(keys_id_);
    values_ = state.paged(values_id_);
    page_table_ = state.page_table(keys_id_);
    if (spec_.fp8_kv_cache) {
      key_scales_ = state.paged(key_scales_id_);
      value_scales_ = state.paged(value_scales_id_);
    }
    if (sparse_) sparse_->bind(arena, state);
    rotary_.bind(arena);
    qkv_buffer_ = arena.tensor(qkv_id_, spec_.dtype, {max_tokens_, shape_.qkv_size()});
    out_buffer_ = arena.tensor(out_id_, spec_.dtype, {max_tokens_, shape_.q_size()});
    partials_ = arena.tensor(partial_id_, DType::kF32, {partial_floats_});
  }

  void list_tensors(WeightTable& table) override {
    qkv_->list_tensors(table);
    out_->list_tensors(table);
    const int64_t q = shape_.q_size(), kv = shape_.kv_size();
    if (shape_.qkv_bias) {
      table.add(prefix_ + "self_attn.q_proj.bias", bias_.rows(0, q));
      table.add(prefix_ + "self_attn.k_proj.bias", bias_.rows(q, kv));
      table.add(prefix_ + "self_attn.v_proj.bias", bias_.rows(q + kv, kv));
    }
    if (!q_norm_.empty() && shape_.qk_norm_weights) {
      table.add(prefix_ + "self_attn.q_norm.weight", q_norm_);
      if (!shape_.shares_kv()) table.add(prefix_ + "self_attn.k_norm.weight", k_norm_);
    }
    if (gate_ != nullptr) gate_->list_tensors(table);
    if (shape_.o_bias) {
      table.add(prefix_ + "self_attn.o_proj.bias", o_bias_.view({spec_.hidden_size}));
    }
    if (shape_.sinks) table.add(prefix_ + "self_attn.sinks", sinks_);
  }

  void finish_loading(const Context& ctx) override {
    qkv_->finish_loading(ctx);
    out_->finish_loading(ctx);
    if (gate_ != nullptr) gate_->finish_loading(ctx);
    if (!q_norm_.empty() && !shape_.qk_norm_weights) {
      fill_with_ones(ctx, q_norm_);
      fill_with_ones(ctx, k_norm_);
    }
    if (sparse_) sparse_->finish_loading(ctx);
    rotary_.upload(ctx);
  }

  std::string norm_name() const override { return prefix_ + "input_layernorm"; }

  void append(OpList& ops, const Value& hidden, const Value& x) const override {
    const std::string attn = prefix_ + "self_attn.";
    const Value qkv = ops.value("attention.qkv", qkv_buffer_);
    const Value out = ops.value("attention.out", out_buffer_);
    Value gates;
    if (gate_ != nullptr) {
      gates = ops.value("attention.gate", gate_buffer_);
      ops.linear(gate_name_, *gate_, gates, x);
    }
    append_keys(ops, x);
    if (scales_queries_) append_query_scale(ops, qkv);
    const bool is_prefill = ops.phase() == Phase::kPrefill;
    if (sparse_ && is_prefill) sparse_->append_compress(ops, attn, keys_, key_scales_);
    // With gates, sinks or wide heads, the fused layer does not combine the splits.
    const bool splits =
        !shape_.output_gate && gate_ == nullptr && !shape_.sinks && shape_.head_dim != 512;
    ops.attention(attn + "attention",
                  {.out = out,
                   .qkv = qkv,
                   .begin =
                       [=, this](const Context& ctx, const Step& step, const Rows& rows,
                                 const RotaryKvParams& rotary, bool leaves_combine) {
                         AttentionParams params = params_of(ctx, step, rows(out), rows(qkv));
                         params.rotary = rotary;
                         params.leaves_combine = leaves_combine;
                         return attend(ctx, step, params, splits);
                       },
                   .splits = splits,
                   .rotates = !sparse_ && !shape_.sinks});
    if (shape_.output_gate) append_gate(ops, out, qkv, shape_.head_dim, 2 * shape_.head_dim);
    if (gate_ != nullptr) {
      append_gate(ops, out, gates, 0, shape_.head_gate ? 1 : shape_.head_dim);
    }
    ops.add_linear(attn + "o_proj", *out_, hidden, out, spec_.residual_scale, adds_, o_bias_);
  }

  void append_keys(OpList& ops, const Value& x) const override {
    const std::string attn = prefix_ + "self_attn.";
    const Value qkv = ops.value("attention.qkv", qkv_buffer_);
    ops.linear(attn + "qkv_proj", *qkv_, qkv, x);
    append_norms(ops, qkv);
    ops.rotary(attn + "rotary_kv", qkv, rotary());
  }

  void append_commit(OpList& ops) const override {
    if (!sparse_) return;
    sparse_->append_compress(ops, prefix_ + "self_attn.", keys_, key_scales_, /*accepted=*/true);
  }

 private:
  int64_t q_norm_size() const { return shape_.joint_qk_norm ? shape_.q_rows() : shape_.head_dim; }
  int64_t k_norm_size() const { return shape_.joint_qk_norm ? shape_.k_rows() : shape_.head_dim; }
  // Fills a norm's weights so that the norm multiplies by 1.
  void fill_with_ones(const Context& ctx, const Tensor& weights) const {
    dispatch_host_dtype(weights.dtype(), [&](auto t) {
      using T = decltype(t);
      const std::vector<T> values(static_cast<size_t>(weights.num_elements()),
                                  from_float<T>(1 - spec_.norm_offset()));
      copy_to_device(ctx.device, weights.data(), values.data(), weights.num_bytes(), ctx.stream);
      synchronize(ctx.device, ctx.stream);
    });
  }
  // The norms of q, k and v that are not part of rotary_kv.
  void append_norms(OpList& ops, const Value& qkv) const {
    const int q = static_cast<int>(shape_.q_rows()), k = static_cast<int>(shape_.k_rows());
    NormHeadsParams norm{.x = {}, .eps = spec_.rms_norm_eps, .weight_offset = spec_.norm_offset()};
    const auto append = [&](const std::string& name) {
      ops.call(
          prefix_ + "self_attn." + name, {qkv}, {qkv},
          [=](const Context& ctx, const Step&, const Rows& rows) {
            NormHeadsParams params = norm;
            params.x = rows(qkv);
            norm_heads(ctx, params);
          },
          norm.weight.empty() ? 0 : norm.weight.num_bytes());
    };
    if (shape_.joint_qk_norm) {
      norm.width = q, norm.weight = q_norm_;
      append("q_norm");
      norm.first = q, norm.width = k, norm.weight = k_norm_;
      append("k_norm");
    }
    if (!shape_.v_norm || shape_.shares_kv()) return;
    norm.first = q + k, norm.num_groups = shape_.num_kv_heads, norm.width = shape_.head_dim;
    norm.weight = {};
    append("v_norm");
  }
  void append_query_scale(OpList& ops, const Value& qkv) const {
    ops.call(prefix_ + "self_attn.query_scale", {qkv}, {qkv},
             [=, this](const Context& ctx, const Step& step, const Rows& rows) {
               scale_queries(ctx, {.qkv = rows(qkv),
                                   .layout = shape_.layout(),
                                   .num_heads = shape_.num_heads,
                                   .num_kv_heads = shape_.num_kv_heads,
                                   .head_dim = shape_.head_dim,
                                   .beta = shape_.query_scale_beta,
                                   .length = shape_.query_scale_length,
                                   .positions = step.tokens.positions});
             });
  }
  // out *= sigmoid(gates); `first`, `stride`: as in SigmoidGateParams.
  void append_gate(OpList& ops, const Value& out, const Value& gates, int first, int stride) const {
    ops.call(prefix_ + "self_attn.output_gate", {out, gates}, {out},
             [=, this](const Context& ctx, const Step&, const Rows& rows) {
               sigmoid_gate(ctx, {.x = rows(out),
                                  .gates = rows(gates),
                                  .head_dim = shape_.head_dim,
                                  .first = first,
                                  .stride = stride,
                                  .of_heads = shape_.head_gate});
             });
  }
  RotaryKvParams rotary() const {
    return {.qkv = {},
            .layout = shape_.layout(),
            .bias = bias_,
            .q_norm = shape_.joint_qk_norm ? Tensor() : q_norm_,
            .k_norm = shape_.joint_qk_norm ? Tensor() : k_norm_,
            .norm_eps = spec_.rms_norm_eps,
            .norm_offset = spec_.norm_offset(),
            .inv_freq = rotary_.inv_freq(),
            .rotary_dim = rotary_.width(),
            .attention_scaling = shape_.rope_attention_scaling,
            .k_cache = keys_,
            .v_cache = values_,
            .k_scales = key_scales_,
            .v_scales = value_scales_,
            .num_heads = shape_.num_heads,
            .num_kv_heads = shape_.shares_kv() ? 0 : shape_.num_kv_heads,
            .head_dim = shape_.head_dim,
            .tokens = {.page_table = page_table_}};
  }
  // Selects blocks if attention is sparse.
  AttentionParams params_of(const Context& ctx, const Step& step, const Tensor& out,
                            const Tensor& qkv) const {
    const bool is_prefill = step.phase == Phase::kPrefill;
    StepTokens tokens = step.tokens;
    tokens.page_table = page_table_;  // the page table of the layers with this window
    return {.out = out,
            .qkv = qkv,
            .layout = shape_.layout(),
            .k_cache = keys_,
            .v_cache = values_,
            .k_scales = key_scales_,
            .v_scales = value_scales_,
            .scale = shape_.softmax_scale,
            .num_heads = shape_.num_heads,
            .num_kv_heads = shape_.num_kv_heads,
            .head_dim = shape_.head_dim,
            .window = shape_.window,
            .by_position = step.verify,
            .selection = sparse_ ? sparse_->select(ctx, qkv, shape_.layout(), tokens, !is_prefill)
                                 : BlockSelection(),
            .sinks = sinks_,
            .tokens = tokens,
            .scratch = partials_};
  }
  // AttentionOp::begin. If `splits`, it may leave attention_combine to the next launch.
  static AttentionParams attend(const Context& ctx, const Step& step, AttentionParams params,
                                bool splits) {
    if (step.phase == Phase::kPrefill) {
      attention_prefill(ctx, params);
    } else if (step.tokens.num_tokens > kMaxScratchTokens) {
      if (!params.rotary.qkv.empty()) rotary_kv(ctx, params.rotary);
      params.rotary = {};
      decode_in_groups(ctx, params);
    } else if (!splits || !params.selection.empty()) {
      attention_decode(ctx, params);
    } else {
      attention_splits(ctx, params);
      return params;
    }
    return {};
  }
  // Groups of sequences run one after another and reuse the scratch, so its size does not grow with
  // the number of sequences.
  static void decode_in_groups(const Context& ctx, const AttentionParams& all) {
    const StepTokens& tokens = all.tokens;
    const int seq_rows = tokens.num_tokens / tokens.num_seqs;
    CHECK_STATE(seq_rows * tokens.num_seqs == tokens.num_tokens && seq_rows <= kMaxScratchTokens,
                "a decode step has {} tokens of {} sequences, expected equally many of each",
                tokens.num_tokens, tokens.num_seqs);
    const int group = kMaxScratchTokens / seq_rows;
    for (int seq = 0; seq < tokens.num_seqs; seq += group) {
      const int count = std::min(group, tokens.num_seqs - seq), first = seq * seq_rows;
      AttentionParams params = all;
      params.out = all.out.rows(first, count * seq_rows);
      params.qkv = all.qkv.rows(first, count * seq_rows);
      params.tokens = sequences_of(tokens, seq, count);
      if (!all.selection.empty()) {
        params.selection.words = all.selection.words.rows(first, count * seq_rows);
      }
      attention_decode(ctx, params);
    }
  }

  const ModelSpec& spec_;
  const Params params_;
  const AttentionShape shape_;
  std::string prefix_, scope_;
  Timeline phase_;
  bool adds_;  // BlockConfig::adds
  std::optional<SparseKeys> sparse_;
  std::string gate_name_;
  std::unique_ptr<LinearMethod> qkv_, out_, gate_;  // gate_ is null without gate_proj and head_gate
  RotaryTable rotary_;
  ModelState::PagedId keys_id_, values_id_, key_scales_id_, value_scales_id_;
  MemoryPlan::Id bias_id_ = 0, q_norm_id_ = 0, k_norm_id_ = 0, qkv_id_ = 0, out_id_ = 0,
                 partial_id_ = 0, gate_id_ = 0, o_bias_id_ = 0, sinks_id_ = 0;
  int64_t max_tokens_ = 0, partial_floats_ = 0;
  bool scales_queries_ = false;  // the context may be longer than query_scale_length
  Tensor keys_, values_;         // [pages, Hkv, 64, D]
  const int* page_table_ = nullptr;
  Tensor key_scales_, value_scales_;  // [pages, Hkv, 64, 1]; empty without an fp8 cache
  Tensor bias_, q_norm_, k_norm_, qkv_buffer_, out_buffer_, partials_;
  Tensor gate_buffer_, o_bias_, sinks_;
};

class SparseAttentionBlock : public AttentionBlock {
 public:
  explicit SparseAttentionBlock(const BlockConfig& config)
      : AttentionBlock(config, SparseKeys(config.params)) {}
};

REGISTER_BLOCK("attention", AttentionBlock);
REGISTER_BLOCK("sparse_attention", SparseAttentionBlock);

}  // namespace
}  // namespace cpmcu
