#include "layers/sparse_keys.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

namespace cpmcu {

SparseKeys::SparseKeys(const Params& params)
    : rule_{.init_blocks = params.integer("init_blocks", SparseRule().init_blocks),
            .window_size = params.integer("window_size", SparseRule().window_size),
            .topk = params.integer("topk", SparseRule().topk),
            .dense_len = params.integer("dense_len", SparseRule().dense_len)} {
  check_rule(rule_);
}

Params SparseKeys::without_rule(const Params& params) {
  constexpr std::array<std::string_view, 4> kNames{"init_blocks", "window_size", "topk",
                                                   "dense_len"};
  Params rest;
  for (const auto& [name, value] : params.values()) {
    if (std::find(kNames.begin(), kNames.end(), name) == kNames.end()) rest.set(name, value);
  }
  return rest;
}

void SparseKeys::plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits,
                      const AttentionShape& shape, DType dtype, Timeline phase) {
  CHECK(!limits.is_cuda() || limits.max_kv <= kMaxSparseEntries,
        "sparse attention on CUDA holds up to {} tokens of a sequence, not {}: lower max_model_len",
        kMaxSparseEntries, limits.max_kv);
  PagedPlane plane{.rows_per_page = kFineRows,
                   .num_heads = shape.num_kv_heads,
                   .width = shape.head_dim,
                   .dtype = dtype};
  fine_id_ = state.add_paged(plane);
  plane.rows_per_page = 1;
  coarse_id_ = state.add_paged(plane);
  max_tokens_ = limits.max_tokens;
  num_heads_ = shape.num_heads;
  num_kv_heads_ = shape.num_kv_heads;
  head_dim_ = shape.head_dim;
  num_words_ = selection_words(limits.max_kv);
  selection_id_ = plan.add_scratch("attention.selection",
                                   8 * max_tokens_ * num_kv_heads_ * num_words_, phase, phase);
  if (limits.is_cuda()) {
    const int num_tokens = static_cast<int>(std::min<int64_t>(max_tokens_, kMaxScoredTokens));
    score_floats_ = select_scratch_floats(num_tokens, num_heads_, num_kv_heads_, limits.max_kv);
  }
  scores_id_ = plan.add_scratch("attention.block_scores", 4 * score_floats_, phase, phase);
  memory_bytes_ =
      limits.is_cuda() ? select_memory_bytes(limits.max_decode_tokens, num_kv_heads_) : 0;
  memory_id_ = plan.add_scratch("attention.select_memory", memory_bytes_, 0, kLoad);
}

void SparseKeys::bind(const Arena& arena, const ModelState& state) {
  keys_ = {.fine = state.paged(fine_id_), .coarse = state.paged(coarse_id_)};
  selection_ = arena.tensor(selection_id_, DType::kU64, {max_tokens_, num_kv_heads_, num_words_});
  scores_ = arena.tensor(scores_id_, DType::kF32, {score_floats_});
  memory_ = arena.tensor(memory_id_, DType::kU8, {memory_bytes_});
}

void SparseKeys::finish_loading(const Context& ctx) const {
  fill_bytes(ctx.device, memory_.data(), 0, memory_bytes_, ctx.stream);
}

int64_t SparseKeys::scratch_floats(int num_tokens, int num_heads, int head_dim, int max_kv) const {
  return sparse_scratch_floats(num_tokens, num_heads, head_dim, max_selected_splits(rule_, max_kv));
}

BlockSelection SparseKeys::select(const Context& ctx, const Tensor& qkv, const QkvLayout& layout,
                                  const StepTokens& tokens, bool keys_are_old) const {
  // All tokens are dense up to dense_len, but dense attention has other splits, and so other bits,
  // beyond kMaxDenseEntries.
  if (tokens.max_kv <= std::min(rule_.dense_len, kMaxDenseEntries)) return {};
  const Tensor selection = selection_.rows(0, tokens.num_tokens);
  select_blocks(ctx, {.selection = selection,
                      .qkv = qkv,
                      .layout = layout,
                      .keys = keys_,
                      .scale = 1 / std::sqrt(static_cast<float>(head_dim_)),
                      .num_heads = num_heads_,
                      .num_kv_heads = num_kv_heads_,
                      .head_dim = head_dim_,
                      .rule = rule_,
                      .keys_are_old = keys_are_old,
                      .tokens = tokens,
                      .scratch = scores_,
                      .memory = memory_});
  return {.words = selection,
          .dense_len = rule_.dense_len,
          .max_splits = max_selected_splits(rule_, tokens.max_kv)};
}

}  // namespace cpmcu
