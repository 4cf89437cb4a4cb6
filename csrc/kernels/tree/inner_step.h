// A draft that is the output of speculative steps of its own, "inner" steps
// (csrc/speculative/drafters/hierarchical.cpp). The inner sequences lie in the slots of the outer
// ones. L tokens of an outer sequence are cached, n of them emitted by its last step.
//
//   inner state                        after begin_inner
//   lengths                            L + 1: the outer next token is cached, too
//   next_tokens                        the first token of the draft, at position L + 1
//   accepted: n + 1 tokens             the n emitted ones, then the first token of the draft
//   stops                              M - 1 tokens may still be drafted
//
// When the inner drafter last drafted, only tokens up to position L - n were final. It processes
// the accepted tokens first, which writes all entries of later tokens again.
#pragma once

#include "kernels/op.h"
#include "kernels/step/step_ops.h"
#include "kernels/tree/tree.h"

namespace cpmcu {

struct BeginInnerParams {
  int num_seqs = 0;                   // B
  const int* seq_slots = nullptr;     // [B]
  const int* lengths = nullptr;       // [slots] L: the outer lengths
  Accepted accepted;                  // the tokens that the outer step accepted
  const int* first_tokens = nullptr;  // [B]
  SlotState inner;                    // out; its accepted.max_path equals that of `accepted`
  SlotStop* stops = nullptr;          // [slots] out: the stops of the inner steps
  // [B, max_path] out: rows[i] of the launch that processed the accepted tokens becomes row
  // slot_rows[i] of the inner accepted hidden states. -1: padding.
  int *rows = nullptr, *slot_rows = nullptr;
  int num_tokens = 0;             // M: number of tokens of each draft
  int* chain = nullptr;           // [B, M] out: the first token, then -1
  InnerCounts* counts = nullptr;  // [B] out: zero steps and tokens
};
REGISTER_OP(begin_inner, BeginInnerParams)

// Appends to the draft the tokens that an inner step emitted. Counts the step if it emitted any.
struct ExtendChainParams {
  int num_seqs = 0;                 // B
  const int* seq_slots = nullptr;   // [B]
  Accepted accepted;                // the tokens that the inner step accepted
  const SlotStop* stops = nullptr;  // [slots] the stops after the inner step
  int num_tokens = 0;               // M
  int* chain = nullptr;             // [B, M]
  InnerCounts* counts = nullptr;    // [B]
};
REGISTER_OP(extend_chain, ExtendChainParams)

inline void check_begin_inner(const BeginInnerParams& p) {
  CHECK(p.num_tokens >= 1 && p.num_tokens < p.accepted.max_path,
        "begin_inner: a draft of {} tokens and accepted paths of up to {}, expected 1 or more "
        "tokens and longer paths",
        p.num_tokens, p.accepted.max_path);
  CHECK(p.inner.accepted.max_path == p.accepted.max_path,
        "begin_inner: inner paths have up to {} tokens, expected {} as outer ones",
        p.inner.accepted.max_path, p.accepted.max_path);
}

}  // namespace cpmcu
