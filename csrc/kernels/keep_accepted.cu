// Moves keys, values and features of accepted nodes into place (kernels/tree.h).
//
// A block does one head of one layer's keys or values of one sequence, a thread 16 bytes of one
// cell. Nodes ascend along a path and never lie before their place, so it is enough that all of a
// block's cells of one round are read before any is written. Behind these blocks a block does a
// part of one row of features. Bound: twice the moved bytes; in practice the latency of four
// dependent loads.
#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/launch_checks.h"
#include "kernels/tree_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

struct KeepArgs {
  uint4* pool;             // [layers * 2, pages, Hkv, 64, vectors]
  const int* page_table;   // [slots, max_pages]
  const int* seq_slots;    // [B]
  const int* lengths;      // [slots]
  const int* paths;        // [B, D + 1]
  const int* num_emitted;  // [B]
  int64_t layer_vectors;   // of one layer's keys or values
  int num_kv_heads;
  int cell_vectors;  // 16-byte vectors of a cell
  int max_pages;
  int max_emitted;
  int num_nodes;
  int num_cell_blocks;      // layers * 2 * Hkv
  const uint4* features;    // [B N, vectors]
  uint4* pending_features;  // [slots (D + 1), vectors]
  int feature_vectors;      // 16-byte vectors of a row
  int row_blocks;           // of a row of features
};

// ---- kernels

// Block `block` of the cells of one sequence.
__device__ void move_cells(const KeepArgs& args, int seq, int block) {
  const int num = args.num_emitted[seq];
  if (num <= 1) return;
  const int slot = args.seq_slots[seq], start = args.lengths[slot] - num;
  const int layer = block / args.num_kv_heads, head = block % args.num_kv_heads;
  const int* path = args.paths + seq * args.max_emitted;
  uint4* cells = args.pool + layer * args.layer_vectors;
  const auto vector_of = [&](int cell, int vector) {
    return cells +
           kv_offset(args.page_table, args.max_pages, slot, start + cell, head, args.num_kv_heads,
                     args.cell_vectors) +
           vector;
  };
  const int num_vectors = (num - 1) * args.cell_vectors;
  for (int first = 0; first < num_vectors; first += kThreads) {
    const int i = first + threadIdx.x;
    const int cell = 1 + i / args.cell_vectors, vector = i % args.cell_vectors;
    const int node = i < num_vectors ? path[cell] : cell;
    uint4 value{};
    if (node != cell) value = *vector_of(node, vector);
    __syncthreads();
    if (node != cell) *vector_of(cell, vector) = value;
  }
}

// Block `block` of the features of one sequence.
__device__ void copy_features(const KeepArgs& args, int seq, int block) {
  const int j = block / args.row_blocks;
  const int vector = block % args.row_blocks * kThreads + threadIdx.x;
  const int node = args.paths[seq * args.max_emitted + j];
  if (node < 0 || vector >= args.feature_vectors) return;
  const int64_t row = seq * args.num_nodes + node;
  const int64_t kept = args.seq_slots[seq] * args.max_emitted + j;
  args.pending_features[kept * args.feature_vectors + vector] =
      args.features[row * args.feature_vectors + vector];
}

// Grid: (cell blocks + feature blocks, B).
__global__ void __launch_bounds__(kThreads)
    keep_accepted_kernel(const __grid_constant__ KeepArgs args) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int seq = blockIdx.y, block = blockIdx.x;
  if (block < args.num_cell_blocks) {
    move_cells(args, seq, block);
  } else {
    copy_features(args, seq, block - args.num_cell_blocks);
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: page_table, seq_slots, lengths, paths, num_emitted.
void keep_accepted(const Context& ctx, const KeepAcceptedParams& p) {
  check_keep(p);
  const int64_t cell_bytes = p.head_dim * size_of(p.pool.dtype());
  CHECK(cell_bytes % 16 == 0 && is_aligned16(p.pool.data()),
        "keep_accepted: cells of {} bytes, expected aligned multiples of 16", cell_bytes);
  KeepArgs args{.pool = p.pool.as<uint4>(),
                .page_table = p.page_table,
                .seq_slots = p.seq_slots,
                .lengths = p.lengths,
                .paths = p.paths,
                .num_emitted = p.num_emitted,
                .layer_vectors = p.pool.size(1) * p.num_kv_heads * kPageSize * (cell_bytes / 16),
                .num_kv_heads = p.num_kv_heads,
                .cell_vectors = static_cast<int>(cell_bytes / 16),
                .max_pages = p.max_pages,
                .max_emitted = p.max_emitted,
                .num_nodes = p.num_nodes};
  // A root alone stays where it is.
  if (p.num_nodes > 1) args.num_cell_blocks = static_cast<int>(p.pool.size(0)) * p.num_kv_heads;
  if (!p.features.empty()) {
    const int64_t row_bytes = p.features.size(1) * size_of(p.features.dtype());
    CHECK(row_bytes % 16 == 0 && is_aligned16(p.features.data()) &&
              is_aligned16(p.pending_features.data()),
          "keep_accepted: features of {} bytes, expected aligned multiples of 16", row_bytes);
    args.features = p.features.as<uint4>();
    args.pending_features = p.pending_features.as<uint4>();
    args.feature_vectors = static_cast<int>(row_bytes / 16);
    args.row_blocks = (args.feature_vectors + kThreads - 1) / kThreads;
  }
  const dim3 grid(args.num_cell_blocks + p.max_emitted * args.row_blocks, p.num_seqs);
  if (grid.x == 0 || grid.y == 0) return;
  launch(ctx, keep_accepted_kernel, grid, dim3(kThreads), 0, args);
}

}  // namespace cpmcu::cuda
