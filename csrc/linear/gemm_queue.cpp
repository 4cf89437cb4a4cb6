#include "linear/gemm_queue.h"

#include <algorithm>
#include <utility>

namespace cpmcu {

bool GemmQueue::push(const FusedGemm& gemm, const Tensor& memory) {
  const PackedLayout& layout = gemm.packed.layout;
  if (layout.planes != 1 || layout.codes == Codes::kOther || gemm.y.dtype() != gemm.x.dtype())
    return false;
  if (!combine_.hidden.empty()) flush();
  if (!gemms_.empty()) {
    const FusedGemm& first = gemms_.front();
    const bool alike = first.x.size(0) == gemm.x.size(0) && first.x.dtype() == gemm.x.dtype() &&
                       first.is_dense() == gemm.is_dense() &&
                       first.packed.layout.unpacks_like(layout);
    // A queued callback reads y: flush before y is overwritten.
    if (!alike || gemms_.size() == kMaxFusedGemms || (!after_.empty() && gemm.beta != 0)) flush();
  }
  // A queued norm or attention is fused only if the new GEMM reads its output.
  const auto is_for_other = [&](const Tensor& out) {
    return !out.empty() && out.data() != gemm.x.data();
  };
  if ((gemms_.empty() && is_for_other(attention_.out)) || is_for_other(norm_.out) ||
      !rotary_.qkv.empty()) {
    flush();
  }
  if (!norm_.out.empty()) {
    FusedGemm& last = gemms_.back();
    last.normed = norm_.out, last.norm_weight = norm_.weight, last.norm_eps = norm_.eps;
    last.norm_offset = norm_.weight_offset;
    norm_ = {};
  }
  gemms_.push_back(gemm);
  memory_ = memory;
  note(gemm.packed);
  return true;
}

void GemmQueue::note(const PackedWeight& weight) {
  if (order_ == nullptr || weight.blocks == nullptr) return;
  order_->resize(std::max(order_->size(), next_ + 1));
  (*order_)[next_++] = weight;
}

// The first weights of the next launch, if it is the same as in the previous pass.
std::vector<PackedWeight> GemmQueue::following() const {
  if (order_ == nullptr) return {};
  const auto from = order_->begin() + static_cast<std::ptrdiff_t>(next_);
  return {from, from + std::min<std::ptrdiff_t>(kMaxFollowing, order_->end() - from)};
}

bool GemmQueue::push(const RmsNormParams& norm) {
  if (!combine_.hidden.empty()) {
    if (combine_.hidden.data() != norm.x.data() || norm.out_stride != 0 || norm.index) return false;
    combine_.norm = norm;
    flush();
    return true;
  }
  if (gemms_.empty() || !norm_.out.empty() || !rotary_.qkv.empty() || norm.out_stride != 0 ||
      norm.index) {
    return false;
  }
  const FusedGemm& last = gemms_.back();
  if (last.y.data() != norm.x.data() || last.is_gated() || gemms_.size() == kMaxFusedGemms) {
    return false;
  }
  norm_ = norm;
  return true;
}

void GemmQueue::push(const AttentionParams& attention) {
  flush();
  attention_ = attention;
}

void GemmQueue::push(const MoeCombineParams& combine) {
  flush();
  combine_ = combine;
}

RmsNormParams GemmQueue::take_norm(const Tensor& x) {
  if (norm_.out.empty() || norm_.out.data() != x.data()) return {};
  const RmsNormParams norm = std::exchange(norm_, {});
  flush();
  return norm;
}

bool GemmQueue::push(const RotaryKvParams& rotary) {
  if (gemms_.empty() || !norm_.out.empty() || !can_follow(gemms_.back(), rotary)) return false;
  rotary_ = rotary;
  return true;
}

void GemmQueue::then(std::function<void()> launch) {
  gemms_.empty() && combine_.hidden.empty() ? launch() : after_.push_back(std::move(launch));
}

void GemmQueue::flush() {
  if (!combine_.hidden.empty()) {
    moe_combine(plain_, std::exchange(combine_, {}));
    for (const auto& launch : std::exchange(after_, {})) launch();
    return;
  }
  const AttentionParams attention = std::exchange(attention_, {});
  if (gemms_.empty()) {
    if (!attention.out.empty()) attention_combine(plain_, attention);
    return;
  }
  const FusedLayerParams layer{.gemms = std::exchange(gemms_, {}),
                               .rotary = std::exchange(rotary_, {}),
                               .attention = attention,
                               .following = following(),
                               .memory = memory_};
  const RmsNormParams norm = std::exchange(norm_, {});
  const auto after = std::exchange(after_, {});
  fused_layer(plain_, layer);
  if (!norm.out.empty()) rms_norm(plain_, norm);
  for (const auto& launch : after) launch();
}

}  // namespace cpmcu
