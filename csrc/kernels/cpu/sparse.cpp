#include "kernels/attention/sparse.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention/sparse_checks.h"
#include "kernels/cpu/simd.h"

namespace cpmcu::cpu {
namespace {

// The mean of the keys of `num_tokens` tokens from `first` on, added in order.
template <typename T>
void write_mean(const CompressKeysParams& p, int slot, int head, int first, int num_tokens,
                std::vector<float>& sum, T* out) {
  const int64_t head_dim = p.k_cache.size(3);
  sum.assign(head_dim, 0);
  for (int token = first; token < first + num_tokens; ++token) {
    const T* key = p.k_cache.as<T>() + kv_offset(p.tokens.page_table, p.tokens.max_pages, slot,
                                                 token, head, static_cast<int>(p.k_cache.size(1)),
                                                 static_cast<int>(head_dim));
    for (int64_t i = 0; i < head_dim; ++i) sum[i] += to_float(key[i]);
  }
  for (int64_t i = 0; i < head_dim; ++i) out[i] = from_float<T>(sum[i] / num_tokens);
}

// The compressed keys of one sequence and head that end among the tokens [begin, end).
template <typename T>
void compress(const CompressKeysParams& p, int slot, int head, int begin, int end) {
  const int64_t num_heads = p.k_cache.size(1), head_dim = p.k_cache.size(3);
  const int* pages = p.tokens.page_table + int64_t{slot} * p.tokens.max_pages;
  thread_local std::vector<float> sum;
  for (int row = begin / kFineStride; row < end / kFineStride; ++row) {
    const int64_t page = pages[row / kFineRows];
    T* out =
        p.keys.fine.as<T>() + ((page * num_heads + head) * kFineRows + row % kFineRows) * head_dim;
    if (row == 0) std::fill(out, out + head_dim, from_float<T>(0));
    if (row > 0) write_mean(p, slot, head, (row - 1) * kFineStride, kFineTokens, sum, out);
  }
  for (int row = begin / kPageSize; row < end / kPageSize; ++row) {
    T* out = p.keys.coarse.as<T>() + (int64_t{pages[row]} * num_heads + head) * head_dim;
    if (row == 0) std::fill(out, out + head_dim, from_float<T>(0));
    if (row > 0) write_mean(p, slot, head, (row - 1) * kPageSize, kCoarseTokens, sum, out);
  }
}

// The scores of the blocks [begin, end) for one query and KV head.
template <typename T>
class BlockScores {
 public:
  BlockScores(const SelectBlocksParams& p, int row, int slot, int kv_head)
      : p_(p),
        row_(row),
        kv_head_(kv_head),
        pages_(p.tokens.page_table + int64_t{slot} * p.tokens.max_pages) {}

  const std::vector<float>& of(const QueryBlocks& blocks) {
    fine_.assign(blocks.fine_end(), 0);
    const int group = p_.num_heads / p_.num_kv_heads;
    for (int h = kv_head_ * group; h < (kv_head_ + 1) * group; ++h) add_head(h, blocks);
    scores_.clear();
    for (int block = blocks.init_end; block < blocks.window_begin; ++block) {
      // fine[0] does not exist. A query in block q does not see the rows from fine_end on.
      const int begin = std::max(kFineRows * block, 1);
      const int end = std::min(kFineRows * (block + 1) + 1, blocks.fine_end());
      float best = 0;  // also for NaN
      for (int r = begin; r < end; ++r) best = std::max(best, fine_[r]);
      scores_.push_back(best);
    }
    return scores_;
  }

 private:
  // Adds the probabilities of one head to those of the fine rows.
  void add_head(int head, const QueryBlocks& blocks) {
    const QkvLayout layout = resolved(p_.layout, p_.num_heads, p_.num_kv_heads, p_.head_dim);
    const T* from = p_.qkv.as<T>() + int64_t{row_} * layout.row + head * layout.q_head;
    const float* q = dot_operand(from, 1, p_.head_dim, query_);
    const int end = blocks.coarse_end();
    products_.resize(static_cast<size_t>(kFineRows) * end);
    for (int page = 1; page < end; ++page) multiply(q, p_.keys.coarse, page, &products_[page]);
    float maximum = -std::numeric_limits<float>::infinity(), total = 0;
    for (int r = 1; r < end; ++r) maximum = std::max(maximum, products_[r] * p_.scale);
    for (int r = 1; r < end; ++r) total += std::exp(products_[r] * p_.scale - maximum);
    for (int page = 0; page < end; ++page) {
      multiply(q, p_.keys.fine, page, &products_[static_cast<size_t>(kFineRows) * page]);
    }
    for (int r = 1; r < blocks.fine_end(); ++r) {
      fine_[r] += std::exp(products_[r] * p_.scale - maximum) / total;
    }
  }
  // out[i] = q . row i of the page
  void multiply(const float* q, const Tensor& keys, int page, float* out) const {
    const int64_t rows = keys.size(2);
    const T* of_page =
        keys.as<T>() + (int64_t{pages_[page]} * p_.num_kv_heads + kv_head_) * rows * p_.head_dim;
    dot_rows(q, 1, of_page, rows, p_.head_dim, out, rows);
  }

  const SelectBlocksParams& p_;
  int row_, kv_head_;
  const int* pages_;  // of the slot
  std::vector<float> query_, products_, fine_, scores_;
};

void set_bits(uint64_t* words, int begin, int end) {
  for (int block = begin; block < end; ++block) words[block / 64] |= uint64_t{1} << block % 64;
}

// Sets the bits of the `count` blocks with the highest scores; scores[0] is block `first`.
void set_best(uint64_t* words, const std::vector<float>& scores, int first, int count) {
  thread_local std::vector<int> order;
  order.resize(scores.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  const auto is_better = [&](int a, int b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  };
  std::nth_element(order.begin(), order.begin() + count, order.end(), is_better);
  for (int i = 0; i < count; ++i) set_bits(words, first + order[i], first + order[i] + 1);
}

}  // namespace

void compress_keys(const Context&, const CompressKeysParams& p) {
  check_compress(p);
  const int num_heads = static_cast<int>(p.k_cache.size(1));
  dispatch_host_dtype(p.k_cache.dtype(), [&](auto t) {
    using T = decltype(t);
#pragma omp parallel for collapse(2)
    for (int seq = 0; seq < p.tokens.num_seqs; ++seq) {
      for (int head = 0; head < num_heads; ++head) {
        const int slot = p.tokens.seq_slots[seq];
        const auto [begin, end] = new_tokens(p.tokens, p.accepted_counts, seq);
        compress<T>(p, slot, head, begin, end);
      }
    }
  });
}

void select_blocks(const Context&, const SelectBlocksParams& p) {
  check_select(p);
  const StepTokens& tokens = p.tokens;
  const int64_t num_words = p.selection.size(2);
  dispatch_host_dtype(p.qkv.dtype(), [&](auto t) {
    using T = decltype(t);
#pragma omp parallel for collapse(2) schedule(dynamic, 4)
    for (int row = 0; row < tokens.num_tokens; ++row) {
      for (int head = 0; head < p.num_kv_heads; ++head) {
        uint64_t* words =
            p.selection.as<uint64_t>() + (int64_t{row} * p.num_kv_heads + head) * num_words;
        const QueryBlocks blocks = blocks_of_query(p.rule, tokens.positions[row]);
        std::fill(words, words + num_words, 0);
        set_bits(words, 0, blocks.init_end);
        set_bits(words, blocks.window_begin, blocks.own + 1);
        if (blocks.needs_scores()) {
          const int slot = tokens.seq_slots[tokens.token_seqs[row]];
          BlockScores<T> scores(p, row, slot, head);
          set_best(words, scores.of(blocks), blocks.init_end, blocks.count);
        } else {
          set_bits(words, blocks.init_end, blocks.init_end + blocks.count);
        }
      }
    }
  });
}

}  // namespace cpmcu::cpu
