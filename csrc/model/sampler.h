// Per-slot sampling parameters and masks in device memory, and the draw.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "kernels/sampling/sample.h"
#include "kernels/step/step_ops.h"
#include "kernels/tree/tree.h"

namespace cpmcu {

// Sampling parameters of one sequence; kernels/sampling/sample.h defines them.
struct SamplingConfig {
  float temperature = 0;
  float top_p = 1;
  int top_k = 0;
  float min_p = 0;
  uint64_t seed = 0;
  uint32_t stream = 0;
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  std::vector<std::pair<int, float>> logit_bias;
  int logprobs = -1;
  // Tokens whose log-probabilities are reported, instead of the likeliest.
  std::vector<int> logprob_ids;
  // Where the device ends the sequence. Used with a drafter; the host finds the same stops later.
  std::vector<int> stop_ids;
  int max_tokens = 1 << 30;
};

// The rule by which a decode step accepts drafted tokens. All but kTargetMatch are lossy: they
// change the text.
enum class VerifyStrategy {
  kTargetMatch,  // accepts tokens that the target draws
  kGreedy,       // accepts the most likely tokens; every draw takes the most likely one, too
  kTopP,         // accepts drawn tokens and other candidates (AcceptTreeParams)
};

struct Verification {
  VerifyStrategy strategy = VerifyStrategy::kTargetMatch;
  int window = 0;  // verify_window of kTopP
};

// Throws for an unknown strategy, named as in RuntimeConfig, and for a negative window.
Verification verification_named(const std::string& strategy, int window);

// The tokens that each row of a step may draw, in host memory. Row r uses mask rows[r]; -1: no
// mask.
struct TokenMasks {
  std::vector<int> rows;            // [R] numbers of masks; empty: no row has a mask
  const uint32_t* words = nullptr;  // [M, num_mask_words(V)]
  int num_masks = 0;                // M: number of masks, at most R
};

class Sampler {
 public:
  ~Sampler();

  void plan(MemoryPlan& plan, int num_slots, int max_rows, int vocab_size, int max_model_len,
            const Verification& verification);
  // A sampler whose sequences are all greedy. It takes no `reset` and no masks. `scope` begins the
  // names of its buffers.
  void plan_greedy(MemoryPlan& plan, const std::string& scope, int num_slots, int max_rows);
  void bind(const Arena& arena);
  void clear(const Context& ctx);  // called after `bind`, before the first sequence

  // Starts a sequence in `slot`. `ids` are its tokens so far, for penalties; the first `num_prompt`
  // are the prompt, and the keys and values of the first `num_cached` exist. Throws if a parameter
  // is out of range. Waits for the device only if the sequence uses penalties or a bias.
  void reset(const Context& ctx, const SlotState& state, int slot, const SamplingConfig& config,
             const std::vector<int>& ids, int num_prompt, int num_cached = 0);

  // Uploads the masks of the next masked draw, of `num_rows` rows. The device must have read the
  // masks of the previous upload.
  void upload_masks(const Context& ctx, const TokenMasks& masks, int num_rows);

  // Draws tokens()[first_row + r] from row r of logits [R, V]. Row r belongs to slot token_slots[r]
  // and position token_positions[r]. If `trees` is given, row r is node first_row + r of the trees,
  // and node first_row is a root; with drafted nodes, candidates() are written too. Graph-safe.
  void draw(const Context& ctx, const Tensor& logits, const int* token_slots,
            const int* token_positions, const TokenTrees* trees, bool masked,
            int first_row = 0) const;

  const int* tokens() const { return tokens_; }
  const TokenLogprobs* logprobs() const { return logprobs_; }
  const TokenCandidates* candidates() const { return candidates_; }  // null unless kTopP
  const Verification& verification() const { return verification_; }
  const SlotSampling* sampling() const { return sampling_; }
  int* counts() const { return counts_; }

 private:
  void check(const SamplingConfig& config) const;
  int64_t num_mask_ints(int num_masks) const {  // ints of mask_rows_ and the masks behind it
    return max_rows_ + int64_t{num_masks} * num_mask_words(vocab_size_);
  }

  Device device_;
  Verification verification_;
  bool is_greedy_ = false;
  int num_slots_ = 0, max_rows_ = 0, vocab_size_ = 0, max_model_len_ = 0;
  MemoryPlan::Id sampling_id_ = 0, counts_id_ = 0, bias_id_ = 0, tokens_id_ = 0, logprobs_id_ = 0,
                 ids_id_ = 0, masks_id_ = 0, candidates_id_ = 0;
  SlotSampling* sampling_ = nullptr;          // [slots]
  SlotSampling* sampling_staging_ = nullptr;  // [slots] pinned staging buffer
  int* counts_ = nullptr;                     // [slots, V], as in SampleParams
  float* bias_ = nullptr;                     // [slots, V]: logit_bias
  int* tokens_ = nullptr;                     // [R] drawn tokens
  TokenLogprobs* logprobs_ = nullptr;         // [R]
  TokenCandidates* candidates_ = nullptr;     // [R]; null unless kTopP
  int* ids_ = nullptr;           // [max_model_len] tokens of a sequence that `reset` starts
  int* mask_rows_ = nullptr;     // [R] numbers of masks, then the masks [R, num_mask_words(V)]
  int* mask_staging_ = nullptr;  // pinned staging buffer of mask_rows_
};

}  // namespace cpmcu
