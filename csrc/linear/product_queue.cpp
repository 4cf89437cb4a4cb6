#include "linear/product_queue.h"

#include <algorithm>
#include <utility>

namespace cpmcu {

bool ProductQueue::push(const ChainLink& link, const Tensor& memory) {
  if (link.w4.digits != 1 || link.y.dtype() != link.x.dtype()) return false;
  if (!links_.empty()) {
    const ChainLink& first = links_.front();
    const bool alike = first.x.size(0) == link.x.size(0) && first.x.dtype() == link.x.dtype() &&
                       first.is_dense() == link.is_dense() &&
                       first.w4.zero_points == link.w4.zero_points;
    // Who waits for the rows of y wants them as they are now.
    if (!alike || links_.size() == kMaxChainLinks || (!after_.empty() && link.beta != 0)) flush();
  }
  // What waits is for a product that reads it, or for none.
  const auto is_for_other = [&](const Tensor& out) {
    return !out.empty() && out.data() != link.x.data();
  };
  if ((links_.empty() && is_for_other(attention_.out)) || is_for_other(norm_.out) ||
      !rotary_.qkv.empty()) {
    flush();
  }
  if (!norm_.out.empty()) {
    ChainLink& last = links_.back();
    last.normed = norm_.out, last.norm_weight = norm_.weight, last.norm_eps = norm_.eps;
    norm_ = {};
  }
  links_.push_back(link);
  memory_ = memory;
  note(link.w4);
  return true;
}

void ProductQueue::note(const W4Weight& weight) {
  if (order_ == nullptr || weight.blocks == nullptr) return;
  order_->resize(std::max(order_->size(), next_ + 1));
  (*order_)[next_++] = weight;
}

// What the next launch will begin with, if all is as it was.
std::vector<W4Weight> ProductQueue::following() const {
  if (order_ == nullptr) return {};
  const auto from = order_->begin() + static_cast<std::ptrdiff_t>(next_);
  return {from, from + std::min<std::ptrdiff_t>(kMaxFollowing, order_->end() - from)};
}

bool ProductQueue::push(const RmsNormParams& norm) {
  if (links_.empty() || !norm_.out.empty() || !rotary_.qkv.empty() || norm.out_stride != 0 ||
      norm.index) {
    return false;
  }
  const ChainLink& last = links_.back();
  if (last.y.data() != norm.x.data() || last.is_gated() || links_.size() == kMaxChainLinks) {
    return false;
  }
  norm_ = norm;
  return true;
}

void ProductQueue::push(const AttentionParams& attention) {
  flush();
  attention_ = attention;
}

bool ProductQueue::push(const RotaryKvParams& rotary) {
  if (links_.empty() || !norm_.out.empty() || !can_follow(links_.back(), rotary)) return false;
  rotary_ = rotary;
  return true;
}

void ProductQueue::then(std::function<void()> launch) {
  links_.empty() ? launch() : after_.push_back(std::move(launch));
}

void ProductQueue::flush() {
  const AttentionParams attention = std::exchange(attention_, {});
  if (links_.empty()) {
    if (!attention.out.empty()) attention_combine(plain_, attention);
    return;
  }
  const ChainParams chain{.links = std::exchange(links_, {}),
                          .rotary = std::exchange(rotary_, {}),
                          .attention = attention,
                          .following = following(),
                          .memory = memory_};
  const RmsNormParams norm = std::exchange(norm_, {});
  const auto after = std::exchange(after_, {});
  gemm_chain(plain_, chain);
  if (!norm.out.empty()) rms_norm(plain_, norm);
  for (const auto& launch : after) launch();
}

}  // namespace cpmcu
