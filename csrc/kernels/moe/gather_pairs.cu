// gather_pairs: sorted[i] = x[pairs[i] / k], rows of 16-bit elements.
//
// Roofline: it writes T k rows. 1024 tokens of a 30B-A3B layer are 34 MB, 11 us at 3 TB/s; the rows
// of x are read from L2.
//
// Schedule: a warp copies a row, and a lane 16 bytes at a time.
//
// The surprising decision: the rows are copied at all. Hopper's TMA loads tiles of consecutive rows
// and shares them between the CTAs of a cluster, but it cannot gather. The copy costs about 7 % of
// the GEMMs that it feeds.
#include "core/launch.h"
#include "core/ptx.cuh"
#include "kernels/launch_checks.h"
#include "kernels/moe/sorted_gemm.h"

namespace cpmcu::cuda {
namespace {

constexpr int kWarps = 8, kUnroll = 4;

__global__ void __launch_bounds__(32 * kWarps)
    gather_pairs_kernel(uint4* sorted, const uint4* x, const int* pairs, int num_pairs, int top_k,
                        int chunks) {
  ptx::pdl_launch();
  ptx::pdl_wait();
  const int row = blockIdx.x * kWarps + threadIdx.x / 32;
  if (row >= num_pairs) return;
  const uint4* from = x + static_cast<int64_t>(pairs[row] / top_k) * chunks;
  uint4* to = sorted + static_cast<int64_t>(row) * chunks;
  for (int first = threadIdx.x % 32; first < chunks; first += 32 * kUnroll) {
    uint4 v[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + 32 * i < chunks) v[i] = from[first + 32 * i];
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + 32 * i < chunks) to[first + 32 * i] = v[i];
    }
  }
}

}  // namespace

// Graph-safe.
void gather_pairs(const Context& ctx, const GatherPairsParams& p) {
  check_gather_pairs(p);
  check_rows("gather_pairs", "x", p.x);
  check_rows("gather_pairs", "sorted", p.sorted);
  const int num_pairs = static_cast<int>(p.sorted.size(0));
  if (num_pairs == 0) return;
  launch(ctx, gather_pairs_kernel, dim3((num_pairs + kWarps - 1) / kWarps), dim3(32 * kWarps), 0,
         p.sorted.as<uint4>(), p.x.as<const uint4>(), p.routing.pairs, num_pairs, p.routing.top_k,
         static_cast<int>(p.x.size(1) / 8));
}

}  // namespace cpmcu::cuda
