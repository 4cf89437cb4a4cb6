// k_quant_pack: K-quants of llama.cpp to weight blocks (Codes::kK4, Codes::kK8).
#pragma once

#include "kernels/gemm/packed/packed.h"

namespace cpmcu {

// Packs rows [first_row, first_row + n) of W. The part that reaches row N also fills the padding
// beyond.
struct KQuantPackParams {
  PackedWeight w;
  // uint8 [n, K / 2] for kK4: the low nibble is the even k. int8 [n, K] for kK8.
  Tensor codes;
  // uint8 [n, k_blocks * record_bytes]: the records of each row (layout.h) in order of K.
  Tensor records;
  Tensor min_records{};   // records of the minima; empty if W has no minima
  int64_t first_row = 0;  // number in the checkpoint's order; a multiple of 8
};

inline void check_k_quant_pack(const KQuantPackParams& p) {
  check_packed_weight(p.w);
  const PackedLayout& layout = p.w.layout;
  const int64_t n = p.codes.num_dims() == 2 ? p.codes.size(0) : 0, k = p.w.k;
  CHECK((layout.codes == Codes::kK4 || layout.codes == Codes::kK8) && n > 0 && n % 8 == 0 &&
            k % 8 == 0 && p.first_row % 8 == 0 && p.first_row >= 0 && p.first_row + n <= p.w.n &&
            p.codes.size(1) == k * layout.bits() / 8 && size_of(p.codes.dtype()) == 1,
        "k_quant_pack: codes {} {} from row {} are no part of a W [{}, {}] of K-quants of {} bits; "
        "rows are packed by eight",
        name_of(p.codes.dtype()), p.codes.shape_text(), p.first_row, p.w.n, k, layout.bits());
  const int64_t bytes = p.w.k_blocks() * layout.record_bytes();
  const auto fits = [&](const Tensor& records) {
    return records.num_dims() == 2 && records.dtype() == DType::kU8 && records.size(0) == n &&
           records.size(1) == bytes;
  };
  CHECK(
      fits(p.records) && (layout.minimum ? fits(p.min_records) : p.min_records.empty()),
      "k_quant_pack: records are {} {}, of minima {}; expected uint8 [{}, {}], and minima only if "
      "W has them",
      name_of(p.records.dtype()), p.records.shape_text(), p.min_records.shape_text(), n, bytes);
}

REGISTER_OP(k_quant_pack, KQuantPackParams)

}  // namespace cpmcu
