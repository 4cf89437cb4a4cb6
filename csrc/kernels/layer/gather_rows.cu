// gather_rows: out[out_index[r]] = x[index[r]].
//
// Roofline: twice the copied bytes of HBM traffic. For few rows: the latency of two dependent
// loads.
//
// Schedule: one thread moves 16 bytes of any dtype. A CTA has 128 such threads, all of one row.
#include "kernels/layer/gather_rows.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

// ---- kernels

struct GatherArgs {
  uint4* out;
  const uint4* x;
  const int* index;      // [R]; null: 0..R-1
  const int* out_index;  // [R]; null: 0..R-1
  int num_vectors;       // number of 16-byte vectors in a row
  int64_t out_stride;    // 16-byte vectors from one row of out to the next
};

// Grid: (R, CTAs of a row).
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const __grid_constant__ GatherArgs args) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row = blockIdx.x, column = blockIdx.y * kThreads + threadIdx.x;
  if (column >= args.num_vectors) return;
  const int64_t from = args.index ? args.index[row] : row;
  const int64_t to = args.out_index ? args.out_index[row] : row;
  if (from < 0) return;
  args.out[to * args.out_stride + column] = args.x[from * args.num_vectors + column];
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: index, out_index.
void gather_rows(const Context& ctx, const GatherRowsParams& p) {
  CHECK(p.x.num_dims() == 2 && p.out.num_dims() == 2 && p.x.dtype() == p.out.dtype() &&
            p.x.size(1) == p.out.size(1),
        "gather_rows: x is {} {}, out is {} {}, expected the same dtype and width",
        name_of(p.x.dtype()), p.x.shape_text(), name_of(p.out.dtype()), p.out.shape_text());
  const int64_t row_bytes = p.x.size(1) * size_of(p.x.dtype());
  CHECK(row_bytes > 0 && row_bytes % 16 == 0 && is_aligned16(p.x.data()) &&
            is_aligned16(p.out.data()),
        "gather_rows: rows have {} bytes, expected a multiple of 16, aligned to 16 bytes",
        row_bytes);
  const int64_t stride_bytes = p.out_stride * size_of(p.x.dtype());
  CHECK(stride_bytes % 16 == 0 && (stride_bytes == 0 || stride_bytes >= row_bytes),
        "gather_rows: rows have {} bytes and a stride of {} bytes, expected a multiple of "
        "16 that is no less than a row",
        row_bytes, stride_bytes);
  const int64_t num_rows = p.num_rows ? p.num_rows : p.out.size(0);
  if (num_rows == 0) return;
  const int num_vectors = static_cast<int>(row_bytes / 16);
  const dim3 grid(num_rows, (num_vectors + kThreads - 1) / kThreads);
  const GatherArgs args{.out = p.out.as<uint4>(),
                        .x = p.x.as<uint4>(),
                        .index = p.index,
                        .out_index = p.out_index,
                        .num_vectors = num_vectors,
                        .out_stride = stride_bytes ? stride_bytes / 16 : num_vectors};
  launch(ctx, gather_rows_kernel, grid, dim3(kThreads), 0, args);
}

}  // namespace cpmcu::cuda
