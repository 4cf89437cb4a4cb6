// gru_cell and chain_step (kernels/tree/gru_chain.h).
//
// Roofline: latency, a few microseconds. chain_step reads K rows of the successors.
//
// Schedule:
//   op          CTA                                    work
//   gru_cell    256 elements of a sequence's state     a thread computes an element
//   chain_step  one for each sequence                  a warp scores a candidate; warp 0 chooses
#include "core/launch.h"
#include "kernels/launch_checks.h"
#include "kernels/sampling/best.cuh"
#include "kernels/tree/candidate_scores.cuh"
#include "kernels/tree/gru_chain.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;  // threads of a CTA of gru_cell
constexpr int kWarps = 32;     // warps of a CTA of chain_step: at least the number of candidates
static_assert(kWarps >= kMaxTopk);

// Grid: (CTAs of a state, B).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    gru_cell_kernel(const float* from_input, const float* from_state, T* state, T* copy, int size,
                    int64_t copy_stride) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const int64_t row = blockIdx.y;
  if (i >= size) return;
  const float* const input = from_input + row * 3 * size + i;
  const float* const own = from_state == nullptr ? nullptr : from_state + row * 3 * size + i;
  const float before = own == nullptr ? 0.0f : to_float(state[row * size + i]);
  const float reset = sigmoid(input[0] + (own == nullptr ? 0.0f : own[0]));
  const float keep = sigmoid(input[size] + (own == nullptr ? 0.0f : own[size]));
  const float fresh = tanhf(input[2 * size] + (own == nullptr ? 0.0f : reset * own[2 * size]));
  const T after = from_float<T>((1.0f - keep) * fresh + keep * before);
  state[row * size + i] = after;
  copy[row * copy_stride + i] = after;
}

// Grid: B. `width`: P.
template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    chain_step_kernel(const __grid_constant__ ChainStepParams p, const float* fixed,
                      const float* moving, const T* successors, int width) {
  __shared__ float dots[kWarps];
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int seq = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = seq * p.draft.num_tokens, position = seq * p.depth + p.level;
  const int* const candidates = p.candidates + position * p.topk;
  if (p.level == 0) {
    for (int i = threadIdx.x; i < p.draft.num_tokens; i += 32 * kWarps) {
      p.draft.tokens[begin + i] = -1;
      p.draft.parents[begin + i] = i;
      p.draft.scores[begin + i] = kNone;
    }
    if (threadIdx.x == 0) p.roots[seq] = p.next_tokens[p.seq_slots[seq]];
  }
  if (moving != nullptr && warp < p.topk) {
    const T* const successor = successors + int64_t{max(candidates[warp], 0)} * width;
    const float dot = correction_of(successor, fixed + int64_t{position} * width,
                                    moving + int64_t{seq} * width, width);
    if (lane == 0) dots[warp] = dot;
  }
  __syncthreads();  // also: level 0 clears the draft before it writes its token
  if (warp > 0) return;

  const auto [logit, largest, sum] = logit_of_lane(candidates, p.logprobs + position * p.topk,
                                                   p.topk, moving == nullptr ? nullptr : dots);
  const uint64_t best = warp_reduce(logit == kNone ? uint64_t{0} : key_of(logit, lane), Max{});
  if (lane > 0) return;
  const float before = p.level == 0 ? 0.0f : p.draft.scores[begin + p.level - 1];
  const float score = best == 0 ? kNone : before + (value_of(best) - largest - logf(sum));
  const bool found = before != kNone && !isnan(score) && score != kNone;
  const int token = found ? candidates[token_of(best)] : -1;
  p.tokens[seq] = max(token, 0);
  if (!found) return;
  p.draft.tokens[begin + p.level] = token;
  p.draft.scores[begin + p.level] = score;
}

}  // namespace

// ---- launchers

// Graph-safe; reads only its tensors from the device.
void gru_cell(const Context& ctx, const GruCellParams& p) {
  check_gru_cell(p);
  if (p.state.size(0) == 0) return;
  const int size = static_cast<int>(p.state.size(1));
  const dim3 grid((size + kThreads - 1) / kThreads, static_cast<unsigned>(p.state.size(0)));
  dispatch_half(p.state.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, gru_cell_kernel<T>, grid, dim3(kThreads), 0, p.from_input.as<const float>(),
           p.from_state.empty() ? nullptr : p.from_state.as<const float>(), p.state.as<T>(),
           p.copy.as<T>(), size, p.copy_stride);
  });
}

// Graph-safe; reads from the device: candidates, logprobs, seq_slots, next_tokens, its tensors.
void chain_step(const Context& ctx, const ChainStepParams& p) {
  check_chain_step(p);
  check_rows("chain_step", "successors", p.successors);
  if (p.num_seqs == 0) return;
  dispatch_half(p.successors.dtype(), [&](auto t) {
    using T = decltype(t);
    launch(ctx, chain_step_kernel<T>, dim3(p.num_seqs), dim3(32 * kWarps), 0, p,
           p.fixed.empty() ? nullptr : p.fixed.as<const float>(),
           p.moving.empty() ? nullptr : p.moving.as<const float>(), p.successors.as<const T>(),
           static_cast<int>(p.successors.size(1)));
  });
}

}  // namespace cpmcu::cuda
