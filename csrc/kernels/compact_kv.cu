// Moves the keys and values of accepted nodes into place, in all layers (kernels/tree.h).
//
// A block does one head of one layer's keys or values of one sequence, a thread 16 bytes of one
// cell. Nodes ascend along a path and never lie before their place, so it is enough that all of a
// block's cells of one round are read before any is written. Bound: twice the moved bytes; in
// practice the latency of four dependent loads.
#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/launch_checks.h"
#include "kernels/tree_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

struct CompactArgs {
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
};

// ---- kernels

// Grid: (layers * 2, Hkv, B).
__global__ void __launch_bounds__(kThreads)
    compact_kv_kernel(const __grid_constant__ CompactArgs args) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int seq = blockIdx.z;
  const int num = args.num_emitted[seq];
  if (num <= 1) return;
  const int slot = args.seq_slots[seq], start = args.lengths[slot] - num;
  const int* path = args.paths + seq * args.max_emitted;
  uint4* cells = args.pool + blockIdx.x * args.layer_vectors;
  const auto vector_of = [&](int cell, int vector) {
    return cells +
           kv_offset(args.page_table, args.max_pages, slot, start + cell, blockIdx.y,
                     args.num_kv_heads, args.cell_vectors) +
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

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: page_table, seq_slots, lengths, paths, num_emitted.
void compact_kv(const Context& ctx, const CompactKvParams& p) {
  check_compact(p);
  const int64_t cell_bytes = p.head_dim * size_of(p.pool.dtype());
  CHECK(cell_bytes % 16 == 0 && is_aligned16(p.pool.data()),
        "compact_kv: cells of {} bytes, expected aligned multiples of 16", cell_bytes);
  if (p.num_seqs == 0 || p.pool.size(0) == 0) return;
  const CompactArgs args{
      .pool = p.pool.as<uint4>(),
      .page_table = p.page_table,
      .seq_slots = p.seq_slots,
      .lengths = p.lengths,
      .paths = p.paths,
      .num_emitted = p.num_emitted,
      .layer_vectors = p.pool.size(1) * p.num_kv_heads * kPageSize * (cell_bytes / 16),
      .num_kv_heads = p.num_kv_heads,
      .cell_vectors = static_cast<int>(cell_bytes / 16),
      .max_pages = p.max_pages,
      .max_emitted = p.max_emitted};
  const dim3 grid(p.pool.size(0), p.num_kv_heads, p.num_seqs);
  launch(ctx, compact_kv_kernel, grid, dim3(kThreads), 0, args);
}

}  // namespace cpmcu::cuda
