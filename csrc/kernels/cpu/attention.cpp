// One pass over the pages of a sequence with a running maximum and sum. Prefill and decode use the
// same code: the order of additions of a token depends only on the KV entries that it sees.
//
// If by_position is set, pages with entries of the tree are gathered first. Each entry is copied to
// its position in plain decoding; the rest of the computation is the same.
#include "kernels/attention/attention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/attention/sparse_checks.h"
#include "kernels/cpu/simd.h"

namespace cpmcu::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Bits [0, n) for any n.
uint64_t low_bits(int n) { return n <= 0 ? 0 : n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

// The visible ones of the 64 entries from `first` on, as bits: entries below `length`, and the
// entries of `mask`, whose bit 0 is entry `length`.
uint64_t visible_entries(int first, int length, uint64_t mask) {
  const int shift = length - first;  // position of mask bit 0 in this page
  const uint64_t from_step = shift >= 64   ? 0
                             : shift >= 0  ? mask << shift
                             : shift > -64 ? mask >> -shift
                                           : 0;
  return low_bits(shift) | from_step;
}

// Copies entries [first, first + num_entries) to `page`. Entries from `length` on are the ancestors
// in `mask`, in order.
template <typename T>
void gather_page(const Tensor& cache, const StepTokens& tokens, int slot, int first,
                 int num_entries, int length, uint64_t mask, int kv_head, T* page) {
  const int num_kv_heads = static_cast<int>(cache.size(1));
  const int head_dim = static_cast<int>(cache.size(3));
  for (int c = first; c < first + num_entries; ++c) {
    uint64_t rest = mask;
    for (int i = length; i < c; ++i) rest &= rest - 1;
    const int entry = c < length ? c : length + std::countr_zero(rest);
    const T* from = cache.as<T>() + kv_offset(tokens.page_table, tokens.max_pages, slot, entry,
                                              kv_head, num_kv_heads, head_dim);
    page = std::copy(from, from + head_dim, page);
  }
}

// The running softmax of one token and head.
template <typename T>
class Softmax {
 public:
  // `q` is a dot_operand; `buffer` holds 2 D floats.
  Softmax(const float* q, float scale, int head_dim, float* buffer)
      : q_(q), scale_(scale), head_dim_(head_dim), sum_(buffer), page_sum_(buffer + head_dim) {
    std::fill(sum_, sum_ + head_dim, 0.f);
  }

  void add_page(const T* k, const T* v, uint64_t visible) {
    if (visible == 0) return;
    float p[kPageSize];
    dot_rows(q_, 1, k, std::bit_width(visible), head_dim_, p, kPageSize);
    float maximum = maximum_;
    for (uint64_t rest = visible; rest != 0; rest &= rest - 1) {
      float& score = p[std::countr_zero(rest)];
      score *= scale_;
      maximum = std::max(maximum, score);
    }
    // The sums of a page are added to the totals once, which reduces rounding errors in long
    // sequences.
    float page_total = 0;
    std::fill(page_sum_, page_sum_ + head_dim_, 0.f);
    // Masked entries are skipped, not weighted with 0, because their values may be infinite.
    for (uint64_t rest = visible; rest != 0;) {
      const int begin = std::countr_zero(rest);
      const int end = begin + std::countr_one(rest >> begin);
      for (int i = begin; i < end; ++i) page_total += p[i] = std::exp(p[i] - maximum);
      add_scaled_rows(p + begin, v + int64_t{begin} * head_dim_, end - begin, head_dim_, page_sum_);
      rest &= ~low_bits(end);
    }
    const float shrink = std::exp(maximum_ - maximum);
    maximum_ = maximum;
    total_ = total_ * shrink + page_total;
    for (int i = 0; i < head_dim_; ++i) sum_[i] = sum_[i] * shrink + page_sum_[i];
  }

  void write(T* out) const {
    for (int i = 0; i < head_dim_; ++i) out[i] = from_float<T>(sum_[i] / total_);
  }

 private:
  const float* q_;
  float scale_;
  int head_dim_;
  float* sum_;       // [D], scaled by exp(-maximum_)
  float* page_sum_;  // [D]
  float maximum_ = -kInfinity;
  float total_ = 0;
};

void check(const AttentionParams& p) {
  CHECK(p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads == 0,
        "attention: {} query heads do not divide over {} KV heads", p.num_heads, p.num_kv_heads);
  const int num_columns = resolved(p.layout, p.num_heads, p.num_kv_heads, p.head_dim).row;
  CHECK(p.qkv.size(0) >= p.tokens.num_tokens && p.qkv.size(1) == num_columns &&
            p.out.size(0) >= p.tokens.num_tokens && p.out.size(1) == p.num_heads * p.head_dim,
        "attention: qkv is {} and out {}, expected {} rows of {} and {} columns",
        p.qkv.shape_text(), p.out.shape_text(), p.tokens.num_tokens, num_columns,
        p.num_heads * p.head_dim);
  CHECK(p.k_cache.dtype() == p.qkv.dtype() && p.v_cache.dtype() == p.qkv.dtype() &&
            p.out.dtype() == p.qkv.dtype(),
        "attention: qkv is {}, the cache {} and {}, out {}; expected one dtype",
        name_of(p.qkv.dtype()), name_of(p.k_cache.dtype()), name_of(p.v_cache.dtype()),
        name_of(p.out.dtype()));
  CHECK(p.window >= 0, "attention: window is {}, expected at least 0", p.window);
  check_selection(p);
  CHECK(p.tokens.first_token >= 0, "attention: first_token {} is negative", p.tokens.first_token);
  CHECK(p.tokens.ancestor_masks == nullptr ||
            p.tokens.first_token + p.tokens.max_seq_tokens <= kMaxTreeSize,
        "attention: a sequence with masks may have up to {} rows, not {}", kMaxTreeSize,
        p.tokens.first_token + p.tokens.max_seq_tokens);
}

void attention(const AttentionParams& p) {
  check(p);
  const StepTokens& tokens = p.tokens;
  const int head_dim = p.head_dim, group = p.num_heads / p.num_kv_heads;
  const QkvLayout layout = resolved(p.layout, p.num_heads, p.num_kv_heads, head_dim);
  dispatch_host_dtype(p.qkv.dtype(), [&](auto t) {
    using T = decltype(t);
#pragma omp parallel for collapse(2) schedule(dynamic, 4)
    for (int row = 0; row < tokens.num_tokens; ++row) {
      for (int h = 0; h < p.num_heads; ++h) {
        const int seq = tokens.token_seqs[row], slot = tokens.seq_slots[seq];
        const int in_seq = row - tokens.seq_token_begin[seq];
        const int cached = tokens.slot_lengths[slot], kv_head = h / group;
        const uint64_t ancestor_mask =
            tokens.ancestor_masks == nullptr ? 0 : tokens.ancestor_masks[row];
        const int own = cached + (p.by_position ? std::popcount(ancestor_mask) - 1
                                                : tokens.first_token + in_seq);
        // A causal row sees one stretch of entries; a mask names the entries from `length` on.
        const bool causal = tokens.ancestor_masks == nullptr || p.by_position;
        const int length = causal ? own + 1 : cached;
        const uint64_t mask = causal ? 0 : ancestor_mask;
        const int end = length + std::bit_width(mask);
        const int begin = p.window > 0 ? std::max(own + 1 - p.window, 0) : 0;

        const uint64_t* blocks =
            p.selection.empty()
                ? nullptr
                : p.selection.words.as<uint64_t>() +
                      (int64_t{row} * p.num_kv_heads + kv_head) * p.selection.words.size(2);

        thread_local std::vector<float> q, buffer;
        thread_local std::vector<T> k_page, v_page;
        const T* q_head = p.qkv.as<T>() + row * p.qkv.size(1) + h * layout.q_head;
        Softmax<T> softmax(dot_operand(q_head, 1, head_dim, q), p.scale, head_dim,
                           aligned_floats(2 * head_dim, buffer));
        for (int first = begin / kPageSize * kPageSize; first < end; first += kPageSize) {
          const uint64_t visible = visible_entries(first, length, mask) & ~low_bits(begin - first);
          if (blocks != nullptr && (blocks[first / 4096] >> first / kPageSize % 64 & 1) == 0)
            continue;
          if (p.by_position && first + kPageSize > cached) {
            const int num_entries = std::min(kPageSize, end - first);
            for (auto [cache, page] : {std::pair{&p.k_cache, &k_page}, {&p.v_cache, &v_page}}) {
              page->resize(int64_t{kPageSize} * head_dim);
              gather_page(*cache, tokens, slot, first, num_entries, cached, ancestor_mask, kv_head,
                          page->data());
            }
            softmax.add_page(k_page.data(), v_page.data(), visible);
            continue;
          }
          const int64_t offset = kv_offset(tokens.page_table, tokens.max_pages, slot, first,
                                           kv_head, p.num_kv_heads, head_dim);
          softmax.add_page(p.k_cache.as<T>() + offset, p.v_cache.as<T>() + offset, visible);
        }
        softmax.write(p.out.as<T>() + row * p.out.size(1) + h * head_dim);
      }
    }
  });
}

}  // namespace

void attention_prefill(const Context&, const AttentionParams& params) {
  CHECK(!params.by_position, "attention_prefill: by_position is for attention_decode");
  attention(params);
}

void attention_splits(const Context&, const AttentionParams& params) {
  CHECK(params.tokens.max_seq_tokens <= kMaxTreeSize,
        "attention_decode: a sequence may have up to {} rows, not {}", kMaxTreeSize,
        params.tokens.max_seq_tokens);
  CHECK(!params.by_position ||
            (params.tokens.ancestor_masks != nullptr && params.tokens.first_token == 0),
        "attention_decode: by_position needs masks and a step in one launch, not first_token {}",
        params.tokens.first_token);
  attention(params);
}

void attention_combine(const Context&, const AttentionParams&) {}

}  // namespace cpmcu::cpu
