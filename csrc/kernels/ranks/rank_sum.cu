// rank_sum: the sum of all ranks' parts, in the order of ranks, and the norm after it.
//
// Roofline: for one token, the latency between two GPUs of one host, about 1 µs. For many tokens,
// the link: 8 bytes for 2 elements.
//
// Schedule: one CTA for each row, up to kExchangeCtas. It pushes its rows to the other ranks, then
// polls the same words of its own receive buffer. A word is always handled by the same CTA, so each
// CTA counts its own rounds. No CTA waits for another of its own GPU. A CTA loads all that its
// first row needs at once and keeps results in registers. Each further trip to L2 would add about
// 0.6 µs.
//
// Surprising: the poll reads the data itself. A flag after the data would cost a fence and a second
// trip over the link.
#include "kernels/ranks/rank_sum.h"

#include <algorithm>

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"
#include "kernels/ranks/words.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 512;

template <typename T>
struct RankSumArgs {
  T* hidden;  // [T, H]
  const T* part;
  T* normed;  // [T, H]; null: no norm
  const T* weight;
  int64_t num_rows;
  int width;  // H
  bool adds;
  float eps, weight_offset;
};

// ---- device helpers

// Adds 4 words, the elements of one vector.
template <typename T>
__device__ __forceinline__ void add(float (&sums)[8], const uint4& words) {
  const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 values = unpack2<T>(all[i]);
    sums[2 * i] += values.x;
    sums[2 * i + 1] += values.y;
  }
}

// A thread's vectors of a row: of this rank's part, and of `hidden` before the sum.
template <typename T, int kVectors>
struct Row {
  uint4 part[kVectors];
  Vec16<T> hidden[kVectors];

  __device__ __forceinline__ void load_from(const RankSumArgs<T>& args, int64_t row) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = column_of(v);
      if (column >= args.width) break;
      part[v] = *reinterpret_cast<const uint4*>(args.part + row * args.width + column);
      if (args.adds) hidden[v] = load<T, 8>(args.hidden + row * args.width + column);
    }
  }
  static __device__ __forceinline__ int column_of(int v) {
    return (v * kThreads + static_cast<int>(threadIdx.x)) * 8;
  }
};

// ---- kernels

// Grid: T, up to kExchangeCtas. kVectors: number of a row's vectors that a thread reads.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kThreads)
    rank_sum_kernel(const __grid_constant__ RankSumArgs<T> args,
                    const __grid_constant__ Exchange exchange) {
  using RowOf = Row<T, kVectors>;
  __shared__ float scratch[32];
  ptx::pdl_launch();
  Vec16<T> weights[kVectors];
  if (args.normed != nullptr) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (RowOf::column_of(v) < args.width) {
        weights[v] = load<T, 8>(args.weight + RowOf::column_of(v));
      }
    }
  }
  ptx::pdl_wait();
  RowOf row;
  row.load_from(args, blockIdx.x);
  const bool is_silent = exchange.state[kSilent] != 0;
  bool waits = exchange.state[kGaveUp] == 0;
  const uint32_t round = next_round(exchange);
  const int64_t half = round % 2 * exchange.half_words();

  for (int64_t at = blockIdx.x; at < args.num_rows && !is_silent; at += gridDim.x) {
    RowOf sent = row;
    if (at != blockIdx.x) sent.load_from(args, at);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = RowOf::column_of(v);
      if (column >= args.width) break;
      send4(exchange, half, (at * args.width + column) / 2, sent.part[v], round);
    }
  }
  const uint64_t* buffer = exchange.buffers[exchange.rank] + half;
  for (int64_t at = blockIdx.x; at < args.num_rows; at += gridDim.x) {
    if (at != blockIdx.x) row.load_from(args, at);
    float squares = 0;
    Vec16<T> out[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t place = at * args.width + RowOf::column_of(v);
      if (RowOf::column_of(v) >= args.width) break;
      float sums[8] = {};
      if (args.adds) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] = to_float(row.hidden[v][i]);
      }
      for (int from = 0; from < exchange.num_ranks; ++from) {
        add<T>(sums, from == exchange.rank
                         ? row.part[v]
                         : receive4(exchange, buffer, from, place / 2, round, waits));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        out[v][i] = from_float<T>(sums[i]);
        squares += to_float(out[v][i]) * to_float(out[v][i]);
      }
      store(args.hidden + place, out[v]);
    }
    if (args.normed == nullptr) continue;
    squares = block_reduce<kThreads>(squares, 0.0f, scratch, Sum{});
    const float scale = rsqrtf(squares / static_cast<float>(args.width) + args.eps);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = RowOf::column_of(v);
      if (column >= args.width) break;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        out[v][i] = from_float<T>(to_float(out[v][i]) * scale *
                                  (to_float(weights[v][i]) + args.weight_offset));
      }
      store(args.normed + at * args.width + column, out[v]);
    }
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads hidden, part and the round from the device.
void rank_sum(const Context& ctx, const RankSumParams& p) {
  check_rank_sum(ctx, p);
  check_rows("rank_sum", "hidden", p.hidden);
  check_rows("rank_sum", "part", p.part);
  const bool norms = !p.norm.out.empty();
  if (norms) {
    check_rows("rank_sum", "the norm", p.norm.out);
    check_vector("rank_sum", "weight", p.norm.weight, p.part.dtype(), p.part.size(1));
  }
  const int64_t rows = p.part.size(0);
  if (rows == 0) return;
  dispatch_half(p.part.dtype(), [&](auto t) {
    using T = decltype(t);
    const RankSumArgs<T> args{.hidden = p.hidden.as<T>(),
                              .part = p.part.as<T>(),
                              .normed = norms ? p.norm.out.as<T>() : nullptr,
                              .weight = norms ? p.norm.weight.as<T>() : nullptr,
                              .num_rows = rows,
                              .width = static_cast<int>(p.part.size(1)),
                              .adds = p.adds,
                              .eps = p.norm.eps,
                              .weight_offset = p.norm.weight_offset};
    const dim3 grid(std::min<int64_t>(rows, kExchangeCtas));
    const int vectors = (args.width + kThreads * 8 - 1) / (kThreads * 8);
    dispatch_int<1, 2, 4>("rank_sum: vectors of a thread", vectors == 3 ? 4 : vectors, [&](auto v) {
      launch(ctx, rank_sum_kernel<T, decltype(v)::value>, grid, dim3(kThreads), 0, args,
             *ctx.exchange);
    });
  });
}

}  // namespace cpmcu::cuda
