// The rows of a draft that stores no keys and reads those of the target. All rows are at the root's
// position L, and attend to the L cached entries only. So each row is a sequence of one token.
#pragma once

#include "kernels/op.h"
#include "kernels/step/accepted.h"
#include "kernels/step/step_tokens.h"

namespace cpmcu {

struct KeylessRowsParams {
  int num_seqs = 0;                  // B
  int num_rows = 0;                  // k: number of rows of each sequence
  const int* seq_slots = nullptr;    // [B]
  const int* lengths = nullptr;      // [slots] L
  const int* next_tokens = nullptr;  // [slots]
  Accepted accepted{};
  int* row_slots = nullptr;   // [B k] out
  int* positions = nullptr;   // [B k] out: L
  int* token_seqs = nullptr;  // [B k] out: the number of the row, because each row is a sequence
  int* seq_token_begin = nullptr;  // [B k + 1] out
  uint64_t* masks = nullptr;       // [B k] out: 0, so a row sees no entry from L on
  int* root_ids = nullptr;         // [B] out
  int* hidden_rows = nullptr;      // [B] out: Accepted::hidden_row of the token at L - 1
  // [slots] out: L - max(counts, 1), the value that begin_draft leaves.
  int* draft_lengths = nullptr;
};

inline void check_keyless_rows(const KeylessRowsParams& p) {
  CHECK(p.num_seqs >= 0 && p.num_rows >= 1,
        "keyless_rows: {} sequences of {} rows, expected at least 1 row", p.num_seqs, p.num_rows);
}
REGISTER_OP(keyless_rows, KeylessRowsParams)

}  // namespace cpmcu
