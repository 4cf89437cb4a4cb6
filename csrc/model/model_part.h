// One rank's part of a model, in a tensor parallel engine.
//
//   q, k, v                rows of W, by whole heads. With joint_qk_norm, q and k have all rows,
//                          those of the rank's heads first
//   gate, up               rows of W
//   o, down                columns of W; their results are summed over the ranks (kernels/ranks)
//   experts                each expert as gate, up and down; each rank has the whole router
//   gated delta net        key heads with their value heads; out_proj as o
//   Mamba-2                groups with their heads; out_proj as o. If the ranks do not divide the
//                          groups, each rank has the whole block
//   short convolution      channels; out_proj as o
//   embedding, norms,      each rank has all of them
//   embeddings of layers
//   head                   each rank has all rows. If the head is dense, a rank multiplies its own
//                          rows, and the logits are gathered
//
// If there are fewer KV heads than ranks, several ranks have the same one.
#pragma once

#include <string>

#include "core/model_spec.h"
#include "core/weights.h"

namespace cpmcu {

// The model of one rank. Throws if the model cannot be divided among `num_ranks`.
ModelSpec part_of(const ModelSpec& whole, int num_ranks);

// The model of one rank without heads of other ranks. Only norms over all heads read these.
ModelSpec without_other_heads(const ModelSpec& part);

// The tensors of a model. They have no memory, so only their shapes may be read.
WeightTable tensors_of(const ModelSpec& spec);

// A draft that reads the keys of its target: each rank has its heads of the attention blocks, and
// all of the other blocks. `scope` begins the names of the draft.
ModelSpec with_part_of_attention(const ModelSpec& whole, int num_ranks, const std::string& scope);

// The tensors of the attention blocks alone, as if each block stored its own keys. They have no
// memory.
WeightTable attention_tensors_of(const ModelSpec& spec, const std::string& scope);

}  // namespace cpmcu
