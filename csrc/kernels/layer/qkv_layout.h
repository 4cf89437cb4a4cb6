// Where the heads of a token lie in its row of qkv, in elements. A head has D elements.
#pragma once

namespace cpmcu {

struct QkvLayout {
  int row = 0;     // from one token to the next; 0: packed
  int q_head = 0;  // from one query head to the next: more than D where a gate lies between them
  int k = 0;       // where the first key head begins
  int v = 0;       // where the first value head begins

  bool is_packed() const { return row == 0; }
  // Columns that a row has at the least.
  int end(int num_kv_heads, int head_dim) const { return v + num_kv_heads * head_dim; }
};

// The layout itself; of a packed one, query, key and value heads one behind another.
inline QkvLayout resolved(const QkvLayout& layout, int num_heads, int num_kv_heads, int head_dim) {
  if (!layout.is_packed()) return layout;
  const int k = num_heads * head_dim, v = k + num_kv_heads * head_dim;
  return {.row = v + num_kv_heads * head_dim, .q_head = head_dim, .k = k, .v = v};
}

}  // namespace cpmcu
