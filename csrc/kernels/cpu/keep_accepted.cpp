#include <cstring>

#include "kernels/tree_checks.h"

namespace cpmcu::cpu {
namespace {

// Sources lie behind their destinations and nodes ascend along a path, so in order nothing is lost.
void move_cells(const KeepAcceptedParams& p) {
  const int64_t cell_bytes = p.head_dim * size_of(p.pool.dtype());
  const int64_t layer_bytes = p.pool.size(1) * p.pool.size(2) * size_of(p.pool.dtype());
  for (int64_t layer = 0; layer < p.pool.size(0); ++layer) {
    char* cells = p.pool.as<char>() + layer * layer_bytes;
    for (int seq = 0; seq < p.num_seqs; ++seq) {
      const int slot = p.seq_slots[seq], num = p.num_emitted[seq];
      const int length = p.lengths[slot] - num;
      for (int j = 1; j < num; ++j) {
        const int node = p.paths[seq * p.max_emitted + j];
        if (node == j) continue;
        for (int head = 0; head < p.num_kv_heads; ++head) {
          const auto cell = [&](int index) {
            return cells + kv_offset(p.page_table, p.max_pages, slot, length + index, head,
                                     p.num_kv_heads, cell_bytes);
          };
          std::memcpy(cell(j), cell(node), cell_bytes);
        }
      }
    }
  }
}

void copy_features(const KeepAcceptedParams& p) {
  const int64_t row_bytes = p.features.size(1) * size_of(p.features.dtype());
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    for (int j = 0; j < p.num_emitted[seq]; ++j) {
      const int row = seq * p.num_nodes + p.paths[seq * p.max_emitted + j];
      const int kept = p.seq_slots[seq] * p.max_emitted + j;
      std::memcpy(p.pending_features.as<char>() + kept * row_bytes,
                  p.features.as<char>() + row * row_bytes, row_bytes);
    }
  }
}

}  // namespace

void keep_accepted(const Context&, const KeepAcceptedParams& p) {
  check_keep(p);
  move_cells(p);
  if (!p.features.empty()) copy_features(p);
}

}  // namespace cpmcu::cpu
