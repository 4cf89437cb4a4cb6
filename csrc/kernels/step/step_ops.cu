// finish_step and reset_slot (kernels/step/step_ops.h).
//
// Roofline: each kernel moves a few KB at most, so launch latency is the cost.
//
// finish_step is one CTA. It writes results directly into mapped host memory. After a barrier, one
// thread sets `*done` by a release store with system scope. If the host reads the new value, all
// results of the step are visible to the host.
#include "kernels/step/step_ops.h"

#include "core/launch.h"
#include "core/ptx.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;

// ---- kernels

// One warp writes one result. Lane 0 writes the token; all lanes write the log-probabilities.
__device__ void publish(const FinishStepParams& p, int sample, SlotResult& result, int lane) {
  const int slot = p.seq_slots[p.sampled_seqs[sample]];
  const int num_logprobs = p.sampling[slot].num_logprobs;
  if (lane == 0) {
    const int token = p.tokens[sample];
    p.state.next_tokens[slot] = token;
    const int64_t path = int64_t{slot} * p.state.accepted.max_path;
    p.state.accepted.ids[path] = token;
    p.state.accepted.paths[path] = -1;
    p.state.accepted.counts[slot] = 1;
    if (token != kNoToken && p.sampling[slot].use_penalties) {
      p.state.counts[int64_t{slot} * p.state.vocab_size + token] += 1;
    }
    result.slot = slot;
    result.num_tokens = 1;
    result.finished = 0;
    result.tokens[0] = token;
  }
  if (num_logprobs < 0) return;
  const TokenLogprobs& from = p.logprobs[sample];
  TokenLogprobs& to = result.logprobs[0];
  if (lane == 0) to.logprob = from.logprob;
  if (lane < min(num_logprobs, kMaxLogprobs)) {
    to.top_ids[lane] = from.top_ids[lane];
    to.top_logprobs[lane] = from.top_logprobs[lane];
  }
}
static_assert(kMaxLogprobs <= 32, "a lane copies at most one of the top tokens");

__global__ void __launch_bounds__(kThreads)
    finish_step_kernel(const __grid_constant__ FinishStepParams p) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const uint64_t num_steps = *p.sink.step_counter;
  SlotResult* results = p.sink.results + (num_steps % p.sink.ring_size) * p.sink.max_seqs;
  if (p.state.history != nullptr) {
    for (int row = threadIdx.x; row < p.num_tokens; row += kThreads) {
      const int seq = p.token_seqs[row], slot = p.seq_slots[seq];
      const int at = p.state.lengths[slot] + row - p.seq_token_begin[seq];
      if (at < p.state.max_len) p.state.history[int64_t{slot} * p.state.max_len + at] = p.ids[row];
    }
    __syncthreads();  // all threads have read the old lengths
  }
  for (int seq = threadIdx.x; seq < p.num_seqs; seq += kThreads) {
    p.state.lengths[p.seq_slots[seq]] += p.seq_token_begin[seq + 1] - p.seq_token_begin[seq];
  }
  for (int sample = threadIdx.x / 32; sample < p.num_sampled; sample += kThreads / 32) {
    publish(p, sample, results[sample], threadIdx.x % 32);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    *p.sink.step_counter = num_steps + 1;
    ptx::store_release_system(p.sink.done, num_steps + 1);
  }
}

__global__ void __launch_bounds__(kThreads)
    clear_slot_kernel(int* counts, int vocab_size, int* length, int* num_shared, int num_cached) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int token = blockIdx.x * kThreads + threadIdx.x;
  if (token < vocab_size) counts[token] = 0;
  if (token != 0) return;
  *length = num_cached;
  if (num_shared != nullptr) *num_shared = num_cached;
}

// Ids may repeat, so the updates are atomic. Integer sums do not depend on the order.
__global__ void __launch_bounds__(kThreads)
    mark_history_kernel(int* counts, int vocab_size, const int* ids, int num_ids, int num_prompt) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= num_ids) return;
  const int id = ids[i];
  if (id < 0 || id >= vocab_size) return;
  if (i < num_prompt) {
    atomicOr(counts + id, kPromptBit);
  } else {
    atomicAdd(counts + id, 1);
  }
}

dim3 ctas_for(int count) { return dim3((count + kThreads - 1) / kThreads); }

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: step_counter, seq_slots, seq_token_begin, sampled_seqs,
// sampling.
void finish_step(const Context& ctx, const FinishStepParams& p) {
  CHECK(
      p.sink.ring_size > 0 && p.num_sampled >= 0 && p.num_sampled <= p.sink.max_seqs &&
          p.num_sampled <= p.num_seqs,
      "finish_step: {} results of {} sequences do not fit a ring of {} steps with {} results each",
      p.num_sampled, p.num_seqs, p.sink.ring_size, p.sink.max_seqs);
  launch(ctx, finish_step_kernel, dim3(1), dim3(kThreads), 0, p);
}

// Not graph-safe: the slot and the number of ids are host values.
void reset_slot(const Context& ctx, const ResetSlotParams& p) {
  CHECK(
      p.num_prompt >= 0 && p.num_prompt <= p.num_ids && p.state.vocab_size > 0,
      "reset_slot: {} prompt ids of {} ids and a vocabulary of {}, expected 0 <= prompt ids <= ids "
      "and a positive vocabulary",
      p.num_prompt, p.num_ids, p.state.vocab_size);
  const int vocab_size = p.state.vocab_size;
  int* counts = p.state.counts + int64_t{p.slot} * vocab_size;
  launch(ctx, clear_slot_kernel, ctas_for(vocab_size), dim3(kThreads), 0, counts, vocab_size,
         p.state.lengths + p.slot,
         p.state.num_shared == nullptr ? nullptr : p.state.num_shared + p.slot, p.num_cached);
  if (p.num_ids == 0) return;
  launch(ctx, mark_history_kernel, ctas_for(p.num_ids), dim3(kThreads), 0, counts, vocab_size,
         p.ids, p.num_ids, p.num_prompt);
}

}  // namespace cpmcu::cuda
