#include "core/model_spec.h"

#include <algorithm>

#include "core/model_limits.h"

namespace cpmcu {
namespace {

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  CHECK(value >= low && value <= high, "{} is {}, expected {} to {}", name, value, low, high);
}

}  // namespace

void ModelSpec::check_validity(bool cuda) const {
  for (const FieldLimit& limit : kModelLimits) {
    const int value = this->*limit.field;
    check_range(limit.name, value, limit.least, limit.most);
    CHECK(value % limit.multiple == 0, "{} is {}, expected a multiple of {}", limit.name, value,
          limit.multiple);
  }
  check_range("num_key_value_heads", num_key_value_heads, 1, num_attention_heads);
  CHECK(num_attention_heads % num_key_value_heads == 0,
        "num_attention_heads {} is not a multiple of num_key_value_heads {}", num_attention_heads,
        num_key_value_heads);
  CHECK(!rope_inv_freq.empty() && static_cast<int>(rope_inv_freq.size()) <= head_dim / 2,
        "rope_inv_freq has {} numbers, expected 1 to head_dim / 2 = {}", rope_inv_freq.size(),
        head_dim / 2);
  CHECK(rms_norm_eps > 0 && rms_norm_eps < 1, "rms_norm_eps is {}, expected between 0 and 1",
        rms_norm_eps);
  CHECK(logit_softcap >= 0, "logit_softcap is {}, expected at least 0", logit_softcap);
  CHECK(layers.empty() || static_cast<int>(layers.size()) == num_hidden_layers,
        "layers lists {} layers, num_hidden_layers is {}", layers.size(), num_hidden_layers);
  CHECK(is_floating(dtype), "the model's dtype is {}, expected float32, float16 or bfloat16",
        name_of(dtype));
  CHECK(!fp8_kv_cache || head_dim % 16 == 0,
        "head_dim is {}, expected a multiple of 16 for an fp8 KV cache", head_dim);
  if (cuda) {
    CHECK(dtype != DType::kF32, "float32 models run on the CPU only; choose bfloat16 or float16");
    CHECK(std::ranges::find(kCudaHeadDims, head_dim) != std::end(kCudaHeadDims),
          "head_dim is {}, expected 64, 128, 256 or 512 on CUDA", head_dim);
    const int group = num_attention_heads / num_key_value_heads;
    CHECK(group <= 64, "{} query heads share a key head, expected at most 64 on CUDA", group);
  }
}

}  // namespace cpmcu
