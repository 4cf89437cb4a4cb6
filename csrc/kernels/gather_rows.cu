// Copies chosen rows: out[r] = x[index[r]].
//
// One thread moves 16 bytes, whatever the dtype; a block is 128 such threads of one row. Bound:
// twice the copied bytes against memory bandwidth; for a few rows the latency of two dependent
// loads.
#include "kernels/gather_rows.h"

#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/launch_checks.h"

namespace cpmcu::cuda {
namespace {

constexpr int kThreads = 128;

// ---- kernels

// Grid: (R, blocks of a row); a row is num_vectors times 16 bytes.
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(uint4* out, const uint4* x, const int* index, int num_vectors) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int column = blockIdx.y * kThreads + threadIdx.x;
  if (column >= num_vectors) return;
  const int64_t source = index[blockIdx.x];
  out[int64_t{blockIdx.x} * num_vectors + column] = x[source * num_vectors + column];
}

}  // namespace

// ---- launchers

// Graph-safe; reads from the device: index.
void gather_rows(const Context& ctx, const GatherRowsParams& p) {
  CHECK(p.x.num_dims() == 2 && p.out.num_dims() == 2 && p.x.dtype() == p.out.dtype() &&
            p.x.size(1) == p.out.size(1),
        "gather_rows: the input is {} {} but the output {} {}", name_of(p.x.dtype()),
        p.x.shape_text(), name_of(p.out.dtype()), p.out.shape_text());
  const int64_t row_bytes = p.x.size(1) * size_of(p.x.dtype());
  CHECK(row_bytes > 0 && row_bytes % 16 == 0 && is_aligned16(p.x.data()) &&
            is_aligned16(p.out.data()),
        "gather_rows: rows of {} bytes, expected aligned multiples of 16", row_bytes);
  if (p.out.size(0) == 0) return;
  const int num_vectors = static_cast<int>(row_bytes / 16);
  const dim3 grid(p.out.size(0), (num_vectors + kThreads - 1) / kThreads);
  launch(ctx, gather_rows_kernel, grid, dim3(kThreads), 0, p.out.as<uint4>(), p.x.as<uint4>(),
         p.index, num_vectors);
}

}  // namespace cpmcu::cuda
