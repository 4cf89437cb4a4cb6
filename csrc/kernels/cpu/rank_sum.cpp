#include "kernels/ranks/rank_sum.h"

#include "core/half.h"
#include "kernels/cpu/rank_words.h"

namespace cpmcu::cpu {

void rank_sum(const Context& ctx, const RankSumParams& p) {
  check_rank_sum(ctx, p);
  const auto parts = exchange_words(*ctx.exchange, p.part.as<uint32_t>(), p.part.num_bytes() / 4);
  dispatch_host_dtype(p.part.dtype(), [&](auto t) {
    using T = decltype(t);
    T* hidden = p.hidden.as<T>();
    for (int64_t i = 0; i < p.part.num_elements(); ++i) {
      float sum = p.adds ? to_float(hidden[i]) : 0;
      for (const std::vector<uint32_t>& words : parts) {
        sum += to_float(reinterpret_cast<const T*>(words.data())[i]);
      }
      hidden[i] = from_float<T>(sum);
    }
  });
  if (!p.norm.out.empty()) cpu::rms_norm(ctx, p.norm);
}

}  // namespace cpmcu::cpu
