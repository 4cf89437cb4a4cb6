// select_blocks: the blocks that each token and KV head attends to (sparse.h).
//
//   f[r] = sum over heads h of exp(q_h . fine[r] - m_h) / Z_h,  score(b) = max f[4 b .. 4 b + 4]
//
// Roofline: the visible compressed keys are read once from HBM for all tokens of a sequence,
// 10 * D bytes for a block and KV head. Example: MiniCPM4-8B at 128K tokens, 5.2 MB, 1.7 us. Many
// tokens: tensor cores, 160 * D operations for a token, query head and block.
//
// Schedule: three kernels, and one more for many tokens. The next one starts while the previous one
// runs. A plain decode step takes one kernel (select_one_token.cu).
//   1. score_keys_kernel over coarse keys: parts of m and Z (block_scores.cuh)
//   2. many tokens: normalise_kernel sums the parts once; else each CTA of the next kernel does
//   3. score_keys_kernel over fine keys: scores of blocks
//   4. choose_blocks_kernel: a CTA has one token and KV head and keeps the scores in registers. It
//      finds the count-th largest two bits at a time, by counting.
//
// Surprising: m and Z of a head are used only as m + log2 Z, so f is a sum of powers of two without
// a division. Scores are not negative, so their bits order like integers.
#include <algorithm>

#include "core/dispatch.h"
#include "kernels/attention/block_scores.cuh"

namespace cpmcu::cuda {
namespace {

// Tokens of a launch from which on normalisers get a launch of their own.
constexpr int kManyTokens = 128;
constexpr int kChooseWarps = 16, kChooseThreads = kChooseWarps * 32;

struct ChooseArgs {
  uint32_t* selection;  // [T, Hkv, num_halves]: halves of 64-bit words, the lower one first
  int num_halves;
  int first;  // number of the launch's first token
  SparseRule rule;
  BlockScores scores;
  const int* positions;
};

struct ChooseSmem {
  uint2 counts[2][kChooseWarps];  // two, so that one barrier separates two rounds
  uint32_t equal[kMaxSparseEntries / kPageSize / 32];
};

// If `num_equal` is negative, the blocks whose keys are at least `value` are chosen. Otherwise
// those with larger keys are chosen, and the lowest num_equal blocks whose key is `value`.
struct Threshold {
  uint32_t value;
  int num_equal;
};

// The count-th largest of the keys of all threads. A key is 0 if its block is no candidate; there
// are more candidates than `count`.
template <int kKeys>
__device__ __forceinline__ Threshold find_threshold(ChooseSmem& smem, const uint32_t (&keys)[kKeys],
                                                    uint32_t count) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t found = 0, num_found = 0;
#pragma unroll 1
  for (int shift = 30; shift >= 0; shift -= 2) {
    // Number of keys from found + (1, 2, 3) << shift on; two counts share a word.
    uint2 mine = make_uint2(0, 0);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      mine.x += keys[i] >= (found | 1u << shift) ? 1 : 0;
      mine.x += keys[i] >= (found | 2u << shift) ? 1 << 16 : 0;
      mine.y += keys[i] >= (found | 3u << shift) ? 1 : 0;
    }
    mine.x = __reduce_add_sync(0xffffffffu, mine.x);
    mine.y = __reduce_add_sync(0xffffffffu, mine.y);
    uint2* const counts = smem.counts[shift / 2 % 2];
    if (lane == 0) counts[warp] = mine;
    __syncthreads();
    uint2 all = lane < kChooseWarps ? counts[lane] : make_uint2(0, 0);
    all.x = __reduce_add_sync(0xffffffffu, all.x);
    all.y = __reduce_add_sync(0xffffffffu, all.y);
    const uint32_t one = all.x & 0xffff, two = all.x >> 16, three = all.y;
    const uint32_t digit = three >= count ? 3 : two >= count ? 2 : one >= count ? 1 : 0;
    if (digit == 0) continue;
    found |= digit << shift;
    num_found = digit == 3 ? three : digit == 2 ? two : one;
    if (num_found == count) return {found, -1};
  }
  // Some keys equal to the threshold are not chosen.
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const uint32_t equal = __ballot_sync(0xffffffffu, keys[i] == found);
    if (lane == 0) smem.equal[i * kChooseWarps + warp] = equal;
  }
  __syncthreads();
  uint32_t num_equal = 0;
  for (int i = 0; i < kKeys * kChooseWarps; ++i) num_equal += __popc(smem.equal[i]);
  return {found, static_cast<int>(count - (num_found - num_equal))};
}

// ---- kernels

// Grid: (tokens, Hkv). Thread t has the blocks t, t + 512, ...
template <int kKeys>
__global__ void __launch_bounds__(kChooseThreads)
    choose_blocks_kernel(const __grid_constant__ ChooseArgs args) {
  __shared__ ChooseSmem smem;
  ptx::pdl_launch();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y;
  const QueryBlocks blocks = blocks_of_query(args.rule, args.positions[args.first + blockIdx.x]);
  const auto block_of = [&](int i) { return i * kChooseThreads + static_cast<int>(threadIdx.x); };
  const auto is_between = [&](int b) { return b >= blocks.init_end && b < blocks.window_begin; };
  ptx::pdl_wait();
  Threshold threshold{1, -1};
  uint32_t keys[kKeys] = {};
  if (blocks.needs_scores()) {
    const float* scores = args.scores.scores_of(row);
    const float* firsts = args.scores.firsts_of(row);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int b = block_of(i);
      if (!is_between(b)) continue;
      float score = scores[b];
      if (b % kTileBlocks == kTileBlocks - 1 && b + 1 < blocks.coarse_end()) {
        score = fmaxf(score, firsts[b / kTileBlocks + 1]);
      }
      keys[i] = __float_as_uint(score) + 1;
    }
    threshold = find_threshold<kKeys>(smem, keys, blocks.count);
  } else if (blocks.count > 0) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) keys[i] = is_between(block_of(i)) ? 1 : 0;
  }
  uint32_t* const to =
      args.selection + (static_cast<int64_t>(args.first) * gridDim.y + row) * args.num_halves;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int b = block_of(i), half = i * kChooseWarps + warp;
    bool chosen = b < blocks.init_end || (b >= blocks.window_begin && b <= blocks.own) ||
                  keys[i] > threshold.value;
    if (keys[i] == threshold.value) {
      int rank = __popc(smem.equal[half] & ((1u << lane) - 1));
      for (int j = 0; j < half && threshold.num_equal >= 0; ++j) rank += __popc(smem.equal[j]);
      chosen = threshold.num_equal < 0 || rank < threshold.num_equal;
    }
    const uint32_t word = __ballot_sync(0xffffffffu, chosen);
    if (lane == 0 && half < args.num_halves) to[half] = word;
  }
  for (int half = kKeys * kChooseWarps + static_cast<int>(threadIdx.x); half < args.num_halves;
       half += kChooseThreads) {
    to[half] = 0;  // blocks beyond max_kv are not chosen
  }
}

// ---- launchers

template <typename T, int kDim, bool kIsFine>
void launch_scores(const Context& ctx, const SelectBlocksParams& p, ScoreArgs<T> args) {
  using Config = ScoreConfig<T, kDim>;
  using Smem = ScoreSmem<Config>;
  static_assert(sizeof(Smem) <= 99 * 1024, "sm_86 and sm_89 have 99 KiB for a CTA");
  const int num_keys = args.out.num_blocks * (kIsFine ? kFineRows : 1);
  const int num_tiles = (num_keys + Config::kKeys - 1) / Config::kKeys;
  const int num_head_tiles = args.out.num_heads / kHeads;
  CHECK(num_head_tiles <= Config::kMaxItems,
        "select_blocks: {} query heads of a KV head, expected at most {}", args.group,
        Config::kMaxItems * kHeads);
  // The CTAs fill whole waves, as few as the tokens need. Each group of tokens loads the keys
  // again.
  const int tokens = std::min(p.tokens.max_seq_tokens, args.end - args.first);
  const int most = Config::kMaxItems / num_head_tiles;  // maximum number of tokens of a group
  const int ctas = num_tiles * p.num_kv_heads * p.tokens.num_seqs;  // CTAs of one group
  const int wave = Config::kCtasPerSm * ctx.sm_count;
  const int fewest = (tokens + most - 1) / most;
  const int waves = (fewest * ctas + wave - 1) / wave;
  const int groups = std::clamp(waves * wave / ctas, fewest, tokens);
  args.group_tokens = (tokens + groups - 1) / groups;
  args.num_groups = (tokens + args.group_tokens - 1) / args.group_tokens;
  const auto kernel = score_keys_kernel<Config, kIsFine>;
  allow_shared_bytes(kernel, sizeof(Smem));
  launch(ctx, kernel, dim3(num_tiles, p.num_kv_heads, p.tokens.num_seqs * args.num_groups),
         Config::kThreads, sizeof(Smem), args);
}

template <typename T>
void launch_normalisers(const Context& ctx, const SelectBlocksParams& p, const ScoreArgs<T>& args) {
  constexpr int kThreads = 256;
  const int count = (args.end - args.first) * p.num_kv_heads * args.out.num_heads;
  launch(ctx, normalise_kernel<T>, dim3((count + kThreads - 1) / kThreads), kThreads, 0, args,
         p.num_kv_heads);
}

void launch_choice(const Context& ctx, const SelectBlocksParams& p, const ChooseArgs& args,
                   int num_tokens) {
  const dim3 grid(num_tokens, p.num_kv_heads);
  const int num_keys = (args.scores.num_blocks + kChooseThreads - 1) / kChooseThreads;
  const auto start = [&](auto keys) {
    launch(ctx, choose_blocks_kernel<keys.value>, grid, kChooseThreads, 0, args);
  };
  if (num_keys <= 1) return start(std::integral_constant<int, 1>{});
  if (num_keys <= 2) return start(std::integral_constant<int, 2>{});
  if (num_keys <= 4) return start(std::integral_constant<int, 4>{});
  if (num_keys <= 5) return start(std::integral_constant<int, 5>{});  // enough for 160K tokens
  start(std::integral_constant<int, kMaxSparseEntries / kPageSize / kChooseThreads>{});
}

template <typename T, int kDim>
void launch_select(const Context& ctx, const SelectBlocksParams& p) {
  constexpr float kLog2E = 1.44269504088896340736f;
  const QkvLayout layout = resolved(p.layout, p.num_heads, p.num_kv_heads, p.head_dim);
  const int num_tokens = p.tokens.num_tokens, most = std::min(num_tokens, kMaxScoredTokens);
  const int group = p.num_heads / p.num_kv_heads;
  const BlockScores scores(p.scratch.as<float>(), most, p.num_kv_heads,
                           BlockScoresShape::of(group, p.tokens.max_kv));
  ScoreArgs<T> args{.qkv = p.qkv.as<const T>(),
                    .fine = p.keys.fine.as<const T>(),
                    .coarse = p.keys.coarse.as<const T>(),
                    .scale_log2 = p.scale * kLog2E,
                    .group = group,
                    .qkv_row = layout.row,
                    .q_head = layout.q_head,
                    .keys_are_old = p.keys_are_old,
                    .first = 0,
                    .end = 0,
                    .num_groups = 1,
                    .group_tokens = 1,
                    .is_normalised = num_tokens >= kManyTokens,
                    .rule = p.rule,
                    .out = scores,
                    .tokens = p.tokens};
  ChooseArgs choice{.selection = p.selection.as<uint32_t>(),
                    .num_halves = 2 * static_cast<int>(p.selection.size(2)),
                    .first = 0,
                    .rule = p.rule,
                    .scores = scores,
                    .positions = p.tokens.positions};
  for (int first = 0; first < num_tokens; first += most) {
    args.first = choice.first = first;
    args.end = std::min(first + most, num_tokens);
    launch_scores<T, kDim, false>(ctx, p, args);
    if (args.is_normalised) launch_normalisers(ctx, p, args);
    launch_scores<T, kDim, true>(ctx, p, args);
    launch_choice(ctx, p, choice, args.end - first);
  }
}

}  // namespace

// Graph-safe. Reads from the device: positions, seq_slots, seq_token_begin, slot_lengths,
// page_table.
void select_blocks(const Context& ctx, const SelectBlocksParams& p) {
  check_select(p);
  if (p.tokens.num_tokens == 0) return;
  CHECK(p.tokens.max_kv <= kMaxSparseEntries,
        "select_blocks: a sequence of up to {} tokens, expected at most {} on CUDA",
        p.tokens.max_kv, kMaxSparseEntries);
  if (select_one_token(ctx, p)) return;
  const int64_t needed =
      select_scratch_floats(p.tokens.num_tokens, p.num_heads, p.num_kv_heads, p.tokens.max_kv);
  CHECK(p.scratch.dtype() == DType::kF32 && p.scratch.num_elements() >= needed,
        "select_blocks: scratch is {} {}, expected {} elements of float32", p.scratch.shape_text(),
        name_of(p.scratch.dtype()), needed);
  dispatch_half(p.qkv.dtype(), [&](auto element) {
    dispatch_int<64, 128>("select_blocks: head_dim", p.head_dim,
                          [&](auto dim) { launch_select<decltype(element), dim.value>(ctx, p); });
  });
}

}  // namespace cpmcu::cuda
