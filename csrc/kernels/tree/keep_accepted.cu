// keep_accepted: moves the entries and hidden states of accepted nodes to their final places
// (kernels/tree/tree.h).
//
// Roofline: twice the moved bytes. In practice, the latency of four dependent loads.
//
// Schedule: a CTA moves the entries of one head of one plane of one sequence. A thread moves 16
// bytes, or one scale of an fp8 cache. Other CTAs copy the hidden states, each a part of one row.
//
// Surprising: the move is in place. The nodes of a path ascend, so place j of the path has a node
// >= j. A CTA therefore only has to read all entries of a round before it writes any.
#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/launch_checks.h"
#include "kernels/tree/tree_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

struct KeepArgs {
  void* pool;             // [planes, pages, heads, 64, 16-byte vectors]
  const int* page_table;  // [slots, max_pages]
  const int* seq_slots;   // [B]
  const int* lengths;     // [slots]
  Accepted accepted;
  int64_t plane_vectors;
  int num_heads;
  int row_vectors;  // 16-byte vectors in the entry of one head
  int max_pages;
  int num_nodes;
  int num_row_ctas;        // number of CTAs that move entries: planes * heads
  const uint4* hidden;     // [B N, 16-byte vectors]
  uint4* accepted_hidden;  // [slots (D + 1), 16-byte vectors]
  int hidden_vectors;      // 16-byte vectors in a row of hidden states
  int hidden_ctas;         // number of CTAs that move one row of hidden states
};

// ---- kernels

// CTA `cta` of the entries of one sequence.
template <typename Vector>
__device__ void move_rows(const KeepArgs& args, int seq, int cta) {
  const int slot = args.seq_slots[seq], num = args.accepted.counts[slot];
  if (num <= 1) return;
  const int start = args.lengths[slot] - num;
  const int plane = cta / args.num_heads, head = cta % args.num_heads;
  const int* path = args.accepted.paths + slot * args.accepted.max_path;
  Vector* rows = static_cast<Vector*>(args.pool) + plane * args.plane_vectors;
  const auto vector_of = [&](int row, int vector) {
    return rows +
           kv_offset(args.page_table, args.max_pages, slot, start + row, head, args.num_heads,
                     args.row_vectors) +
           vector;
  };
  const int num_vectors = (num - 1) * args.row_vectors;
  for (int first = 0; first < num_vectors; first += kThreads) {
    const int i = first + threadIdx.x;
    const int row = 1 + i / args.row_vectors, vector = i % args.row_vectors;
    const int node = i < num_vectors ? path[row] : row;
    Vector value{};
    if (node != row) value = *vector_of(node, vector);
    __syncthreads();
    if (node != row) *vector_of(row, vector) = value;
  }
}

// CTA `cta` of the hidden states of one sequence.
__device__ void copy_hidden(const KeepArgs& args, int seq, int cta) {
  const int j = cta / args.hidden_ctas;
  const int vector = cta % args.hidden_ctas * kThreads + threadIdx.x;
  const int slot = args.seq_slots[seq];
  const int node = args.accepted.paths[slot * args.accepted.max_path + j];
  if (node < 0 || vector >= args.hidden_vectors) return;
  const int64_t row = seq * args.num_nodes + node;
  const int position = args.lengths[slot] - args.accepted.counts[slot] + j;
  const int64_t kept = args.accepted.hidden_row(slot, position);
  args.accepted_hidden[kept * args.hidden_vectors + vector] =
      args.hidden[row * args.hidden_vectors + vector];
}

// Grid: (CTAs of entries + CTAs of hidden states, B).
template <typename Vector>
__global__ void __launch_bounds__(kThreads)
    keep_accepted_kernel(const __grid_constant__ KeepArgs args) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int seq = blockIdx.y, cta = blockIdx.x;
  if (cta < args.num_row_ctas) {
    move_rows<Vector>(args, seq, cta);
  } else {
    copy_hidden(args, seq, cta - args.num_row_ctas);
  }
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: page_table, seq_slots, lengths, accepted.
void keep_accepted(const Context& ctx, const KeepAcceptedParams& p) {
  check_keep(p);
  KeepArgs args{.pool = p.pool.data(),
                .page_table = p.page_table,
                .seq_slots = p.seq_slots,
                .lengths = p.lengths,
                .accepted = p.accepted,
                .num_heads = p.num_heads,
                .max_pages = p.max_pages,
                .num_nodes = p.num_nodes};
  bool moves_words = false;  // true for the scales of an fp8 cache
  // A tree with only a root needs no move.
  if (p.num_nodes > 1 && !p.pool.empty()) {
    const int64_t row_bytes = p.width * size_of(p.pool.dtype());
    moves_words = row_bytes == 4;
    CHECK((row_bytes % 16 == 0 || moves_words) && is_aligned16(p.pool.data()),
          "keep_accepted: entries have {} bytes, expected 4 or a multiple of 16, in a pool aligned "
          "to 16 bytes",
          row_bytes);
    args.row_vectors = moves_words ? 1 : static_cast<int>(row_bytes / 16);
    args.plane_vectors = p.pool.size(1) * p.num_heads * kPageSize * args.row_vectors;
    args.num_row_ctas = static_cast<int>(p.pool.size(0)) * p.num_heads;
  }
  if (!p.hidden.empty()) {
    const int64_t row_bytes = p.hidden.size(1) * size_of(p.hidden.dtype());
    CHECK(row_bytes % 16 == 0 && is_aligned16(p.hidden.data()) &&
              is_aligned16(p.accepted_hidden.data()),
          "keep_accepted: hidden states have {} bytes, expected a multiple of 16, aligned to 16 "
          "bytes",
          row_bytes);
    args.hidden = p.hidden.as<uint4>();
    args.accepted_hidden = p.accepted_hidden.as<uint4>();
    args.hidden_vectors = static_cast<int>(row_bytes / 16);
    args.hidden_ctas = (args.hidden_vectors + kThreads - 1) / kThreads;
  }
  const dim3 grid(args.num_row_ctas + p.accepted.max_path * args.hidden_ctas, p.num_seqs);
  if (grid.x == 0 || grid.y == 0) return;
  const auto kernel = moves_words ? keep_accepted_kernel<uint32_t> : keep_accepted_kernel<uint4>;
  launch(ctx, kernel, grid, dim3(kThreads), 0, args);
}

}  // namespace cpmcu::cuda
