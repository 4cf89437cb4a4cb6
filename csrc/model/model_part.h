// What one rank of a tensor parallel engine has of a model.
//
//   q, k, v, gate, up      rows: whole heads, whole columns of the MLP
//   o, down                columns; their results are summed over the ranks (kernels/ranks)
//   embedding, norms       each rank has all of them
//   head                   each rank has all rows; of a dense head it multiplies its own, and the
//                          logits are gathered
//
// If there are fewer key heads than ranks, several ranks have the same one.
#pragma once

#include "core/model_spec.h"
#include "core/weights.h"

namespace cpmcu {

// The model of one rank. Throws if the model cannot be divided among so many.
ModelSpec part_of(const ModelSpec& whole, int num_ranks);

// The tensors of a model, without memory: only their shapes may be read.
WeightTable tensors_of(const ModelSpec& whole);

}  // namespace cpmcu
