// The arithmetic of rotary_kv.h. All kernels that use it produce the same bits.
//
// Sine and cosine: three float64 operations reduce the float32 angle, which may exceed 131072, to
// half turns for sincospif. sincosf would do the reduction in a slow path with an array in local
// memory.
#pragma once

#include "kernels/launch_checks.h"
#include "kernels/layer/rotary_kv.h"

namespace cpmcu::cuda {

struct Rotation {
  float cosine, sine;
};

// The rotation by `angle`, in radians: any float32 number of less than 2^31 half turns.
__device__ __forceinline__ Rotation rotation_by(float angle, float attention_scaling) {
  constexpr double kHalfTurns = 0.31830988618379067;  // 1 / pi
  const double turns = static_cast<double>(angle) * kHalfTurns;
  Rotation by;
  sincospif(static_cast<float>(fma(-2.0, rint(turns * 0.5), turns)), &by.sine, &by.cosine);
  return {.cosine = __fmul_rn(by.cosine, attention_scaling),
          .sine = __fmul_rn(by.sine, attention_scaling)};
}

// Rotates the pair of elements i and i + R / 2 of a head.
__device__ __forceinline__ void rotate(float& low, float& high, const Rotation& by) {
  const float old_low = low;
  low = __fmaf_rn(low, by.cosine, -__fmul_rn(high, by.sine));
  high = __fmaf_rn(high, by.cosine, __fmul_rn(old_low, by.sine));
}

inline void check_rotary_kv(const RotaryKvParams& p) {
  const int64_t num_columns = (p.num_heads + 2 * int64_t{p.num_kv_heads}) * p.head_dim;
  const QkvLayout layout = resolved(p.layout, p.num_heads, p.num_kv_heads, p.head_dim);
  check_rows("rotary_kv", "qkv", p.qkv);
  CHECK(p.qkv.size(0) >= p.tokens.num_tokens && p.qkv.size(1) == layout.row,
        "rotary_kv: qkv is {}, expected {} rows of {} columns", p.qkv.shape_text(),
        p.tokens.num_tokens, layout.row);
  CHECK(
      layout.row % 8 == 0 && layout.q_head % 8 == 0 && layout.k % 8 == 0 && layout.v % 8 == 0 &&
          layout.end(p.num_kv_heads, p.head_dim) <= layout.row,
      "rotary_kv: query head stride {}, keys at column {} and values at column {} of {}, expected "
      "multiples of 8 within the row",
      layout.q_head, layout.k, layout.v, layout.row);
  CHECK(rotary_dim_of(p) % 16 == 0 && rotary_dim_of(p) <= p.head_dim,
        "rotary_kv: {} of {} elements are rotated, expected a multiple of 16 up to head_dim",
        rotary_dim_of(p), p.head_dim);
  const DType dtype = p.qkv.dtype();
  if (!p.bias.empty()) check_vector("rotary_kv", "bias", p.bias, dtype, num_columns);
  if (!p.q_norm.empty()) check_vector("rotary_kv", "q_norm", p.q_norm, dtype, p.head_dim);
  if (!p.k_norm.empty()) check_vector("rotary_kv", "k_norm", p.k_norm, dtype, p.head_dim);
  check_kv_cache("rotary_kv", p.k_cache, p.k_scales, dtype, p.num_kv_heads, p.head_dim);
  check_kv_cache("rotary_kv", p.v_cache, p.v_scales, dtype, p.num_kv_heads, p.head_dim);
  CHECK(is_aligned16(p.k_cache.data()) && is_aligned16(p.v_cache.data()),
        "rotary_kv: a cache is unaligned, expected an address aligned to 16 bytes");
  CHECK(p.inv_freq != nullptr && is_aligned16(p.inv_freq),
        "rotary_kv: inv_freq is null or unaligned, expected an address aligned to 16 bytes");
}

}  // namespace cpmcu::cuda
