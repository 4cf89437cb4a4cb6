// One pass over the pages of a sequence with a running maximum and sum. Prefill and decode use the
// same code: the order of additions of a token depends only on the KV entries that it sees.
//
// If by_position is set, pages with entries of the tree are gathered first, but for chains. Each
// entry is copied to its position in plain decoding; the rest of the computation is the same.
#include "kernels/attention/attention.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels/attention/sparse_checks.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/threads.h"
#include "kernels/layer/rotary_kv.h"

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

// A KV head's rows of keys or values in the cache.
class CacheRows {
 public:
  CacheRows(const Tensor& cache, const Tensor& scales, const StepTokens& tokens, int slot,
            int kv_head)
      : cache_(cache), scales_(scales), tokens_(tokens), slot_(slot), kv_head_(kv_head) {}

  // Copies an entry in the dtype of the cache.
  template <typename T>
  void copy(int entry, T* row) const {
    const T* from = cache_.as<T>() + place(entry) * head_dim();
    std::copy(from, from + head_dim(), row);
  }
  // Copies an entry of an fp8 cache as float32.
  void dequantise(int entry, float* row) const {
    const int64_t at = place(entry);
    const uint8_t* codes = cache_.as<uint8_t>() + at * head_dim();
    const float scale = scales_.as<float>()[at];
    for (int i = 0; i < head_dim(); ++i) row[i] = scale * kE4m3Values[codes[fp8_place(i)]];
  }

 private:
  static const std::array<float, 256> kE4m3Values;

  int head_dim() const { return static_cast<int>(cache_.size(3)); }
  int64_t place(int entry) const {
    return kv_offset(tokens_.page_table, tokens_.max_pages, slot_, entry, kv_head_,
                     static_cast<int>(cache_.size(1)), 1);
  }

  const Tensor &cache_, &scales_;
  const StepTokens& tokens_;
  int slot_, kv_head_;
};

const std::array<float, 256> CacheRows::kE4m3Values = [] {
  std::array<float, 256> values{};
  for (int code = 0; code < 256; ++code) values[code] = from_e4m3(static_cast<uint8_t>(code));
  return values;
}();

// Calls copy(i, entry) for the entries [first, first + num_entries). From `length` on, these are
// the ancestors in `mask`, in order.
template <typename Copy>
void for_each_entry(int first, int num_entries, int length, uint64_t mask, Copy copy) {
  for (int c = first; c < first + num_entries; ++c) {
    uint64_t rest = mask;
    for (int i = length; i < c; ++i) rest &= rest - 1;
    copy(c - first, c < length ? c : length + std::countr_zero(rest));
  }
}

// The running softmax of one token and head, over pages of T.
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

  // `sink`: a further logit, without a value; null: none.
  template <typename Out>
  void write(Out* out, const float* sink) const {
    const float total = sink == nullptr ? total_ : total_ + std::exp(*sink - maximum_);
    for (int i = 0; i < head_dim_; ++i) out[i] = from_float<Out>(sum_[i] / total);
  }

 private:
  const float* q_;
  float scale_;
  int head_dim_;
  float* sum_;       // [D] sums of probability * value, scaled by exp(-maximum_)
  float* page_sum_;  // [D] the same for one page
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
  CHECK(p.out.dtype() == p.qkv.dtype(), "attention: qkv is {}, out {}; expected one dtype",
        name_of(p.qkv.dtype()), name_of(p.out.dtype()));
  check_kv_cache("attention", p.k_cache, p.k_scales, p.qkv.dtype(), p.num_kv_heads, p.head_dim);
  check_kv_cache("attention", p.v_cache, p.v_scales, p.qkv.dtype(), p.num_kv_heads, p.head_dim);
  CHECK(p.window >= 0, "attention: window is {}, expected at least 0", p.window);
  check_selection(p);
  CHECK(
      p.sinks.empty() || (p.sinks.dtype() == DType::kF32 && p.sinks.num_elements() == p.num_heads),
      "attention: sinks are {} {}, expected float32 [{}]", name_of(p.sinks.dtype()),
      p.sinks.shape_text(), p.num_heads);
  CHECK(p.tokens.first_token >= 0, "attention: first_token {} is negative", p.tokens.first_token);
  CHECK(p.tokens.ancestor_masks == nullptr ||
            p.tokens.first_token + p.tokens.max_seq_tokens <= kMaxTreeSize,
        "attention: a sequence with masks may have up to {} rows, not {}", kMaxTreeSize,
        p.tokens.first_token + p.tokens.max_seq_tokens);
}

// The page at `first` in two buffers: dequantised, or with the entries of a tree gathered.
struct PageCopy {
  CacheRows keys, values;
  int head_dim;
  bool dequantises;

  template <typename Page>
  void fill(std::vector<Page>& k, std::vector<Page>& v, int first, int num_entries, int length,
            uint64_t mask) const {
    k.resize(int64_t{kPageSize} * head_dim);
    v.resize(int64_t{kPageSize} * head_dim);
    for_each_entry(first, num_entries, length, mask, [&](int i, int entry) {
      const int64_t at = int64_t{i} * head_dim;
      copy_row(keys, entry, k.data() + at);
      copy_row(values, entry, v.data() + at);
    });
  }

 private:
  template <typename Page>
  void copy_row(const CacheRows& rows, int entry, Page* row) const {
    if constexpr (std::is_same_v<Page, float>) {
      if (dequantises) return rows.dequantise(entry, row);
    }
    rows.copy(entry, row);
  }
};

// One token and query head. Pages are of T, or dequantised to float32.
template <typename T, typename Page>
void attend(const AttentionParams& p, const QkvLayout& layout, int row, int h) {
  const StepTokens& tokens = p.tokens;
  const int head_dim = p.head_dim;
  const int seq = tokens.token_seqs[row], slot = tokens.seq_slots[seq];
  const int in_seq = row - tokens.seq_token_begin[seq];
  const int cached = tokens.slot_lengths[slot], kv_head = h / (p.num_heads / p.num_kv_heads);
  const uint64_t ancestor_mask = tokens.ancestor_masks == nullptr ? 0 : tokens.ancestor_masks[row];
  const int own =
      cached + (p.by_position ? std::popcount(ancestor_mask) - 1 : tokens.first_token + in_seq);
  // A causal row sees one stretch of entries; a mask names the entries from `length` on.
  const bool causal = tokens.ancestor_masks == nullptr || p.by_position;
  const int length = causal ? own + 1 : cached;
  const uint64_t mask = causal ? 0 : ancestor_mask;
  // The entries of a chain's nodes lie in order already.
  const bool scattered = p.by_position && (ancestor_mask & (ancestor_mask + 1)) != 0;
  const int end = length + std::bit_width(mask);
  const int begin = p.window > 0 ? std::max(own + 1 - p.window, 0) : 0;

  const uint64_t* blocks = p.selection.empty() ? nullptr
                                               : p.selection.words.as<uint64_t>() +
                                                     (int64_t{row} * p.num_kv_heads + kv_head) *
                                                         p.selection.words.size(2);

  thread_local std::vector<float> numbers, q, buffer;
  thread_local std::vector<Page> k_page, v_page;
  const T* q_head = p.qkv.as<T>() + row * p.qkv.size(1) + h * layout.q_head;
  const float* operand;
  if constexpr (std::is_same_v<T, Page>) {
    operand = dot_operand(q_head, 1, head_dim, q);
  } else {
    operand = as_floats(q_head, head_dim, numbers);
  }
  Softmax<Page> softmax(operand, p.scale, head_dim, aligned_floats(2 * head_dim, buffer));
  const PageCopy pages{CacheRows(p.k_cache, p.k_scales, tokens, slot, kv_head),
                       CacheRows(p.v_cache, p.v_scales, tokens, slot, kv_head), head_dim,
                       !p.k_scales.empty()};
  for (int first = begin / kPageSize * kPageSize; first < end; first += kPageSize) {
    const uint64_t visible = visible_entries(first, length, mask) & ~low_bits(begin - first);
    if (blocks != nullptr && (blocks[first / 4096] >> first / kPageSize % 64 & 1) == 0) continue;
    const bool gathers = scattered && first + kPageSize > cached;
    if (gathers || pages.dequantises) {
      const int num_entries = std::min(kPageSize, end - first);
      pages.fill(k_page, v_page, first, num_entries, gathers ? cached : end, ancestor_mask);
      softmax.add_page(k_page.data(), v_page.data(), visible);
      continue;
    }
    const int64_t offset = kv_offset(tokens.page_table, tokens.max_pages, slot, first, kv_head,
                                     p.num_kv_heads, head_dim);
    softmax.add_page(p.k_cache.as<Page>() + offset, p.v_cache.as<Page>() + offset, visible);
  }
  softmax.write(p.out.as<T>() + row * p.out.size(1) + h * head_dim,
                p.sinks.empty() ? nullptr : p.sinks.as<float>() + h);
}

// An estimate for threads_pay. A KV entry takes as long as 4 weights for each of its numbers.
int64_t work_of(const AttentionParams& p) {
  const StepTokens& tokens = p.tokens;
  int64_t entries = 0;
  for (int row = 0; row < tokens.num_tokens; ++row) {
    const int slot = tokens.seq_slots[tokens.token_seqs[row]];
    entries += tokens.slot_lengths[slot] + tokens.max_seq_tokens;
  }
  return 4 * entries * p.num_heads * p.head_dim;
}

void attention(const AttentionParams& p) {
  check(p);
  const QkvLayout layout = resolved(p.layout, p.num_heads, p.num_kv_heads, p.head_dim);
  dispatch_host_dtype(p.qkv.dtype(), [&](auto t) {
    using T = decltype(t);
#pragma omp parallel for collapse(2) schedule(dynamic, 4) if (threads_pay(work_of(p)))
    for (int row = 0; row < p.tokens.num_tokens; ++row) {
      for (int h = 0; h < p.num_heads; ++h) {
        p.k_scales.empty() ? attend<T, T>(p, layout, row, h) : attend<T, float>(p, layout, row, h);
      }
    }
  });
}

}  // namespace

void attention_prefill(const Context&, const AttentionParams& params) {
  CHECK(!params.by_position, "attention_prefill: by_position is for attention_decode");
  attention(params);
}

void attention_splits(const Context& ctx, const AttentionParams& params) {
  CHECK(params.tokens.max_seq_tokens <= kMaxTreeSize,
        "attention_decode: a sequence may have up to {} rows, not {}", kMaxTreeSize,
        params.tokens.max_seq_tokens);
  CHECK(!params.by_position ||
            (params.tokens.ancestor_masks != nullptr && params.tokens.first_token == 0),
        "attention_decode: by_position needs masks and a step in one launch, not first_token {}",
        params.tokens.first_token);
  CHECK(params.rotary.qkv.empty() || params.selection.empty(),
        "attention_decode: rotary_kv and a selection are given, expected one of them");
  if (!params.rotary.qkv.empty()) cpu::rotary_kv(ctx, params.rotary);
  attention(params);
}

void attention_combine(const Context&, const AttentionParams&) {}

}  // namespace cpmcu::cpu
