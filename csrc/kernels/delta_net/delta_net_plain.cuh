// A decode step of one token for each of many sequences (gated_delta_net.cu). One CTA computes a
// value head of a sequence.
//
// With many sequences each SM has several heads to compute, so a cluster for a head gains nothing.
// In a cluster each CTA prepares the same q and k. One CTA issues 9,700 instructions for a head, a
// cluster 30,400. S arrives in shared memory by one TMA copy, which begins before the projection is
// done. An SM holds three CTAs: it can copy S of two heads while it computes the third.
//
// With `accepts_all`, the step's token is added to S at once. So in the next step no accepted token
// is left. For each accepted token of the last step, and then for the step's token:
//   1. Warp 0 prepares q and k, warp 1 v, warp 2 the gates.
//   2. Each warp updates four tiles of S. After the last token to add it stores them.
// Then warp 3 computes the gated norm.
#pragma once

#include "kernels/delta_net/delta_net_head.cuh"

namespace cpmcu::cuda::delta_net {

constexpr int kPlainWarps = 4;
constexpr int kPlainCtas = 3;  // CTAs on an SM

template <typename T>
struct PlainHead : Head<T, 1, false> {
  using Base = Head<T, 1, false>;
  using Base::args;
  using Base::Base;
  using Base::lane;
  using Base::shared;
  using Base::warp;

  // S and two tokens, of which one is prepared while another is in use.
  static Capacity capacity() {
    return {.rows = 2, .raws = 0, .outputs = 1, .squares = 4, .copies = 1};
  }

  __device__ __forceinline__ uint32_t barrier() const {
    return ptx::shared_address(shared.barriers);
  }
  // Starts the copy of S. One thread calls it.
  __device__ __forceinline__ void fetch_state() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    constexpr int kBytes = kDim * kDim * sizeof(float);
    ptx::mbarrier_init(barrier(), 1);
    ptx::mbarrier_init_fence();
    ptx::mbarrier_expect_bytes(barrier(), kBytes);
    ptx::bulk_copy(ptx::shared_address(shared.copies), state(0), kBytes, barrier(),
                   ptx::evict_first_policy());
#endif
  }
  __device__ __forceinline__ float* state(int tile) const {
    return args.state + (this->at * kHeadWarps + tile) * kTileFloats;
  }

  // Raw token i: -3 to -1 are the window, the others are accepted tokens.
  __device__ __forceinline__ const T* old_row(int i) const {
    return i < 0 ? this->window() + (kWindow + i) * kRawWidth : this->pending(this->path()[i]);
  }
  // Loads four channels of the three tokens before token i. `column`: of raw tokens in memory.
  __device__ __forceinline__ void load_before(Vec<T, 4> (&x)[kConvTaps], int i, int column) const {
#pragma unroll
    for (int t = 0; t < kWindow; ++t) x[t] = load<T, 4>(old_row(i - kWindow + t) + column);
  }
  // The same of token i itself. `place`: column of the step's projections.
  __device__ __forceinline__ Vec<T, 4> load_token(int i, bool is_step, int column,
                                                  int place) const {
    return load<T, 4>(is_step ? this->row_of(0) + place : old_row(i) + column);
  }
  // Keeps the step's token as the pending one, or in the window if `at_once`. `moves`: accepted
  // tokens were added.
  __device__ __forceinline__ void keep(const Vec<T, 4> (&x)[kConvTaps], int column, bool moves,
                                       bool at_once) const {
    if (!at_once) store(this->pending(0) + column, x[kWindow]);
    const auto move = [&](int first) {
#pragma unroll
      for (int t = 0; t < kWindow; ++t) {
        store(this->window() + t * kRawWidth + column, x[first + t]);
      }
    };
    if (at_once) {
      move(1);
    } else if (moves) {
      move(0);
    }
  }

  // Prepares accepted token i, or the step's token if i is their number.
  __device__ __forceinline__ void prepare(int i, bool is_step, bool at_once) const {
    const int row = i % 2, c = 4 * lane;
    typename Base::Weights weights;
    if (warp == 0) {
      const int keys = args.num_key_heads * kDim;
      load_filters(weights.q, args.conv, this->key_head * kDim + c);
      load_filters(weights.k, args.conv, keys + this->key_head * kDim + c);
      Vec<T, 4> q[kConvTaps], k[kConvTaps];
      load_before(q, i, c), load_before(k, i, kDim + c);
      if (is_step) ptx::pdl_wait();
      q[kWindow] = load_token(i, is_step, c, this->places.q + c);
      k[kWindow] = load_token(i, is_step, kDim + c, this->places.k + c);
      if (is_step) keep(q, c, i > 0, at_once), keep(k, kDim + c, i > 0, at_once);
      this->template prepare_keys<1>(row, 1, q, k, weights);
    } else if (warp == 1) {
      typename Base::Filters of_v;
      this->load_value_filters(of_v);
      Vec<T, 4> v[kConvTaps];
      load_before(v, i, 2 * kDim + c);
      if (is_step) ptx::pdl_wait();
      v[kWindow] = load_token(i, is_step, 2 * kDim + c, this->places.v + c);
      if (is_step) keep(v, 2 * kDim + c, i > 0, at_once);
      this->prepare_value(row, true, v, of_v);
    } else {
      if (is_step) ptx::pdl_wait();
      if (threadIdx.x != 64) return;
      weights.rate = expf(args.a_log[this->head]);
      weights.bias = args.dt_bias[this->head];
      const T* const gates = is_step ? nullptr : old_row(i) + kRawWidth;
      const Vec<T, 2> ba = is_step ? this->gates_in_step(0) : Vec<T, 2>{gates[0], gates[1]};
      if (is_step) store(this->pending(0) + kRawWidth, ba);
      this->prepare_gates(row, ba, weights);
    }
  }

  // Updates S by the prepared token `row`; its o goes to shared memory. `goes_on`: another token
  // follows; `stores`: S now has all tokens to add.
  __device__ __forceinline__ void update(int row, bool goes_on, bool stores) const {
    const float* const columns = shared.v + row * kDim;
    const Prepared token{this->keys(row), columns, shared.gates + row};
    Operands x;
    x.load_k(token, lane), x.load_others(token, lane);
#pragma unroll 1
    for (int tile = warp; tile < kHeadWarps; tile += kPlainWarps) {
      float* const copy = shared.copies + tile * kTileFloats;
      x.load_v(columns + tile * kTile, lane);
      Columns s;
      s.load_from(copy, lane);
      const float o = s.template step<true>(x, lane).sum();
      shared.o[tile * kTile + pair_of(lane) * 2 + lane % 2] = o;
      if (goes_on) s.put_to(copy, lane);
      if (stores) s.store_to(state(tile), lane);
    }
  }

  // The gated norm, by one warp. The sum of squares is that of a cluster: of each 32 columns, then
  // over these four sums.
  __device__ __forceinline__ void write(const Vec<T, 4>& z) const {
    typename Base::Weights weights;
    this->load_norm(weights);
    const float4 o = *reinterpret_cast<const float4*>(shared.o + 4 * lane);
    float squares[1] = {this->squares_of(o)};
    sum_lanes<8>(squares);
    float sum = 0;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      sum = __fadd_rn(sum, __shfl_sync(0xffffffffu, squares[0], 8 * p));
    }
    this->store_normed(0, o, sum, z, weights);
  }
};

template <typename T>
__global__ void __launch_bounds__(32 * kPlainWarps, kPlainCtas)
    plain_step_kernel(const __grid_constant__ DeltaArgs<T> args) {
  extern __shared__ __align__(16) char memory[];
  ptx::pdl_launch();
  using Cta = PlainHead<T>;
  typename Cta::Memory shared(memory, args.capacity);
  const int seq = blockIdx.x / args.num_value_heads, head = blockIdx.x % args.num_value_heads;
  const StepTokens& tokens = args.tokens;
  const int slot = tokens.seq_slots[seq], first = tokens.seq_token_begin[seq];
  if (tokens.seq_token_begin[seq + 1] == first) return;
  const Cta cta(args, shared, head, slot, first);
  if (threadIdx.x == 0) cta.fetch_state();
  const int length = tokens.slot_lengths[slot];
  const int num_accepted = cta.num_accepted(length, args.pending_rows);
  const bool at_once = args.accepts_all && args.accepted.counts[slot] > 0;
  const int last_added = at_once ? num_accepted : num_accepted - 1;
  Vec<T, 4> z;
#pragma unroll 1
  for (int i = 0; i <= num_accepted; ++i) {
    const bool is_step = i == num_accepted;
    cta.prepare(i, is_step, at_once);
    if (is_step && cta.warp == 3) z = cta.load_z(0);
    __syncthreads();
    if (i == 0) ptx::mbarrier_wait(cta.barrier(), 0);
    cta.update(i % 2, !is_step, i == last_added);
  }
  __syncthreads();
  if (cta.warp == 3) cta.write(z);
  if (threadIdx.x == 0) args.folded[cta.at] = at_once ? length + 1 : length;
}

}  // namespace cpmcu::cuda::delta_net
