// embedding: out[t] = table[ids[t]] * scale, in float32, rounded once.
//
// Roofline: 4 bytes an element of HBM traffic. For one token: the latency of two dependent loads.
//
// Schedule: one thread moves 8 elements (16 bytes). A CTA has 128 such threads, all of one row.
//
// Surprising: a row is spread over several CTAs, because a loop in one CTA would add latency for
// one token.
#include "kernels/layer/embedding.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "core/vec.cuh"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

struct EmbeddingArgs {
  void* out;          // [T, H]
  const void* table;  // [V, H]
  const int* ids;     // [T]
  int64_t vocab_size;
  int num_vectors;  // vectors of 8 elements in a row: H / 8
  int64_t out_stride;
  float scale;
};

// ---- kernels

// Grid: (T, CTAs of a row).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const __grid_constant__ EmbeddingArgs args) {
  ptx::pdl_wait();
  ptx::pdl_launch();  // not before: core/launch.h
  const int64_t row = blockIdx.x;
  const int column = blockIdx.y * kThreads + threadIdx.x;
  if (column >= args.num_vectors) return;

  const int id = args.ids[row];
  const int64_t table_row = id >= 0 && id < args.vocab_size ? id : 0;
  const T* table = static_cast<const T*>(args.table);
  Vec16<T> v = load<T, 8>(table + (table_row * args.num_vectors + column) * 8);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = from_float<T>(to_float(v[i]) * args.scale);
  store(static_cast<T*>(args.out) + row * args.out_stride + column * 8, v);
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: ids.
void embedding(const Context& ctx, const EmbeddingParams& p) {
  check_rows("embedding", "out", p.out);
  check_rows("embedding", "table", p.table);
  CHECK(p.table.dtype() == p.out.dtype() && p.table.size(1) == p.out.size(1),
        "embedding: table is {} {}, out is {} {}, expected the same dtype and width",
        name_of(p.table.dtype()), p.table.shape_text(), name_of(p.out.dtype()), p.out.shape_text());
  check_stride("embedding", p.out_stride, p.out.size(1));
  if (p.out.size(0) == 0) return;
  const int num_vectors = static_cast<int>(p.out.size(1) / 8);
  const dim3 grid(p.out.size(0), (num_vectors + kThreads - 1) / kThreads);
  const EmbeddingArgs args{.out = p.out.data(),
                           .table = p.table.data(),
                           .ids = p.ids,
                           .vocab_size = p.table.size(0),
                           .num_vectors = num_vectors,
                           .out_stride = p.out_stride ? p.out_stride : p.out.size(1),
                           .scale = p.scale};
  dispatch_half(p.out.dtype(), [&](auto t) {
    launch(ctx, embedding_kernel<decltype(t)>, grid, dim3(kThreads), 0, args);
  });
}

}  // namespace cpmcu::cuda
