// rank_sum: the sum of all ranks' parts, in the order of ranks.
//
// Roofline: for one token latency, about 1 µs between two GPUs of one host. For many tokens the
// link: 8 bytes for each 2 elements.
//
// Schedule: a CTA pushes its words to all ranks, then polls the same words of its own receive
// buffer. A word is always handled by the same CTA, so each CTA counts its own rounds and no CTA
// waits for another of its own GPU.
//
// Surprising: the poll reads the data itself. A flag after the data would cost a fence and a second
// trip over the link.
#include <algorithm>

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/ranks/rank_sum.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPollsPerCheck = 1024;  // of the clock and of the other ranks' failure

// ---- device helpers

// The data of a word once it has the number of this round. After the deadline `waits` becomes false
// and the result is undefined.
__device__ uint32_t receive(const Exchange& exchange, const uint64_t* word, uint32_t round,
                            bool& waits) {
  uint64_t value = ptx::load_system64(word), begin = 0;
  for (int polls = 1; static_cast<uint32_t>(value >> 32) != round && waits; ++polls) {
    value = ptx::load_system64(word);
    if (polls % kPollsPerCheck != 0) continue;
    const uint64_t now = ptx::global_nanoseconds();
    if (begin == 0) begin = now;
    const bool is_late = now - begin > kWaitSeconds * 1'000'000'000;
    waits = !is_late && *exchange.failed == 0;
    if (waits) continue;
    exchange.state[kGaveUp] = 1;
    if (is_late) *exchange.failed = 1 + exchange.rank;
  }
  return static_cast<uint32_t>(value);
}

// ---- kernels

// Grid: up to kExchangeCtas.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    rank_sum_kernel(uint32_t* hidden, const uint32_t* part, int64_t num_words, bool adds,
                    const __grid_constant__ Exchange exchange) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const uint32_t round = exchange.rounds[blockIdx.x] + 1;
  __syncthreads();
  if (threadIdx.x == 0) exchange.rounds[blockIdx.x] = round;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  const int64_t half = round % 2 * exchange.half_words();
  const bool is_silent = exchange.state[kSilent] != 0;
  bool waits = exchange.state[kGaveUp] == 0;
  for (int64_t i = first; i < num_words && !is_silent; i += step) {
    const uint64_t value = uint64_t{round} << 32 | part[i];
    for (int to = 0; to < exchange.num_ranks; ++to) {
      if (to == exchange.rank) continue;
      ptx::store_system64(exchange.buffers[to] + half + exchange.rank * exchange.num_words + i,
                          value);
    }
  }
  const uint64_t* buffer = exchange.buffers[exchange.rank] + half;
  for (int64_t i = first; i < num_words; i += step) {
    float2 sum = adds ? unpack2<T>(hidden[i]) : float2{0, 0};
    for (int from = 0; from < exchange.num_ranks; ++from) {
      const uint32_t word =
          from == exchange.rank
              ? part[i]
              : receive(exchange, buffer + from * exchange.num_words + i, round, waits);
      const float2 values = unpack2<T>(word);
      sum.x += values.x;
      sum.y += values.y;
    }
    hidden[i] = pack2<T>(sum.x, sum.y);
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads hidden, part and the round from the device.
void rank_sum(const Context& ctx, const RankSumParams& p) {
  check_rank_sum(ctx, p);
  const int64_t num_words = p.part.num_bytes() / 4;
  if (num_words == 0) return;
  const int64_t ctas = std::min<int64_t>((num_words + kThreads - 1) / kThreads, kExchangeCtas);
  dispatch_half(p.part.dtype(), [&](auto t) {
    launch(ctx, rank_sum_kernel<decltype(t)>, dim3(static_cast<unsigned>(ctas)), dim3(kThreads), 0,
           p.hidden.as<uint32_t>(), p.part.as<uint32_t>(), num_words, p.adds, *ctx.exchange);
  });
}

}  // namespace cpmcu::cuda
