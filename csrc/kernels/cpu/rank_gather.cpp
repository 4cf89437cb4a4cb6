#include "kernels/ranks/rank_gather.h"

#include <cstring>

#include "kernels/cpu/rank_words.h"

namespace cpmcu::cpu {

void rank_gather(const Context& ctx, const RankGatherParams& p) {
  check_rank_gather(ctx, p);
  const int64_t rows = p.part.size(0), columns = p.part.size(1);
  const auto parts = exchange_words(*ctx.exchange, p.part.as<uint32_t>(), rows * columns);
  auto* out = p.out.as<uint32_t>();
  for (int64_t row = 0; row < rows; ++row) {
    for (const std::vector<uint32_t>& part : parts) {
      std::memcpy(out, part.data() + row * columns, static_cast<size_t>(4 * columns));
      out += columns;
    }
  }
}

}  // namespace cpmcu::cpu
