#include "kernels/attention/sparse.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention/sparse_checks.h"
#include "kernels/cpu/simd.h"
#include "kernels/layer/fp8_row.h"

namespace cpmcu::cpu {
namespace {

// The mean of the keys of `num_tokens` tokens from `first` on, added in order.
template <typename T>
void write_mean(const LayerKeys& layer, const StepTokens& tokens, int slot, int head, int first,
                int num_tokens, std::vector<float>& sum, T* out) {
  const Tensor& cache = layer.k_cache;
  const int head_dim = static_cast<int>(cache.size(3));
  sum.assign(head_dim, 0);
  for (int token = first; token < first + num_tokens; ++token) {
    const int64_t at = kv_offset(tokens.page_table, tokens.max_pages, slot, token, head,
                                 static_cast<int>(cache.size(1)), 1);
    if (layer.k_scales.empty()) {
      const T* key = cache.as<T>() + at * head_dim;
      for (int i = 0; i < head_dim; ++i) sum[i] += to_float(key[i]);
    } else {
      const uint8_t* codes = cache.as<uint8_t>() + at * head_dim;
      const float scale = layer.k_scales.as<float>()[at];
      for (int i = 0; i < head_dim; ++i) sum[i] += scale * from_e4m3(codes[fp8_place(i)]);
    }
  }
  for (int i = 0; i < head_dim; ++i) out[i] = from_float<T>(sum[i] / num_tokens);
}

// The compressed keys of one layer, sequence and head that end among the tokens [begin, end).
template <typename T>
void compress(const LayerKeys& layer, const StepTokens& tokens, int slot, int head, int begin,
              int end) {
  const int64_t num_heads = layer.k_cache.size(1), head_dim = layer.k_cache.size(3);
  const int* pages = tokens.page_table + int64_t{slot} * tokens.max_pages;
  thread_local std::vector<float> sum;
  const auto write = [&](int row, int stride, int num_tokens, T* out) {
    if (row == 0) {
      std::fill(out, out + head_dim, from_float<T>(0));
    } else {
      write_mean(layer, tokens, slot, head, (row - 1) * stride, num_tokens, sum, out);
    }
  };
  for (int row = begin / kFineStride; row < end / kFineStride; ++row) {
    const int64_t plane = pages[row / kFineRows] * num_heads + head;
    write(row, kFineStride, kFineTokens,
          layer.compressed.fine.as<T>() + (plane * kFineRows + row % kFineRows) * head_dim);
  }
  for (int row = begin / kPageSize; row < end / kPageSize; ++row) {
    const int64_t plane = pages[row] * num_heads + head;
    write(row, kPageSize, kCoarseTokens, layer.compressed.coarse.as<T>() + plane * head_dim);
  }
}

// The scores of one query and KV head for the blocks [init_end, window_begin).
template <typename T>
class BlockScores {
 public:
  BlockScores(const SelectBlocksParams& p, int row, int slot, int kv_head)
      : p_(p),
        kv_head_(kv_head),
        group_(p.num_heads / p.num_kv_heads),
        pages_(p.tokens.page_table + int64_t{slot} * p.tokens.max_pages) {
    const QkvLayout layout = resolved(p.layout, p.num_heads, p.num_kv_heads, p.head_dim);
    for (int h = 0; h < group_; ++h) {
      const T* head =
          p.qkv.as<T>() + int64_t{row} * layout.row + int64_t{kv_head * group_ + h} * layout.q_head;
      heads_.insert(heads_.end(), head, head + p.head_dim);
    }
    queries_ = dot_operand(heads_.data(), group_, p.head_dim, buffer_);
  }

  // Element i is the score of block init_end + i.
  std::vector<float> of(const QueryBlocks& blocks) {
    const std::vector<float> f = fine_sums(blocks);
    std::vector<float> scores;
    for (int block = blocks.init_end; block < blocks.window_begin; ++block) {
      const int begin = std::max(kFineRows * block, 1);  // fine[0] does not exist
      const int end = std::min(kFineRows * (block + 1) + 1, blocks.fine_end());
      float best = 0;  // the result also if all scores are NaN
      for (int r = begin; r < end; ++r) best = std::max(best, f[r]);
      scores.push_back(best);
    }
    return scores;
  }

 private:
  // f of the fine rows.
  std::vector<float> fine_sums(const QueryBlocks& blocks) {
    const int num_fine = blocks.fine_end(), num_coarse = blocks.coarse_end();
    std::vector<float> maxima, totals, f(num_fine, 0.f);
    multiply(p_.keys.coarse, num_coarse);
    for (int h = 0; h < group_; ++h) {
      const float* s = products_.data() + int64_t{h} * num_coarse;
      float maximum = -std::numeric_limits<float>::infinity(), total = 0;
      for (int r = 1; r < num_coarse; ++r) maximum = std::max(maximum, s[r] * p_.scale);
      for (int r = 1; r < num_coarse; ++r) total += std::exp(s[r] * p_.scale - maximum);
      maxima.push_back(maximum);
      totals.push_back(total);
    }
    multiply(p_.keys.fine, num_coarse);
    for (int h = 0; h < group_; ++h) {
      const float* s = products_.data() + int64_t{h} * num_fine;
      for (int r = 1; r < num_fine; ++r) {
        f[r] += std::exp(s[r] * p_.scale - maxima[h]) / totals[h];
      }
    }
    return f;
  }
  // products_[h, r] = head h . row r, for the rows of the first `num_pages` pages.
  void multiply(const Tensor& keys, int num_pages) {
    const int64_t rows = keys.size(2), num_rows = rows * num_pages;
    products_.resize(static_cast<size_t>(group_ * num_rows));
    for (int page = 0; page < num_pages; ++page) {
      const T* of_page =
          keys.as<T>() + (int64_t{pages_[page]} * p_.num_kv_heads + kv_head_) * rows * p_.head_dim;
      dot_rows(queries_, group_, of_page, rows, p_.head_dim, products_.data() + page * rows,
               num_rows);
    }
  }

  const SelectBlocksParams& p_;
  int kv_head_, group_;
  const int* pages_;  // page numbers of the slot
  std::vector<T> heads_;
  const float* queries_ = nullptr;  // the queries of heads_, as dot_operand() converts them
  std::vector<float> buffer_, products_;
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
  const int num_layers = static_cast<int>(p.layers.size());
  const int num_heads = static_cast<int>(p.layers.front().k_cache.size(1));
  dispatch_host_dtype(p.layers.front().compressed.fine.dtype(), [&](auto t) {
    using T = decltype(t);
#pragma omp parallel for collapse(3)
    for (int layer = 0; layer < num_layers; ++layer) {
      for (int seq = 0; seq < p.tokens.num_seqs; ++seq) {
        for (int head = 0; head < num_heads; ++head) {
          const int slot = p.tokens.seq_slots[seq];
          const auto [begin, end] = new_tokens(p.tokens, p.accepted_counts, seq);
          compress<T>(p.layers[layer], p.tokens, slot, head, begin, end);
        }
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
