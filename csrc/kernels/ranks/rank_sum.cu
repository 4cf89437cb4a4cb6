// rank_sum: the sum of all ranks' parts, in the order of ranks, and the norm after it.
//
// Roofline: for one token, the latency between two GPUs of one host, about 1 µs. For many tokens,
// the link: 8 bytes for 2 elements.
//
// Schedule: one CTA for each row, up to kExchangeCtas. It pushes its rows to the other ranks, then
// polls the same words of its own receive buffer. A word is always handled by the same CTA, so each
// CTA counts its own rounds. No CTA waits for another of its own GPU.
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
  T* normed;  // null: no norm
  const T* weight;
  int64_t num_rows;
  int width;  // H
  bool adds;
  float eps, weight_offset;
};

// ---- device helpers

// Adds 4 words, the elements of one vector.
template <typename T>
__device__ __forceinline__ void add(float (&sums)[8], const uint32_t (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 values = unpack2<T>(words[i]);
    sums[2 * i] += values.x;
    sums[2 * i + 1] += values.y;
  }
}

// Adds the words of vector `at` of all ranks, in their order.
template <typename T>
__device__ __forceinline__ void add_parts(float (&sums)[8], const Exchange& exchange,
                                          const uint64_t* buffer, const T* part, int64_t at,
                                          uint32_t round, bool& waits) {
  for (int from = 0; from < exchange.num_ranks; ++from) {
    uint32_t words[4];
    if (from == exchange.rank) {
      const uint4 own = *reinterpret_cast<const uint4*>(part + at);
      words[0] = own.x, words[1] = own.y, words[2] = own.z, words[3] = own.w;
    } else {
      const uint4 sent = receive4(exchange, buffer, from, at / 2, round, waits);
      words[0] = sent.x, words[1] = sent.y, words[2] = sent.z, words[3] = sent.w;
    }
    add<T>(sums, words);
  }
}

// ---- kernels

// Grid: T, up to kExchangeCtas.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    rank_sum_kernel(const __grid_constant__ RankSumArgs<T> args,
                    const __grid_constant__ Exchange exchange) {
  __shared__ float scratch[32];
  ptx::pdl_launch();
  ptx::pdl_wait();
  const uint32_t round = next_round(exchange);
  const int64_t half = round % 2 * exchange.half_words();
  const bool is_silent = exchange.state[kSilent] != 0;
  bool waits = exchange.state[kGaveUp] == 0;
  const auto first = static_cast<int>(threadIdx.x) * 8;

  for (int64_t row = blockIdx.x; row < args.num_rows && !is_silent; row += gridDim.x) {
    for (int column = first; column < args.width; column += kThreads * 8) {
      const int64_t at = row * args.width + column;
      send4(exchange, half, at / 2, *reinterpret_cast<const uint4*>(args.part + at), round);
    }
  }
  const uint64_t* buffer = exchange.buffers[exchange.rank] + half;
  for (int64_t row = blockIdx.x; row < args.num_rows; row += gridDim.x) {
    float squares = 0;
    for (int column = first; column < args.width; column += kThreads * 8) {
      const int64_t at = row * args.width + column;
      float sums[8] = {};
      if (args.adds) {
        const Vec16<T> hidden = load<T, 8>(args.hidden + at);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] = to_float(hidden[i]);
      }
      add_parts<T>(sums, exchange, buffer, args.part, at, round, waits);
      Vec16<T> out;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        out[i] = from_float<T>(sums[i]);
        squares += to_float(out[i]) * to_float(out[i]);
      }
      store(args.hidden + at, out);
    }
    if (args.normed == nullptr) continue;
    squares = block_reduce<kThreads>(squares, 0.0f, scratch, Sum{});
    const float scale = rsqrtf(squares / static_cast<float>(args.width) + args.eps);
    for (int column = first; column < args.width; column += kThreads * 8) {
      const int64_t at = row * args.width + column;
      const Vec16<T> hidden = load<T, 8>(args.hidden + at);  // as this thread stored it
      const Vec16<T> weight = load<T, 8>(args.weight + column);
      Vec16<T> out;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        out[i] =
            from_float<T>(to_float(hidden[i]) * scale * (to_float(weight[i]) + args.weight_offset));
      }
      store(args.normed + at, out);
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
    launch(ctx, rank_sum_kernel<T>, dim3(std::min<int64_t>(rows, kExchangeCtas)), dim3(kThreads), 0,
           args, *ctx.exchange);
  });
}

}  // namespace cpmcu::cuda
