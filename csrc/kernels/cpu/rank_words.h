// The protocol of core/exchange.h in host memory: each rank is a thread.
#pragma once

#include <cstdint>
#include <vector>

#include "core/exchange.h"

namespace cpmcu::cpu {

// Sends `num_words` words of 4 bytes to all ranks and returns those of each rank, in their order.
// Throws RankFailure if a rank does not answer.
std::vector<std::vector<uint32_t>> exchange_words(const Exchange& exchange, const uint32_t* part,
                                                  int64_t num_words);

}  // namespace cpmcu::cpu
