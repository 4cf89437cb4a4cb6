// One model on one device, or one GPU's part of it (engine/ranks.h): load, prefill, decode,
// release.
//
// Not thread-safe: one thread drives it. Steps are enqueued and collected separately, so that the
// host can launch ahead. The device writes results to mapped memory, in the order of the steps.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/exchange.h"
#include "core/weights.h"
#include "engine/batch.h"
#include "engine/graph_runner.h"
#include "engine/pages.h"
#include "engine/runtime_config.h"
#include "kernels/gemm/cublaslt.h"
#include "speculative/step.h"
#include "state/page_shares.h"

namespace cpmcu {

// The cached prefix of a sequence: whole pages, which the sequence shares. `pages` has one item for
// each group of layers. In group 0 the item has all pages of the prefix, in other groups those
// that a token behind the prefix reads.
struct CachedPrefix {
  std::vector<HeldPages> pages{};
  int num_tokens = 0;
};

class Engine {
 public:
  // Maximum number of steps that are enqueued and not collected.
  static constexpr int kMaxInFlight = 8;

  // The output of a step for one sequence.
  struct SlotOutput {
    int slot = 0;
    std::vector<int> tokens{};
    std::vector<TokenLogprobs> logprobs{};  // one for each token, if the sequence asks for them
    int num_logprobs = -1;
    bool finished = false;  // the device ended the sequence
    InnerCounts inner{};    // counts of the draft's own speculative steps
  };
  using DraftedTree = SpeculativeStep::DraftedTree;

  // Plans all memory and allocates none. If it does not fit, throws Error(kMemory) with the sizes.
  // Without `draft`, decode steps are plain. `rank`, below config.num_ranks, selects the part of
  // the model. Call `plan_pages`, then `allocate`.
  Engine(const ModelSpec& spec, const RuntimeConfig& config,
         const std::optional<DrafterSpec>& draft, int rank);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  // Pages of each group that fit into the memory.
  const std::vector<int64_t>& most_pages() const { return most_pages_; }
  // Plans `num_pages` of each group, which determine `max_model_len`.
  void plan_pages(const std::vector<int64_t>& num_pages);
  void allocate();
  // This rank's exchange, which Ranks connects to the others; null: there is one rank.
  Exchange* exchange() { return ctx_.exchange == nullptr ? nullptr : &exchange_; }
  void silence();             // see Ranks::silence
  void synchronize_device();  // waits until all steps are done

  // ---- load
  const WeightTable& weights() const { return weights_; }
  void load_file(const std::string& path, const std::vector<FileEntry>& entries,
                 const std::function<void(int64_t)>& progress);
  void load_array(const std::string& name, DType dtype, const std::vector<int64_t>& shape,
                  const void* data);
  void finish_loading();

  // ---- sequences
  // `ids`: the tokens of the sequence so far. The first `num_prompt` are the prompt; penalties
  // count prompt and generated tokens separately.
  // `cached`: the prefix whose state exists; prefill starts behind it. `reserve` and
  // `reserve_windows` take the pages beyond `cached.pages`, and `pages().load` fills them.
  int add_sequence(const SamplingConfig& sampling, const std::vector<int>& ids, int num_prompt,
                   const CachedPrefix& cached = {});
  void release(int slot);
  // Gives the pages of a slot back, but keeps its sequence. Before its next step, `reserve` and
  // `reserve_windows` must take pages again and `pages().load` must fill them. No step of the slot
  // may be in flight.
  void vacate(int slot);
  // Grows the slot to hold `num_tokens`; false if too few pages are free. If only steps in flight
  // still read the needed pages, waits for these steps.
  bool reserve(int slot, int num_tokens);
  // Takes the pages of the slot's next step in the groups of layers with a window. After the step,
  // the slot has at most `num_tokens` tokens. Pages before the window are given back. Every step
  // calls this function, and throws if too few pages are free.
  bool reserve_windows(int slot, int num_tokens);
  // Takes the pages of one more decode step of these slots, in order. Returns the number of slots
  // before the first one whose pages are not free.
  int reserve_step(const std::vector<int>& slots);
  // The pages of each group that `reserve` (num_tokens) and `reserve_windows` (step_end) would
  // lack, even after the steps in flight.
  std::vector<int> num_missing(int slot, int num_tokens, int step_end) const;

  // Owners and copies of pages. The prefix cache owns pages as slots do.
  Pages& pages() { return pages_; }

  // ---- steps
  // write(first_row, rows, logits [rows, V]) for consecutive rows of a step, on the host.
  using WriteLogits = std::function<void(int, int, const float*)>;
  // `masks`: one for each sequence that draws a token, in order. `write`: receives the logits of
  // every row; the call then waits for the device. `skip_draft`: the drafter does not process the
  // chunks. Later drafts of these sequences are worse, but no emitted token changes.
  void prefill(const std::vector<PrefillItem>& items, const TokenMasks& masks = {},
               const WriteLogits& write = nullptr, bool skip_draft = false);
  // `shape`: the shape of the draft; by default the drafter's largest. It changes no emitted token,
  // unless verify_strategy is topp.
  void decode(const std::vector<int>& slots, std::optional<DraftShape> shape = {});
  // A decode step in two halves, for sequences with token masks. The mask of a node depends on the
  // tokens before it, and only the host can compute it. `begin_masked` returns the tree of each
  // slot while the forward pass runs. `end_masked` takes the masks of the nodes, draws and accepts.
  // Another step or a release between the halves abandons the open step.
  std::vector<DraftedTree> begin_masked(const std::vector<int>& slots,
                                        std::optional<DraftShape> shape = {});
  void end_masked(const TokenMasks& masks);
  int in_flight() const { return static_cast<int>(in_flight_.size()); }
  std::vector<SlotOutput> collect();

  // ---- facts
  const MemoryPlan& memory_plan() const { return plan_; }
  Device device() const { return ctx_.device; }
  const RuntimeConfig& config() const { return config_; }
  const ModelSpec& spec() const { return spec_; }
  int max_model_len() const { return max_tokens_; }
  int chunk_length() const { return limits_.max_tokens; }
  // Pages of group 0, without those of the idle slot. A page holds 64 tokens of a sequence.
  int num_pages() const { return states_.group(0).pool().num_pages() - num_idle_pages_; }
  int num_free_pages() const { return states_.group(0).pool().num_unowned(); }
  // An upper bound of the tokens that a decode step emits for a sequence.
  int tokens_per_step() const { return step_.max_path(); }
  int num_rewritten() const { return step_.num_rewritten(); }
  // The shapes of `decode` among which each step may choose.
  std::vector<DraftShape> draft_shapes() const { return step_.shapes(); }
  int launch_ahead() const { return ctx_.compute_capability > 0 ? 2 : 1; }
  std::map<std::string, int64_t> counters() const;
  // The launches of a pass of the target on this device, or on one of `capability` (CutTarget).
  std::vector<LaunchRow> launches(Phase phase, std::optional<int> capability = {}) const;
  // For tests: cuts the target's pass for a device of `capability`. On the CPU a fused layer runs
  // op by op.
  void cut_for(int capability);

 private:
  struct Slot {
    bool used = false;
    bool has_root = false;  // its last prefill drew the token that decoding starts from
    // Number of sequences so far. It tells a step whether its sequence is still in the slot.
    uint64_t generation = 0;
    int num_logprobs = -1;
    int num_shared = 0;        // tokens of the cached prefix that the sequence began with
    int length = 0;            // cached tokens after the last collected step
    int in_flight_tokens = 0;  // maximum number of tokens that the steps in flight may add
  };
  struct StepInFlight {
    uint64_t number = 0;
    bool decodes = false;  // a decode step: adds up to tokens_per_step tokens to each sequence
    // The slots that draw a token, with their generations.
    std::vector<std::pair<int, uint64_t>> sampled{};
  };

  void plan_memory();
  std::vector<PageDemand> page_demands() const;
  void plan_buffers(int max_tokens);
  void bind();
  void plan_exchange();
  void bind_exchange();
  void check_exchange() const;
  void check_ready() const;
  void begin_step();
  void end_step(const std::vector<int>& sampled_slots, bool decodes);
  SpeculativeStep::Batch begin_decode(const std::vector<int>& slots,
                                      std::optional<DraftShape> shape);
  void end_decode(const std::vector<int>& slots);
  GraphRunner::Key key_of(const SpeculativeStep::Batch& batch, GraphRunner::Part part) const;
  void upload_masks(const TokenMasks& masks, int num_rows);
  void run_prefill(const std::vector<PrefillItem>& items, int num_sampled, bool masked,
                   const WriteLogits& write, bool skip_draft);
  Step prefill_step(const std::vector<PrefillItem>& items) const;
  void read_logits(const Tensor& hidden, const WriteLogits& write);
  int padded_seqs(int num_seqs) const;
  int length_bound(int slot) const;
  int kv_bucket(int num_tokens) const;
  void check_slot(int slot) const;
  void check_distinct(std::vector<int> slots) const;
  void check_ids(const std::vector<int>& ids) const;
  void ensure_room(int slot, int num_tokens);

  const int rank_;
  std::optional<ModelSpec> whole_;  // the undivided model; empty: there is one rank
  ModelSpec spec_;                  // this rank's part of the model
  RuntimeConfig config_;
  DeviceContext ctx_;
  Exchange exchange_;
  MemoryPlan::Id receive_id_ = 0, rounds_id_ = 0;
  std::unique_ptr<CublasLt> cublas_;
  StepLimits limits_;
  int max_tokens_ = 0;  // maximum number of tokens of one sequence
  // The slot that pads a step to one of few numbers of sequences. It holds no sequence and emits
  // nothing. -1: steps are not padded.
  int idle_slot_ = -1;
  int num_idle_pages_ = 0;
  std::vector<int64_t> most_pages_;
  MemoryPlan plan_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<WeightLoader> loader_;
  WeightTable weights_;
  StateCache states_;
  ModelState& state_;
  Transformer model_;
  Sampler sampler_;
  SpeculativeStep step_;
  StagedBlock prefill_block_, decode_block_;
  PrefillInputs prefill_inputs_{};
  ResultRing ring_;
  uint64_t num_steps_ = 0;
  Pages pages_;
  std::optional<GraphRunner> graphs_;
  MemoryPlan::Id last_rows_id_ = 0;
  Tensor last_rows_;  // [slots, H]: hidden states of the rows that draw a token
  std::vector<Slot> slots_;
  std::vector<int> decode_slots_;  // the slots whose numbers are in device memory
  // The open masked step, which waits for its masks.
  std::optional<SpeculativeStep::Batch> masked_batch_;
  std::vector<int> masked_slots_;
  std::deque<StepInFlight> in_flight_;
  int64_t num_waits_ = 0;
  bool ready_ = false;
};

}  // namespace cpmcu
