// packed_gemm: selects a kernel for the architecture and M. The general kernel is in
// packed/kernel.cuh.
#include "kernels/gemm/packed/kernel.cuh"

namespace cpmcu::cuda {

#ifdef CPMCU_SM90
// packed_gemm_sm90.cu
void packed_gemm_sm90(const Context& ctx, const PackedLayout& layout, DType dtype,
                      PackedGemmArgs args);
// packed_large_sm90.cu
bool packed_gemm_large_sm90(const Context& ctx, const PackedLayout& layout, DType dtype,
                            const PackedGemmArgs& args);
#endif

template <int>
using AnyMma = MmaSync;

void packed_gemm(const Context& ctx, const PackedGemmParams& params) {
  check_packed_gemm(params);
  const PackedWeight& w = params.w;
  PackedGemmArgs args{.blocks = static_cast<const char*>(w.blocks),
                      .partials = params.scratch.as<float>(),
                      .n = static_cast<int>(w.n),
                      .k = static_cast<int>(w.k),
                      .tiles = static_cast<int>(w.row_blocks()),
                      .k_blocks = static_cast<int>(w.k_blocks()),
                      .plane_k_blocks = static_cast<int>(w.k_blocks() / w.layout.planes),
                      .block_bytes = static_cast<int>(w.block_bytes()),
                      .slices = w.slices(),
                      .scale_form = scale_form(w.layout),
                      .float_out = params.y.dtype() == DType::kF32,
                      .gated = w.gated,
                      .alpha = params.alpha,
                      .beta = params.beta};
  const int64_t m = params.x.size(0);
#ifdef CPMCU_SM90
  // The kernel for many rows writes 16 bytes of a row at a time.
  const bool fits = params.y.dtype() == params.x.dtype() && w.out_features() % 8 == 0;
  if (ctx.compute_capability == 90 && m > kMaxRows && fits) {
    args.y = params.y.data();
    args.x = params.x.data();
    args.m = static_cast<int>(m);
    if (packed_gemm_large_sm90(ctx, w.layout, params.x.dtype(), args)) return;
  }
#endif
  for (int64_t row = 0; row < m; row += kMaxRows) {
    const int64_t rows = std::min<int64_t>(kMaxRows, m - row);
    args.y = params.y.rows(row, rows).data();
    args.x = params.x.rows(row, rows).data();
    args.m = static_cast<int>(rows);
#ifdef CPMCU_SM90
    if (ctx.compute_capability == 90) {
      packed_gemm_sm90(ctx, w.layout, params.x.dtype(), args);
      continue;
    }
#endif
    launch_packed_rows<AnyMma>(ctx, w.layout, params.x.dtype(), args);
  }
}

}  // namespace cpmcu::cuda
