// attention_prefill on Hopper: heads of 128, each row up to its own cell.
//
// Roofline: 4 * rows * cells * D operations a head on tensor cores: 1 TFLOP, 1.5 ms at 680 TFLOP/s,
// a layer of MiniCPM4-8B for a chunk of 2048 tokens behind 30000. K and V of a tile of 128 cells
// are 64 KB for 8.4 MFLOP, from L2, which 128 rows of a head at a time can afford.
//
// The surprising decision: none of a product waits for a softmax. While one tile's scores become
// probabilities, its own warps have the values of the tile before under way, and the keys of this
// one were asked for before those: so a warpgroup alone keeps its tensor cores at work, and two are
// there to fill what is left.
//
// Work: a block of threads has 128 rows of one (sequence, query head), 64 a warpgroup, with the
// queries, the scores of 128 cells and the output in registers. A third warpgroup feeds: a thread
// asks the copy engine for pages of keys and values by tensor maps over the whole cache. Cells come
// in tiles of two pages from cell 0 upwards, and what a row does not see changes no bit of it: so
// its bits do not depend on the chunk that it came in (tiles.cuh).
#include "kernels/attention/tiles.cuh"
#include "kernels/gemm/tensor_map.cuh"

namespace cpmcu::cuda {
namespace {

template <typename T>
struct HopperPrefill {
  static constexpr int kDim = 128, kPanels = kDim / 64;
  static constexpr int kRows = 128, kCells = 128;  // of a block, of a tile
  static constexpr int kPages = kCells / kPageSize;
  static constexpr int kStages = 2;
  static constexpr int kMultiplying = 256, kThreads = kMultiplying + 128;
  // Of 168 that each thread begins with.
  static constexpr int kFeedingRegisters = 24, kMultiplyingRegisters = 240;
  using Tile = SwizzledTile<T, kCells, kDim>;

  // Of a stage's keys and values: they have come, all warps are done with them.
  struct Barriers {
    uint64_t full[kStages][2], empty[kStages][2];
  };
  struct Smem {
    Tile tiles[kStages][2];                // keys, values
    SwizzledTile<T, kRows, kDim> queries;  // then the output
    Barriers barriers;
  };
};

// The whole cache of a layer as rows of D elements: page, KV head, cell.
struct CacheMaps {
  TensorMap of[2];  // keys, values
};

// ---- kernels

template <typename T>
__global__ void __launch_bounds__(HopperPrefill<T>::kThreads, 1)
    attention_prefill_sm90_kernel(const __grid_constant__ AttentionArgs<T> args,
                                  const __grid_constant__ CacheMaps maps) {
  using Config = HopperPrefill<T>;
  constexpr int kDim = Config::kDim, kCells = Config::kCells, kPanels = Config::kPanels;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(shared);
  const int warp = ptx::uniform_warp(), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      for (int what = 0; what < 2; ++what) {
        ptx::mbarrier_init(ptx::shared_address(&smem.barriers.full[i][what]), 1);
        ptx::mbarrier_init(ptx::shared_address(&smem.barriers.empty[i][what]),
                           Config::kMultiplying / 32);
      }
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::pdl_wait();
  ptx::pdl_launch();
  const Sequence seq = load_sequence(args.rows, blockIdx.z);
  const int block_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * Config::kRows;
  if (block_row >= seq.num_rows) return;
  const int head = blockIdx.x, kv_head = head / (args.num_heads / args.num_kv_heads);
  const int block_rows = min(Config::kRows, seq.num_rows - block_row);
  const int cell_end = seq.length + block_row + block_rows;  // of those that some row sees
  const int num_tiles = (cell_end + kCells - 1) / kCells;
  const auto full = [&](int tile, int what) {
    return ptx::shared_address(&smem.barriers.full[tile % Config::kStages][what]);
  };
  const auto empty = [&](int tile, int what) {
    return ptx::shared_address(&smem.barriers.empty[tile % Config::kStages][what]);
  };
  const auto parity_of = [](int tile) { return tile / Config::kStages % 2; };

  if (warp >= Config::kMultiplying / 32) {
    ptx::give_registers<Config::kFeedingRegisters>();
    if (threadIdx.x != Config::kMultiplying) return;
    const int* pages = args.rows.page_table + static_cast<int64_t>(seq.slot) * args.rows.max_pages;
    const int last_page = (cell_end - 1) / kPageSize;
    int map_rows[Config::kPages];  // where this tile's pages begin
    const auto look_up = [&](int tile) {
#pragma unroll
      for (int i = 0; i < Config::kPages; ++i) {
        const int page = pages[min(tile * Config::kPages + i, last_page)];
        map_rows[i] = (page * args.num_kv_heads + kv_head) * kPageSize;
      }
    };
    look_up(0);
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
#pragma unroll
      for (int what = 0; what < 2; ++what) {
        ptx::mbarrier_wait(empty(tile, what), parity_of(tile) ^ 1);
        ptx::mbarrier_expect_bytes(full(tile, what), sizeof(typename Config::Tile));
        const uint32_t to = ptx::shared_address(smem.tiles[tile % Config::kStages][what].data);
#pragma unroll
        for (int i = 0; i < Config::kPages; ++i) {
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            ptx::tensor_copy(
                to + panel * Config::Tile::kPanelBytes + i * kPageSize * Config::Tile::kRowBytes,
                &maps.of[what], panel * 64, map_rows[i], full(tile, what));
          }
        }
      }
      look_up(tile + 1);
    }
    return;
  }
  ptx::take_registers<Config::kMultiplyingRegisters>();

  const int64_t stride = args.qkv_row;
  fetch_tile<Config::kMultiplying>(
      smem.queries, args.qkv + (seq.row_begin + block_row) * stride + head * args.q_head, stride,
      block_rows);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  ptx::named_barrier<1, Config::kMultiplying>();
  uint32_t queries[kDim / 16][4];
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) {
    load_fragment_a(queries[k16], smem.queries, warp * 16, k16);
  }

  const auto descriptor = [&](int tile, int what) {
    const auto& of = smem.tiles[tile % Config::kStages][what];
    return ptx::wgmma_descriptor_swizzle128(ptx::shared_address(of.data));
  };
  constexpr int kPanel = Config::Tile::kPanelBytes / 16, kRow = Config::Tile::kRowBytes / 16;
  RowTile<kDim> rows;
  rows.clear();
  float scores[kCells / 8][4], factor[2];
  uint32_t probabilities[kCells / 16][4];
  const auto multiply_keys = [&](int tile) {
    ptx::mbarrier_wait(full(tile, 0), parity_of(tile));
    const uint64_t keys = descriptor(tile, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < kDim / 16; ++k16) {
      ptx::wgmma_64xNx16<T, kCells / 8>(scores, queries[k16], keys + k16 / 4 * kPanel + k16 % 4 * 2,
                                        k16 > 0);
    }
    ptx::wgmma_commit();
  };
  const auto multiply_values = [&](int tile) {
    const uint64_t values = descriptor(tile, 1);
    ptx::wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < kCells / 16; ++k16) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        auto& columns = *reinterpret_cast<float (*)[8][4]>(&rows.acc[8 * panel]);
        ptx::wgmma_64xNx16<T, 8, true>(columns, probabilities[k16],
                                       values + panel * kPanel + k16 * 16 * kRow, true);
      }
    }
    ptx::wgmma_commit();
  };
  const auto release = [&](int tile, int what) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(empty(tile, what));
  };
  // Scores of a tile become probabilities.
  const int warp_row = block_row + warp * 16;
  const auto soften = [&](int tile) {
    const int seen = seq.length + warp_row + 1 - tile * kCells;  // of its cells, by the first row
    if (seen < kCells) {
#pragma unroll
      for (int n = 0; n < kCells / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int cell = n * 8 + lane % 4 * 2 + i % 2;
          if (cell >= seen + lane / 4 + i / 2 * 8) scores[n][i] = kMinusInfinity;
        }
      }
    }
    add_scores(rows, scores, args.scale_log2, factor);
  };
  const auto pack = [&] {
#pragma unroll
    for (int k16 = 0; k16 < kCells / 16; ++k16) {
      pack_fragment_a<T>(probabilities[k16], scores, k16);
    }
  };

  multiply_keys(0);
  ptx::wgmma_wait<0>();
  release(0, 0);
  soften(0);
  pack();
#pragma unroll 1
  for (int tile = 1; tile < num_tiles; ++tile) {
    multiply_keys(tile);
    ptx::mbarrier_wait(full(tile - 1, 1), parity_of(tile - 1));
    multiply_values(tile - 1);
    ptx::wgmma_wait<1>();
    release(tile, 0);
    soften(tile);
    ptx::wgmma_wait<0>();
    release(tile - 1, 1);
    if (is_not_one(factor)) rows.multiply(factor);
    pack();
  }
  // Behind the last cell anything may lie, which a probability of 0 would not make 0 of.
  const int last = num_tiles - 1;
  ptx::mbarrier_wait(full(last, 1), parity_of(last));
  auto& values = smem.tiles[last % Config::kStages][1];
  for (int i = threadIdx.x % 128; i < (num_tiles * kCells - cell_end) * (kDim / 8); i += 128) {
    const int row = kCells - 1 - i / (kDim / 8);
    *reinterpret_cast<uint4*>(values.chunk(row, i % (kDim / 8))) = make_uint4(0, 0, 0, 0);
  }
  ptx::shared_copy_fence();
  warp < 4 ? ptx::named_barrier<2, 128>() : ptx::named_barrier<3, 128>();
  multiply_values(last);
  ptx::wgmma_wait<0>();

  // The warp's own query rows are read: they make room for its output, which leaves in 16 bytes.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float inverse = inverse_of(quad_sum(rows.sum[half]));
    const int row = warp * 16 + half * 8 + lane / 4;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float (&acc)[4] = rows.acc[n];
      *reinterpret_cast<uint32_t*>(smem.queries.chunk(row, n) + lane % 4 * 2) =
          pack2<T>(normalised(acc[2 * half], inverse), normalised(acc[2 * half + 1], inverse));
    }
  }
  __syncwarp();
  constexpr int kChunks = kDim / 8;
#pragma unroll
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int row = warp * 16 + i / kChunks;
    if (row < block_rows) {
      T* to = args.out + (int64_t{seq.row_begin + block_row + row} * args.num_heads + head) * kDim;
      store(to + i % kChunks * 8, load<T, 8>(smem.queries.chunk(row, i % kChunks)));
    }
  }
}

// ---- launchers

template <typename T>
void launch_prefill(const Context& ctx, const AttentionParams& p) {
  using Config = HopperPrefill<T>;
  const auto kernel = attention_prefill_sm90_kernel<T>;
  const auto map = [&](const Tensor& cache) {
    const int rows = static_cast<int>(cache.size(0) * cache.size(1) * kPageSize);
    return make_map(cache.data(), rows, Config::kDim, cache.dtype(), kPageSize);
  };
  allow_shared_bytes(kernel, sizeof(typename Config::Smem));
  const int row_tiles = (p.rows.max_seq_rows + Config::kRows - 1) / Config::kRows;
  launch(ctx, kernel, dim3(p.num_heads, row_tiles, p.rows.num_seqs), dim3(Config::kThreads),
         sizeof(typename Config::Smem), make_args<T>(p), CacheMaps{map(p.k_cache), map(p.v_cache)});
}

}  // namespace

void attention_prefill_sm90(const Context& ctx, const AttentionParams& params) {
  dispatch_half(params.qkv.dtype(),
                [&](auto element) { launch_prefill<decltype(element)>(ctx, params); });
}

}  // namespace cpmcu::cuda
