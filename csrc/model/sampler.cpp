#include "model/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace cpmcu {

Verification verification_named(const std::string& strategy, int window) {
  CHECK(window >= 0, "verify_window is {}, expected at least 0", window);
  if (strategy == "target_match") return {VerifyStrategy::kTargetMatch, window};
  if (strategy == "greedy") return {VerifyStrategy::kGreedy, window};
  CHECK(strategy == "topp", "verify_strategy is \"{}\", expected target_match, greedy or topp",
        strategy);
  return {VerifyStrategy::kTopP, window};
}

Sampler::~Sampler() {
  if (sampling_staging_ != nullptr) release_pinned(device_, sampling_staging_);
  if (mask_staging_ != nullptr) release_pinned(device_, mask_staging_);
}

void Sampler::plan(MemoryPlan& plan, int num_slots, int max_rows, int vocab_size, int max_model_len,
                   const Verification& verification) {
  verification_ = verification;
  num_slots_ = num_slots, max_rows_ = max_rows;
  vocab_size_ = vocab_size, max_model_len_ = max_model_len;
  const int64_t slot_words = int64_t{4} * num_slots * vocab_size;
  sampling_id_ =
      plan.add("sampling", "state", static_cast<int64_t>(sizeof(SlotSampling)) * num_slots);
  counts_id_ = plan.add("token_counts", "state", slot_words);
  bias_id_ = plan.add("logit_bias", "state", slot_words);
  ids_id_ = plan.add("history_ids", "state", int64_t{4} * max_model_len);
  tokens_id_ = plan.add("drawn_tokens", "state", int64_t{4} * max_rows);
  logprobs_id_ =
      plan.add("drawn_logprobs", "state", static_cast<int64_t>(sizeof(TokenLogprobs)) * max_rows);
  masks_id_ = plan.add("token_masks", "state", 4 * num_mask_ints(max_rows));
  if (verification.strategy == VerifyStrategy::kTopP) {
    candidates_id_ = plan.add("token_candidates", "state",
                              static_cast<int64_t>(sizeof(TokenCandidates)) * max_rows);
  }
}

void Sampler::plan_greedy(MemoryPlan& plan, const std::string& scope, int num_slots, int max_rows) {
  is_greedy_ = true;
  num_slots_ = num_slots, max_rows_ = max_rows;
  sampling_id_ =
      plan.add(scope + "sampling", "state", static_cast<int64_t>(sizeof(SlotSampling)) * num_slots);
  tokens_id_ = plan.add(scope + "drawn_tokens", "state", int64_t{4} * max_rows);
}

void Sampler::bind(const Arena& arena) {
  sampling_ = arena.array<SlotSampling>(sampling_id_);
  tokens_ = arena.array<int>(tokens_id_);
  if (is_greedy_) return;
  counts_ = arena.array<int>(counts_id_);
  bias_ = arena.array<float>(bias_id_);
  logprobs_ = arena.array<TokenLogprobs>(logprobs_id_);
  ids_ = arena.array<int>(ids_id_);
  if (verification_.strategy == VerifyStrategy::kTopP) {
    candidates_ = arena.array<TokenCandidates>(candidates_id_);
  }
  mask_rows_ = arena.array<int>(masks_id_);
}

void Sampler::clear(const Context& ctx) {
  device_ = ctx.device;
  const int64_t bytes = static_cast<int64_t>(sizeof(SlotSampling)) * num_slots_;
  sampling_staging_ = static_cast<SlotSampling*>(allocate_pinned(ctx.device, bytes));
  std::fill_n(sampling_staging_, num_slots_, SlotSampling{});
  copy_to_device(ctx.device, sampling_, sampling_staging_, bytes, ctx.stream);
  if (is_greedy_) return;
  mask_staging_ = static_cast<int*>(allocate_pinned(ctx.device, 4 * num_mask_ints(max_rows_)));
}

void Sampler::check(const SamplingConfig& config) const {
  CHECK(config.temperature >= 0 && std::isfinite(config.temperature),
        "temperature is {}, expected a finite number of at least 0", config.temperature);
  CHECK(config.top_p > 0 && config.top_p <= 1, "top_p is {}, expected above 0 and at most 1",
        config.top_p);
  CHECK(config.min_p >= 0 && config.min_p <= 1, "min_p is {}, expected 0 to 1", config.min_p);
  CHECK(config.top_k >= 0, "top_k is {}, expected at least 0", config.top_k);
  CHECK(config.repetition_penalty > 0 && std::isfinite(config.repetition_penalty),
        "repetition_penalty is {}, expected above 0", config.repetition_penalty);
  CHECK(std::isfinite(config.presence_penalty) && std::isfinite(config.frequency_penalty),
        "presence_penalty is {} and frequency_penalty {}, expected finite numbers",
        config.presence_penalty, config.frequency_penalty);
  CHECK(config.logprobs >= -1 && config.logprobs <= kMaxLogprobs,
        "logprobs is {}, expected -1 (none) to {}", config.logprobs, kMaxLogprobs);
  CHECK(config.logprob_ids.empty() ||
            config.logprob_ids.size() == static_cast<size_t>(config.logprobs),
        "logprob_ids has {} tokens, expected as many as logprobs, which is {}",
        config.logprob_ids.size(), config.logprobs);
  for (const int id : config.logprob_ids) {
    CHECK(id >= 0 && id < vocab_size_, "logprob_ids names token {}, expected 0 to {}", id,
          vocab_size_ - 1);
  }
  for (const auto& [id, value] : config.logit_bias) {
    CHECK(id >= 0 && id < vocab_size_, "logit_bias names token {}, expected 0 to {}", id,
          vocab_size_ - 1);
    CHECK(!std::isnan(value), "logit_bias of token {} is NaN, expected a number", id);
  }
}

void Sampler::reset(const Context& ctx, const SlotState& state, int slot,
                    const SamplingConfig& config, const std::vector<int>& ids, int num_prompt,
                    int num_cached) {
  check(config);
  const bool use_penalties = config.repetition_penalty != 1 || config.presence_penalty != 0 ||
                             config.frequency_penalty != 0;
  const bool use_bias = !config.logit_bias.empty();
  const bool greedy = verification_.strategy == VerifyStrategy::kGreedy;
  SlotSampling& sampling = sampling_staging_[slot];
  sampling = {.temperature = greedy ? 0 : config.temperature,
              .top_p = config.top_p,
              .min_p = config.min_p,
              .top_k = config.top_k,
              .seed = config.seed,
              .stream = config.stream,
              .repetition_penalty = config.repetition_penalty,
              .presence_penalty = config.presence_penalty,
              .frequency_penalty = config.frequency_penalty,
              .use_penalties = use_penalties,
              .use_bias = use_bias,
              .num_logprobs = config.logprobs,
              .names_logprobs = !config.logprob_ids.empty()};
  std::copy(config.logprob_ids.begin(), config.logprob_ids.end(), sampling.logprob_ids);
  copy_to_device(ctx.device, sampling_ + slot, sampling_staging_ + slot, sizeof(SlotSampling),
                 ctx.stream);
  const int num_ids = use_penalties ? static_cast<int>(ids.size()) : 0;
  CHECK_STATE(num_ids <= max_model_len_, "a history has {} ids, expected at most {}", num_ids,
              max_model_len_);
  copy_to_device(ctx.device, ids_, ids.data(), int64_t{4} * num_ids, ctx.stream);
  reset_slot(ctx, {.slot = slot,
                   .state = state,
                   .ids = ids_,
                   .num_ids = num_ids,
                   .num_prompt = std::min(num_prompt, num_ids),
                   .num_cached = num_cached});
  std::vector<float> bias;
  if (use_bias) {
    bias.resize(static_cast<size_t>(vocab_size_));
    for (const auto& [id, value] : config.logit_bias) bias[static_cast<size_t>(id)] += value;
    copy_to_device(ctx.device, bias_ + int64_t{slot} * vocab_size_, bias.data(),
                   int64_t{4} * vocab_size_, ctx.stream);
  }
  if (num_ids > 0 || use_bias)
    synchronize(ctx.device, ctx.stream);  // ids and bias are in pageable memory
}

void Sampler::upload_masks(const Context& ctx, const TokenMasks& masks, int num_rows) {
  CHECK(static_cast<int>(masks.rows.size()) == num_rows,
        "masks are given for {} rows, expected the {} rows of the step", masks.rows.size(),
        num_rows);
  CHECK(masks.num_masks <= num_rows,
        "{} masks are given, expected at most one for each of the {} rows", masks.num_masks,
        num_rows);
  for (int index : masks.rows) {
    CHECK(index >= -1 && index < masks.num_masks, "a row names mask {}, there are {} masks", index,
          masks.num_masks);
  }
  std::copy(masks.rows.begin(), masks.rows.end(), mask_staging_);
  const int64_t num_ints = num_mask_ints(masks.num_masks);
  std::memcpy(mask_staging_ + max_rows_, masks.words, 4 * (num_ints - max_rows_));
  copy_to_device(ctx.device, mask_rows_, mask_staging_, 4 * num_ints, ctx.stream);
}

void Sampler::draw(const Context& ctx, const Tensor& logits, const int* token_slots,
                   const int* token_positions, const TokenTrees* trees, bool masked,
                   int first_row) const {
  sample(ctx, {.logits = logits,
               .token_slots = token_slots,
               .token_positions = token_positions,
               .sampling = sampling_,
               .counts = counts_,
               .bias = bias_,
               .tree_tokens = trees ? trees->tokens + first_row : nullptr,
               .tree_masks = trees ? trees->masks + first_row : nullptr,
               .tree_size = trees ? trees->num_nodes : 0,
               .mask_rows = masked ? mask_rows_ + first_row : nullptr,
               .masks = reinterpret_cast<const uint32_t*>(mask_rows_ + max_rows_),
               .tokens = tokens_ + first_row,
               .logprobs = logprobs_ + first_row,
               .candidates = candidates_ && trees && trees->num_nodes > 1 ? candidates_ + first_row
                                                                          : nullptr});
}

}  // namespace cpmcu
