// q[t, h] *= 1 + beta * ln(1 + floor(positions[t] / length)), in float32, rounded once.
//
// It is the factor of Ministral 3 for texts beyond the length of its training. A token below
// `length` keeps its bits. The op runs after rotary_kv: a rotation does not change the factor.
#pragma once

#include "kernels/layer/qkv_layout.h"
#include "kernels/op.h"

namespace cpmcu {

struct ScaleQueriesParams {
  Tensor qkv;  // [T, columns of the layout]; the queries change in place
  QkvLayout layout{};
  int num_heads = 0;     // Hq
  int num_kv_heads = 0;  // Hkv
  int head_dim = 0;      // D
  float beta = 0;
  int length = 0;                  // queries at lower positions keep their values
  const int* positions = nullptr;  // [T] in device memory
};

// Raises an error for sizes that do not fit; returns the layout with all fields set.
inline QkvLayout check_scale_queries(const ScaleQueriesParams& p) {
  const QkvLayout layout = resolved(p.layout, p.num_heads, p.num_kv_heads, p.head_dim);
  CHECK(p.qkv.num_dims() == 2 && p.qkv.size(1) == layout.row && p.head_dim % 8 == 0 &&
            layout.row % 8 == 0 && layout.q_head % 8 == 0,
        "scale_queries: qkv is {}, expected rows of {} columns; head_dim is {}, expected a "
        "multiple of 8",
        p.qkv.shape_text(), layout.row, p.head_dim);
  CHECK(p.length >= 1, "scale_queries: length is {}, expected at least 1", p.length);
  return layout;
}

REGISTER_OP(scale_queries, ScaleQueriesParams)

}  // namespace cpmcu
