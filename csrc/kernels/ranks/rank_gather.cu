// rank_gather: each rank's columns, side by side.
//
// Roofline: the link, 8 bytes an element: 0.5 MB for a row of 128K logits on two GPUs, about 2 µs.
//
// Schedule: one CTA for `width` words of the message, up to kExchangeCtas. It pushes its words,
// then polls the same words of the other ranks.
//
// Surprising: `width` is that of rank_sum's rows, so both ops share buffers and rounds.
#include "kernels/ranks/rank_gather.h"

#include <algorithm>

#include "core/launch.h"
#include "kernels/ranks/words.cuh"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 256;

// ---- kernels

// Grid: num_words / width, up to kExchangeCtas.
__global__ void __launch_bounds__(kThreads)
    rank_gather_kernel(float* out, const float* part, int64_t num_words, int columns, int width,
                       const __grid_constant__ Exchange exchange) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const uint32_t round = next_round(exchange);
  const int64_t half = round % 2 * exchange.half_words();
  const bool is_silent = exchange.state[kSilent] != 0;
  bool waits = exchange.state[kGaveUp] == 0;
  const auto words_of = [&](int64_t at) { return *reinterpret_cast<const uint4*>(part + at); };
  const auto each = [&](const auto& use) {
    for (int64_t first = int64_t{blockIdx.x} * width; first < num_words;
         first += int64_t{gridDim.x} * width) {
      const int64_t end = std::min(first + width, num_words);
      for (int64_t at = first + threadIdx.x * 4; at < end; at += kThreads * 4) use(at);
    }
  };
  if (!is_silent) {
    each([&](int64_t at) { send4(exchange, half, at, words_of(at), round); });
  }
  const uint64_t* buffer = exchange.buffers[exchange.rank] + half;
  each([&](int64_t at) {
    const int64_t row = at / columns, column = at % columns;
    float* to = out + row * exchange.num_ranks * columns + column;
    for (int from = 0; from < exchange.num_ranks; ++from, to += columns) {
      const uint4 words =
          from == exchange.rank ? words_of(at) : receive4(exchange, buffer, from, at, round, waits);
      *reinterpret_cast<uint4*>(to) = words;
    }
  });
}

}  // namespace

// ---- launchers

// Graph-safe; reads part and the round from the device.
void rank_gather(const Context& ctx, const RankGatherParams& p) {
  check_rank_gather(ctx, p);
  const int64_t num_words = p.part.num_elements(), width = ctx.exchange->width;
  if (num_words == 0) return;
  const int64_t ctas = std::min<int64_t>((num_words + width - 1) / width, kExchangeCtas);
  launch(ctx, rank_gather_kernel, dim3(static_cast<unsigned>(ctas)), dim3(kThreads), 0,
         p.out.as<float>(), p.part.as<float>(), num_words, static_cast<int>(p.part.size(1)),
         static_cast<int>(width), *ctx.exchange);
}

}  // namespace cpmcu::cuda
