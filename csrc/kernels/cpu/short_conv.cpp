#include "kernels/short_conv/short_conv.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/half.h"
#include "kernels/cpu/accepted_path.h"

namespace cpmcu::cpu {
namespace {

// One sequence of a step.
template <typename T>
class Sequence {
 public:
  Sequence(const ShortConvParams& p, int seq)
      : p_(p),
        width_(p.out.size(1)),
        kernel_size_(static_cast<int>(p.weight.size(1))),
        slot_(p.tokens.seq_slots[seq]),
        first_(p.tokens.seq_token_begin[seq]),
        num_tokens_(p.tokens.seq_token_begin[seq + 1] - first_),
        length_(p.tokens.slot_lengths[slot_]),
        window_(p.window.as<T>() + slot_ * (kernel_size_ - 1) * width_),
        pending_(p.pending.as<T>() + slot_ * p.pending.size(1) * width_),
        folded_(p.folded.as<int>() + slot_ * width_),
        before_(window_, window_ + (kernel_size_ - 1) * width_) {}

  void run() {
    fold();
    std::vector<T> inputs(static_cast<size_t>(num_tokens_ * width_));
    for (int j = 0; j < num_tokens_; ++j) multiply(inputs.data() + j * width_, j);
    for (int j = 0; j < num_tokens_; ++j) convolve(inputs.data(), j);
    if (p_.commits) {
      for (int j = 0; j < num_tokens_; ++j) remember(inputs.data() + j * width_);
    } else {
      std::copy(inputs.begin(), inputs.end(), pending_);
    }
    std::copy(before_.begin(), before_.end(), window_);
    std::fill(folded_, folded_ + width_, p_.commits ? length_ + num_tokens_ : length_);
  }

 private:
  // Moves the accepted tokens of the slot's last step to the window.
  void fold() {
    for (const int node :
         accepted_path(p_.accepted, slot_, *folded_, length_, p_.pending.size(1))) {
      remember(pending_ + node * width_);
    }
  }
  void remember(const T* inputs) {
    std::copy(before_.begin() + width_, before_.end(), before_.begin());
    std::copy(inputs, inputs + width_, before_.end() - width_);
  }

  const T* row(int j) const { return p_.x.as<T>() + int64_t{first_ + j} * p_.x.size(1); }
  // u of a token.
  void multiply(T* to, int j) const {
    const T* b = row(j);
    if (p_.silu) {
      std::copy(b + p_.first, b + p_.first + width_, to);
      return;
    }
    for (int64_t i = 0; i < width_; ++i) {
      to[i] = from_float<T>(to_float(b[i]) * to_float(b[2 * width_ + i]));
    }
  }
  // The output of a token. `inputs`: u of the sequence's tokens.
  void convolve(const T* inputs, int j) const {
    std::vector<const T*> rows(static_cast<size_t>(kernel_size_));
    int node = j, missing = 0;
    for (int t = kernel_size_ - 1; t >= 0; --t) {
      rows[static_cast<size_t>(t)] = node >= 0
                                         ? inputs + node * width_
                                         : before_.data() + (kernel_size_ - 2 - missing++) * width_;
      if (node >= 0) node = parent_of(node);
    }
    const T* c = row(j) + width_;  // the gate c of the gated form
    T* out = p_.out.as<T>() + int64_t{first_ + j} * width_;
    for (int64_t i = 0; i < width_; ++i) {
      const T* weight = p_.weight.as<T>() + i * kernel_size_;
      float sum = p_.bias.empty() ? 0 : to_float(p_.bias.as<T>()[i]);
      for (int t = 0; t < kernel_size_; ++t) {
        sum += to_float(weight[t]) * to_float(rows[static_cast<size_t>(t)][i]);
      }
      out[i] = from_float<T>(p_.silu ? sum / (1 + std::exp(-sum)) : to_float(c[i]) * sum);
    }
  }
  int parent_of(int node) const {
    const int* parents = p_.tokens.token_parents;
    return p_.commits || parents == nullptr ? node - 1 : parents[first_ + node];
  }

  const ShortConvParams& p_;
  const int64_t width_;
  const int kernel_size_, slot_, first_, num_tokens_, length_;
  T *window_, *pending_;
  int* folded_;
  std::vector<T> before_;  // [K - 1, H]: u of the tokens before the step
};

}  // namespace

void short_conv(const Context&, const ShortConvParams& p) {
  check_short_conv(p);
  dispatch_host_dtype(p.x.dtype(), [&](auto t) {
#pragma omp parallel for if (p.tokens.num_seqs > 1)
    for (int seq = 0; seq < p.tokens.num_seqs; ++seq) Sequence<decltype(t)>(p, seq).run();
  });
}

}  // namespace cpmcu::cpu
