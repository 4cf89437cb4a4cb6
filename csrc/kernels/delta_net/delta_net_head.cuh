// The parts of gated_delta_net.cu that work on one value head: convolution, norms and gates, the
// window, the gated norm of outputs. The file gated_delta_net.cu explains the schedule.
#pragma once

#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/delta_net/delta_net_memory.cuh"

namespace cpmcu::cuda::delta_net {

// Addresses of q, k and v of a raw token; v begins at the CTA's columns.
template <typename T>
struct Raw {
  const T *q, *k, *v;
};

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// The convolution of kN channels, rounded as the model's dtype. `w`: [kN, 4] of these channels.
template <typename T, int kN>
__device__ __forceinline__ void convolve(float (&to)[kN], const Vec<T, kN>& x0,
                                         const Vec<T, kN>& x1, const Vec<T, kN>& x2,
                                         const Vec<T, kN>& x3, const float (&w)[kN][kConvTaps]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    float sum = __fmul_rn(w[i][0], to_float(x0[i]));
    sum = __fmaf_rn(w[i][1], to_float(x1[i]), sum);
    sum = __fmaf_rn(w[i][2], to_float(x2[i]), sum);
    sum = __fmaf_rn(w[i][3], to_float(x3[i]), sum);
    to[i] = __fmul_rn(sum, sigmoid(sum));
  }
  // Pairs round in one instruction.
#pragma unroll
  for (int i = 0; i + 1 < kN; i += 2) {
    const uint32_t pair = pack2<T>(to[i], to[i + 1]);
    to[i] = to_float(reinterpret_cast<const T*>(&pair)[0]);
    to[i + 1] = to_float(reinterpret_cast<const T*>(&pair)[1]);
  }
  if constexpr (kN % 2 != 0) to[kN - 1] = to_float(from_float<T>(to[kN - 1]));
}

template <typename T, int kN>
__device__ __forceinline__ void load_filters(float (&w)[kN][kConvTaps], const T* __restrict__ conv,
                                             int channel) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const Vec<T, kConvTaps> filters = load<T, kConvTaps>(conv + int64_t{channel + i} * kConvTaps);
#pragma unroll
    for (int t = 0; t < kConvTaps; ++t) w[i][t] = to_float(filters[t]);
  }
}

// Sums over kLanes neighbouring lanes, for each of kN numbers.
template <int kLanes, int kN>
__device__ __forceinline__ void sum_lanes(float (&x)[kN]) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
#pragma unroll
    for (float& each : x) {
      each = __fadd_rn(each, __shfl_xor_sync(0xffffffffu, each, distance));
    }
  }
}

// ---- one CTA

template <typename T, int kSplit, bool kCommits>
struct Head {
  using Memory = Shared<T, kSplit>;
  static constexpr int kWidth = Memory::kWidth;
  static constexpr int kV = kWidth / 32;                    // channels of v in a lane
  static constexpr int kWarps = kHeadWarps / kSplit;        // that own columns of S
  static constexpr bool kSpecial = kCommits && kSplit > 1;  // four more warps prepare tokens
  static constexpr int kProducers = kSpecial ? 4 : kWarps;
  static constexpr int kFirstProducer = kSpecial ? kWarps : 0;
  static constexpr int kThreads = 32 * (kFirstProducer + kProducers);
  // A prompt is processed in stages. A producer prepares kRun neighbouring tokens at once.
  static constexpr int kStage = kSplit > 1 ? 32 : 16;
  static constexpr int kRun = kSplit > 1 ? 4 : 1;
  // Outputs: four columns in a lane, kTokens tokens in a warp.
  static constexpr int kTokenLanes = kWidth / 4;
  static constexpr int kTokens = 32 / kTokenLanes;

  // Columns of the head's projections.
  struct Places {
    int q, k, v, z, b, a;  // v and z: of the CTA's columns
  };

  const DeltaArgs<T>& args;
  Memory& shared;
  int part, head, key_head, slot;
  int64_t at;  // of the slot's head
  int warp, lane;
  Places places;
  // The first token of the sequence.
  const T *qkvz, *ba;
  T* out;

  __device__ __forceinline__ Head(const DeltaArgs<T>& args, Memory& shared, int head, int slot,
                                  int first_token)
      : args(args), shared(shared), part(blockIdx.x % kSplit), head(head), slot(slot) {
    const int group = args.num_value_heads / args.num_key_heads;
    key_head = head / group;
    const int in_group = head - key_head * group;
    const auto column = [&](const HeadColumns& of, int width) {
      return of.first + key_head * of.stride + in_group * width;
    };
    at = int64_t{slot} * args.num_value_heads + head;
    warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const DeltaLayout& layout = args.layout;
    places = {layout.q.first + key_head * layout.q.stride,
              layout.k.first + key_head * layout.k.stride,
              column(layout.v, kDim) + part * kWidth,
              column(layout.z, kDim) + part * kWidth,
              column(layout.b, 1),
              column(layout.a, 1)};
    qkvz = args.qkvz + int64_t{first_token} * layout.qkvz_row;
    ba = args.ba + int64_t{first_token} * layout.ba_row;
    out = args.out + (int64_t{first_token} * args.num_value_heads + head) * kDim + part * kWidth;
  }

  __device__ __forceinline__ T* pending(int node) const {
    return args.pending + (at * args.pending_rows + node) * kPendingWidth;
  }
  __device__ __forceinline__ Raw<T> in_window(int place) const {
    const T* const row = shared.window + place * Memory::kWindowWidth;
    return {row, row + kDim, row + 2 * kDim};
  }
  // Token i of the step's sequence.
  __device__ __forceinline__ const T* row_of(int i) const {
    return qkvz + int64_t{i} * args.layout.qkvz_row;
  }
  __device__ __forceinline__ Raw<T> in_step(int i) const {
    const T* const row = row_of(i);
    return {row + places.q, row + places.k, row + places.v};
  }
  // b and a of a token of the step.
  __device__ __forceinline__ Vec<T, 2> gates_in_step(int i) const {
    const T* const row = ba + int64_t{i} * args.layout.ba_row;
    return {row[places.b], row[places.a]};
  }
  __device__ __forceinline__ const float* keys(int row) const {
    return shared.keys + row * 2 * kKeyFloats;
  }

  // ---- weights

  struct Weights {
    // Weights of the convolution, for 4 channels of q, 4 of k and kV of v.
    float q[4][kConvTaps], k[4][kConvTaps], v[kV][kConvTaps];
    float rate, bias;  // exp(A_log) and dt_bias
    float norm[4];     // of the lane's columns of the outputs
  };
  __device__ __forceinline__ void load_weights(Weights& w) const {
    const int keys = args.num_key_heads * kDim;
    load_filters(w.q, args.conv, key_head * kDim + lane * 4);
    load_filters(w.k, args.conv, keys + key_head * kDim + lane * 4);
    load_filters(w.v, args.conv, 2 * keys + head * kDim + part * kWidth + lane * kV);
    w.rate = expf(args.a_log[head]);
    w.bias = args.dt_bias[head];
    const auto norm = load<T, 4>(args.norm + part * kWidth + lane % kTokenLanes * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) w.norm[i] = to_float(norm[i]);
  }

  // ---- a token: convolution, norms and gates -> row `row` of shared memory

  // q and k; `x_q`, `x_k`: of the three tokens before and of the token itself.
  __device__ __forceinline__ void prepare_keys(int row, const Vec<T, 4>* x_q, const Vec<T, 4>* x_k,
                                               const Weights& w) const {
    float q[4], k[4], sums[3] = {};
    convolve(q, x_q[0], x_q[1], x_q[2], x_q[3], w.q);
    convolve(k, x_k[0], x_k[1], x_k[2], x_k[3], w.k);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[0] = __fmaf_rn(q[i], q[i], sums[0]);
      sums[1] = __fmaf_rn(k[i], k[i], sums[1]);
      sums[2] = __fmaf_rn(q[i], k[i], sums[2]);
    }
    sum_lanes<32>(sums);
    const float of_q = __fmul_rn(0.08838834764831845f, rsqrtf(__fadd_rn(sums[0], 1e-6f)));
    const float of_k = rsqrtf(__fadd_rn(sums[1], 1e-6f));
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = __fmul_rn(q[i], of_q), k[i] = __fmul_rn(k[i], of_k);
    float* const to = shared.keys + row * 2 * kKeyFloats;
    store_key(to, q, lane);
    store_key(to + kKeyFloats, k, lane);
    if (lane == 0) shared.gates[row].z = __fmul_rn(sums[2], __fmul_rn(of_q, of_k));
  }
  __device__ __forceinline__ void prepare_value(int row, const Vec<T, kV>* x,
                                                const Weights& w) const {
    float v[kV];
    convolve(v, x[0], x[1], x[2], x[3], w.v);
#pragma unroll
    for (int i = 0; i < kV; ++i) shared.v[row * kWidth + lane * kV + i] = v[i];
  }
  __device__ __forceinline__ void prepare_gates(int row, const Vec<T, 2>& ba,
                                                const Weights& w) const {
    const float x = __fadd_rn(to_float(ba[1]), w.bias);
    const float softplus = x > 20 ? x : log1pf(expf(x));
    shared.gates[row].x = expf(-__fmul_rn(w.rate, softplus));
    shared.gates[row].y = sigmoid(to_float(ba[0]));
  }

  // The tokens that `prepare` reads: the step's or the accepted ones. Both use the same code, so
  // that a step finds it in the instruction cache.
  struct Source {
    const T *rows, *gates;
    int row, gates_row;  // elements
    Places places;
    const int* nodes;    // the pending token of each accepted one
    const int* parents;  // of the step's tokens
    bool is_step;

    __device__ __forceinline__ int node(int i) const { return is_step ? i : nodes[i]; }
    // The token before token i. Tokens -1, -2, … are in the window.
    __device__ __forceinline__ int before(int i) const {
      return is_step && i >= 0 ? parents[i] : i - 1;
    }
  };
  __device__ __forceinline__ Source source(bool is_step) const {
    if (is_step) {
      return {qkvz,   ba,      args.layout.qkvz_row, args.layout.ba_row,
              places, nullptr, shared.tree->parents, true};
    }
    const Places in_pending{0, kDim, 2 * kDim + part * kWidth, 0, kRawWidth, kRawWidth + 1};
    return {pending(0), pending(0), kPendingWidth, kPendingWidth,
            in_pending, path(),     nullptr,       false};
  }
  __device__ __forceinline__ Raw<T> raw(const Source& from, int i) const {
    if (i < 0) return in_window(kWindow + i);
    const T* const row = from.rows + int64_t{from.node(i)} * from.row;
    return {row + from.places.q, row + from.places.k, row + from.places.v};
  }

  // Prepares `count` tokens, by all warps. Stores the step's raw tokens as pending ones.
  __device__ __forceinline__ void prepare(int count, const Weights& w, const Source& from) const {
    const int token = kThreads - 1 - static_cast<int>(threadIdx.x);
    if (token < count) {
      const T* const row = from.gates + int64_t{from.node(token)} * from.gates_row;
      const Vec<T, 2> ba{row[from.places.b], row[from.places.a]};
      prepare_gates(token, ba, w);
      if (from.is_step && part == 0) store(pending(token) + kRawWidth, ba);
    }
#pragma unroll 1
    for (int unit = warp; unit < 2 * count; unit += kThreads / 32) {
      const int i = unit < count ? unit : unit - count;
      const int x2 = from.before(i), x1 = from.before(x2), x0 = from.before(x1);
      const Raw<T> raws[kConvTaps] = {raw(from, x0), raw(from, x1), raw(from, x2), raw(from, i)};
      if (unit < count) {
        Vec<T, 4> q[kConvTaps], k[kConvTaps];
#pragma unroll
        for (int t = 0; t < kConvTaps; ++t) {
          q[t] = load<T, 4>(raws[t].q + lane * 4);
          k[t] = load<T, 4>(raws[t].k + lane * 4);
        }
        prepare_keys(i, q, k, w);
        if (from.is_step && part == 0) {
          store(pending(i) + lane * 4, q[3]);
          store(pending(i) + kDim + lane * 4, k[3]);
        }
      } else {
        Vec<T, kV> v[kConvTaps];
#pragma unroll
        for (int t = 0; t < kConvTaps; ++t) v[t] = load<T, kV>(raws[t].v + lane * kV);
        prepare_value(i, v, w);
        if (from.is_step) store(pending(i) + 2 * kDim + part * kWidth + lane * kV, v[3]);
      }
    }
  }

  // Prepares tokens begin .. begin + count - 1 of a prompt in rows row, row + 1, …, by the
  // producers.
  template <typename GetRaw>
  __device__ __forceinline__ void prepare_stage(int begin, int count, int row, const Weights& w,
                                                GetRaw&& raw) const {
    const int thread = static_cast<int>(threadIdx.x) - 32 * kFirstProducer;
    if (thread < count) prepare_gates(row + thread, gates_in_step(begin + thread), w);
    for (int i = (warp - kFirstProducer) * kRun; i < count; i += kProducers * kRun) {
      Vec<T, 4> q[kRun + kWindow], k[kRun + kWindow];
      Vec<T, kV> v[kRun + kWindow];
      const auto load_token = [&](int t, const Raw<T>& from) {
        q[t] = load<T, 4>(from.q + lane * 4);
        k[t] = load<T, 4>(from.k + lane * 4);
        v[t] = load<T, kV>(from.v + lane * kV);
      };
      if (begin + i >= kWindow) {
        Raw<T> from = in_step(begin + i - kWindow);
#pragma unroll
        for (int t = 0; t < kRun + kWindow; ++t) {
          load_token(t, from);
          const int64_t step = i + t + 1 - kWindow < count ? args.layout.qkvz_row : 0;
          from.q += step, from.k += step, from.v += step;
        }
      } else {
#pragma unroll
        for (int t = 0; t < kRun + kWindow; ++t) {
          load_token(t, raw(begin + min(i + t - kWindow, count - 1)));
        }
      }
#pragma unroll
      for (int t = 0; t < kRun; ++t) {
        if (i + t >= count) break;
        prepare_keys(row + i + t, q + t, k + t, w);
        prepare_value(row + i + t, v + t, w);
      }
    }
  }

  // ---- the recurrence

  __device__ __forceinline__ float* tile() const {
    return args.state + (at * kHeadWarps + part * kWarps + warp) * kTileFloats;
  }
  __device__ __forceinline__ float* copy(int index) const {
    return shared.copies + (index * kWarps + warp) * kTileFloats;
  }
  __device__ __forceinline__ Operands operands(int row) const {
    Operands x;
    x.load(keys(row), shared.v + row * kWidth + warp * kTile, shared.gates + row, lane);
    return x;
  }
  __device__ __forceinline__ void store_output(int row, float o) const {
    if (lane % 8 < 2) shared.o[row * kWidth + warp * kTile + lane / 8 * 2 + lane % 8] = o;
  }

  // The accepted tokens that S does not contain yet.
  __device__ __forceinline__ int num_accepted(int length) const {
    const Accepted& accepted = args.accepted;
    const int folded = args.folded[at];
    if (accepted.counts == nullptr || folded == length) return 0;
    const int count = accepted.counts[slot];
    return folded + count == length && count <= args.capacity.rows && path()[0] >= 0 ? count : 0;
  }
  __device__ __forceinline__ const int* path() const {
    return args.accepted.paths + int64_t{slot} * args.accepted.max_path;
  }

  // ---- the window

  // Calls f(column of a raw token in global memory, column in `window`) for the CTA's columns. The
  // columns of q and k belong to all CTAs of the head.
  template <typename F>
  __device__ __forceinline__ void each_column(int thread, int num_threads, F&& f) const {
#pragma unroll 1
    for (int c = thread; c < Memory::kWindowWidth; c += num_threads) {
      f(c < 2 * kDim ? c : c + part * kWidth, c);
    }
  }
  // Replaces the window by the last three tokens of the window and `count` tokens that follow it.
  template <typename F>
  __device__ __forceinline__ void move_window(int count, F&& raw, int thread,
                                              int num_threads) const {
    each_column(thread, num_threads, [&](int, int c) {
      T values[kWindow];
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        const Raw<T> from = raw(count + j - kWindow);
        values[j] = c < kDim ? from.q[c] : c < 2 * kDim ? from.k[c - kDim] : from.v[c - 2 * kDim];
      }
#pragma unroll
      for (int j = 0; j < kWindow; ++j) shared.window[j * Memory::kWindowWidth + c] = values[j];
    });
  }
  __device__ __forceinline__ T* window() const { return args.window + at * kWindow * kRawWidth; }
  __device__ __forceinline__ void load_window() const {
    each_column(threadIdx.x, kThreads, [&](int from, int to) {
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        shared.window[j * Memory::kWindowWidth + to] = window()[j * kRawWidth + from];
      }
    });
  }
  // After a barrier of the cluster behind load_window: all CTAs of a head read q and k.
  __device__ __forceinline__ void store_window(int thread, int num_threads) const {
    each_column(thread, num_threads, [&](int to, int c) {
      if (c < 2 * kDim && part != 0) return;
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        window()[j * kRawWidth + to] = shared.window[j * Memory::kWindowWidth + c];
      }
    });
  }

  __device__ __forceinline__ const float* outputs(int row) const {
    return shared.o + row * kWidth + lane % kTokenLanes * 4;
  }
  // ---- the exchange of sums of squares between the CTAs of the head

  __device__ __forceinline__ uint32_t barrier(int exchange) const {
    return ptx::shared_address(shared.barriers + exchange);
  }
  __device__ __forceinline__ void init_barriers() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (kSplit > 1) {
      if (threadIdx.x != 0) return;
      for (int i = 0; i < kExchanges; ++i) ptx::mbarrier_init(barrier(i), 1);
      ptx::mbarrier_init_fence();
    }
#endif
  }
  // All CTAs of the head have initialised their barriers and have read what they share: the window
  // and the pending tokens in global memory. NOTE: it does not publish writes.
  static __device__ __forceinline__ void meet() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (kSplit > 1) {
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
#endif
  }
  // One thread says how many tokens the exchange has, a multiple of 4.
  __device__ __forceinline__ void expect_squares(int exchange, int tokens) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (kSplit > 1) {
      ptx::mbarrier_expect_bytes(barrier(exchange), kSplit * tokens * sizeof(float));
    }
#endif
  }
  // Sends the CTA's sums of squares of the warp's tokens to each CTA of the head. All lanes call
  // it. `row`: of the lane's token; `is_row`: o is there. `place`: of the warp's first token.
  __device__ __forceinline__ void send_squares(int exchange, int row, bool is_row,
                                               int place) const {
    float sum[1] = {};
    if (is_row) {
      const float4 o = *reinterpret_cast<const float4*>(outputs(row));
      sum[0] = __fmaf_rn(o.w, o.w, __fmaf_rn(o.z, o.z, __fmaf_rn(o.y, o.y, __fmul_rn(o.x, o.x))));
    }
    sum_lanes<kTokenLanes>(sum);
    float* const to = shared.squares + part * args.capacity.squares + place;
    if constexpr (kSplit > 1) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
      static_assert(kTokens == 4, "a warp sends 16 bytes");
      float sums[kTokens];
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        sums[i] = __shfl_sync(0xffffffffu, sum[0], i * kTokenLanes);
      }
      if (lane < kSplit) {
        ptx::store_cluster16(ptx::cluster_address(ptx::shared_address(to), lane), sums,
                             ptx::cluster_address(barrier(exchange), lane));
      }
#endif
    } else {
      if (is_row && lane == 0) *to = sum[0];
    }
  }
  __device__ __forceinline__ void wait_for_squares(int exchange, int parity) const {
    if constexpr (kSplit > 1) {
      ptx::mbarrier_wait(barrier(exchange), parity);
    } else if constexpr (!kCommits) {
      __syncthreads();
    }
  }

  // ---- outputs: norm * o / rms(o) * silu(z)

  __device__ __forceinline__ Vec<T, 4> load_z(int i) const {
    return load<T, 4>(row_of(i) + places.z + lane % kTokenLanes * 4);
  }
  // Writes the lane's columns of token i, whose o is in row `row`.
  __device__ __forceinline__ void write_output(int i, int row, int place, const Vec<T, 4>& z,
                                               const Weights& w) const {
    float sum = 0;
#pragma unroll
    for (int p = 0; p < kSplit; ++p) {
      sum = __fadd_rn(sum, shared.squares[p * args.capacity.squares + place]);
    }
    const float scale = rsqrtf(__fmaf_rn(sum, 1.0f / kDim, args.eps));
    const float4 v = *reinterpret_cast<const float4*>(outputs(row));
    const float o[4] = {v.x, v.y, v.z, v.w};
    Vec<T, 4> out;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float gate = to_float(z[c]);
      out[c] = from_float<T>(
          __fmul_rn(__fmul_rn(w.norm[c], __fmul_rn(o[c], scale)), __fmul_rn(gate, sigmoid(gate))));
    }
    store(this->out + int64_t{i} * args.num_value_heads * kDim + lane % kTokenLanes * 4, out);
  }
};

}  // namespace cpmcu::cuda::delta_net
