// One speculative step: propose, verify, accept. The functions at the end build the arguments.
#include "speculative/step.h"

#include <algorithm>

#include "kernels/layer/gather_rows.h"

namespace cpmcu {

void SpeculativeStep::propose(const Context& ctx, const Batch& batch) {
  Draft draft;
  if (batch.shape.depth > 0) draft = drafter_->propose(ctx, draft_batch(batch));
  tree_build(
      ctx,
      {.draft = draft, .trees = trees_of(batch), .seq_slots = batch.seq_slots, .slots = slots_});
}

void SpeculativeStep::verify(const Context& ctx, const Batch& batch, bool goes_on) {
  Step step = verify_step(batch);
  step.accepts_all = goes_on && batch.shape.tree_size == 1;
  const Tensor hidden = target_.model.forward(ctx, step);
  if (logits_fit(batch)) target_.model.head(ctx, hidden);
}

void SpeculativeStep::accept(const Context& ctx, const Batch& batch, bool masked,
                             const ResultSink& sink) {
  draw(ctx, batch, masked);
  accept_tree(ctx, {.trees = trees_of(batch),
                    .drawn = target_.sampler.tokens(),
                    .logprobs = target_.sampler.logprobs(),
                    .seq_slots = batch.seq_slots,
                    .sampling = target_.sampler.sampling(),
                    .candidates = target_.sampler.candidates(),
                    .verify_window = target_.sampler.verification().window,
                    .state = slots_,
                    .stops = stops_,
                    .inner = batch.shape.depth > 0 ? drafter_->inner_counts() : nullptr,
                    .sink = sink});
  commit(ctx, batch);
}

// Draws a token at each node. If the logits of all nodes do not fit, head and sampler run on groups
// of whole trees.
void SpeculativeStep::draw(const Context& ctx, const Batch& batch, bool masked) {
  const TokenTrees trees = trees_of(batch);
  const int num_tokens = batch.num_tokens(), num_nodes = trees.num_nodes;
  const Tensor hidden = target_.model.hidden(num_tokens);
  const int group_size =
      logits_fit(batch) ? num_tokens : target_.model.max_logit_rows() / num_nodes * num_nodes;
  for (int row = 0; row < num_tokens; row += group_size) {
    const int count = std::min(group_size, num_tokens - row);
    const Tensor logits = logits_fit(batch) ? target_.model.logits(count)
                                            : target_.model.head(ctx, hidden.rows(row, count), row);
    target_.sampler.draw(ctx, logits, trees.token_slots + row, trees.token_positions + row, &trees,
                         masked, row);
  }
}

// Moves the KV entries and hidden states of accepted nodes into place. Then each block commits the
// rest of its state.
void SpeculativeStep::commit(const Context& ctx, const Batch& batch) {
  const int num_tokens = batch.num_tokens();
  KeepAcceptedParams keep{.page_table = states_->page_table(),
                          .max_pages = states_->max_pages(),
                          .num_seqs = batch.num_seqs,
                          .num_nodes = batch.shape.tree_size,
                          .seq_slots = batch.seq_slots,
                          .lengths = slots_.lengths,
                          .accepted = slots_.accepted};
  if (needs_.final) {
    keep.hidden = target_.model.final_hidden(num_tokens);
    keep.accepted_hidden = accepted_.final;
  }
  state_->commit(ctx, keep);
  if (!needs_.layers.empty()) {
    keep.hidden = target_.model.aux_hidden(num_tokens);
    keep.accepted_hidden = accepted_.layers;
    keep_accepted(ctx, keep);
  }
  target_.model.commit(ctx, verify_step(batch));
}

// ---- prompts and sequences

void SpeculativeStep::draft_prompt(const Context& ctx, DraftPrompt prompt, bool skip) {
  if (!drafter_) return;
  prompt.hidden = hidden_of(ctx, prompt.tokens.num_tokens);
  prompt.accepted = accepted_;
  if (!skip) drafter_->prefill(ctx, prompt);
  keep_hidden(ctx, prompt.hidden, prompt.last_rows, prompt.slot_rows,
              prompt.tokens.num_seqs * max_path());
}

HiddenStates SpeculativeStep::hidden_of(const Context& ctx, int num_tokens) const {
  HiddenStates hidden;
  if (needs_.final) {
    hidden.final = final_.rows(0, num_tokens);
    target_.model.final_norm(ctx, hidden.final, target_.model.hidden(num_tokens));
  }
  if (!needs_.layers.empty()) hidden.layers = target_.model.aux_hidden(num_tokens);
  return hidden;
}

void SpeculativeStep::keep_hidden(const Context& ctx, const HiddenStates& hidden, const int* rows,
                                  const int* slot_rows, int num_rows) const {
  const auto keep = [&](const Tensor& accepted, const Tensor& from) {
    if (from.empty()) return;
    gather_rows(
        ctx,
        {.out = accepted, .x = from, .index = rows, .out_index = slot_rows, .num_rows = num_rows});
  };
  keep(accepted_.final, hidden.final);
  keep(accepted_.layers, hidden.layers);
}

void SpeculativeStep::reset(const Context& ctx, int slot, const SlotStop& stop,
                            const std::vector<int>& cached) {
  stops_staging_[slot] = stop;
  copy_to_device(ctx.device, stops_ + slot, stops_staging_ + slot, sizeof(SlotStop), ctx.stream);
  if (!drafter_ || cached.empty()) return;
  copy_to_device(ctx.device, slots_.history + int64_t{slot} * slots_.max_len, cached.data(),
                 static_cast<int64_t>(4 * cached.size()), ctx.stream);
  synchronize(ctx.device, ctx.stream);  // the ids lie in pageable memory
}

void SpeculativeStep::publish_trees(const Context& ctx, const Batch& batch) {
  if (!drafter_) return;
  const int count = batch.num_tokens();
  copy_to_host(ctx.device, trees_staging_, trees_.tokens, int64_t{4} * count, ctx.stream);
  copy_to_host(ctx.device, trees_staging_ + count, trees_.parents, int64_t{4} * count, ctx.stream);
  trees_ready_->record(ctx.stream);
}

std::vector<SpeculativeStep::DraftedTree> SpeculativeStep::read_trees(const Batch& batch) const {
  if (!drafter_) return std::vector<DraftedTree>(batch.num_seqs, {.tokens = {0}, .parents = {-1}});
  trees_ready_->wait();
  const int num_nodes = batch.shape.tree_size, count = batch.num_tokens();
  const int *tokens = trees_staging_, *parents = trees_staging_ + count;
  std::vector<DraftedTree> trees;
  for (int node = 0; node < count; node += num_nodes) {
    trees.push_back({.tokens = {tokens + node, tokens + node + num_nodes},
                     .parents = {parents + node, parents + node + num_nodes}});
  }
  return trees;
}

// ---- arguments

DraftBatch SpeculativeStep::draft_batch(const Batch& batch) const {
  return {.num_seqs = batch.num_seqs,
          .shape = batch.shape,
          .seq_slots = batch.seq_slots,
          .max_kv = batch.max_kv,
          .page_table = states_->page_table(),
          .max_pages = states_->max_pages(),
          .slots = slots_,
          .accepted = accepted_};
}

TokenTrees SpeculativeStep::trees_of(const Batch& batch) const {
  TokenTrees trees = trees_;
  trees.num_seqs = batch.num_seqs;
  trees.num_nodes = batch.shape.tree_size;
  return trees;
}

Step SpeculativeStep::verify_step(const Batch& batch) const {
  const int num_nodes = batch.shape.tree_size;
  Step step{.phase = Phase::kDecode,
            .ids = trees_.token_ids,
            .verify = num_nodes > 1,
            .tokens = {.num_tokens = batch.num_tokens(),
                       .num_seqs = batch.num_seqs,
                       .max_seq_tokens = num_nodes,
                       .max_kv = batch.max_kv,
                       .positions = trees_.token_positions,
                       .token_seqs = trees_.token_seqs,
                       .seq_slots = batch.seq_slots,
                       .seq_token_begin = trees_.seq_token_begin,
                       .slot_lengths = slots_.lengths,
                       .token_parents = trees_.parents,
                       .page_table = states_->page_table(),
                       .max_pages = states_->max_pages()},
            .accepted = slots_.accepted};
  if (step.verify) step.tokens.ancestor_masks = trees_.masks;
  return step;
}

int SpeculativeStep::lookahead() const {
  if (!drafter_) return 0;
  const auto [depth, tree_size] = largest_;
  return std::max({tree_size, depth + 1, drafter_->lookahead(depth)});
}

std::vector<DraftShape> SpeculativeStep::shapes() const {
  std::vector<DraftShape> shapes{{}};
  if (drafter_) {
    for (const DraftShape& shape : drafter_->shapes()) shapes.push_back(shape);
  }
  return shapes;
}

DraftShape SpeculativeStep::shrunk(const DraftShape& limit) const {
  return drafter_ ? drafter_->shrunk(limit) : DraftShape{};
}

void SpeculativeStep::check_shape(const DraftShape& shape) const {
  CHECK(shape.depth >= 0 && shape.tree_size >= 1 && shape.within(largest_),
        "a decode step of depth {} and {} nodes, expected a depth of 0 to {} and 1 to {} nodes",
        shape.depth, shape.tree_size, largest_.depth, largest_.tree_size);
  if (shape.depth == 0) {
    CHECK(shape.tree_size == 1, "a decode step of depth 0 and {} nodes, expected 1, the root",
          shape.tree_size);
  } else if (!drafter_->fits(shape)) {
    const DraftShape fits = drafter_->shrunk(shape);
    CHECK(false,
          "a decode step of depth {} and {} nodes, but within it the drafter \"{}\" drafts at most "
          "depth {} and {} nodes",
          shape.depth, shape.tree_size, method_, fits.depth, fits.tree_size);
  }
}

}  // namespace cpmcu
