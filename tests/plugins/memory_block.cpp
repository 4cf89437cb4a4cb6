// A plugin that adds a kind of block with its own state: "memory". CPU and float32 only. Compiled
// by tests/unit/test_extension_points.py.
//
// Token t with the normed input x[t] adds gain * (m[t] + s[t]) to the residual stream:
//   m[t] = decay * m[parent of t] + x[t]     a per-slot tensor; accepted tokens only
//   s[t] = sum of x over earlier pages       a paged plane with one row for each page
// s[t] omits the page of t and the page before it. All other earlier pages are full and committed,
// for every chunk length and every tree of depth below 64.
#include <cstring>

#include "layers/block.h"

namespace {

using namespace cpmcu;

class MemoryBlock : public Block {
 public:
  explicit MemoryBlock(const BlockConfig& config)
      : spec_(config.spec), prefix_(config.prefix), decay_(config.params.number("decay", 0.5f)) {
    config.params.check_known("a memory block", {"decay"});
  }

  void plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits) override {
    gain_id_ = plan.add(prefix_ + "memory.gain", "weights", 4 * width());
    state_id_ = state.add_slot({.name = prefix_ + "memory", .shape = {width()}});
    sums_id_ = state.add_paged(
        {.rows_per_page = 1, .width = static_cast<int>(width()), .dtype = DType::kF32});
    max_tokens_ = limits.max_tokens;
    // `commit` reads it after the step, so it is not scratch.
    rows_id_ = plan.add(prefix_ + "memory.rows", "state", 2 * 4 * max_tokens_ * width());
  }
  void bind(const Arena& arena, const ModelState& state) override {
    gain_ = arena.tensor(gain_id_, DType::kF32, {width()});
    memory_ = state.per_slot(state_id_);
    sums_ = state.paged(sums_id_);
    memories_ = arena.array<float>(rows_id_);
    inputs_ = memories_ + max_tokens_ * width();
  }
  void list_tensors(WeightTable& table) override { table.add(prefix_ + "memory.gain", gain_); }
  void finish_loading(const Context&) override {}
  std::string norm_name() const override { return prefix_ + "memory_norm"; }

  void append(OpList& ops, const Value& hidden, const Value& x) const override {
    ops.call(prefix_ + "memory", {hidden, x}, {hidden},
             [=, this](const Context&, const Step& step, const Rows& rows) {
               remember(step, rows(hidden), rows(x));
             });
  }
  void append_commit(OpList& ops) const override {
    ops.call(prefix_ + "memory.commit", {}, {},
             [this](const Context&, const Step& step, const Rows&) { commit(step); });
  }

 private:
  void remember(const Step& step, const Tensor& hidden, const Tensor& x) const {
    const StepTokens& tokens = step.tokens;
    const int64_t h = width();
    std::memcpy(inputs_, x.data(), 4 * tokens.num_tokens * h);
    for (int row = 0; row < tokens.num_tokens; ++row) {
      const int seq = tokens.token_seqs[row], slot = tokens.seq_slots[seq];
      const int first = tokens.seq_token_begin[seq], j = row - first;
      const int parent = tokens.token_parents == nullptr ? j - 1 : tokens.token_parents[row];
      const float* before =
          parent < 0 ? memory_.as<float>() + slot * h : memories_ + (first + parent) * h;
      float* memory = memories_ + row * h;
      for (int i = 0; i < h; ++i) memory[i] = decay_ * before[i] + inputs_[row * h + i];
      for (int i = 0; i < h; ++i)
        hidden.as<float>()[row * h + i] += gain_.as<float>()[i] * memory[i];
      for (int page = 0; page < tokens.positions[row] / kPageSize - 1; ++page) {
        const float* sum = sum_of(tokens, slot, page * kPageSize);
        for (int i = 0; i < h; ++i)
          hidden.as<float>()[row * h + i] += gain_.as<float>()[i] * sum[i];
      }
      if (step.phase == Phase::kPrefill) keep(tokens, slot, row, tokens.positions[row]);
    }
  }

  void commit(const Step& step) const {
    const StepTokens& tokens = step.tokens;
    const Accepted& accepted = step.accepted;
    for (int seq = 0; seq < tokens.num_seqs; ++seq) {
      const int slot = tokens.seq_slots[seq];
      const int* path = accepted.paths + slot * accepted.max_path;
      for (int j = 0; j < accepted.counts[slot]; ++j) {
        const int row = tokens.seq_token_begin[seq] + path[j];
        keep(tokens, slot, row, tokens.positions[row]);
      }
    }
  }

  int64_t width() const { return spec_.hidden_size; }
  float* sum_of(const StepTokens& tokens, int slot, int position) const {
    const int page = tokens.page_table[slot * tokens.max_pages + position / kPageSize];
    return sums_.as<float>() + page * width();
  }
  // The token at `position` of the slot is row `row` of the step.
  void keep(const StepTokens& tokens, int slot, int row, int position) const {
    std::memcpy(memory_.as<float>() + slot * width(), memories_ + row * width(), 4 * width());
    float* sum = sum_of(tokens, slot, position);
    if (position % kPageSize == 0) std::memset(sum, 0, 4 * width());
    for (int i = 0; i < width(); ++i) sum[i] += inputs_[row * width() + i];
  }

  const ModelSpec& spec_;
  std::string prefix_;
  float decay_;
  int64_t max_tokens_ = 0;
  MemoryPlan::Id gain_id_ = 0, rows_id_ = 0;
  ModelState::SlotId state_id_;
  ModelState::PagedId sums_id_;
  Tensor gain_;                                    // [H]
  Tensor memory_;                                  // [slots, H]
  Tensor sums_;                                    // [pages, 1, 1, H]
  float *memories_ = nullptr, *inputs_ = nullptr;  // [T, H] of the step
};

REGISTER_BLOCK("memory", MemoryBlock);

}  // namespace
