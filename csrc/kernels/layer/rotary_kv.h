// The op between the qkv GEMM and attention: bias, per-head RMSNorm of q and k, RoPE of q and k,
// and the write of k and v into the paged cache. q is rewritten in place.
//
// RoPE rotates pairs of the first R elements of a head (NeoX style), in float32. With
// a = position * inv_freq[i], c = cos(a) * attention_scaling, s = sin(a) * attention_scaling:
//
//   x[i], x[i + R / 2] -> x[i] c - x[i + R / 2] s, x[i + R / 2] c + x[i] s
//
// Elements from R on are not rotated.
#pragma once

#include "kernels/layer/qkv_layout.h"
#include "kernels/op.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu {

struct RotaryKvParams {
  Tensor qkv;  // [T, columns of the layout]; q is rewritten in place
  QkvLayout layout{};
  Tensor bias;    // [(Hq + 2 Hkv) * D]; may be empty
  Tensor q_norm;  // [D]; may be empty
  Tensor k_norm;  // [D]; may be empty
  float norm_eps = 1e-6f;
  float norm_offset = 0;            // added to the weights of both norms
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
