// The protocol of core/exchange.h in host memory: each rank is a thread.
#pragma once

#include <cstdint>
#include <vector>

#include "core/exchange.h"

namespace cpmcu::cpu {

// Sends `num_words` words of 4 bytes to the other ranks. Returns the words of all ranks, this one
// included, in the order of ranks. Throws RankFailure if a rank does not answer.
std::vector<std::vector<uint32_t>> exchange_words(const Exchange& exchange, const uint32_t* part,
                                                  int64_t num_words);

}  // namespace cpmcu::cpu
