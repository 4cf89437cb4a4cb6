// The protocol of core/exchange.h in device code. Word w of a message belongs to CTA
// (w / width) % kExchangeCtas, with the same `width` in every launch. A shorter message has fewer
// CTAs, which handle the same words. So each CTA counts its own rounds.
#pragma once

#include "core/exchange.h"
#include "core/ptx.cuh"

namespace cpmcu::cuda {

// Polls of a word between two checks of the clock and of `failed`.
constexpr int kPollsPerCheck = 1024;

// The number of this CTA's round. Called once in a launch, by all threads.
__device__ __forceinline__ uint32_t next_round(const Exchange& exchange) {
  const uint32_t round = exchange.rounds[blockIdx.x] + 1;
  __syncthreads();
  if (threadIdx.x == 0) exchange.rounds[blockIdx.x] = round;
  return round;
}

// Words [at, at + 4) of a rank: waits until all have the number of this round. `buffer`: the half
// of this rank's receive buffer. After the deadline `waits` becomes false, and the result is
// undefined.
__device__ inline uint4 receive4(const Exchange& exchange, const uint64_t* buffer, int from,
                                 int64_t at, uint32_t round, bool& waits) {
  const uint64_t* words = buffer + from * exchange.num_words + at;
  ulonglong2 low = ptx::load_system64x2(words), high = ptx::load_system64x2(words + 2);
  const auto has_round = [&](uint64_t word) { return static_cast<uint32_t>(word >> 32) == round; };
  const auto is_here = [&] {
    return has_round(low.x) && has_round(low.y) && has_round(high.x) && has_round(high.y);
  };
  uint64_t begin = 0;
  for (int polls = 1; !is_here() && waits; ++polls) {
    low = ptx::load_system64x2(words), high = ptx::load_system64x2(words + 2);
    if (polls % kPollsPerCheck != 0) continue;
    const uint64_t now = ptx::global_nanoseconds();
    if (begin == 0) begin = now;
    const bool is_late = now - begin > kWaitSeconds * 1'000'000'000;
    waits = !is_late && *exchange.failed == 0;
    if (waits) continue;
    exchange.state[kGaveUp] = 1;
    if (is_late) *exchange.failed = 1 + exchange.rank;
  }
  return {static_cast<uint32_t>(low.x), static_cast<uint32_t>(low.y), static_cast<uint32_t>(high.x),
          static_cast<uint32_t>(high.y)};
}

// Sends words [at, at + 4) to all other ranks. `half`: the offset of the half of the buffers.
__device__ __forceinline__ void send4(const Exchange& exchange, int64_t half, int64_t at,
                                      uint4 part, uint32_t round) {
  const uint64_t number = uint64_t{round} << 32;
  for (int to = 0; to < exchange.num_ranks; ++to) {
    if (to == exchange.rank) continue;
    uint64_t* words = exchange.buffers[to] + half + exchange.rank * exchange.num_words + at;
    ptx::store_system64x2(words, number | part.x, number | part.y);
    ptx::store_system64x2(words + 2, number | part.z, number | part.w);
  }
}

}  // namespace cpmcu::cuda
