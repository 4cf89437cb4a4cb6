// One model on one device: load, prefill, decode, release.
//
// Not thread-safe: one thread drives it. Steps are enqueued and collected separately, so that the
// host can launch ahead: results come back through mapped memory, in the order of the steps.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/weights.h"
#include "engine/batch.h"
#include "engine/graph_runner.h"
#include "engine/runtime_config.h"
#include "engine/sampler.h"
#include "kernels/gemm/cublaslt.h"
#include "model/transformer.h"
#include "spec/drafter.h"

namespace cpmcu {

class Engine {
 public:
  static constexpr int kMaxInFlight = 8;  // steps enqueued and not collected

  // What a step emitted for one sequence.
  struct SlotOutput {
    int slot = 0;
    std::vector<int> tokens{};
    std::vector<TokenLogprobs> logprobs{};  // one a token, if the sequence asks for them
    int num_logprobs = -1;
    bool finished = false;  // the device ended the sequence
  };

  // Node 0 is the root, whose token has been emitted. Unused nodes hold token -1.
  struct DraftedTree {
    std::vector<int> tokens{}, parents{};  // [N]
  };

  // Plans and allocates all memory. Throws Error(kMemory) that says what does not fit.
  // With a drafter, decode steps are speculative cycles.
  Engine(const ModelSpec& spec, const RuntimeConfig& config,
         const std::optional<DrafterSpec>& draft = std::nullopt);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // ---- load
  const WeightTable& weights() const { return weights_; }
  void load_file(const std::string& path, const std::vector<FileEntry>& entries,
                 const std::function<void(int64_t)>& progress);
  void load_array(const std::string& name, DType dtype, const std::vector<int64_t>& shape,
                  const void* data);
  void finish_loading();

  // ---- sequences
  // `ids` is what the sequence has said so far, of which the first `num_prompt` are the prompt
  // (penalties tell them apart).
  int add_sequence(const SamplingConfig& sampling, const std::vector<int>& ids, int num_prompt);
  void release(int slot);
  bool reserve(int slot, int num_tokens);

  // ---- steps
  // write(first_row, rows, logits [rows, V]) for consecutive rows of a step, on the host.
  using WriteLogits = std::function<void(int, int, const float*)>;
  // `masks`: of the sequences that draw a token, in order. With `write`, also reads every row's
  // logits back, and so waits for the device.
  void prefill(const std::vector<PrefillItem>& items, const TokenMasks& masks = {},
               const WriteLogits& write = nullptr);
  // `shape`: how much a speculative cycle drafts, at most (and by default) what the DrafterSpec
  // says. It never changes what is emitted.
  void decode(const std::vector<int>& slots, std::optional<DraftShape> shape = {});
  // The same in two halves, for sequences whose tokens are masked: which tokens a node of the tree
  // may draw depends on those before it, and only the host can tell. `begin_masked` returns a tree
  // of each slot while the forward pass over it runs (without a drafter: of the root alone);
  // `end_masked` takes masks of their nodes, draws and accepts. Another step, or a release,
  // between the two abandons the first.
  std::vector<DraftedTree> begin_masked(const std::vector<int>& slots,
                                        std::optional<DraftShape> shape = {});
  void end_masked(const TokenMasks& masks);
  int in_flight() const { return static_cast<int>(pending_.size()); }
  std::vector<SlotOutput> collect();
  // Logits of every position of a prompt.
  void prompt_logits(const std::vector<int>& ids, const WriteLogits& write);

  // ---- facts
  const MemoryPlan& memory_plan() const { return plan_; }
  const RuntimeConfig& config() const { return config_; }
  const ModelSpec& spec() const { return spec_; }
  int max_model_len() const { return limits_.max_model_len; }
  int chunk_length() const { return limits_.max_rows; }
  int num_pages() const { return cache_.num_pages(); }
  int num_free_pages() const { return cache_.num_free_pages(); }
  // Most tokens that a decode step emits for a sequence.
  int tokens_per_step() const { return draft_ ? draft_->depth + 1 : 1; }
  int launch_ahead() const { return ctx_.device.is_cuda() ? 2 : 1; }
  std::map<std::string, int64_t> counters() const;

 private:
  struct Slot {
    bool used = false;
    uint64_t generation = 0;  // tells a slot's owners apart in steps in flight
    int num_logprobs = -1;
    int in_flight_tokens = 0;  // bound of what steps in flight may add to host_lengths_
  };
  struct PendingStep {
    uint64_t number = 0;
    bool cycle = false;  // speculative: adds up to tokens_per_step tokens
    std::vector<std::pair<int, uint64_t>> sampled{};  // slot, its generation
  };

  void plan_memory();
  void bind();
  void check_ready() const;
  void begin_step();
  void end_step(const std::vector<int>& sampled_slots, bool cycle = false);
  int64_t feature_width() const;
  void plan_draft();
  void bind_draft();
  int lookahead() const;  // cells beyond its tokens that a sequence needs during a step
  void run_prefill(const std::vector<PrefillItem>& items, int num_rows, int num_sampled,
                   bool masked, const WriteLogits& write);
  void read_logits(const Tensor& hidden, const WriteLogits& write);
  GraphRunner::Key begin_decode_step(const std::vector<int>& slots, const DraftShape& shape);
  void check_shape(const DraftShape& shape) const;
  void end_decode_step(const std::vector<int>& slots);
  void propose(int num_seqs, int max_kv);
  void verify(int num_seqs, int max_kv);
  void accept(int num_seqs, bool masked);
  // The largest, for which memory is planned.
  DraftShape max_shape() const {
    return draft_ ? DraftShape{draft_->depth, draft_->tree_size} : DraftShape{};
  }
  TokenTrees trees_of(int num_seqs) const;
  void publish_trees(int num_seqs);
  std::vector<DraftedTree> read_trees(int num_seqs) const;
  void upload_masks(const TokenMasks& masks, int num_rows);
  void draft_prompts(const std::vector<PrefillItem>& items, const Tensor& hidden);
  void finish(const StepInputs::Device& inputs, int num_seqs, int num_sampled);
  StepRows step_rows(const StepInputs::Device& inputs, int num_rows, int num_seqs, int max_seq_rows,
                     int max_kv) const;
  Step decode_step(int num_seqs, int max_kv) const;
  Step verify_step(const TokenTrees& trees, int max_kv) const;
  BeginDecodeParams begin_params(int num_seqs) const;
  DraftBatch draft_batch(int num_seqs, int max_kv) const;
  AcceptTreeParams accept_params(const TokenTrees& trees) const;
  KeepAcceptedParams keep_params(const TokenTrees& trees) const;
  int length_bound(int slot) const;
  Step prefill_step(const std::vector<PrefillItem>& items, int num_rows) const;
  int kv_bucket(int num_cells) const;
  void check_slot(int slot) const;
  void check_ids(const std::vector<int>& ids) const;
  void check_room(int slot, int num_rows) const;
  SlotState slot_state() const;

  ModelSpec spec_;
  RuntimeConfig config_;
  DeviceContext ctx_;
  std::unique_ptr<CublasLt> cublas_;
  StepLimits limits_;
  MemoryPlan plan_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<WeightLoader> loader_;
  WeightTable weights_;
  std::optional<DrafterSpec> draft_;
  std::unique_ptr<Drafter> drafter_;
  Transformer model_;
  KvCache cache_;
  Sampler sampler_;
  StepInputs prefill_inputs_, decode_inputs_;
  ResultRing ring_;
  std::optional<GraphRunner> graphs_;
  MemoryPlan::Id lengths_id_ = 0, next_tokens_id_ = 0, last_rows_id_ = 0;
  int* lengths_ = nullptr;      // [slots] device
  int* next_tokens_ = nullptr;  // [slots] device
  Tensor last_rows_;            // [slots, H]: rows that draw a token
  // Speculation: trees, what was accepted, what the drafter has not seen yet.
  MemoryPlan::Id spec_ints_id_ = 0, tree_masks_id_ = 0, stops_id_ = 0, history_id_ = 0,
                 features_id_ = 0, pending_features_id_ = 0;
  int64_t num_spec_ints_ = 0;
  TokenTrees trees_;
  int *paths_ = nullptr, *num_emitted_ = nullptr, *zeros_ = nullptr, *history_ = nullptr;
  SlotStop* stops_ = nullptr;         // [slots]
  SlotStop* stops_mirror_ = nullptr;  // pinned
  int* trees_mirror_ = nullptr;       // pinned: tokens and parents, [2, B N]
  std::optional<Event> trees_ready_;  // in the mirror
  DraftState draft_state_;
  DraftShape shape_;  // of the decode step that is enqueued
  Tensor features_;   // [T, F] of a prompt chunk
  std::vector<Slot> slots_;
  std::vector<int> host_lengths_;  // what lengths_ will be once the steps in flight are done
  std::vector<int> decode_slots_;  // as they lie on the device
  std::vector<int> half_done_;     // slots of a decode step whose second half is still to come
  std::deque<PendingStep> pending_;
  uint64_t num_steps_ = 0;
  int64_t num_waits_ = 0;
  bool ready_ = false;
};

}  // namespace cpmcu
