// The layout of a token's row of qkv, in elements. A head has D elements.
#pragma once

namespace cpmcu {

struct QkvLayout {
  // Elements from one token to the next. 0: the heads of q, k and v lie side by side without gaps.
  int row = 0;
  // Elements from one query head to the next: more than D if gates lie between them.
  int q_head = 0;
  int k = 0;  // first element of the first key head
  int v = 0;  // first element of the first value head

  bool is_packed() const { return row == 0; }
  // Minimum number of columns of a row.
  int end(int num_kv_heads, int head_dim) const { return v + num_kv_heads * head_dim; }
};

// The layout with all fields set. A packed layout has query, key and value heads without gaps.
inline QkvLayout resolved(const QkvLayout& layout, int num_heads, int num_kv_heads, int head_dim) {
  if (!layout.is_packed()) return layout;
  const int k = num_heads * head_dim, v = k + num_kv_heads * head_dim;
  return {.row = v + num_kv_heads * head_dim, .q_head = head_dim, .k = k, .v = v};
}

}  // namespace cpmcu
