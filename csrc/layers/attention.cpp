// Grouped-query attention with rotary positions over the paged KV cache: "attention".
#include "kernels/attention/attention.h"

#include <cmath>

#include "kernels/rotary_kv.h"
#include "layers/block.h"
#include "layers/rotary.h"
#include "linear/linear.h"
#include "linear/product_queue.h"

namespace cpmcu {
namespace {

class AttentionBlock : public Block {
 public:
  explicit AttentionBlock(const BlockConfig& config)
      : spec_(config.spec),
        prefix_(config.prefix),
        scope_(config.scope),
        layer_(config.kv_layer),
        window_(config.window),
        phase_(config.phase) {
    const int64_t q = int64_t{spec_.num_attention_heads} * spec_.head_dim;
    const int64_t kv = int64_t{spec_.num_key_value_heads} * spec_.head_dim;
    const std::string attn = prefix_ + "self_attn.";
    qkv_ =
        make_linear(spec_.linear_method_of(attn + "qkv_proj"),
                    {.parts = {{attn + "q_proj", q}, {attn + "k_proj", kv}, {attn + "v_proj", kv}},
                     .in_features = config.in_features ? config.in_features : spec_.hidden_size,
                     .dtype = spec_.dtype,
                     .options = spec_.linear_options,
                     .name = attn + "qkv_proj"});
    out_ = make_linear(spec_.linear_method_of(attn + "o_proj"),
                       {.parts = {{attn + "o_proj", spec_.hidden_size}},
                        .in_features = q,
                        .dtype = spec_.dtype,
                        .options = spec_.linear_options});
  }

  void plan(MemoryPlan& plan, const StepLimits& limits) override {
    qkv_->plan(plan, limits);
    out_->plan(plan, limits);
    const int64_t bytes = size_of(spec_.dtype);
    if (spec_.qkv_bias) {
      bias_id_ = plan.add(prefix_ + "self_attn.qkv_proj.bias", "weights", bytes * spec_.qkv_size());
    }
    if (spec_.qk_norm) {
      q_norm_id_ = plan.add(prefix_ + "self_attn.q_norm", "weights", bytes * spec_.head_dim);
      k_norm_id_ = plan.add(prefix_ + "self_attn.k_norm", "weights", bytes * spec_.head_dim);
    }
    rotary_.plan(plan, spec_, scope_);
    qkv_id_ = plan.add_scratch("attention.qkv", bytes * limits.max_rows * spec_.qkv_size(),
                               phase_ + 1, phase_ + 2);
    out_id_ = plan.add_scratch("attention.out",
                               bytes * limits.max_rows * spec_.num_attention_heads * spec_.head_dim,
                               phase_ + 2, phase_ + 3);
    if (limits.is_cuda()) {
      partial_floats_ = attention_scratch_floats(limits.max_decode_rows, spec_.num_attention_heads,
                                                 spec_.head_dim, limits.max_model_len);
    }
    partial_id_ =
        plan.add_scratch("attention.partials", 4 * partial_floats_, phase_ + 2, phase_ + 2);
    max_rows_ = limits.max_rows;
  }

  void bind(const Arena& arena) override {
    qkv_->bind(arena);
    out_->bind(arena);
    if (spec_.qkv_bias) bias_ = arena.tensor(bias_id_, spec_.dtype, {spec_.qkv_size()});
    if (spec_.qk_norm) {
      q_norm_ = arena.tensor(q_norm_id_, spec_.dtype, {spec_.head_dim});
      k_norm_ = arena.tensor(k_norm_id_, spec_.dtype, {spec_.head_dim});
    }
    rotary_.bind(arena);
    qkv_buffer_ = arena.tensor(qkv_id_, spec_.dtype, {max_rows_, spec_.qkv_size()});
    out_buffer_ =
        arena.tensor(out_id_, spec_.dtype, {max_rows_, spec_.num_attention_heads * spec_.head_dim});
    partials_ = arena.tensor(partial_id_, DType::kF32, {partial_floats_});
  }

  void list_tensors(WeightTable& table) override {
    qkv_->list_tensors(table);
    out_->list_tensors(table);
    const int64_t q = int64_t{spec_.num_attention_heads} * spec_.head_dim;
    const int64_t kv = int64_t{spec_.num_key_value_heads} * spec_.head_dim;
    if (spec_.qkv_bias) {
      table.add(prefix_ + "self_attn.q_proj.bias", bias_.rows(0, q));
      table.add(prefix_ + "self_attn.k_proj.bias", bias_.rows(q, kv));
      table.add(prefix_ + "self_attn.v_proj.bias", bias_.rows(q + kv, kv));
    }
    if (spec_.qk_norm) {
      table.add(prefix_ + "self_attn.q_norm.weight", q_norm_);
      table.add(prefix_ + "self_attn.k_norm.weight", k_norm_);
    }
  }

  void finish_loading(const Context& ctx) override {
    qkv_->finish_loading(ctx);
    out_->finish_loading(ctx);
    rotary_.upload(ctx, spec_);
  }

  std::string norm_name() const override { return prefix_ + "input_layernorm"; }

  void forward(const Context& ctx, const Step& step, const Tensor& hidden, const Tensor& x,
               const KvCache& cache) const override {
    const Tensor qkv = qkv_buffer_.rows(0, step.rows.num_rows);
    const Tensor out = out_buffer_.rows(0, step.rows.num_rows);
    qkv_->forward(ctx, step.phase, qkv, x, 1, 0);
    const RotaryKvParams rotary{.qkv = qkv,
                                .bias = bias_,
                                .q_norm = q_norm_,
                                .k_norm = k_norm_,
                                .norm_eps = spec_.rms_norm_eps,
                                .inv_freq = rotary_.inv_freq(),
                                .attention_scaling = spec_.rope_attention_scaling,
                                .k_cache = cache.keys(layer_),
                                .v_cache = cache.values(layer_),
                                .num_heads = spec_.num_attention_heads,
                                .num_kv_heads = spec_.num_key_value_heads,
                                .head_dim = spec_.head_dim,
                                .rows = step.rows};
    ProductQueue* const queue = ProductQueue::of(ctx);
    if (queue == nullptr || !queue->push(rotary)) rotary_kv(ctx, rotary);
    const AttentionParams params{.out = out,
                                 .qkv = qkv,
                                 .k_cache = cache.keys(layer_),
                                 .v_cache = cache.values(layer_),
                                 .scale = 1 / std::sqrt(static_cast<float>(spec_.head_dim)),
                                 .num_heads = spec_.num_attention_heads,
                                 .num_kv_heads = spec_.num_key_value_heads,
                                 .head_dim = spec_.head_dim,
                                 .window = window_,
                                 .by_position = step.verify,
                                 .rows = step.rows,
                                 .scratch = partials_};
    if (step.phase == Phase::kPrefill) {
      attention_prefill(ctx, params);
    } else if (queue == nullptr) {
      attention_decode(ctx, params);
    } else {
      attention_splits(ctx, params);
      queue->push(params);
    }
    out_->forward(ctx, step.phase, hidden, out, spec_.residual_scale, 1);
  }

 private:
  const ModelSpec& spec_;
  std::string prefix_, scope_;
  int layer_;
  int window_;
  Timeline phase_;
  std::unique_ptr<LinearMethod> qkv_, out_;
  RotaryTable rotary_;
  MemoryPlan::Id bias_id_ = 0, q_norm_id_ = 0, k_norm_id_ = 0, qkv_id_ = 0, out_id_ = 0,
                 partial_id_ = 0;
  int64_t max_rows_ = 0, partial_floats_ = 0;
  Tensor bias_, q_norm_, k_norm_, qkv_buffer_, out_buffer_, partials_;
};

REGISTER_BLOCK("attention", AttentionBlock);

}  // namespace
}  // namespace cpmcu
