#include "kernels/layer/softcap.h"

#include <cmath>

namespace cpmcu::cpu {

void softcap(const Context&, const SoftcapParams& p) {
  check_softcap(p);
  float* x = p.x.as<float>();
  for (int64_t i = 0; i < p.x.num_elements(); ++i) x[i] = p.cap * std::tanh(x[i] / p.cap);
}

}  // namespace cpmcu::cpu
