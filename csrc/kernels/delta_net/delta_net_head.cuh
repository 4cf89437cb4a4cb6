// The parts of gated_delta_net.cu that work on one value head: shared memory, convolution, the
// columns of S in registers, the gated norm. The file gated_delta_net.cu explains the schedule.
#pragma once

#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/delta_net/gated_delta_net.h"

namespace cpmcu::cuda::delta_net {

constexpr int kDim = 128;  // Dk and Dv
constexpr int kTile = kDeltaTileWidth;
constexpr int kWindow = kConvTaps - 1;
constexpr int kHeadWarps = kDim / kTile;
constexpr int kPromptRows = 16;   // tokens of a prompt that are prepared at once
constexpr int kRows = kDim / 32;  // rows of S in a lane: lane, lane + 32, …

template <typename T>
struct DeltaArgs {
  T* out;         // [T, Hv * 128]
  const T* qkvz;  // [T, row of the layout]
  const T* ba;    // [T, row of the layout]
  const T* conv;  // [channels, 4]
  const float* a_log;
  const float* dt_bias;
  const T* norm;  // [128]
  float eps;
  float* state;  // [slots, Hv, 16, 128 * 8]
  T* window;     // [slots, Hv, 3, 384]
  T* pending;    // [slots, Hv, pending_rows, 392]
  int* folded;   // [slots, Hv]
  Accepted accepted;
  DeltaLayout layout;
  int num_key_heads, num_value_heads;
  int pending_rows;
  int max_rows;  // tokens that shared memory holds
  StepTokens tokens;
};

constexpr int kRawWidth = 3 * kDim;
constexpr int kPendingWidth = kRawWidth + 8;

// The share of a head that a CTA computes, and its shared memory.
template <typename T, int kSplit>
struct Shared {
  static constexpr int kWidth = kDim / kSplit;            // columns of v
  static constexpr int kWindowWidth = 2 * kDim + kWidth;  // q, k and these columns

  float *q, *k, *v, *o, *decay, *beta;  // [rows, 128], [rows, 128], [rows, kWidth] x 2, [rows] x 2
  float* squares;                       // [2, kSplit, rows] sums of squares of o
  uint64_t* ancestors;                  // [64] of each node, itself included
  int* parents;                         // [64]
  T* window;                            // [3, kWindowWidth] raw tokens before the step

  __device__ __forceinline__ Shared(char* memory, int rows) {
    const auto take = [&](int count) {
      float* const at = reinterpret_cast<float*>(memory);
      memory += count * sizeof(float);
      return at;
    };
    ancestors = reinterpret_cast<uint64_t*>(take(2 * kMaxTreeSize));
    parents = reinterpret_cast<int*>(take(kMaxTreeSize));
    q = take(rows * kDim), k = take(rows * kDim);
    v = take(rows * kWidth), o = take(rows * kWidth);
    decay = take(rows), beta = take(rows);
    squares = take(2 * kSplit * rows);
    window = reinterpret_cast<T*>(memory);
  }
  static size_t num_bytes(int rows) {
    const size_t floats = 3 * kMaxTreeSize + rows * (2 * kDim + 2 * kWidth + 2 + 2 * kSplit);
    return floats * sizeof(float) + kWindow * kWindowWidth * sizeof(T);
  }
};

// Addresses of q, k and v of a raw token; v begins at the CTA's columns.
template <typename T>
struct Raw {
  const T *q, *k, *v;
};

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// The convolution of kN channels, rounded as the model's dtype. `w`: [kN, 4] of these channels.
template <typename T, int kN>
__device__ __forceinline__ void convolve(float (&to)[kN], const T* x0, const T* x1, const T* x2,
                                         const T* x3, const float (&w)[kN][kConvTaps]) {
  const Vec<T, kN> v0 = load<T, kN>(x0), v1 = load<T, kN>(x1), v2 = load<T, kN>(x2),
                   v3 = load<T, kN>(x3);
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    float sum = __fmul_rn(w[i][0], to_float(v0[i]));
    sum = __fmaf_rn(w[i][1], to_float(v1[i]), sum);
    sum = __fmaf_rn(w[i][2], to_float(v2[i]), sum);
    sum = __fmaf_rn(w[i][3], to_float(v3[i]), sum);
    to[i] = to_float(from_float<T>(__fmul_rn(sum, sigmoid(sum))));
  }
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

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

// Divides 128 numbers, 4 in each lane, by their length. `scale` multiplies the result.
__device__ __forceinline__ void normalise(float (&x)[4], float scale) {
  float sum = 0;
#pragma unroll
  for (float each : x) sum = __fmaf_rn(each, each, sum);
  const float factor = __fmul_rn(scale, rsqrtf(__fadd_rn(warp_sum(sum), 1e-6f)));
#pragma unroll
  for (float& each : x) each = __fmul_rn(each, factor);
}

// Sums p[c] over the lanes of the warp. Lane l gets the sum of column l / 4.
__device__ __forceinline__ float sum_of_column(const float (&p)[kTile], int lane) {
  float a[4], b[2];
  const bool upper = lane & 16, high = lane & 8, odd = lane & 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float other = __shfl_xor_sync(0xffffffffu, upper ? p[i] : p[i + 4], 16);
    a[i] = __fadd_rn(upper ? p[i + 4] : p[i], other);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float other = __shfl_xor_sync(0xffffffffu, high ? a[i] : a[i + 2], 8);
    b[i] = __fadd_rn(high ? a[i + 2] : a[i], other);
  }
  float sum = __fadd_rn(odd ? b[1] : b[0], __shfl_xor_sync(0xffffffffu, odd ? b[0] : b[1], 4));
  sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
  return __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
}

// One warp's 8 columns of S.
struct Columns {
  float s[kRows][kTile];

  __device__ __forceinline__ void load_from(const float* tile, int lane) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float4* const at = reinterpret_cast<const float4*>(tile + (lane + 32 * j) * kTile);
      const float4 low = at[0], high = at[1];
      s[j][0] = low.x, s[j][1] = low.y, s[j][2] = low.z, s[j][3] = low.w;
      s[j][4] = high.x, s[j][5] = high.y, s[j][6] = high.z, s[j][7] = high.w;
    }
  }
  __device__ __forceinline__ void store_to(float* tile, int lane) const {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      float4* const at = reinterpret_cast<float4*>(tile + (lane + 32 * j) * kTile);
      at[0] = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
      at[1] = make_float4(s[j][4], s[j][5], s[j][6], s[j][7]);
    }
  }
  // S <- decay S + k (beta (v - decay S^T k))^T; `v`: of the lane's column.
  __device__ __forceinline__ void update(const float* k_row, float v, float decay, float beta,
                                         int lane) {
    float k[kRows], p[kTile] = {};
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      k[j] = k_row[lane + 32 * j];
#pragma unroll
      for (int c = 0; c < kTile; ++c) {
        s[j][c] = __fmul_rn(s[j][c], decay);
        p[c] = __fmaf_rn(k[j], s[j][c], p[c]);
      }
    }
    const float delta = __fmul_rn(beta, __fsub_rn(v, sum_of_column(p, lane)));
#pragma unroll
    for (int c = 0; c < kTile; ++c) {
      const float of_column = __shfl_sync(0xffffffffu, delta, 4 * c);
#pragma unroll
      for (int j = 0; j < kRows; ++j) s[j][c] = __fmaf_rn(k[j], of_column, s[j][c]);
    }
  }
  // (S^T q) of the lane's column.
  __device__ __forceinline__ float output(const float* q_row, int lane) const {
    float p[kTile] = {};
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float q = q_row[lane + 32 * j];
#pragma unroll
      for (int c = 0; c < kTile; ++c) p[c] = __fmaf_rn(q, s[j][c], p[c]);
    }
    return sum_of_column(p, lane);
  }
};

// ---- one CTA

template <typename T, int kSplit>
struct Head {
  using Memory = Shared<T, kSplit>;
  static constexpr int kWidth = Memory::kWidth;
  static constexpr int kWarps = kHeadWarps / kSplit;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kV = kWidth / 32;  // channels of v in a lane

  const DeltaArgs<T>& args;
  Memory& shared;
  int part, head, key_head, first, slot;
  int64_t at;  // of the slot's head
  int warp, lane;

  __device__ __forceinline__ int column(const HeadColumns& of, int width) const {
    const int group = args.num_value_heads / args.num_key_heads;
    return of.first + key_head * of.stride + head % group * width;
  }
  __device__ __forceinline__ T* pending(int node) const {
    return args.pending + (at * args.pending_rows + node) * kPendingWidth;
  }
  __device__ __forceinline__ Raw<T> in_window(int place) const {
    const T* const row = shared.window + place * Memory::kWindowWidth;
    return {row, row + kDim, row + 2 * kDim};
  }
  __device__ __forceinline__ Raw<T> in_pending(int node) const {
    const T* const row = pending(node);
    return {row, row + kDim, row + 2 * kDim + part * kWidth};
  }
  // Token i of the step's sequence.
  __device__ __forceinline__ Raw<T> in_step(int i) const {
    const T* const row = args.qkvz + int64_t{first + i} * args.layout.qkvz_row;
    return {row + args.layout.q.first + key_head * args.layout.q.stride,
            row + args.layout.k.first + key_head * args.layout.k.stride,
            row + column(args.layout.v, kDim) + part * kWidth};
  }

  // Convolution weights of the lane's channels: 4 of q, 4 of k, kV of v.
  struct Filters {
    float q[4][kConvTaps], k[4][kConvTaps], v[kV][kConvTaps];
  };
  __device__ __forceinline__ void load(Filters& filters) const {
    const int keys = args.num_key_heads * kDim;
    load_filters(filters.q, args.conv, key_head * kDim + lane * 4);
    load_filters(filters.k, args.conv, keys + key_head * kDim + lane * 4);
    load_filters(filters.v, args.conv, 2 * keys + head * kDim + part * kWidth + lane * kV);
  }

  // Writes q, k, v and the gates of a token to row `row` of shared memory. `raw`: the three tokens
  // before and the token itself.
  __device__ __forceinline__ void prepare(int row, const Raw<T> (&raw)[kConvTaps], T b, T a,
                                          const Filters& filters) const {
    float q[4], k[4], v[kV];
    const int c = lane * 4, cv = lane * kV;
    convolve(q, raw[0].q + c, raw[1].q + c, raw[2].q + c, raw[3].q + c, filters.q);
    convolve(k, raw[0].k + c, raw[1].k + c, raw[2].k + c, raw[3].k + c, filters.k);
    convolve(v, raw[0].v + cv, raw[1].v + cv, raw[2].v + cv, raw[3].v + cv, filters.v);
    normalise(q, 0.08838834764831845f);  // 128^-1/2
    normalise(k, 1);
    *reinterpret_cast<float4*>(shared.q + row * kDim + c) = make_float4(q[0], q[1], q[2], q[3]);
    *reinterpret_cast<float4*>(shared.k + row * kDim + c) = make_float4(k[0], k[1], k[2], k[3]);
#pragma unroll
    for (int i = 0; i < kV; ++i) shared.v[row * kWidth + cv + i] = v[i];
    if (lane == 0) {
      const float x = __fadd_rn(to_float(a), args.dt_bias[head]);
      const float softplus = x > 20 ? x : log1pf(expf(x));
      shared.decay[row] = expf(-__fmul_rn(expf(args.a_log[head]), softplus));
      shared.beta[row] = sigmoid(to_float(b));
    }
  }

  __device__ __forceinline__ void update(Columns& columns, int row) const {
    columns.update(shared.k + row * kDim, shared.v[row * kWidth + warp * kTile + lane / 4],
                   shared.decay[row], shared.beta[row], lane);
  }
  __device__ __forceinline__ void store_output(const Columns& columns, int row) const {
    const float o = columns.output(shared.q + row * kDim, lane);
    if (lane % 4 == 0) shared.o[row * kWidth + warp * kTile + lane / 4] = o;
  }

  // The accepted tokens that S does not contain yet.
  __device__ __forceinline__ int num_accepted(int length) const {
    const Accepted& accepted = args.accepted;
    const int folded = args.folded[at];
    if (accepted.counts == nullptr || folded == length) return 0;
    const int count = accepted.counts[slot];
    return folded + count == length && count <= args.max_rows && path()[0] >= 0 ? count : 0;
  }
  __device__ __forceinline__ const int* path() const {
    return args.accepted.paths + int64_t{slot} * args.accepted.max_path;
  }

  // Calls f(column of a raw token in global memory, column in `window`) for the CTA's columns. The
  // columns of q and k belong to all CTAs of the head.
  template <typename F>
  __device__ __forceinline__ void each_column(F&& f) const {
    for (int c = threadIdx.x; c < Memory::kWindowWidth; c += kThreads) {
      f(c < 2 * kDim ? c : c + part * kWidth, c);
    }
  }
  // Replaces the window by the last three tokens of the window and `count` tokens that follow it.
  template <typename F>
  __device__ __forceinline__ void move_window(int count, F&& raw) const {
    each_column([&](int, int c) {
      T values[kWindow];
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        const int place = count + j;
        if (place < kWindow) {
          values[j] = shared.window[place * Memory::kWindowWidth + c];
        } else {
          const Raw<T> from = raw(place - kWindow);
          values[j] = c < kDim ? from.q[c] : c < 2 * kDim ? from.k[c - kDim] : from.v[c - 2 * kDim];
        }
      }
#pragma unroll
      for (int j = 0; j < kWindow; ++j) shared.window[j * Memory::kWindowWidth + c] = values[j];
    });
  }

  // Updates S and the window by `count` accepted tokens. All threads call it.
  __device__ void fold(Columns& columns, int count, const Filters& filters) const {
    const int* const nodes = path();
    const auto raw = [&](int i) { return i < 0 ? in_window(kWindow + i) : in_pending(nodes[i]); };
    for (int i = warp; i < count; i += kWarps) {
      const T* const gates = pending(nodes[i]) + kRawWidth;
      prepare(i, {raw(i - 3), raw(i - 2), raw(i - 1), raw(i)}, gates[0], gates[1], filters);
    }
    __syncthreads();
    for (int i = 0; i < count; ++i) update(columns, i);
    move_window(count, raw);
    __syncthreads();
  }

  // out = norm * o / rms(o) * silu(z) for `count` tokens from token `begin` on. Rows of shared
  // memory are tokens; `parity` alternates between calls.
  __device__ void write_outputs(int begin, int count, int parity) const {
    float* const squares = shared.squares + parity * kSplit * args.max_rows;
    for (int row = warp; row < count; row += kWarps) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kV; ++i) {
        const float o = shared.o[row * kWidth + lane + 32 * i];
        sum = __fmaf_rn(o, o, sum);
      }
      sum = warp_sum(sum);
      float* const mine = squares + part * args.max_rows + row;
      if constexpr (kSplit > 1) {
        if (lane < kSplit) ptx::store_to_cta(mine, lane, sum);
      } else {
        if (lane == 0) *mine = sum;
      }
    }
    if constexpr (kSplit > 1) {
      ptx::cluster_arrive_release();
      ptx::cluster_wait();
    } else {
      __syncthreads();
    }
    for (int row = warp; row < count; row += kWarps) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kSplit; ++i) sum = __fadd_rn(sum, squares[i * args.max_rows + row]);
      const float scale = rsqrtf(__fmaf_rn(sum, 1.0f / kDim, args.eps));
      const int64_t token = first + begin + row;
      const T* const z = args.qkvz + token * args.layout.qkvz_row + column(args.layout.z, kDim);
      T* const out = args.out + (token * args.num_value_heads + head) * kDim;
#pragma unroll
      for (int i = 0; i < kV; ++i) {
        const int c = part * kWidth + lane + 32 * i;
        const float gate = to_float(z[c]);
        const float o = __fmul_rn(shared.o[row * kWidth + lane + 32 * i], scale);
        out[c] = from_float<T>(
            __fmul_rn(__fmul_rn(to_float(args.norm[c]), o), __fmul_rn(gate, sigmoid(gate))));
      }
    }
  }

  // Stores the raw projections of the step's nodes, which the next step may fold.
  __device__ __forceinline__ void store_pending(int count) const {
    each_column([&](int to, int c) {
      if (c < 2 * kDim && part != 0) return;
      for (int i = 0; i < count; ++i) {
        const Raw<T> from = in_step(i);
        pending(i)[to] = c < kDim       ? from.q[c]
                         : c < 2 * kDim ? from.k[c - kDim]
                                        : from.v[c - 2 * kDim];
      }
    });
    if (part != 0 || threadIdx.x >= count) return;
    const T* const ba = args.ba + int64_t{first + threadIdx.x} * args.layout.ba_row;
    T* const gates = pending(threadIdx.x) + kRawWidth;
    gates[0] = ba[column(args.layout.b, 1)];
    gates[1] = ba[column(args.layout.a, 1)];
  }
  __device__ __forceinline__ T* window() const { return args.window + at * kWindow * kRawWidth; }
  __device__ __forceinline__ void load_window() const {
    each_column([&](int from, int to) {
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        shared.window[j * Memory::kWindowWidth + to] = window()[j * kRawWidth + from];
      }
    });
  }
  __device__ __forceinline__ void store_window() const {
    each_column([&](int to, int c) {
      if (c < 2 * kDim && part != 0) return;
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        window()[j * kRawWidth + to] = shared.window[j * Memory::kWindowWidth + c];
      }
    });
  }
};

}  // namespace cpmcu::cuda::delta_net
