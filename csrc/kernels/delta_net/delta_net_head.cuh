// The parts of gated_delta_net.cu that work on one value head: convolution, norms and gates, the
// window, the gated norm of outputs. The file gated_delta_net.cu explains the schedule.
#pragma once

#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/delta_net/delta_net_convolve.cuh"
#include "kernels/delta_net/delta_net_exchange.cuh"

namespace cpmcu::cuda::delta_net {

// ---- one CTA

template <typename T, int kSplit, bool kCommits>
struct Head {
  using Memory = Shared<T, kSplit>;
  static constexpr int kWidth = Memory::kWidth;
  static constexpr int kV = kWidth / 32;              // channels of v that a lane of a prompt has
  static constexpr int kWarps = kHeadWarps / kSplit;  // warps that own columns of S
  static constexpr bool kSpecial = kCommits && kSplit > 1;  // eight more warps prepare the tokens
  static constexpr int kProducers = kSpecial ? 8 : kWarps;
  static constexpr int kFirstProducer = kSpecial ? kWarps : 0;
  static constexpr int kThreads = 32 * (kFirstProducer + kProducers);
  static constexpr int kStage = kSplit > 1 ? 32 : 16;  // tokens in one stage of a prompt
  // v and outputs: four columns in a lane, kTokens tokens in a warp.
  static constexpr int kTokenLanes = kWidth / 4;
  static constexpr int kTokens = 32 / kTokenLanes;

  const DeltaArgs<T>& args;
  Memory& shared;
  Exchange<Memory> exchange;
  int part, head, key_head, slot;
  int64_t at;  // index of the head in [slots, Hv]
  int warp, lane;
  Places places;
  // The first token of the sequence.
  const T *qkvz, *ba;
  T* out;

  __device__ __forceinline__ Head(const DeltaArgs<T>& args, Memory& shared, int head, int slot,
                                  int first_token)
      : args(args), shared(shared), exchange(shared), part(exchange.part), head(head), slot(slot) {
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
  // v and outputs: the first of the lane's columns, and its token among those of the warp.
  __device__ __forceinline__ int column() const { return lane % kTokenLanes * 4; }
  __device__ __forceinline__ int token() const { return lane / kTokenLanes; }
  __device__ __forceinline__ T* window_row(int place) const {
    return shared.window + place * Memory::kWindowWidth;
  }
  // Places 0 to 2 have the tokens before the step. `fetch` fills the places after them.
  __device__ __forceinline__ Raw<T> in_window(int place) const {
    const T* const row = window_row(place);
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
    float q[4][kConvTaps], k[4][kConvTaps];  // convolution weights of the lane's channels
    float rate, bias;                        // exp(A_log) and dt_bias of the head
    float norm[4];                           // norm weights of the lane's output columns
  };
  __device__ __forceinline__ void load_weights(Weights& w) const {
    const int keys = args.num_key_heads * kDim;
    load_filters(w.q, args.conv, key_head * kDim + lane * 4);
    load_filters(w.k, args.conv, keys + key_head * kDim + lane * 4);
    w.rate = expf(args.a_log[head]);
    w.bias = args.dt_bias[head];
    load_norm(w);
  }
  __device__ __forceinline__ void load_norm(Weights& w) const {
    const auto norm = load<T, 4>(args.norm + part * kWidth + column());
#pragma unroll
    for (int i = 0; i < 4; ++i) w.norm[i] = to_float(norm[i]);
  }
  // Filters of v. For the tokens of a prompt a lane has kV channels, the same ones for all tokens.
  using Filters = float[4][kConvTaps];
  using PromptFilters = float[kV][kConvTaps];
  template <int kN>
  __device__ __forceinline__ void load_value_filters(float (&of_v)[kN][kConvTaps]) const {
    const int before = 2 * args.num_key_heads * kDim + head * kDim + part * kWidth;
    load_filters(of_v, args.conv, before + (kN == 4 ? column() : lane * kV));
  }

  // ---- a token: convolution, norms and gates -> row `row` of shared memory

  // Prepares q and k of kN tokens, and stores those of the first `count`. `x_q` and `x_k` are the
  // convolution's inputs: three earlier tokens, then the kN tokens. The work on one token does not
  // wait for another.
  template <int kN>
  __device__ __forceinline__ void prepare_keys(int row, int count, const Vec<T, 4>* x_q,
                                               const Vec<T, 4>* x_k, const Weights& w) const {
    float q[kN][4], k[kN][4], sums[3 * kN] = {};
#pragma unroll
    for (int t = 0; t < kN; ++t) {
      convolve(q[t], x_q + t, w.q);
      convolve(k[t], x_k + t, w.k);
      float* const sum = sums + 3 * t;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[0] = __fmaf_rn(q[t][i], q[t][i], sum[0]);
        sum[1] = __fmaf_rn(k[t][i], k[t][i], sum[1]);
        sum[2] = __fmaf_rn(q[t][i], k[t][i], sum[2]);
      }
    }
    sum_lanes<32>(sums);
#pragma unroll
    for (int t = 0; t < kN; ++t) {
      const float* const sum = sums + 3 * t;
      const float of_q = __fmul_rn(0.08838834764831845f, rsqrtf(__fadd_rn(sum[0], 1e-6f)));
      const float of_k = rsqrtf(__fadd_rn(sum[1], 1e-6f));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        q[t][i] = __fmul_rn(q[t][i], of_q), k[t][i] = __fmul_rn(k[t][i], of_k);
      }
      if (t >= count) continue;
      float* const to = shared.keys + (row + t) * 2 * kKeyFloats;
      store_key(to, q[t], lane);
      store_key(to + kKeyFloats, k[t], lane);
      if (lane == 0) to[kProductAt] = __fmul_rn(sum[2], __fmul_rn(of_q, of_k));
    }
  }
  // `row`: of the lane's token, which is stored if it `exists`.
  __device__ __forceinline__ void prepare_value(int row, bool exists, const Vec<T, 4>* x,
                                                const Filters& of_v) const {
    float v[4];
    convolve(v, x, of_v);
    if (!exists) return;
    *reinterpret_cast<float4*>(shared.v + row * kWidth + column()) =
        make_float4(v[0], v[1], v[2], v[3]);
  }
  __device__ __forceinline__ void prepare_gates(int row, const Vec<T, 2>& ba,
                                                const Weights& w) const {
    const float x = __fadd_rn(to_float(ba[1]), w.bias);
    const float softplus = x > 20 ? x : log1pf(expf(x));
    shared.gates[row] =
        make_float2(expf(-__fmul_rn(w.rate, softplus)), approximate_sigmoid(to_float(ba[0])));
  }

  __device__ __forceinline__ Source<T> source(bool is_step) const {
    if (is_step) {
      const bool is_tree = args.tokens.token_parents != nullptr;
      return {qkvz,
              ba,
              args.layout.qkvz_row,
              args.layout.ba_row,
              places,
              nullptr,
              is_tree ? shared.tree->windows : nullptr,
              true};
    }
    const Places in_pending{0, kDim, 2 * kDim + part * kWidth, 0, kRawWidth, kRawWidth + 1};
    return {pending(0), pending(0), kPendingWidth, kPendingWidth,
            in_pending, path(),     nullptr,       false};
  }

  // Starts the copy of `count` raw tokens to shared memory, all at once.
  __device__ __forceinline__ void fetch(int count, const Source<T>& from) const {
    constexpr int kChunks = Memory::kWindowWidth / 8;
#pragma unroll 1
    for (int i = threadIdx.x; i < count * kChunks; i += kThreads) {
      const int token = i / kChunks, c = i % kChunks * 8;
      const int column = c < kDim       ? from.places.q + c
                         : c < 2 * kDim ? from.places.k + c - kDim
                                        : from.places.v + c - 2 * kDim;
      ptx::cp_async16(window_row(kWindow + token) + c,
                      from.rows + int64_t{from.node(token)} * from.row + column);
    }
    ptx::cp_async_commit();
  }

  // Prepares `count` tokens, by all warps. Stores the step's raw tokens as pending ones. The CTAs
  // of a head share the work on q and k of a step with more tokens than warps.
  __device__ __forceinline__ void prepare(int count, const Weights& w, const Filters& of_v,
                                          const Source<T>& from) const {
    fetch(count, from);
    const int last = kThreads - 1 - static_cast<int>(threadIdx.x);
    if (last < count) {
      const T* const row = from.gates + int64_t{from.node(last)} * from.gates_row;
      const Vec<T, 2> ba{row[from.places.b], row[from.places.a]};
      prepare_gates(last, ba, w);
      if (from.is_step && part == 0) store(pending(last) + kRawWidth, ba);
    }
    const bool shares = !kCommits && kSplit > 1 && from.is_step && count > kWarps;
    const int stride = shares ? kSplit : 1, begin = shares ? part : 0;
    const int keys = (count - begin + stride - 1) / stride;
    if (shares && threadIdx.x == 0) exchange.expect_keys(count - keys);
    ptx::cp_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int unit = warp; unit < keys + (count + kTokens - 1) / kTokens; unit += kThreads / 32) {
      const bool is_key = unit < keys;
      const int first = is_key ? unit * stride + begin : (unit - keys) * kTokens + token();
      const int i = min(first, count - 1);
      const uint32_t window = from.window(i);
      const T* const rows[kConvTaps] = {window_row(window >> 16), window_row(window >> 8 & 0xff),
                                        window_row(window & 0xff), window_row(kWindow + i)};
      if (is_key) {
        Vec<T, 4> q[kConvTaps], k[kConvTaps];
#pragma unroll
        for (int t = 0; t < kConvTaps; ++t) {
          q[t] = load<T, 4>(rows[t] + lane * 4);
          k[t] = load<T, 4>(rows[t] + kDim + lane * 4);
        }
        prepare_keys<1>(i, 1, q, k, w);
        if (shares) exchange.send_keys(this->keys(i));
        if (from.is_step && (shares || part == 0)) {
          store(pending(i) + lane * 4, q[3]);
          store(pending(i) + kDim + lane * 4, k[3]);
        }
      } else {
        Vec<T, 4> v[kConvTaps];
#pragma unroll
        for (int t = 0; t < kConvTaps; ++t) v[t] = load<T, 4>(rows[t] + 2 * kDim + column());
        prepare_value(i, first < count, v, of_v);
        if (from.is_step && first < count) {
          store(pending(i) + 2 * kDim + part * kWidth + column(), v[3]);
        }
      }
    }
    __syncthreads();
    if (shares) exchange.wait(kExchangeOfKeys, 0);
  }

  // Prepares tokens begin .. begin + count - 1 of a prompt in rows row, row + 1, …, by the
  // producers.
  template <typename GetRaw>
  __device__ __forceinline__ void prepare_stage(int begin, int count, int row, const Weights& w,
                                                const PromptFilters& of_v, GetRaw&& raw) const {
    const int thread = static_cast<int>(threadIdx.x) - 32 * kFirstProducer;
    if (thread < count) prepare_gates(row + thread, gates_in_step(begin + thread), w);
    for (int i = (warp - kFirstProducer) * kTokens; i < count; i += kProducers * kTokens) {
      Vec<T, 4> q[kTokens + kWindow], k[kTokens + kWindow];
      Vec<T, kV> v[kTokens + kWindow];
      const auto load_token = [&](int t, const Raw<T>& from) {
        q[t] = load<T, 4>(from.q + lane * 4);
        k[t] = load<T, 4>(from.k + lane * 4);
        v[t] = load<T, kV>(from.v + lane * kV);
      };
      if (begin + i >= kWindow) {
        Raw<T> from = in_step(begin + i - kWindow);
#pragma unroll
        for (int t = 0; t < kTokens + kWindow; ++t) {
          load_token(t, from);
          const int64_t step = i + t + 1 - kWindow < count ? args.layout.qkvz_row : 0;
          from.q += step, from.k += step, from.v += step;
        }
      } else {
#pragma unroll
        for (int t = 0; t < kTokens + kWindow; ++t) {
          load_token(t, raw(begin + min(i + t - kWindow, count - 1)));
        }
      }
      prepare_keys<kTokens>(row + i, count - i, q, k, w);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        float value[kV];
        convolve(value, v + t, of_v);
        if (i + t >= count) continue;
#pragma unroll
        for (int c = 0; c < kV; ++c) shared.v[(row + i + t) * kWidth + lane * kV + c] = value[c];
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
  __device__ __forceinline__ Prepared prepared(int row) const {
    return {keys(row), shared.v + row * kWidth + warp * kTile, shared.gates + row};
  }
  __device__ __forceinline__ Operands operands(int row) const {
    Operands x;
    x.load_k(prepared(row), lane);
    x.load_others(prepared(row), lane);
    return x;
  }
  // Adds a token to S.
  __device__ __forceinline__ void update(Columns& state, int row) const {
    state.step<false>(operands(row), lane);
  }
  // Four lanes have the same o. All four store it, which avoids a branch.
  __device__ __forceinline__ void store_output(int row, const OutputParts& parts) const {
    const float o = parts.sum();
    shared.o[row * kWidth + warp * kTile + pair_of(lane) * 2 + lane % 2] = o;
  }

  // The accepted tokens that S does not contain yet, at most `most`.
  __device__ __forceinline__ int num_accepted(int length, int most) const {
    if (args.accepted.counts == nullptr) return 0;
    // All three loads are issued before any result is used.
    const int folded = args.folded[at], count = args.accepted.counts[slot], first = path()[0];
    const bool is_known = folded != length && folded + count == length;
    return is_known && count <= most && first >= 0 ? count : 0;
  }
  __device__ __forceinline__ const int* path() const {
    return args.accepted.paths + int64_t{slot} * args.accepted.max_path;
  }

  // ---- the window

  // Calls f(column of a raw token in global memory, column in `window`) for every 8 columns of
  // the CTA. The columns of q and k belong to all CTAs of the head.
  template <typename F>
  __device__ __forceinline__ void each_chunk(int thread, int num_threads, F&& f) const {
#pragma unroll 1
    for (int c = 8 * thread; c < Memory::kWindowWidth; c += 8 * num_threads) {
      f(c < 2 * kDim ? c : c + part * kWidth, c);
    }
  }
  // Replaces the window by the last three tokens of the window and `count` tokens that follow it.
  template <typename F>
  __device__ __forceinline__ void move_window(int count, F&& raw, int thread,
                                              int num_threads) const {
    each_chunk(thread, num_threads, [&](int, int c) {
      Vec16<T> values[kWindow];
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        const Raw<T> from = raw(count + j - kWindow);
        values[j] = load<T, 8>(c < kDim       ? from.q + c
                               : c < 2 * kDim ? from.k + c - kDim
                                              : from.v + c - 2 * kDim);
      }
#pragma unroll
      for (int j = 0; j < kWindow; ++j) store(window_row(j) + c, values[j]);
    });
  }
  __device__ __forceinline__ T* window() const { return args.window + at * kWindow * kRawWidth; }
  // Starts the copy of the window.
  __device__ __forceinline__ void load_window() const {
    each_chunk(threadIdx.x, kThreads, [&](int from, int to) {
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        ptx::cp_async16(window_row(j) + to, window() + j * kRawWidth + from);
      }
    });
    ptx::cp_async_commit();
  }
  // Call it after load_window and a cluster barrier, because all CTAs of a head read q and k.
  __device__ __forceinline__ void store_window(int thread, int num_threads) const {
    each_chunk(thread, num_threads, [&](int to, int c) {
      if (c < 2 * kDim && part != 0) return;
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        store(window() + j * kRawWidth + to, load<T, 8>(window_row(j) + c));
      }
    });
  }

  __device__ __forceinline__ const float* outputs(int row) const {
    return shared.o + row * kWidth + column();
  }
  static __device__ __forceinline__ float squares_of(const float4& o) {
    return __fmaf_rn(o.w, o.w, __fmaf_rn(o.z, o.z, __fmaf_rn(o.y, o.y, __fmul_rn(o.x, o.x))));
  }
  // Sends the CTA's sums of squares of the warp's tokens to each CTA of the head. All lanes call
  // it. `row`: of the lane's token; `is_row`: o is there. `place`: of the warp's first token.
  __device__ __forceinline__ void send_squares(int round, int row, bool is_row, int place) const {
    float sum[1] = {};
    if (is_row) {
      sum[0] = squares_of(*reinterpret_cast<const float4*>(outputs(row)));
    }
    sum_lanes<kDim / 4 / Memory::kParts>(sum);
    if constexpr (kSplit > 1) {
      exchange.send_squares(round, sum[0], place);
    } else {
      if (is_row && lane == 0) *exchange.squares(0, place) = sum[0];
    }
  }
  __device__ __forceinline__ void wait_for_squares(int round, int parity) const {
    if constexpr (kSplit > 1) {
      exchange.wait(round, parity);
    } else if constexpr (!kCommits) {
      __syncthreads();
    }
  }

  // ---- outputs: norm * o / rms(o) * silu(z)

  __device__ __forceinline__ Vec<T, 4> load_z(int i) const {
    return load<T, 4>(row_of(i) + places.z + column());
  }
  // Writes the lane's columns of token i, whose o is in row `row`.
  __device__ __forceinline__ void write_output(int i, int row, int place, const Vec<T, 4>& z,
                                               const Weights& w) const {
    float sum = 0;
#pragma unroll
    for (int p = 0; p < Memory::kParts; ++p) sum = __fadd_rn(sum, *exchange.squares(p, place));
    store_normed(i, *reinterpret_cast<const float4*>(outputs(row)), sum, z, w);
  }
  // `sum`: the sum of squares of the token's o, of which `v` is the lane's part.
  __device__ __forceinline__ void store_normed(int i, const float4& v, float sum,
                                               const Vec<T, 4>& z, const Weights& w) const {
    const float scale = rsqrtf(__fmaf_rn(sum, 1.0f / kDim, args.eps));
    const float o[4] = {v.x, v.y, v.z, v.w};
    Vec<T, 4> out;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float gate = to_float(z[c]);
      out[c] = from_float<T>(__fmul_rn(__fmul_rn(w.norm[c], __fmul_rn(o[c], scale)),
                                       __fmul_rn(gate, approximate_sigmoid(gate))));
    }
    store(this->out + int64_t{i} * args.num_value_heads * kDim + column(), out);
  }
};

}  // namespace cpmcu::cuda::delta_net
