// How the ranks of a tensor parallel engine exchange messages (kernels/ranks).
//
// A message is pushed into the other ranks' receive buffers in words of 8 bytes: 4 bytes of data
// and the round number. A reader polls each word until it has the number of the reader's round. So
// neither a flag nor a fence is needed. Rounds alternate between two halves of the buffer. Two
// halves suffice: if a rank has received round n + 1, the sender has read round n.
#pragma once

#include <cstdint>
#include <string>

#include "core/check.h"

namespace cpmcu {

constexpr int kMaxRanks = 8;
// Maximum number of CTAs of a launch; each CTA counts its own rounds.
constexpr int kExchangeCtas = 512;
constexpr int64_t kWaitSeconds = 4;  // a rank that waits longer gives up the step

// The exchange as one rank sees it.
struct Exchange {
  int rank = 0, num_ranks = 1;
  int64_t num_words = 0;           // maximum number of words of a message
  int64_t width = 0;               // 8-byte words in one row of hidden states, a multiple of 4
  uint64_t* buffers[kMaxRanks]{};  // the receive buffer of each rank: [2, num_ranks, num_words]
  // [kExchangeCtas + 1] in this rank's memory: rounds so far of each CTA, then those of
  // in_fused_layers().
  uint32_t* rounds = nullptr;
  uint32_t* state = nullptr;  // flags in this rank's memory, with the indices of ExchangeState
  // In host memory that all ranks share: 1 + the rank that gave up, or 0.
  volatile int* failed = nullptr;
  int64_t fused_words = 0;  // num_words of the exchange that in_fused_layers() returns

  constexpr int64_t half_words() const { return num_ranks * num_words; }
  // 8-byte words of a receive buffer, both halves and those of in_fused_layers() included.
  constexpr int64_t buffer_words() const { return 2 * num_ranks * (num_words + fused_words); }

  // The exchange of sums within fused layers: its words lie behind the others, and all CTAs of a
  // launch share one count of rounds.
  Exchange in_fused_layers() const {
    Exchange inner = *this;
    for (int to = 0; to < num_ranks; ++to) inner.buffers[to] += 2 * half_words();
    inner.num_words = fused_words;
    inner.rounds += kExchangeCtas;
    return inner;
  }
};

// A rank got no answer. `is_echo`: the cause is the earlier failure of another rank.
class RankFailure : public Error {
 public:
  RankFailure(std::string message, bool is_echo)
      : Error(ErrorKind::kRuntime, std::move(message)), is_echo_(is_echo) {}
  bool is_echo() const { return is_echo_; }

 private:
  bool is_echo_;
};

// Indices of flags in Exchange::state. kGaveUp: later rounds do not wait. kSilent, for tests: the
// rank sends nothing.
enum ExchangeState { kGaveUp = 0, kSilent = 1, kNumExchangeStates = 2 };

}  // namespace cpmcu
