// C.ops of quantised weights (kernels/gemm/packed/packed.h) and of the fused layer. A Python
// PackedWeight is an array of bytes with the weight blocks, and the numbers that describe them.
#include <pybind11/stl.h>

#include <map>

#include "kernels/bind_packed_weight.h"
#include "kernels/gemm/fused_layer.h"
#include "kernels/gemm/packed/code8_pack.h"
#include "kernels/gemm/packed/float_group_pack.h"
#include "kernels/gemm/packed/int4_pack.h"
#include "kernels/gemm/packed/int8_pack.h"
#include "kernels/gemm/packed/k_quant_pack.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace cpmcu {
namespace {

using Weight = OpsParams<PackedWeight>;

void bind_packs(py::module_& m) {
  const char* int8_h = "csrc/kernels/gemm/packed/int8_pack.h";
  using Int8 = Int8PackParams;
  bind_op(m, "int8_pack", int8_pack, int8_h, field("w", &Int8::w), field("codes", &Int8::codes),
          field("scales", &Int8::scales), py::kw_only(), option("zeros", &Int8::zeros),
          option("zero_offset", &Int8::zero_offset), option("first_row", &Int8::first_row),
          option("k_per_scale", &Int8::k_per_scale, 32));
  using K = KQuantPackParams;
  bind_op(m, "k_quant_pack", k_quant_pack, "csrc/kernels/gemm/packed/k_quant_pack.h",
          field("w", &K::w), field("codes", &K::codes), field("records", &K::records),
          py::kw_only(), option("min_records", &K::min_records),
          option("first_row", &K::first_row));
  using Float = FloatGroupPackParams;
  bind_op(m, "float_group_pack", float_group_pack, "csrc/kernels/gemm/packed/float_group_pack.h",
          field("w", &Float::w), field("codes", &Float::codes), field("scales", &Float::scales),
          py::kw_only(), option("powers", &Float::powers), option("factor", &Float::factor),
          option("divides", &Float::divides), option("first_row", &Float::first_row),
          option("interleaved", &Float::interleaved));
  using Code8 = Code8PackParams;
  bind_op(m, "code8_pack", code8_pack, "csrc/kernels/gemm/packed/code8_pack.h",
          field("w", &Code8::w), field("codes", &Code8::codes), field("scales", &Code8::scales),
          py::kw_only(), option("first_row", &Code8::first_row),
          option("rows_per_scale", &Code8::rows_per_scale),
          option("k_per_scale", &Code8::k_per_scale));
  using Int4 = Int4PackParams;
  const auto n = [](Int4& p, int64_t size) { p.n = size ? size : p.w.n; };
  const auto k = [](Int4& p, int64_t size) { p.k = size ? size : p.w.k; };
  bind_op(m, "int4_pack", int4_pack,
          "csrc/kernels/gemm/packed/packed.h; format: 0 GPTQ, 1 GPTQ v2, 2 AWQ, 3 compressed, 4 "
          "Marlin",
          field("w", &Int4::w), field("format", &Int4::format), py::kw_only(), field("q", &Int4::q),
          field("scales", &Int4::scales), option("zeros", &Int4::zeros),
          option("first_row", &Int4::first_row), option("first_k", &Int4::first_k),
          optional(field_of<Int4, int64_t>("n", n), py::int_(0)),
          optional(field_of<Int4, int64_t>("k", k), py::int_(0)),
          option("k_per_scale", &Int4::k_per_scale));
}

}  // namespace

Codes codes_of(const std::string& name) {
  const std::map<std::string, Codes> known = {{"int4", Codes::kInt4}, {"int8", Codes::kInt8},
                                              {"e4m3", Codes::kE4m3}, {"e2m1", Codes::kE2m1},
                                              {"k4", Codes::kK4},     {"k8", Codes::kK8}};
  const auto found = known.find(name);
  CHECK(found != known.end(),
        "codes are \"{}\", expected \"int4\", \"int8\", \"e4m3\", \"e2m1\", \"k4\" or \"k8\"",
        name);
  return found->second;
}

void bind_packed_ops(py::module_& m) {
  py::class_<Weight> weight(m, "PackedWeight",
                            "Quantised weights; see csrc/kernels/gemm/packed/packed.h.");
  bind_init(
      weight,
      [](const Weight& made) {
        const int64_t bytes = made.arrays[0]->tensor().num_bytes();
        CHECK(bytes == made.params.num_bytes(), "the blocks have {} bytes, expected {}", bytes,
              made.params.num_bytes());
      },
      field_of<PackedWeight, SharedArray>("blocks",
                                          [](PackedWeight& w, const SharedArray& blocks) {
                                            w.blocks = blocks->as<uint8_t>(DType::kU8);
                                          }),
      py::kw_only(), packed_weight_fields(),
      within(&PackedWeight::layout, option("planes", &PackedLayout::planes)));
  bind_packs(m);
  using Quantize = PackedQuantizeParams;
  bind_op(m, "packed_quantize", packed_quantize, "csrc/kernels/gemm/packed/packed.h",
          field("w", &Quantize::w), field("x", &Quantize::x), option("index", &Quantize::index));
  using Dequantize = PackedDequantizeParams;
  bind_op(m, "packed_dequantize", packed_dequantize, "csrc/kernels/gemm/packed/packed.h",
          field("out", &Dequantize::out), field("w", &Dequantize::w),
          option("first_row", &Dequantize::first_row));
  using Gemm = PackedGemmParams;
  bind_op(m, "packed_gemm", packed_gemm, "csrc/kernels/gemm/packed/packed.h", field("y", &Gemm::y),
          field("x", &Gemm::x), field("w", &Gemm::w), option("alpha", &Gemm::alpha),
          option("beta", &Gemm::beta), option("scratch", &Gemm::scratch));
  py::class_<OpsParams<FusedGemm>> fused(m, "FusedGemm", "A GEMM of fused_layer.");
  using Fused = FusedGemm;
  const auto store_weight = [](void* params, py::handle passed, Arrays& kept) {
    Fused& gemm = *static_cast<Fused*>(params);
    py::isinstance<Weight>(passed) ? store(gemm.packed, passed, kept) : store(gemm.w, passed, kept);
  };
  bind_init(
      fused, [](const OpsParams<Fused>&) {}, field("y", &Fused::y), field("x", &Fused::x),
      Fields<Fused>{{{.name = "w", .set = store_weight}}}, option("gated", &Fused::gated),
      option("alpha", &Fused::alpha), option("beta", &Fused::beta),
      option("scratch", &Fused::scratch), option("bias", &Fused::bias),
      option("normed", &Fused::normed), option("norm_weight", &Fused::norm_weight),
      option("norm_eps", &Fused::norm_eps, 1e-5f), option("norm_offset", &Fused::norm_offset));
  m.def(
      "fused_layer_prepare",
      [](const OpsContext& c, SharedArray memory) {
        fused_layer_prepare(c.ctx, tensor_of(memory));
      },
      "ctx"_a, "memory"_a, "csrc/kernels/gemm/fused_layer.h");
  m.def(
      "fused_layer",
      [](const OpsContext& c, const std::vector<OpsParams<FusedGemm>>& gemms, SharedArray memory,
         const OpsParams<RotaryKvParams>* rotary, const OpsParams<AttentionParams>* attention,
         const std::vector<Weight>& following) {
        FusedLayerParams layer{.gemms = {}, .memory = tensor_of(memory)};
        if (rotary != nullptr) layer.rotary = rotary->params;
        if (attention != nullptr) layer.attention = attention->params;
        for (const auto& gemm : gemms) layer.gemms.push_back(gemm.params);
        for (const Weight& w : following) layer.following.push_back(w.params);
        fused_layer(c.ctx, layer);
      },
      "ctx"_a, "gemms"_a, "memory"_a, "rotary"_a = nullptr, "attention"_a = nullptr,
      "following"_a = std::vector<Weight>(), "csrc/kernels/gemm/fused_layer.h");
  m.def("fused_layer_bytes", &fused_layer_bytes, "max_rows"_a, "Size of fused_layer's memory.");
  m.def(
      "packed_scratch_floats",
      [](const Weight& w, int64_t max_rows) { return packed_scratch_floats(w.params, max_rows); },
      "w"_a, "max_rows"_a, "Size of packed_gemm's scratch.");
}

}  // namespace cpmcu
