// Gemma 4's assistant: "gemma4_assistant". A small network without keys of its own:
//
//   x = pre_projection [embedding(id) | hidden state]
//   h = layers(x): a layer attends to the keys and values of the target's last layer of its kind
//   logits = lm_head of norm(h); the next hidden state = post_projection of norm(h)
//
// The hidden state is the target's after its final norm, of the last cached token. For a drafted
// token it is the state that its parent gave. All drafted tokens have the root's position. The
// assistant stores nothing, so a step without a draft leaves no gap, and prompts need no pass.
//
// Each of several ranks has the heads that read its part of the keys, and all other layers.
// Source: transformers, Gemma4AssistantForCausalLM.
#include <memory>
#include <vector>

#include "core/carver.h"
#include "kernels/layer/embedding.h"
#include "kernels/layer/gather_rows.h"
#include "kernels/tree/keyless_rows.h"
#include "layers/sublayer.h"
#include "model/model_part.h"
#include "pass/replay.h"
#include "speculative/beam_drafter.h"
#include "speculative/draft_head.h"
#include "speculative/head_parts.h"

namespace cpmcu {
namespace {

// The draft's layers read the target's cache, so they need its form and heads.
DrafterSpec with_cache_of(DrafterSpec spec, const ModelSpec& target) {
  if (!spec.model) return spec;
  spec.model->fp8_kv_cache = target.fp8_kv_cache;
  if (target.num_ranks > 1) {
    spec.model = with_part_of_attention(*spec.model, target.num_ranks, spec.scope);
  }
  return spec;
}

class Gemma4Assistant : public BeamDrafter {
 public:
  Gemma4Assistant(const DrafterSpec& spec, const ModelSpec& target)
      : BeamDrafter(with_cache_of(spec, target), target),
        whole_(target.num_ranks > 1 ? spec.model : std::nullopt),
        head_(spec_, vocab_ids_, target),
        pre_(HeadParts::make_layer(model(), spec_.scope + "pre_projection",
                                   2 * int64_t{target.hidden_size}, model().hidden_size)),
        post_(HeadParts::make_layer(model(), spec_.scope + "post_projection", model().hidden_size,
                                    target.hidden_size)),
        final_norm_(model(), spec_.scope + "norm") {
    spec_.options.check_known("a Gemma 4 assistant", {"topk", "vocab_ids", "own_head"});
    for (int i = 0; i < model().num_hidden_layers; ++i) {
      const LayerSpec layer = model().layer(i);
      CHECK(layer.size() == 2, "a layer of the assistant has {} blocks, expected 2", layer.size());
      const std::string prefix = spec_.scope + "layers." + std::to_string(i) + ".";
      const Timeline phases[] = {kMixer, kMlp};
      for (size_t block = 0; block < 2; ++block) {
        layers_.push_back(std::make_unique<Sublayer>(
            i, layer[block].kind,
            BlockConfig{.spec = model(),
                        .params = layer[block].params,
                        .prefix = prefix,
                        .scope = "",  // the scope of the target, whose keys are read
                        .phase = phases[block]}));
      }
    }
  }

  HiddenNeeds needs() const override { return {.final = true}; }
  int lookahead(int) const override { return 0; }

  void plan(MemoryPlan& plan, StateCache& states, const DraftLimits& limits) override {
    BeamDrafter::plan(plan, states, limits);
    of_target_ = &states.model("");
    max_rows_ = int64_t{limits.max_seqs} * topk_;
    const auto rows = static_cast<int>(max_rows_);
    const StepLimits step{.max_tokens = rows,
                          .max_decode_tokens = rows,
                          .max_kv = limits.max_kv,
                          .compute_capability = limits.compute_capability};
    pre_->plan(plan, step);
    post_->plan(plan, step);
    for (const auto& layer : layers_) layer->plan(plan, *of_target_, step);
    final_norm_.plan(plan);
    head_.plan(plan, step);
    rows_id_ = plan.add(spec_.scope + "rows", "state", carved_bytes([&](Carver& c) { layout(c); }));
    const int64_t element = size_of(model().dtype);
    const auto scratch = [&](const char* name, int64_t columns, int first) {
      return plan.add_scratch(spec_.scope + name, max_rows_ * columns * element, first, kSample);
    };
    both_id_ = scratch("concat", 2 * int64_t{target_.hidden_size}, kEmbed);
    hidden_id_ = scratch("hidden", model().hidden_size, kEmbed);
    normed_id_ = scratch("normed", model().hidden_size, kEmbed);
    branch_id_ = scratch("branch", model().hidden_size, kEmbed);
    if (whole_) part_id_ = scratch("part", model().hidden_size, kEmbed);
    recycled_id_ = scratch("recycled", target_.hidden_size, kEmbed);
  }

  void bind(const Arena& arena) override {
    BeamDrafter::bind(arena);
    pre_->bind(arena);
    post_->bind(arena);
    for (const auto& layer : layers_) layer->bind(arena, *of_target_);
    final_norm_.bind(arena);
    head_.bind(arena);
    Carver carver(arena.array<char>(rows_id_));
    layout(carver);
    const auto tensor = [&](MemoryPlan::Id id, int64_t columns) {
      return arena.tensor(id, model().dtype, {max_rows_, columns});
    };
    both_ = tensor(both_id_, 2 * int64_t{target_.hidden_size});
    hidden_ = tensor(hidden_id_, model().hidden_size);
    normed_ = tensor(normed_id_, model().hidden_size);
    branch_ = tensor(branch_id_, model().hidden_size);
    if (whole_) part_ = tensor(part_id_, model().hidden_size);
    recycled_ = tensor(recycled_id_, target_.hidden_size);
    pass_.append([&](OpList& ops) { append(ops); });
  }

  void list_tensors(WeightTable& table) override {
    pre_->list_tensors(table);
    post_->list_tensors(table);
    for (const auto& layer : layers_) layer->list_tensors(table);
    final_norm_.list_tensors(table);
    head_.list_tensors(table);
  }

  WeightTable divided_tensors() const override {
    return whole_ ? attention_tensors_of(*whole_, spec_.scope) : WeightTable();
  }

  void finish_loading(const Context& ctx, const TargetParts& target) override {
    BeamDrafter::finish_loading(ctx, target);
    embedding_table_ = target.embedding_table;
    pre_->finish_loading(ctx);
    post_->finish_loading(ctx);
    for (const auto& layer : layers_) layer->block().finish_loading(ctx);
    head_.finish_loading(ctx, target);
    pass_.cut(HeadParts::cut_target(ctx));
  }

  // The draft keeps nothing of a prompt.
  void prefill(const Context&, const DraftPrompt&) override {}

  Draft propose(const Context& ctx, const DraftBatch& batch) override {
    const int k = width_of(batch.shape);
    const DraftBeam beam = beam_of(batch);
    for (int level = 0; level < batch.shape.depth; ++level) {
      const Tensor last =
          level == 0 ? run(ctx, batch, 1, rows_.root_ids, batch.accepted.final, rows_.hidden_rows)
                     : run(ctx, batch, k, beam.token_ids, recycled_, beam.token_parents);
      expand(ctx, batch, level, last);
    }
    return select(ctx, batch);
  }

 protected:
  bool shifted() const override { return true; }
  int most_rows() const override { return topk_; }
  Tensor forward(const Context&, const Step&, const HiddenRows&, Source) override {
    CHECK_STATE(false, "a Gemma 4 assistant does not process accepted tokens");
    return {};
  }
  Tensor head(const Context& ctx, const Tensor& hidden) override {
    return head_.forward(ctx, hidden);
  }

 private:
  void layout(Carver& carver) {
    const int64_t b = limits_.max_seqs, rows = b * topk_;
    rows_ = {.row_slots = carver.take<int>(rows),
             .positions = carver.take<int>(rows),
             .token_seqs = carver.take<int>(rows),
             .seq_token_begin = carver.take<int>(rows + 1),
             .masks = carver.take<uint64_t>(rows),
             .root_ids = carver.take<int>(b),
             .hidden_rows = carver.take<int>(b)};
  }

  void append(OpList& ops) const {
    const Value both = ops.value("concat", both_), hidden = ops.value("hidden", hidden_),
                normed = ops.value("normed", normed_), branch = ops.value("branch", branch_);
    ops.linear(spec_.scope + "pre_projection", *pre_, hidden, both);
    for (size_t i = 0; i < layers_.size(); ++i) {
      if (whole_) ops.sum_over_ranks(i % 2 == 0 ? ops.value("part", part_) : Value{});
      layers_[i]->append(ops, hidden, normed, branch);
    }
    final_norm_.append(ops, normed, hidden);
    ops.linear(spec_.scope + "post_projection", *post_, ops.value("recycled", recycled_), normed);
  }

  // Runs k rows of each sequence. Row r has id ids[r] and hidden state x[index[r]]. Returns the
  // result after the final norm [B k, h]; `recycled_` then has the next hidden states.
  Tensor run(const Context& ctx, const DraftBatch& batch, int k, const int* ids, const Tensor& x,
             const int* index) {
    KeylessRowsParams rows = rows_;
    rows.num_seqs = batch.num_seqs;
    rows.num_rows = k;
    rows.seq_slots = batch.seq_slots;
    rows.lengths = batch.slots.lengths;
    rows.next_tokens = batch.slots.next_tokens;
    rows.accepted = batch.slots.accepted;
    rows.draft_lengths = draft_lengths_;
    const bool is_first = ids == rows_.root_ids;
    if (is_first || k > 1) keyless_rows(ctx, rows);
    const int num_rows = batch.num_seqs * k;
    const int64_t width = target_.hidden_size;
    const Tensor both = both_.rows(0, num_rows);
    const Tensor right(both.as<char>() + width * size_of(both.dtype()), both.dtype(),
                       {num_rows, width});
    embedding(ctx, {.out = Tensor(both.data(), both.dtype(), {num_rows, width}),
                    .table = embedding_table_,
                    .ids = ids,
                    .scale = target_.embed_scale,
                    .out_stride = 2 * width});
    gather_rows(ctx, {.out = right, .x = x, .index = index, .out_stride = 2 * width});
    StepTokens tokens{.num_tokens = num_rows,
                      .num_seqs = num_rows,
                      .max_seq_tokens = 1,
                      .max_kv = batch.max_kv,
                      .positions = rows.positions,
                      .token_seqs = rows.token_seqs,
                      .seq_slots = rows.row_slots,
                      .seq_token_begin = rows.seq_token_begin,
                      .slot_lengths = batch.slots.lengths,
                      .ancestor_masks = rows.masks,
                      .page_table = batch.page_table,
                      .max_pages = batch.max_pages};
    pass_.replay(ctx, {.phase = Phase::kDecode, .ids = ids, .tokens = tokens});
    return normed_.rows(0, num_rows);
  }

  const std::optional<ModelSpec> whole_;  // the undivided draft; empty: there is one rank
  DraftHead head_;
  std::unique_ptr<LinearMethod> pre_, post_;
  RmsNorm final_norm_;
  std::vector<std::unique_ptr<Sublayer>> layers_;
  Pass pass_;
  ModelState* of_target_ = nullptr;
  Tensor embedding_table_;
  KeylessRowsParams rows_;
  int64_t max_rows_ = 0;
  MemoryPlan::Id rows_id_ = 0, both_id_ = 0, hidden_id_ = 0, normed_id_ = 0, branch_id_ = 0,
                 recycled_id_ = 0, part_id_ = 0;
  Tensor both_;  // [B k, 2 H]: embeddings and hidden states; H is the target's hidden size
  Tensor hidden_, normed_, branch_;  // [B k, h] each
  Tensor part_;                      // [B k, h]: this rank's part of a sum over ranks
  Tensor recycled_;                  // [B k, H]: hidden states for the next level
};

REGISTER_DRAFTER("gemma4_assistant", Gemma4Assistant);

}  // namespace
}  // namespace cpmcu
