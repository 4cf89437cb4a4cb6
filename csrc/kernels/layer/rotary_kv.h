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

#include <string_view>

#include "kernels/layer/fp8_row.h"
#include "kernels/layer/qkv_layout.h"
#include "kernels/op.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu {

struct RotaryKvParams {
  Tensor qkv;  // [T, columns of the layout]; q is rewritten in place
  QkvLayout layout{};
  Tensor bias;    // [(Hq + 2 Hkv) * D]; empty: no bias
  Tensor q_norm;  // [D]; empty: no norm of q
  Tensor k_norm;  // [D]; empty: no norm of k
  float norm_eps = 1e-6f;
  float norm_offset = 0;            // added to the weights of both norms
  const float* inv_freq = nullptr;  // [R / 2] radians per position, in device memory
  int rotary_dim = 0;               // R, the rotated elements of a head; 0: D
  float attention_scaling = 1;
  // [pages, Hkv, 64, D]. If Hkv is 0, qkv has queries only, and nothing is written.
  Tensor k_cache;
  Tensor v_cache;  // [pages, Hkv, 64, D]
  // [pages, Hkv, 64, 1] float32: the caches have e4m3 codes as uint8 (kernels/layer/fp8_row.h).
  // Empty: the caches have the dtype of qkv.
  Tensor k_scales{};
  Tensor v_scales{};
  int num_heads = 0;     // Hq
  int num_kv_heads = 0;  // Hkv
  int head_dim = 0;      // D
  StepTokens tokens;
};

inline int rotary_dim_of(const RotaryKvParams& p) {
  return p.rotary_dim > 0 ? p.rotary_dim : p.head_dim;
}

// Raises an error unless the caches and their scales fit each other and `dtype`, that of qkv.
inline void check_kv_cache(std::string_view op, const Tensor& cache, const Tensor& scales,
                           DType dtype, int num_kv_heads, int head_dim) {
  if (num_kv_heads == 0) return;
  const DType expected = scales.empty() ? dtype : DType::kU8;
  CHECK(cache.dtype() == expected && cache.num_dims() == 4 && cache.size(1) == num_kv_heads &&
            cache.size(2) == kPageSize && cache.size(3) == head_dim,
        "{}: a cache is {} {}, expected {} [pages, {}, {}, {}]", op, name_of(cache.dtype()),
        cache.shape_text(), name_of(expected), num_kv_heads, kPageSize, head_dim);
  if (scales.empty()) return;
  CHECK(head_dim % 16 == 0, "{}: head_dim is {}, expected a multiple of 16 in an fp8 cache", op,
        head_dim);
  CHECK(scales.dtype() == DType::kF32 &&
            scales.num_elements() == cache.size(0) * num_kv_heads * kPageSize,
        "{}: the scales of a cache are {} {}, expected float32 [{}, {}, {}, 1]", op,
        name_of(scales.dtype()), scales.shape_text(), cache.size(0), num_kv_heads, kPageSize);
}

REGISTER_OP(rotary_kv, RotaryKvParams)

}  // namespace cpmcu
