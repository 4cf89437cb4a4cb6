#include "kernels/layer/rotary_kv.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/half.h"

namespace cpmcu::cpu {
namespace {

void normalize(float* x, const Tensor& weight, float offset, float eps, int head_dim) {
  float sum = 0;
  for (int i = 0; i < head_dim; ++i) sum += x[i] * x[i];
  const float scale = 1 / std::sqrt(sum / head_dim + eps);
  dispatch_host_dtype(weight.dtype(), [&](auto t) {
    using T = decltype(t);
    for (int i = 0; i < head_dim; ++i) x[i] *= scale * (to_float(weight.as<T>()[i]) + offset);
  });
}

void rotate(float* x, const float* cosines, const float* sines, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosines[i] - b * sines[i];
    x[i + half] = b * cosines[i] + a * sines[i];
  }
}

// Writes a head's numbers as e4m3 codes and returns their scale.
float write_fp8(const float* x, int head_dim, uint8_t* codes) {
  uint32_t max = 0;
  for (int i = 0; i < head_dim; ++i) max = std::max(max, magnitude_bits(x[i]));
  const Fp8Scale scale(max);
  for (int i = 0; i < head_dim; ++i) codes[fp8_place(i)] = to_e4m3(x[i] * scale.inverse);
  return scale.scale;
}

}  // namespace

void rotary_kv(const Context&, const RotaryKvParams& p) {
  const StepTokens& tokens = p.tokens;
  const int head_dim = p.head_dim, half = rotary_dim_of(p) / 2;
  const QkvLayout layout = resolved(p.layout, p.num_heads, p.num_kv_heads, head_dim);
  const int num_qk_heads = p.num_heads + p.num_kv_heads;
  CHECK(p.qkv.size(0) >= tokens.num_tokens && p.qkv.size(1) == layout.row &&
            layout.end(p.num_kv_heads, head_dim) <= layout.row,
        "rotary_kv: qkv is {}, expected {} rows of {} columns, keys at {} and values at {}",
        p.qkv.shape_text(), tokens.num_tokens, layout.row, layout.k, layout.v);
  CHECK(half >= 1 && 2 * half <= head_dim && rotary_dim_of(p) % 2 == 0,
        "rotary_kv: {} of {} elements are rotated, expected an even number up to head_dim",
        rotary_dim_of(p), head_dim);
  const DType dtype = p.qkv.dtype();
  check_kv_cache("rotary_kv", p.k_cache, p.k_scales, dtype, p.num_kv_heads, head_dim);
  check_kv_cache("rotary_kv", p.v_cache, p.v_scales, dtype, p.num_kv_heads, head_dim);
  dispatch_host_dtype(p.qkv.dtype(), [&](auto t) {
    using T = decltype(t);
#pragma omp parallel for if (int64_t{tokens.num_tokens} * layout.row > 16384)
    for (int row = 0; row < tokens.num_tokens; ++row) {
      const int seq = tokens.token_seqs[row], slot = tokens.seq_slots[seq];
      const int entry =
          tokens.slot_lengths[slot] + tokens.first_token + row - tokens.seq_token_begin[seq];
      thread_local std::vector<float> scratch;
      scratch.resize(2 * head_dim);
      float* head = scratch.data();
      float* cosines = head + head_dim;
      float* sines = cosines + half;
      for (int i = 0; i < half; ++i) {
        const float angle = static_cast<float>(tokens.positions[row]) * p.inv_freq[i];
        cosines[i] = std::cos(angle) * p.attention_scaling;
        sines[i] = std::sin(angle) * p.attention_scaling;
      }
      // The heads are ordered q, k, v.
      for (int h = 0; h < num_qk_heads + p.num_kv_heads; ++h) {
        const bool is_q = h < p.num_heads, is_v = h >= num_qk_heads;
        const int column = is_q   ? h * layout.q_head
                           : is_v ? layout.v + (h - num_qk_heads) * head_dim
                                  : layout.k + (h - p.num_heads) * head_dim;
        T* in = p.qkv.as<T>() + int64_t{row} * layout.row + column;
        for (int i = 0; i < head_dim; ++i) {
          head[i] = to_float(in[i]);
          if (!p.bias.empty()) head[i] += to_float(p.bias.as<T>()[h * head_dim + i]);
        }
        const Tensor& norm = is_q ? p.q_norm : p.k_norm;
        if (!is_v && !norm.empty()) normalize(head, norm, p.norm_offset, p.norm_eps, head_dim);
        if (!is_v) rotate(head, cosines, sines, half);

        T* out = in;
        if (!is_q) {
          const int kv_head = (h - p.num_heads) % p.num_kv_heads;
          const Tensor &cache = is_v ? p.v_cache : p.k_cache,
                       &scales = is_v ? p.v_scales : p.k_scales;
          const int64_t at = kv_offset(tokens.page_table, tokens.max_pages, slot, entry, kv_head,
                                       p.num_kv_heads, 1);
          if (!scales.empty()) {
            scales.as<float>()[at] = write_fp8(head, head_dim, cache.as<uint8_t>() + at * head_dim);
            continue;
          }
          out = cache.as<T>() + at * head_dim;
        }
        for (int i = 0; i < head_dim; ++i) out[i] = from_float<T>(head[i]);
      }
    }
  });
}

}  // namespace cpmcu::cpu
