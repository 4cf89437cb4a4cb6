// k_quant_pack: K-quants of llama.cpp to weight blocks (Codes::kK4, Codes::kK8).
#pragma once

#include "kernels/gemm/packed/packed.h"

namespace cpmcu {

constexpr int kSuperK = 256;  // k that share d, and e

// Packs rows [first_row, first_row + n) of W. The part that reaches row N also fills the padding
// beyond. Names as in layout.h.
struct KQuantPackParams {
  PackedWeight w;
  Tensor codes;           // kK4: uint8 [n, K / 2], the low nibble is the even k; kK8: int8 [n, K]
  Tensor scales;          // d: float16 [n, K / 256]
  Tensor group_scales;    // s: bytes [n, K / group]
  Tensor mins{};          // e: as d; empty if W has no minimum
  Tensor group_mins{};    // m: as s
  int64_t first_row = 0;  // in the checkpoint's order; a multiple of 8
};

inline void check_k_quant_pack(const KQuantPackParams& p) {
  check_packed_weight(p.w);
  const PackedLayout& layout = p.w.layout;
  const int64_t n = p.codes.num_dims() == 2 ? p.codes.size(0) : 0, k = p.w.k;
  CHECK((layout.codes == Codes::kK4 || layout.codes == Codes::kK8) && n > 0 && n % 8 == 0 &&
            k % kSuperK == 0 && p.first_row % 8 == 0 && p.first_row >= 0 &&
            p.first_row + n <= p.w.n && p.codes.size(1) == k * layout.bits() / 8 &&
            size_of(p.codes.dtype()) == 1,
        "k_quant_pack: codes {} {} from row {} are no part of a W [{}, {}] of K-quants of {} bits; "
        "rows are packed by eight, k by {}",
        name_of(p.codes.dtype()), p.codes.shape_text(), p.first_row, p.w.n, k, layout.bits(),
        kSuperK);
  const auto fits = [&](const Tensor& super, const Tensor& groups) {
    return super.num_dims() == 2 && super.dtype() == DType::kF16 && super.size(0) == n &&
           super.size(1) == k / kSuperK && groups.num_dims() == 2 && groups.size(0) == n &&
           groups.size(1) == k / layout.group && size_of(groups.dtype()) == 1;
  };
  CHECK(fits(p.scales, p.group_scales) &&
            (layout.minimum ? fits(p.mins, p.group_mins) : p.mins.empty() && p.group_mins.empty()),
        "k_quant_pack: scales are {} and {}, minima {} and {}; expected float16 [{}, {}] and bytes "
        "[{}, {}], and minima only if W has them",
        p.scales.shape_text(), p.group_scales.shape_text(), p.mins.shape_text(),
        p.group_mins.shape_text(), n, k / kSuperK, n, k / layout.group);
}

REGISTER_OP(k_quant_pack, KQuantPackParams)

}  // namespace cpmcu
