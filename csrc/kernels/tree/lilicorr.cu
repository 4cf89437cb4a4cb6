// The ops of a LiLiCorr head (kernels/tree/lilicorr.h).
//
// Roofline: latency. A sequence has at most 256 rows, whose matrices lie in L2.
//
// Schedule:
//   op                  CTA                                        work
//   candidate_features  a row                                      a thread has every 256th column
//   candidate_states    a row                                      likewise
//   bias_silu           256 columns of a row                       a thread computes an element
//   lattice_attention   the K queries of a position, of one head   a warp has a query
//   factor_inputs       a row                                      a thread has every 256th column
//   factor_pairs        the K parents of a position                a warp has a parent
//
// A lane of lattice_attention has every 32nd key, so the lanes read rows of k at a stride of 3 N.
// These reads of 16 bytes hit L1: the queries of a CTA share the keys.
#include <cmath>

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"
#include "kernels/layer/silu.cuh"
#include "kernels/tree/lilicorr_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kNone = -INFINITY;
constexpr int kMaxKeys = kMaxDraftDepth * kMaxLatticeTopk;  // maximum number of keys of a sequence
constexpr int kKeysPerLane = (kMaxKeys + 31) / 32;

// ---- kernels

// fmaxf returns the other argument if one is NaN.
__device__ __forceinline__ float bounded(float logprob) { return fmaxf(logprob, kLeastLogprob); }

// Grid: R. `width`: N.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    candidate_features_kernel(const float* logprobs, int topk, const T* norm_weight,
                              const T* norm_bias, const T* weight, const T* bias, T* out,
                              int width) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int64_t row = blockIdx.x;
  const int rank = static_cast<int>(row % topk);
  float largest = kLeastLogprob;
  for (int i = 0; i < topk; ++i) largest = fmaxf(largest, bounded(logprobs[row - rank + i]));
  const float own = bounded(logprobs[row]);
  float x[kCandidateFeatures] = {
      own, expf(own), own - largest,
      topk > 1 ? static_cast<float>(rank) / static_cast<float>(topk - 1) : 0.0f,
      rank == 0 ? 1.0f : 0.0f};
  float mean = 0, variance = 0;
#pragma unroll
  for (float value : x) mean += value / kCandidateFeatures;
#pragma unroll
  for (float value : x) variance += (value - mean) * (value - mean) / kCandidateFeatures;
  const float factor = rsqrtf(variance + kFeatureNormEps);
#pragma unroll
  for (int f = 0; f < kCandidateFeatures; ++f) {
    x[f] = (x[f] - mean) * factor * to_float(norm_weight[f]) + to_float(norm_bias[f]);
  }
  for (int i = threadIdx.x; i < width; i += kThreads) {
    float sum = to_float(bias[i]);
#pragma unroll
    for (int f = 0; f < kCandidateFeatures; ++f) {
      sum += to_float(weight[i * kCandidateFeatures + f]) * x[f];
    }
    out[row * width + i] = from_float<T>(silu(sum));
  }
}

// Grid: R. `width`: N.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    candidate_states_kernel(T* x, const T* hidden, const T* slots, const T* ranks, const T* biases,
                            int num_biases, int depth, int topk, int width) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int64_t row = blockIdx.x, position = row / topk;
  const int64_t slot = position % depth, rank = row % topk;
  for (int i = threadIdx.x; i < width; i += kThreads) {
    float sum = to_float(x[row * width + i]) + to_float(hidden[position * width + i]) +
                to_float(slots[slot * width + i]) + to_float(ranks[rank * width + i]);
    for (int b = 0; b < num_biases; ++b) sum += to_float(biases[int64_t{b} * width + i]);
    x[row * width + i] = from_float<T>(sum);
  }
}

// Grid: (R, CTAs of a row). `width`: values of a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) bias_silu_kernel(T* y, const T* bias, int width) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= width) return;
  T* const at = y + int64_t{blockIdx.x} * width + i;
  *at = from_float<T>(silu(to_float(*at) + to_float(bias[i])));
}

// Grid: (D, heads, B), 32 K threads. Dynamic shared memory: K rows of the query and of the
// probabilities of its keys, float32. `head_dim`: size of the CTA's head.
template <typename T>
__global__ void __launch_bounds__(32 * kMaxLatticeTopk)
    lattice_attention_kernel(const T* qkv, const T* slot_bias, const T* same_bias, T* out,
                             int depth, int topk, int num_distances, int head_dim) {
  extern __shared__ float shared[];
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
  const int num_keys = depth * topk, width = head_dim * gridDim.y;
  const int64_t first = int64_t{blockIdx.z} * num_keys;  // first row of the sequence
  const int64_t own = first + blockIdx.x * topk + warp;
  const T* const heads = qkv + head * head_dim;
  float* const query = shared + warp * (head_dim + num_keys);
  float* const probabilities = query + head_dim;
  for (int i = lane; i < head_dim; i += 32) query[i] = to_float(heads[own * 3 * width + i]);
  __syncwarp();

  const float factor = rsqrtf(static_cast<float>(head_dim));
  float logits[kKeysPerLane], largest = kNone;
#pragma unroll
  for (int n = 0; n < kKeysPerLane; ++n) {
    const int key = n * 32 + lane;
    logits[n] = kNone;
    if (key >= num_keys) continue;
    const T* const row = heads + (first + key) * 3 * width + width;
    float dot = 0;
    for (int i = 0; i < head_dim; i += 8) {
      const Vec16<T> eight = load<T, 8>(row + i);
#pragma unroll
      for (int e = 0; e < 8; ++e) dot += query[i + e] * to_float(eight[e]);
    }
    const int distance = static_cast<int>(blockIdx.x) - key / topk;
    logits[n] = dot * factor +
                to_float(slot_bias[head * num_distances + distance + num_distances / 2]) +
                (distance == 0 ? to_float(same_bias[head]) : 0.0f);
    largest = fmaxf(largest, logits[n]);
  }
  largest = warp_reduce(largest, Max{});
  float sum = 0;
#pragma unroll
  for (int n = 0; n < kKeysPerLane; ++n) {
    const int key = n * 32 + lane;
    if (key >= num_keys) continue;
    const float weight = expf(logits[n] - largest);
    probabilities[key] = weight;
    sum += weight;
  }
  sum = warp_reduce(sum, Sum{});
  __syncwarp();

  const T* const values = heads + first * 3 * width + 2 * width;
  for (int i = lane; i < head_dim; i += 32) {
    float total = 0;
    for (int key = 0; key < num_keys; ++key) {
      total += probabilities[key] * to_float(values[int64_t{key} * 3 * width + i]);
    }
    out[own * width + head * head_dim + i] = from_float<T>(total / sum);
  }
}

// Grid: R. `width`: N, `rows_per_seq`: D K.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    factor_inputs_kernel(const T* x, const T* anchors, T* out, int rows_per_seq, int width) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int64_t row = blockIdx.x, seq = row / rows_per_seq;
  for (int i = threadIdx.x; i < width; i += kThreads) {
    const T own = x[row * width + i], anchor = anchors[seq * width + i];
    T* const to = out + row * 3 * width + i;
    to[0] = own;
    to[width] = anchor;
    to[2 * width] = from_float<T>(to_float(own) * to_float(anchor));
  }
}

// Grid: (D, B), 32 K threads. `size`: F.
__global__ void __launch_bounds__(32 * kMaxLatticeTopk)
    factor_pairs_kernel(const int* candidates, const float* factors, const float* anchors,
                        float* pairs, int topk, int size, float eps, float scale) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, seq = blockIdx.y;
  const int64_t row = (int64_t{seq} * gridDim.x + blockIdx.x) * topk;
  const bool is_root = blockIdx.x == 0;
  if (is_root && warp > 0) return;
  const float* const above =
      is_root ? anchors + int64_t{seq} * size : factors + (row - topk + warp) * 2 * size;
  float squares = 0;
  for (int i = lane; i < size; i += 32) squares += above[i] * above[i];
  const float norm = fmaxf(sqrtf(warp_reduce(squares, Sum{})), eps);
  float logit = kNone;  // logit of candidate `lane`
  if (is_root || candidates[row - topk + warp] >= 0) {
    for (int b = 0; b < topk; ++b) {
      const float* const below = factors + (row + b) * 2 * size + size;
      float dot = 0, own_squares = 0;
      for (int i = lane; i < size; i += 32) {
        dot += above[i] * below[i];
        own_squares += below[i] * below[i];
      }
      dot = warp_reduce(dot, Sum{});
      const float own_norm = fmaxf(sqrtf(warp_reduce(own_squares, Sum{})), eps);
      const float score = scale * dot / (norm * own_norm);
      if (lane == b && candidates[row + b] >= 0 && !isnan(score)) logit = score;
    }
  }
  const float largest = warp_reduce(logit, Max{});
  const float sum = warp_reduce(logit == kNone ? 0.0f : expf(logit - largest), Sum{});
  if (lane < topk) {
    pairs[(row + warp) * topk + lane] = logit == kNone ? kNone : logit - largest - logf(sum);
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads only its tensors and logprobs from the device.
void candidate_features(const Context& ctx, const CandidateFeaturesParams& p) {
  check_candidate_features(p);
  if (p.size.rows() == 0) return;
  dispatch_half(p.out.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, candidate_features_kernel<T>, dim3(static_cast<unsigned>(p.size.rows())),
           dim3(kThreads), 0, p.logprobs, p.size.topk, p.norm_weight.as<const T>(),
           p.norm_bias.as<const T>(), p.weight.as<const T>(), p.bias.as<const T>(), p.out.as<T>(),
           static_cast<int>(p.out.size(1)));
  });
}

// Graph-safe; reads only its tensors from the device, as the ops below do.
void candidate_states(const Context& ctx, const CandidateStatesParams& p) {
  check_candidate_states(p);
  if (p.size.rows() == 0) return;
  dispatch_half(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, candidate_states_kernel<T>, dim3(static_cast<unsigned>(p.size.rows())),
           dim3(kThreads), 0, p.x.as<T>(), p.hidden.as<const T>(), p.slots.as<const T>(),
           p.ranks.as<const T>(), p.biases.as<const T>(), static_cast<int>(p.biases.size(0)),
           p.size.depth, p.size.topk, static_cast<int>(p.x.size(1)));
  });
}

void bias_silu(const Context& ctx, const BiasSiluParams& p) {
  check_bias_silu(p);
  if (p.y.size(0) == 0) return;
  const int width = static_cast<int>(p.y.size(1));
  const dim3 grid(static_cast<unsigned>(p.y.size(0)), (width + kThreads - 1) / kThreads);
  dispatch_half(p.y.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, bias_silu_kernel<T>, grid, dim3(kThreads), 0, p.y.as<T>(), p.bias.as<const T>(),
           width);
  });
}

void lattice_attention(const Context& ctx, const LatticeAttentionParams& p) {
  check_lattice_attention(p);
  check_rows("lattice_attention", "qkv", p.qkv);
  if (p.size.rows() == 0) return;
  const int head_dim = static_cast<int>(p.out.size(1) / p.num_heads);
  const int num_keys = p.size.depth * p.size.topk;
  static_assert(4 * kMaxLatticeTopk * (kMaxLatticeHeadDim + kMaxKeys) <= 48 * 1024);
  const size_t shared_bytes = sizeof(float) * p.size.topk * (head_dim + num_keys);
  dispatch_half(p.out.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, lattice_attention_kernel<T>, dim3(p.size.depth, p.num_heads, p.size.num_seqs),
           dim3(32 * p.size.topk), shared_bytes, p.qkv.as<const T>(), p.slot_bias.as<const T>(),
           p.same_bias.as<const T>(), p.out.as<T>(), p.size.depth, p.size.topk,
           static_cast<int>(p.slot_bias.size(1)), head_dim);
  });
}

void factor_inputs(const Context& ctx, const FactorInputsParams& p) {
  check_factor_inputs(p);
  if (p.size.rows() == 0) return;
  dispatch_half(p.x.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, factor_inputs_kernel<T>, dim3(static_cast<unsigned>(p.size.rows())), dim3(kThreads),
           0, p.x.as<const T>(), p.anchors.as<const T>(), p.out.as<T>(), p.size.depth * p.size.topk,
           static_cast<int>(p.x.size(1)));
  });
}

// Reads candidates, too.
void factor_pairs(const Context& ctx, const FactorPairsParams& p) {
  check_factor_pairs(p);
  if (p.size.rows() == 0) return;
  launch(ctx, factor_pairs_kernel, dim3(p.size.depth, p.size.num_seqs), dim3(32 * p.size.topk), 0,
         p.candidates, p.factors.as<const float>(), p.anchors.as<const float>(), p.pairs,
         p.size.topk, static_cast<int>(p.anchors.size(1)), p.eps, p.scale);
}

}  // namespace cpmcu::cuda
