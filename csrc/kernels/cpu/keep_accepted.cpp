#include <cstring>

#include "kernels/tree/tree_checks.h"

namespace cpmcu::cpu {
namespace {

// Nodes ascend along a path and path[j] >= j. So copying in the order of j overwrites no source.
void move_rows(const KeepAcceptedParams& p) {
  const int64_t row_bytes = p.width * size_of(p.pool.dtype());
  const int64_t plane_bytes = p.pool.size(1) * p.pool.size(2) * size_of(p.pool.dtype());
  for (int64_t plane = 0; plane < p.pool.size(0); ++plane) {
    char* rows = p.pool.as<char>() + plane * plane_bytes;
    for (int seq = 0; seq < p.num_seqs; ++seq) {
      const int slot = p.seq_slots[seq], num = p.accepted.counts[slot];
      const int* path = p.accepted.paths + int64_t{slot} * p.accepted.max_path;
      const int length = p.lengths[slot] - num;
      for (int j = 1; j < num; ++j) {
        if (path[j] == j) continue;
        for (int head = 0; head < p.num_heads; ++head) {
          const auto row_at = [&](int index) {
            return rows + kv_offset(p.page_table, p.max_pages, slot, length + index, head,
                                    p.num_heads, row_bytes);
          };
          std::memcpy(row_at(j), row_at(path[j]), row_bytes);
        }
      }
    }
  }
}

void copy_hidden(const KeepAcceptedParams& p) {
  const int64_t row_bytes = p.hidden.size(1) * size_of(p.hidden.dtype());
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const int slot = p.seq_slots[seq], num = p.accepted.counts[slot];
    const int64_t first = int64_t{slot} * p.accepted.max_path;
    for (int j = 0; j < num; ++j) {
      const int row = seq * p.num_nodes + p.accepted.paths[first + j];
      const int64_t to = p.accepted.hidden_row(slot, p.lengths[slot] - num + j);
      std::memcpy(p.accepted_hidden.as<char>() + to * row_bytes,
                  p.hidden.as<char>() + row * row_bytes, row_bytes);
    }
  }
}

}  // namespace

void keep_accepted(const Context&, const KeepAcceptedParams& p) {
  check_keep(p);
  if (!p.pool.empty()) move_rows(p);
  if (!p.hidden.empty()) copy_hidden(p);
}

}  // namespace cpmcu::cpu
