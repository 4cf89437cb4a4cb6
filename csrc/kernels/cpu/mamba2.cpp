#include "kernels/mamba2/mamba2.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/half.h"
#include "kernels/cpu/accepted_path.h"

namespace cpmcu::cpu {
namespace {

// A token of one head.
template <typename T>
struct Row {
  const T *x, *b, *c;  // x [P], B [N] and C [N] of a head
  T dt;
};

// One head of one sequence.
template <typename T>
class Head {
 public:
  Head(const Mamba2Params& p, int seq, int head)
      : p_(p),
        shape_(p.shape),
        head_(head),
        slot_(p.tokens.seq_slots[seq]),
        first_(p.tokens.seq_token_begin[seq]),
        num_tokens_(p.tokens.seq_token_begin[seq + 1] - first_),
        length_(p.tokens.slot_lengths[slot_]),
        state_size_(int64_t{shape_.head_dim} * shape_.state_size) {
    const int64_t at = slot_ * int64_t{shape_.num_heads} + head_;
    state_ = p.state.as<float>() + at * state_size_;
    pending_ = p.pending.as<T>() + at * p.pending.size(2) * shape_.pending_width();
    folded_ = p.folded.as<int>() + at;
  }

  void run() {
    fold();
    p_.commits ? prefill() : decode();
    *folded_ = p_.commits ? length_ + num_tokens_ : length_;
  }

 private:
  // Adds the accepted tokens of the slot's last step to S.
  void fold() {
    for (const int node :
         accepted_path(p_.accepted, slot_, *folded_, length_, p_.pending.size(2))) {
      const T* x = pending_ + node * shape_.pending_width();
      const T* b = x + shape_.head_dim;
      update(state_, {x, b, nullptr, b[shape_.state_size]});
    }
  }

  void prefill() {
    for (int j = 0; j < num_tokens_; ++j) {
      update(state_, row_of(j));
      write(j, state_);
    }
  }

  // Stores the tokens, and computes each node from its ancestors' updates of a copy of S.
  void decode() {
    const auto parent_of = [&](int j) {
      return p_.tokens.token_parents == nullptr ? j - 1 : p_.tokens.token_parents[first_ + j];
    };
    std::vector<float> work;
    for (int j = 0; j < num_tokens_; ++j) {
      const Row<T> row = row_of(j);
      T* pending = pending_ + j * shape_.pending_width();
      pending = std::copy(row.x, row.x + shape_.head_dim, pending);
      *std::copy(row.b, row.b + shape_.state_size, pending) = row.dt;
      if (j == 0 || parent_of(j) != j - 1) {
        work.assign(state_, state_ + state_size_);
        std::vector<int> path;
        for (int node = parent_of(j); node >= 0; node = parent_of(node)) path.push_back(node);
        for (auto node = path.rbegin(); node != path.rend(); ++node) {
          update(work.data(), row_of(*node));
        }
      }
      update(work.data(), row);
      write(j, work.data());
    }
  }

  Row<T> row_of(int j) const {
    const T* xbc = p_.xbc.as<T>() + int64_t{first_ + j} * p_.xbc.size(1);
    const int group = head_ / (shape_.num_heads / shape_.num_groups);
    const T* b = xbc + shape_.inner() + int64_t{group} * shape_.state_size;
    return {xbc + int64_t{head_} * shape_.head_dim, b,
            b + int64_t{shape_.num_groups} * shape_.state_size,
            p_.dt.as<T>()[int64_t{first_ + j} * p_.dt.size(1) + p_.first_dt + head_]};
  }

  // ---- arithmetic. Each function is compiled once, so that prefill and trees share its bits.

  // One token's update of S.
  [[gnu::noinline]] void update(float* state, const Row<T>& row) const {
    const float dt = to_float(row.dt) + p_.dt_bias.as<float>()[head_];
    const float softplus = dt > 20 ? dt : std::log1p(std::exp(dt));
    const float step = std::min(std::max(softplus, p_.min_step), p_.max_step);
    const float decay = std::exp(-std::exp(p_.a_log.as<float>()[head_]) * step);
    for (int i = 0; i < shape_.head_dim; ++i) {
      float* s = state + int64_t{i} * shape_.state_size;
      const float dx = step * to_float(row.x[i]);
      for (int n = 0; n < shape_.state_size; ++n) s[n] = s[n] * decay + dx * to_float(row.b[n]);
    }
  }

  // y of token j.
  [[gnu::noinline]] void write(int j, const float* state) const {
    const Row<T> row = row_of(j);
    const float d = p_.d.as<float>()[head_];
    T* y = p_.y.as<T>() + int64_t{first_ + j} * shape_.inner() + int64_t{head_} * shape_.head_dim;
    for (int i = 0; i < shape_.head_dim; ++i) {
      const float* s = state + int64_t{i} * shape_.state_size;
      float sum = 0;
      for (int n = 0; n < shape_.state_size; ++n) sum += s[n] * to_float(row.c[n]);
      y[i] = from_float<T>(sum + d * to_float(row.x[i]));
    }
  }

  const Mamba2Params& p_;
  const MambaShape& shape_;
  const int head_, slot_, first_, num_tokens_, length_;
  const int64_t state_size_;
  float* state_;
  T* pending_;
  int* folded_;
};

}  // namespace

void mamba2(const Context&, const Mamba2Params& p) {
  check_mamba2(p);
  const int heads = p.shape.num_heads, count = p.tokens.num_seqs * heads;
  dispatch_host_dtype(p.xbc.dtype(), [&](auto t) {
#pragma omp parallel for if (count > 1)
    for (int i = 0; i < count; ++i) Head<decltype(t)>(p, i / heads, i % heads).run();
  });
}

}  // namespace cpmcu::cpu
