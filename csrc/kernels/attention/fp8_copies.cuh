// The prompt kernels on Hopper over an fp8 cache: keys and values as 16-bit numbers in scratch,
// where TMA and wgmma read them. The numbers are codes without their scales, so every one is exact.
// The kernels multiply scores and probabilities by the scales (fp8_tiles.cuh).
//
// A pair is a sequence and a KV head. The scratch may hold a part of the pairs; then an op is
// several rounds of copies and attention. A token's bits depend on its pair alone.
#pragma once

#include <algorithm>

#include "kernels/attention/fp8_tiles.cuh"

namespace cpmcu::cuda {

constexpr int kCopyDim = 128;  // head size, D

// The pairs of a round.
struct Fp8Copies {
  void* rows[2];     // keys and values as T: [pairs, entries, D]
  float* scales[2];  // of keys and of values: [pairs, entries]
  int entries;       // entries of a pair, a multiple of kCopyEntries
  int num_seqs, first_kv_head, num_kv_heads;

  // `seq` and `kv_head` are numbers within the round.
  __device__ __forceinline__ int first_row(int seq, int kv_head) const {
    return (seq * num_kv_heads + kv_head) * entries;
  }
};

// The positions of tokens whose results are needed.
struct NeededTokens {
  int begin, end;
};

// Copies the pairs of a round. `args.tokens` begins with the round's sequences.
void copy_codes(const Context& ctx, const AttentionArgs<__half>& args, const Fp8Copies& copies,
                NeededTokens needed);
void copy_codes(const Context& ctx, const AttentionArgs<__nv_bfloat16>& args,
                const Fp8Copies& copies, NeededTokens needed);

// Calls attend(args, copies) for each round, after its copies. In `args`, numbers of sequences and
// heads begin at 0 in each round.
template <typename T, typename Attend>
void for_each_round(const Context& ctx, const AttentionParams& p, NeededTokens needed,
                    Attend attend) {
  const StepTokens& tokens = p.tokens;
  const int64_t pair_floats = fp8_pair_floats(p.head_dim, tokens.max_kv);
  CHECK(p.scratch.dtype() == DType::kF32 && p.scratch.num_elements() >= pair_floats,
        "attention_prefill: scratch is {} {}, expected {} elements of float32 for an fp8 cache",
        p.scratch.shape_text(), name_of(p.scratch.dtype()), pair_floats);
  const int64_t num_pairs = p.scratch.num_elements() / pair_floats;
  const int most_heads = static_cast<int>(std::min<int64_t>(num_pairs, p.num_kv_heads));
  const int head_rounds = (p.num_kv_heads + most_heads - 1) / most_heads;
  const int round_heads = (p.num_kv_heads + head_rounds - 1) / head_rounds;
  const int round_seqs = static_cast<int>(std::max<int64_t>(num_pairs / p.num_kv_heads, 1));
  const int group = p.num_heads / p.num_kv_heads;
  for (int seq = 0; seq < tokens.num_seqs; seq += round_seqs) {
    for (int head = 0; head < p.num_kv_heads; head += round_heads) {
      Fp8Copies copies{.rows = {},
                       .scales = {},
                       .entries = fp8_pair_entries(tokens.max_kv),
                       .num_seqs = std::min(round_seqs, tokens.num_seqs - seq),
                       .first_kv_head = head,
                       .num_kv_heads = std::min(round_heads, p.num_kv_heads - head)};
      const int64_t num_entries = int64_t{copies.num_seqs} * copies.num_kv_heads * copies.entries;
      T* const keys = reinterpret_cast<T*>(p.scratch.as<float>());
      copies.rows[kKeys] = keys;
      copies.rows[kValues] = keys + num_entries * p.head_dim;
      copies.scales[kKeys] = p.scratch.as<float>() + num_entries * p.head_dim;
      copies.scales[kValues] = copies.scales[kKeys] + num_entries;
      AttentionArgs<T> args = make_args<T>(p);
      args.tokens.seq_slots += seq;
      args.tokens.seq_token_begin += seq;
      copy_codes(ctx, args, copies, needed);
      args.qkv += static_cast<int64_t>(head) * group * args.q_head;
      args.out += static_cast<int64_t>(head) * group * p.head_dim;
      if (args.selection != nullptr) args.selection += head * args.selection_words;
      attend(args, copies);
    }
  }
}

// Multiplies the columns of a tile's scores or probabilities by the scales of their entries.
template <typename T, int kTiles>
__device__ __forceinline__ void scale_columns(float (&x)[kTiles][4], const float* scales) {
  scales += static_cast<int>(threadIdx.x) % 4 * 2;
  scale_columns_by<T>(
      x, [&](int n) { return __ldg(reinterpret_cast<const float2*>(scales + n * 8)); });
}

}  // namespace cpmcu::cuda
