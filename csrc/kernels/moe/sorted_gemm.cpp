// Checks that the device has the GEMMs of sorted rows, and launches them.
#ifdef CPMCU_WITH_CUDA
#include "kernels/moe/sorted_gemm.h"

#include "kernels/launch_checks.h"

namespace cpmcu::cuda {

#ifdef CPMCU_SM90
// sorted_gemm_sm90.cu and packed_sorted_gemm_sm90.cu
void sorted_gemm_sm90(const Context& ctx, const SortedGemmParams& params);
void packed_sorted_gemm_sm90(const Context& ctx, const PackedSortedGemmParams& params);
#endif

namespace {

void check_launch(const char* op, const Context& ctx, const SortedRows& rows, const void* w) {
  CHECK(has_sorted_gemm(ctx),
        "{}: the device has compute capability {}.{}, expected 9.0 and a build with 90a "
        "(expert_gemm runs on all)",
        op, ctx.compute_capability / 10, ctx.compute_capability % 10);
  check_rows(op, "x", rows.x);
  CHECK(is_aligned16(w), "{}: W is not aligned to 16 bytes", op);
  CHECK(is_aligned16(rows.y.data()), "{}: y is not aligned to 16 bytes", op);
}

}  // namespace

void sorted_gemm(const Context& ctx, const SortedGemmParams& params) {
  check_sorted_gemm(params);
  check_launch("sorted_gemm", ctx, params.rows, params.w.data());
  if (params.rows.y.size(0) == 0) return;
#ifdef CPMCU_SM90
  sorted_gemm_sm90(ctx, params);
#endif
}

void packed_sorted_gemm(const Context& ctx, const PackedSortedGemmParams& params) {
  check_packed_sorted_gemm(params);
  check_launch("packed_sorted_gemm", ctx, params.rows, params.w.blocks);
  if (params.rows.y.size(0) == 0) return;
#ifdef CPMCU_SM90
  packed_sorted_gemm_sm90(ctx, params);
#endif
}

}  // namespace cpmcu::cuda
#endif
