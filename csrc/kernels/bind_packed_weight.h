// The fields of a PackedWeight, for the ops of packed weights and of experts.
#pragma once

#include "kernels/bind_fields.h"
#include "kernels/gemm/packed/packed.h"

namespace cpmcu {

Codes codes_of(const std::string& name);  // bind_packed_ops.cpp

inline auto packed_layout_options() {
  using L = PackedLayout;
  const auto codes = [](L& layout, const std::string& name) { layout.codes = codes_of(name); };
  const auto scale_dtype = [](L& layout, const std::string& name) {
    layout.scale_dtype = parse_dtype(name);
  };
  return fields_of<L>(optional(field_of<L, std::string>("codes", codes)),
                      option("zero_points", &L::zero_points), option("minimum", &L::minimum),
                      option("halves", &L::halves),
                      optional(field_of<L, std::string>("scale_dtype", scale_dtype)),
                      option("scale_rows", &L::scale_rows), option("group", &L::group));
}

// Keywords, beside the blocks.
inline auto packed_weight_fields() {
  using W = PackedWeight;
  return fields_of<W>(field("n", &W::n), field("k", &W::k),
                      within(&W::layout, packed_layout_options()), option("gated", &W::gated));
}

}  // namespace cpmcu
