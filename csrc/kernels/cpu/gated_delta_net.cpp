#include "kernels/delta_net/gated_delta_net.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/half.h"
#include "kernels/cpu/accepted_path.h"

namespace cpmcu::cpu {
namespace {

constexpr int kTile = kDeltaTileWidth;
constexpr int kWindow = kConvTaps - 1;

// q, k, v of a token after convolution and norms, and its gates.
struct Row {
  std::vector<float> q, k, v;
  float decay = 1, beta = 0;
};

// One value head of one sequence. A raw token is the 2 Dk + Dv numbers q, k, v before the
// convolution.
template <typename T>
class Head {
 public:
  Head(const GatedDeltaNetParams& p, int seq, int head)
      : p_(p),
        shape_(p.shape),
        head_(head),
        slot_(p.tokens.seq_slots[seq]),
        first_(p.tokens.seq_token_begin[seq]),
        num_tokens_(p.tokens.seq_token_begin[seq + 1] - first_),
        length_(p.tokens.slot_lengths[slot_]) {
    const int64_t heads = shape_.num_value_heads, at = slot_ * heads + head_;
    state_size_ = int64_t{shape_.key_dim} * shape_.value_dim;
    state_ = p.state.as<float>() + at * state_size_;
    window_ = p.window.as<T>() + at * kWindow * shape_.raw_width();
    pending_ = p.pending.as<T>() + at * p.pending.size(2) * shape_.pending_width();
    folded_ = p.folded.as<int>() + at;
    recent_.assign(kWindow * shape_.raw_width(), 0.f);
    for (int64_t i = 0; i < kWindow * shape_.raw_width(); ++i) recent_[i] = to_float(window_[i]);
  }

  void run() {
    fold();
    const bool at_once = p_.commits || (p_.accepts_all && p_.accepted.counts[slot_] > 0);
    at_once ? prefill() : decode();
    *folded_ = at_once ? length_ + num_tokens_ : length_;
    for (int64_t i = 0; i < kWindow * shape_.raw_width(); ++i) {
      window_[i] = from_float<T>(recent_[i]);
    }
  }

 private:
  using Raw = std::vector<float>;

  // Adds the accepted tokens of the slot's last step to S.
  void fold() {
    for (const int node :
         accepted_path(p_.accepted, slot_, *folded_, length_, p_.pending.size(2))) {
      const T* row = pending_ + node * shape_.pending_width();
      Raw raw(shape_.raw_width());
      for (size_t c = 0; c < raw.size(); ++c) raw[c] = to_float(row[c]);
      const T* gates = row + shape_.raw_width();
      update(state_, prepare(raw, recent(0), recent(1), recent(2), gates[0], gates[1]));
      remember(raw);
    }
  }

  void prefill() {
    for (int j = 0; j < num_tokens_; ++j) {
      const Raw raw = raw_of(j);
      const Row row = prepare(raw, recent(0), recent(1), recent(2), b_of(j), a_of(j));
      update(state_, row);
      write(j, row, state_);
      remember(raw);
    }
  }

  // Stores the raw tokens, and computes each node from its ancestors' updates of a copy of S.
  void decode() {
    std::vector<Raw> raws;
    std::vector<Row> rows;
    std::vector<int> parents;
    for (int j = 0; j < num_tokens_; ++j) {
      const int parent =
          p_.tokens.token_parents == nullptr ? j - 1 : p_.tokens.token_parents[first_ + j];
      parents.push_back(parent);
      raws.push_back(raw_of(j));
      T* pending = pending_ + j * shape_.pending_width();
      for (size_t c = 0; c < raws[j].size(); ++c) pending[c] = from_float<T>(raws[j][c]);
      pending[shape_.raw_width()] = b_of(j);
      pending[shape_.raw_width() + 1] = a_of(j);
      // The three raw tokens before this one, the latest last.
      const float* before[kWindow];
      int node = parent, missing = 0;
      for (int t = kWindow - 1; t >= 0; --t) {
        before[t] = node >= 0 ? raws[node].data() : recent(kWindow - 1 - missing++);
        if (node >= 0) node = parents[node];
      }
      rows.push_back(prepare(raws[j], before[0], before[1], before[2], b_of(j), a_of(j)));
    }
    std::vector<float> work;
    for (int j = 0; j < num_tokens_; ++j) {
      if (j == 0 || parents[j] != j - 1) {
        work.assign(state_, state_ + state_size_);
        std::vector<int> path;
        for (int node = parents[j]; node >= 0; node = parents[node]) path.push_back(node);
        for (auto node = path.rbegin(); node != path.rend(); ++node) {
          update(work.data(), rows[*node]);
        }
      }
      update(work.data(), rows[j]);
      write(j, rows[j], work.data());
    }
  }

  // ---- raw tokens

  const float* recent(int i) const { return recent_.data() + int64_t{i} * shape_.raw_width(); }
  void remember(const Raw& raw) {
    const auto width = static_cast<int64_t>(raw.size());
    std::copy(recent_.begin() + width, recent_.end(), recent_.begin());
    std::copy(raw.begin(), raw.end(), recent_.end() - width);
  }
  int key_head() const { return head_ / shape_.group(); }
  int column(const HeadColumns& at, int width) const {
    return at.first + key_head() * at.stride + head_ % shape_.group() * width;
  }
  const T* qkvz(int j) const { return p_.qkvz.as<T>() + int64_t{first_ + j} * p_.layout.qkvz_row; }
  T b_of(int j) const {
    return p_.ba.as<T>()[int64_t{first_ + j} * p_.layout.ba_row + column(p_.layout.b, 1)];
  }
  T a_of(int j) const {
    return p_.ba.as<T>()[int64_t{first_ + j} * p_.layout.ba_row + column(p_.layout.a, 1)];
  }
  Raw raw_of(int j) const {
    Raw raw;
    raw.reserve(shape_.raw_width());
    const T* row = qkvz(j);
    const auto take = [&](int from, int count) {
      for (int i = 0; i < count; ++i) raw.push_back(to_float(row[from + i]));
    };
    take(p_.layout.q.first + key_head() * p_.layout.q.stride, shape_.key_dim);
    take(p_.layout.k.first + key_head() * p_.layout.k.stride, shape_.key_dim);
    take(column(p_.layout.v, shape_.value_dim), shape_.value_dim);
    return raw;
  }

  // ---- arithmetic. Each function is compiled once, so that prefill and trees share its bits.

  // Convolution, SiLU, norms and gates. `x0`, `x1`, `x2`: the raw tokens before, the latest last.
  [[gnu::noinline]] Row prepare(const Raw& raw, const float* x0, const float* x1, const float* x2,
                                T b, T a) const {
    const int dk = shape_.key_dim, dv = shape_.value_dim, hk = shape_.num_key_heads;
    const T* conv = p_.conv_weight.as<T>();
    const auto convolve = [&](std::vector<float>& to, int from, int count, int channel) {
      to.resize(count);
      for (int i = 0; i < count; ++i) {
        const T* w = conv + int64_t{channel + i} * kConvTaps;
        const int c = from + i;
        float sum = to_float(w[0]) * x0[c];
        sum += to_float(w[1]) * x1[c];
        sum += to_float(w[2]) * x2[c];
        sum += to_float(w[3]) * raw[c];
        to[i] = to_float(from_float<T>(sum / (1 + std::exp(-sum))));
      }
    };
    Row row;
    convolve(row.q, 0, dk, key_head() * dk);
    convolve(row.k, dk, dk, (hk + key_head()) * dk);
    convolve(row.v, 2 * dk, dv, 2 * hk * dk + head_ * dv);
    normalise(row.q, 1 / std::sqrt(static_cast<float>(dk)));
    normalise(row.k, 1);
    const float x = to_float(a) + p_.dt_bias.as<float>()[head_];
    const float softplus = x > 20 ? x : std::log1p(std::exp(x));
    row.decay = std::exp(-std::exp(p_.a_log.as<float>()[head_]) * softplus);
    row.beta = 1 / (1 + std::exp(-to_float(b)));
    return row;
  }

  static void normalise(std::vector<float>& x, float scale) {
    float sum = 0;
    for (float each : x) sum += each * each;
    const float factor = scale / std::sqrt(sum + 1e-6f);
    for (float& each : x) each *= factor;
  }

  // One token's update of S.
  [[gnu::noinline]] void update(float* state, const Row& row) const {
    const int dk = shape_.key_dim;
    for (int tile = 0; tile < shape_.value_dim / kTile; ++tile) {
      float* s = state + int64_t{tile} * dk * kTile;
      float sum[kTile] = {};
      for (int i = 0; i < dk; ++i) {
        for (int c = 0; c < kTile; ++c) {
          s[i * kTile + c] *= row.decay;
          sum[c] += row.k[i] * s[i * kTile + c];
        }
      }
      float delta[kTile];
      for (int c = 0; c < kTile; ++c) delta[c] = row.beta * (row.v[tile * kTile + c] - sum[c]);
      for (int i = 0; i < dk; ++i) {
        for (int c = 0; c < kTile; ++c) s[i * kTile + c] += row.k[i] * delta[c];
      }
    }
  }

  // out = gated norm of S^T q.
  [[gnu::noinline]] void write(int j, const Row& row, const float* state) const {
    const int dk = shape_.key_dim, dv = shape_.value_dim;
    std::vector<float> o(dv, 0.f);
    for (int tile = 0; tile < dv / kTile; ++tile) {
      const float* s = state + int64_t{tile} * dk * kTile;
      float* sum = o.data() + tile * kTile;
      for (int i = 0; i < dk; ++i) {
        for (int c = 0; c < kTile; ++c) sum[c] += row.q[i] * s[i * kTile + c];
      }
    }
    float squares = 0;
    for (float each : o) squares += each * each;
    const float scale = 1 / std::sqrt(squares / static_cast<float>(dv) + p_.norm_eps);
    const T* z = qkvz(j) + column(p_.layout.z, dv);
    const T* weight = p_.norm_weight.as<T>();
    T* out = p_.out.as<T>() + int64_t{first_ + j} * shape_.value_columns() + head_ * dv;
    for (int c = 0; c < dv; ++c) {
      const float gate = to_float(z[c]);
      out[c] = from_float<T>(to_float(weight[c]) * (o[c] * scale) * gate / (1 + std::exp(-gate)));
    }
  }

  const GatedDeltaNetParams& p_;
  const DeltaShape& shape_;
  const int head_, slot_, first_, num_tokens_, length_;
  int64_t state_size_;
  float* state_;
  T *window_, *pending_;
  int* folded_;
  std::vector<float> recent_;  // [3, 2 Dk + Dv]: the raw tokens before the step
};

}  // namespace

void gated_delta_net(const Context&, const GatedDeltaNetParams& p) {
  check_gated_delta_net(p);
  const int heads = p.shape.num_value_heads, count = p.tokens.num_seqs * heads;
  dispatch_host_dtype(p.qkvz.dtype(), [&](auto t) {
#pragma omp parallel for if (count > 1)
    for (int i = 0; i < count; ++i) Head<decltype(t)>(p, i / heads, i % heads).run();
  });
}

}  // namespace cpmcu::cpu
