// Attention of one token of each sequence to its chosen blocks: plain decode steps.
//
// Roofline: the chosen blocks are read once from HBM. Example: MiniCPM4-8B, 96 blocks of two KV
// heads, 6.3 MB, 2.1 us.
//
// Schedule: a CTA has one split (two blocks) of a KV head; each of four warps has a KV tile of it.
//   1. Find the split in the token's words; copy keys, queries and values.
//   2. Each warp: scores, probabilities, probabilities * values; the result replaces the keys.
//   3. Each warp adds the results of all warps, in order, for its part of the dimensions, and
//      writes partial results for attention_combine.
//
// Surprising: nothing is copied before the previous kernel ends, because it chooses the blocks. So
// latency limits, and the largest number of CTAs is the fastest schedule.
#include "kernels/attention/decode.cuh"
#include "kernels/attention/selected_splits.cuh"

namespace cpmcu::cuda {
namespace {

template <typename T, int kDim_, bool kFp8_>
struct OneTokenConfig {
  using Element = T;
  static constexpr bool kFp8 = kFp8_;
  static constexpr int kDim = kDim_;
  static constexpr int kWarps = 4, kThreads = kWarps * 32;
  static constexpr int kColumns = kDim / kWarps;  // dimensions of the output that a warp sums
  static constexpr int kCtasPerSm = 3;
  static_assert(kWarps * kKvTile == kSplitBlocks * kPageSize, "a KV tile for each warp");
};

template <typename Config>
struct OneTokenSmem {
  using T = typename Config::Element;
  using KvTile = CacheTile<T, Config::kFp8, kKvTile, Config::kDim>;
  union Keys {
    KvTile entries;
    float4 acc[Config::kDim / 8][32];  // sums of probability * value over the KV tile
  };
  static_assert(sizeof(KvTile) == sizeof(Keys) || Config::kFp8);
  struct Warp {
    Keys keys;
    KvTile values;
  } warps[Config::kWarps];
  SwizzledTile<T, kWarpRows, Config::kDim> queries;
  float2 states[Config::kWarps][kWarpRows];  // row maxima and sums of each KV tile
};

// Multiplies the warp's KV tile. Its sums go to shared memory.
template <typename Config>
__device__ __forceinline__ void multiply_tile(OneTokenSmem<Config>& smem, float scale_log2,
                                              int warp, int lane, int num_entries) {
  using T = typename Config::Element;
  auto& own = smem.warps[warp];
  float scores[1][kKvTileN8][4];
  multiply_keys<T>(scores, own.keys.entries, 0, [&](uint32_t (&q)[1][4], int k16) {
    load_fragment_a(q[0], smem.queries, 0, k16);
  });
  scale_columns<T>(scores[0], own.keys.entries, 0);
  if (num_entries < kKvTile) {
    const uint32_t sees = static_cast<uint32_t>(first_entries(num_entries));
    const uint32_t both[2] = {sees, sees};
    mask_scores(scores[0], both);
  }
  const SoftmaxState sums = softmax_of_kv_tile(scores[0], scale_log2);
  ptx::cp_async_wait<0>();
  __syncwarp();  // the values have arrived; the keys are no longer read
  scale_columns<T>(scores[0], own.values, 0);
  multiply_kv_tile_values<T, Config::kDim>(
      scores[0], values_from(own.values, 0), [&](int n16, const float (&acc)[2][4]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          own.keys.acc[2 * n16 + n][lane] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
        }
      });
  if (lane % 4 == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      smem.states[warp][half * 8 + lane / 4] = make_float2(sums.row_max[half], sums.sum[half]);
    }
  }
}

// ---- kernels

// Grid: (Hkv, max_splits, B).
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    sparse_one_token_kernel(const __grid_constant__ AttentionArgs<typename Config::Element> args) {
  using T = typename Config::Element;
  constexpr int kDim = Config::kDim, kColumns = Config::kColumns;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<OneTokenSmem<Config>*>(shared);
  ptx::pdl_launch();
  const int lane = threadIdx.x % 32, warp = ptx::uniform_warp();
  const int kv_head = static_cast<int>(blockIdx.x), split = static_cast<int>(blockIdx.y);
  const int seq = static_cast<int>(blockIdx.z), group = args.num_heads / args.num_kv_heads;
  const int slot = args.tokens.seq_slots[seq], row = args.tokens.seq_token_begin[seq];
  const int own = args.tokens.positions[row];
  ptx::pdl_wait();
  const uint64_t* words = selection_of(args, row, kv_head);
  const LaneWords selected(words, args.selection_words);
  if (split >= selected.num_splits()) return;
  const int blocks[2] = {selected.block(2 * split), selected.block(2 * split + 1)};
  // The first entry of warp w's KV tile, and how many entries from there on the token sees.
  const auto entry_of = [&](int w) {
    return (w < 2 ? blocks[0] : blocks[1]) * kPageSize + w % 2 * kKvTile;
  };
  const auto entries_of = [&](int w) {
    return w < 2 || blocks[1] >= 0 ? own + 1 - entry_of(w) : 0;
  };
  const int num_entries = entries_of(warp);
  fetch_tile<Config::kThreads>(smem.queries,
                               args.qkv + static_cast<int64_t>(row) * args.qkv_row +
                                   static_cast<int64_t>(kv_head) * group * args.q_head,
                               args.q_head, group);
  if (num_entries > 0) {
    const int entry = entry_of(warp);
    const int64_t offset =
        entry_offset<kDim>(args, page_of(args.tokens, slot, entry), kv_head, entry);
    fetch_cache<32>(smem.warps[warp].keys.entries, args, kKeys, offset, num_entries, lane);
    ptx::cp_async_commit();
    fetch_cache<32>(smem.warps[warp].values, args, kValues, offset, num_entries, lane);
  } else {
    ptx::cp_async_commit();
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<1>();
  __syncthreads();
  if (num_entries > 0) multiply_tile<Config>(smem, args.scale_log2, warp, lane, num_entries);
  __syncthreads();

  RowTile<kColumns> state;
  state.clear();
#pragma unroll 1
  for (int w = 0; w < Config::kWarps; ++w) {
    if (entries_of(w) <= 0) continue;
    SoftmaxState sums;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 v = smem.states[w][half * 8 + lane / 4];
      sums.row_max[half] = v.x, sums.sum[half] = v.y;
    }
    float weight[2];
    begin_kv_tile(state, sums, weight);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float4 part = smem.warps[w].keys.acc[warp * (kColumns / 8) + n][lane];
      add_weighted(state.acc[n], {part.x, part.y, part.z, part.w}, weight);
    }
  }
  const Partials all(args.scratch, static_cast<int>(gridDim.y),
                     args.tokens.num_tokens * args.num_heads, kDim);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = half * 8 + lane / 4;
    if (head >= group) continue;
    const int64_t index = split * all.num_rows + row * args.num_heads + kv_head * group + head;
    float* to = all.acc + index * kDim + warp * kColumns + lane % 4 * 4;
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 2) {
      *reinterpret_cast<float4*>(to + n * 8) =
          make_float4(state.acc[n][2 * half], state.acc[n][2 * half + 1],
                      state.acc[n + 1][2 * half], state.acc[n + 1][2 * half + 1]);
    }
    if (warp == 0 && lane % 4 == 0) {
      all.states[index] = make_float2(state.row_max[half], state.sum[half]);
    }
  }
}

// ---- launchers

template <typename Config>
void launch_one_token(const Context& ctx, const AttentionParams& params) {
  using Smem = OneTokenSmem<Config>;
  static_assert(sizeof(Smem) <= 99 * 1024, "sm_86 and sm_89 have 99 KiB for a CTA");
  const auto kernel = sparse_one_token_kernel<Config>;
  allow_shared_bytes(kernel, sizeof(Smem));
  launch(ctx, kernel,
         dim3(params.num_kv_heads, params.selection.max_splits, params.tokens.num_seqs),
         Config::kThreads, sizeof(Smem), make_args<typename Config::Element>(params));
}

}  // namespace

// Graph-safe. Reads from the device: positions, seq_slots, seq_token_begin, page_table, selection.
void sparse_one_token(const Context& ctx, const AttentionParams& params) {
  dispatch_selected(params, [&](auto element, auto dim, auto is_fp8) {
    launch_one_token<OneTokenConfig<decltype(element), dim.value, is_fp8.value>>(ctx, params);
  });
}

}  // namespace cpmcu::cuda
