// Everything between the qkv product and attention: bias, per-head RMSNorm of q and k, RoPE of q
// and k, and the write of k and v into the paged cache. q is written back in place.
//
// RoPE rotates the halves of the first R elements of a head (NeoX style): with a = position *
// inv_freq[i], c = cos(a) * scaling, s = sin(a) * scaling: (x[i], x[i + R/2]) -> (x[i] c - x[i+R/2]
// s, x[i+R/2] c + x[i] s), in float32. Elements from R on stay.
#pragma once

#include "kernels/layer/qkv_layout.h"
#include "kernels/op.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu {

struct RotaryKvParams {
  Tensor qkv;  // [T, columns of the layout]; q part rewritten in place
  QkvLayout layout{};
  Tensor bias;    // [(Hq + 2 Hkv) * D] or empty
  Tensor q_norm;  // [D] or empty
  Tensor k_norm;  // [D] or empty
  float norm_eps = 1e-6f;
  const float* inv_freq = nullptr;  // [R / 2] on the device
  int rotary_dim = 0;               // R; 0: D
  float attention_scaling = 1;
  Tensor k_cache;        // [pages, Hkv, 64, D]
  Tensor v_cache;        // [pages, Hkv, 64, D]
  int num_heads = 0;     // Hq
  int num_kv_heads = 0;  // Hkv
  int head_dim = 0;      // D
  StepTokens tokens;
};

inline int rotary_dim_of(const RotaryKvParams& p) {
  return p.rotary_dim > 0 ? p.rotary_dim : p.head_dim;
}

REGISTER_OP(rotary_kv, RotaryKvParams)

}  // namespace cpmcu
