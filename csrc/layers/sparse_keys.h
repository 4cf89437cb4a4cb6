// The parts of a sparse attention block that dense attention does not have (kernels/attention/
// sparse.h): the rule by which blocks are chosen, the compressed keys in the pages, and the blocks
// chosen for a step's tokens.
#pragma once

#include <string>

#include "core/arena.h"
#include "core/params.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/sparse.h"
#include "kernels/step/step.h"
#include "layers/attention_shape.h"
#include "pass/op_list.h"
#include "state/model_state.h"

namespace cpmcu {

class SparseKeys {
 public:
  // The rule's numbers are parameters of the block: init_blocks, window_size, topk, dense_len.
  explicit SparseKeys(const Params& params);
  // The other parameters of the block.
  static Params without_rule(const Params& params);

  // Queries and compressed keys have `dtype`. Attention runs in `phase`.
  void plan(MemoryPlan& plan, ModelState& state, const StepLimits& limits,
            const AttentionShape& shape, DType dtype, Timeline phase);
  void bind(const Arena& arena, const ModelState& state);
  void finish_loading(const Context& ctx) const;

  // Appends the compression of the keys of a prefill step, or of the accepted tokens of a decode
  // step. `prefix` begins the op's name. Only an fp8 cache has `scales`.
  void append_compress(OpList& ops, const std::string& prefix, const Tensor& keys,
                       const Tensor& scales, bool accepted = false) const {
    ops.compress(prefix + "compress_keys",
                 {.k_cache = keys, .k_scales = scales, .compressed = keys_}, accepted);
  }
  // Elements of the scratch of attention_decode.
  int64_t scratch_floats(int num_tokens, int num_heads, int head_dim, int max_kv) const;
  // The blocks of each token; empty if all tokens of the step are dense. `qkv` [T, columns of the
  // layout]: after RoPE. keys_are_old: see SelectBlocksParams.
  BlockSelection select(const Context& ctx, const Tensor& qkv, const QkvLayout& layout,
                        const StepTokens& tokens, bool keys_are_old) const;

 private:
  SparseRule rule_;
  ModelState::PagedId fine_id_, coarse_id_;
  MemoryPlan::Id selection_id_ = 0, scores_id_ = 0, memory_id_ = 0;
  int num_heads_ = 0, num_kv_heads_ = 0, head_dim_ = 0;
  int64_t max_tokens_ = 0, num_words_ = 0, score_floats_ = 0, memory_bytes_ = 0;
  CompressedKeys keys_;
  Tensor selection_;  // [T, Hkv, words]: the chosen blocks as bits
  Tensor scores_;     // `scratch` of SelectBlocksParams
  Tensor memory_;     // `memory` of SelectBlocksParams
};

}  // namespace cpmcu
