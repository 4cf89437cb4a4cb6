#include "kernels/cpu/rank_words.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

namespace cpmcu::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// Waits until a word has the number of this round, and returns its data.
uint32_t receive(const Exchange& exchange, uint64_t* word, uint32_t round, int from) {
  const std::atomic_ref<uint64_t> at(*word);
  Clock::time_point begin;
  for (int spins = 0;; ++spins) {
    const uint64_t value = at.load(std::memory_order_relaxed);
    if (value >> 32 == round) return static_cast<uint32_t>(value);
    if (spins % 64 != 63) continue;
    if (spins == 63) begin = Clock::now();
    if (*exchange.failed != 0) throw RankFailure("another rank failed", /*is_echo=*/true);
    if (Clock::now() - begin > std::chrono::seconds(kWaitSeconds)) {
      *exchange.failed = 1 + exchange.rank;
      throw RankFailure(
          format_text("rank {} got no answer from rank {} within {} s: the step is lost; "
                      "load the model again",
                      exchange.rank, from, kWaitSeconds),
          /*is_echo=*/false);
    }
    std::this_thread::yield();
  }
}

}  // namespace

std::vector<std::vector<uint32_t>> exchange_words(const Exchange& exchange, const uint32_t* part,
                                                  int64_t num_words) {
  const uint32_t round = ++exchange.rounds[0];
  const int64_t half = round % 2 * exchange.half_words();
  const auto buffer = [&](int of, int from) {
    return exchange.buffers[of] + half + from * exchange.num_words;
  };
  for (int to = 0; to < exchange.num_ranks; ++to) {
    if (to == exchange.rank || exchange.state[kSilent] != 0) continue;
    uint64_t* words = buffer(to, exchange.rank);
    for (int64_t i = 0; i < num_words; ++i) {
      const uint64_t value = uint64_t{round} << 32 | part[i];
      std::atomic_ref<uint64_t>(words[i]).store(value, std::memory_order_relaxed);
    }
  }
  std::vector<std::vector<uint32_t>> received(static_cast<size_t>(exchange.num_ranks));
  for (int from = 0; from < exchange.num_ranks; ++from) {
    std::vector<uint32_t>& words = received[static_cast<size_t>(from)];
    words.resize(static_cast<size_t>(num_words));
    if (from == exchange.rank) {
      std::memcpy(words.data(), part, static_cast<size_t>(4 * num_words));
      continue;
    }
    uint64_t* sent = buffer(exchange.rank, from);
    for (int64_t i = 0; i < num_words; ++i) {
      words[static_cast<size_t>(i)] = receive(exchange, sent + i, round, from);
    }
  }
  return received;
}

}  // namespace cpmcu::cpu
