// C.ops of quantised weights (kernels/gemm/packed/packed.h) and of the fused layer. A Python
// PackedWeight is an array of bytes with the weight blocks, and the numbers that describe them.
// Length of bind_packed_ops: one binding after another, without branches.
#include <pybind11/stl.h>

#include <map>

#include "kernels/bind_ops.h"
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

struct OpsWeight {
  PackedWeight weight;
  SharedArray blocks;
};

struct OpsFusedGemm {
  FusedGemm gemm;
  std::vector<SharedArray> arrays;  // keeps the memory alive
};

}  // namespace

PackedLayout layout_of(const std::string& codes, int planes, bool zero_points, bool minimum,
                       const std::string& scale_dtype, int scale_rows, int group) {
  const std::map<std::string, Codes> known = {{"int4", Codes::kInt4}, {"int8", Codes::kInt8},
                                              {"e4m3", Codes::kE4m3}, {"e2m1", Codes::kE2m1},
                                              {"k4", Codes::kK4},     {"k8", Codes::kK8}};
  const auto found = known.find(codes);
  CHECK(found != known.end(),
        "codes are \"{}\", expected \"int4\", \"int8\", \"e4m3\", \"e2m1\", \"k4\" or \"k8\"",
        codes);
  return {.codes = found->second,
          .planes = planes,
          .zero_points = zero_points,
          .minimum = minimum,
          .scale_dtype = parse_dtype(scale_dtype),
          .scale_rows = scale_rows,
          .group = group};
}

void bind_packed_ops(py::module_& m) {
  py::class_<OpsWeight>(m, "PackedWeight",
                        "Quantised weights; see csrc/kernels/gemm/packed/packed.h.")
      .def(py::init([](SharedArray blocks, int64_t n, int64_t k, const std::string& codes,
                       int planes, bool zero_points, bool minimum, const std::string& scale_dtype,
                       int scale_rows, int group, bool gated) {
             OpsWeight made{{.blocks = blocks->as<uint8_t>(DType::kU8),
                             .n = n,
                             .k = k,
                             .layout = layout_of(codes, planes, zero_points, minimum, scale_dtype,
                                                 scale_rows, group),
                             .gated = gated},
                            blocks};
             const int64_t bytes = blocks->tensor().num_bytes();
             CHECK(bytes == made.weight.num_bytes(), "the blocks have {} bytes, expected {}", bytes,
                   made.weight.num_bytes());
             return made;
           }),
           "blocks"_a, py::kw_only(), "n"_a, "k"_a, "codes"_a = "int4", "planes"_a = 1,
           "zero_points"_a = false, "minimum"_a = false, "scale_dtype"_a = "float16",
           "scale_rows"_a = 1, "group"_a = 0, "gated"_a = false);
  m.def(
      "int8_pack",
      [](const OpsContext& c, const OpsWeight& w, SharedArray codes, SharedArray scales,
         SharedArray zeros, int zero_offset, int64_t first_row, int64_t k_per_scale) {
        int8_pack(c.ctx, {.w = w.weight,
                          .codes = tensor_of(codes),
                          .scales = tensor_of(scales),
                          .zeros = tensor_of(zeros),
                          .zero_offset = zero_offset,
                          .first_row = first_row,
                          .k_per_scale = k_per_scale});
      },
      "ctx"_a, "w"_a, "codes"_a, "scales"_a, py::kw_only(), "zeros"_a = SharedArray(),
      "zero_offset"_a = 0, "first_row"_a = 0, "k_per_scale"_a = 32,
      "csrc/kernels/gemm/packed/int8_pack.h");
  m.def(
      "k_quant_pack",
      [](const OpsContext& c, const OpsWeight& w, SharedArray codes, SharedArray scales,
         SharedArray group_scales, SharedArray mins, SharedArray group_mins, int64_t first_row) {
        k_quant_pack(c.ctx, {.w = w.weight,
                             .codes = tensor_of(codes),
                             .scales = tensor_of(scales),
                             .group_scales = tensor_of(group_scales),
                             .mins = tensor_of(mins),
                             .group_mins = tensor_of(group_mins),
                             .first_row = first_row});
      },
      "ctx"_a, "w"_a, "codes"_a, "scales"_a, "group_scales"_a, py::kw_only(),
      "mins"_a = SharedArray(), "group_mins"_a = SharedArray(), "first_row"_a = 0,
      "csrc/kernels/gemm/packed/k_quant_pack.h");
  m.def(
      "float_group_pack",
      [](const OpsContext& c, const OpsWeight& w, SharedArray codes, SharedArray scales,
         bool powers, SharedArray factor, bool divides, int64_t first_row, bool interleaved) {
        float_group_pack(c.ctx, {.w = w.weight,
                                 .codes = tensor_of(codes),
                                 .scales = tensor_of(scales),
                                 .powers = powers,
                                 .factor = tensor_of(factor),
                                 .divides = divides,
                                 .first_row = first_row,
                                 .interleaved = interleaved});
      },
      "ctx"_a, "w"_a, "codes"_a, "scales"_a, py::kw_only(), "powers"_a = false,
      "factor"_a = SharedArray(), "divides"_a = false, "first_row"_a = 0, "interleaved"_a = false,
      "csrc/kernels/gemm/packed/float_group_pack.h");
  m.def(
      "code8_pack",
      [](const OpsContext& c, const OpsWeight& w, SharedArray codes, SharedArray scales,
         int64_t first_row, int64_t rows_per_scale, int64_t k_per_scale) {
        code8_pack(c.ctx, {.w = w.weight,
                           .codes = tensor_of(codes),
                           .scales = tensor_of(scales),
                           .first_row = first_row,
                           .rows_per_scale = rows_per_scale,
                           .k_per_scale = k_per_scale});
      },
      "ctx"_a, "w"_a, "codes"_a, "scales"_a, py::kw_only(), "first_row"_a = 0,
      "rows_per_scale"_a = 1, "k_per_scale"_a = 128, "csrc/kernels/gemm/packed/code8_pack.h");
  m.def(
      "int4_pack",
      [](const OpsContext& c, const OpsWeight& w, int format, SharedArray q, SharedArray scales,
         SharedArray zeros, int64_t first_row, int64_t first_k, int64_t n, int64_t k,
         int64_t k_per_scale) {
        int4_pack(c.ctx, {.w = w.weight,
                          .format = static_cast<Int4Format>(format),
                          .q = tensor_of(q),
                          .scales = tensor_of(scales),
                          .zeros = tensor_of(zeros),
                          .first_row = first_row,
                          .first_k = first_k,
                          .n = n ? n : w.weight.n,
                          .k = k ? k : w.weight.k,
                          .k_per_scale = k_per_scale});
      },
      "ctx"_a, "w"_a, "format"_a, py::kw_only(), "q"_a, "scales"_a, "zeros"_a = SharedArray(),
      "first_row"_a = 0, "first_k"_a = 0, "n"_a = 0, "k"_a = 0, "k_per_scale"_a = 128,
      "csrc/kernels/gemm/packed/packed.h; format: 0 GPTQ, 1 GPTQ v2, 2 AWQ, 3 compressed, 4 "
      "Marlin");
  m.def(
      "packed_quantize",
      [](const OpsContext& c, const OpsWeight& w, SharedArray x, SharedArray index) {
        packed_quantize(c.ctx, {.w = w.weight, .x = tensor_of(x), .index = ints(index)});
      },
      "ctx"_a, "w"_a, "x"_a, "index"_a = SharedArray(), "csrc/kernels/gemm/packed/packed.h");
  m.def(
      "packed_dequantize",
      [](const OpsContext& c, SharedArray out, const OpsWeight& w, int64_t first_row) {
        packed_dequantize(c.ctx, {.out = tensor_of(out), .w = w.weight, .first_row = first_row});
      },
      "ctx"_a, "out"_a, "w"_a, "first_row"_a = 0, "csrc/kernels/gemm/packed/packed.h");
  m.def(
      "packed_gemm",
      [](const OpsContext& c, SharedArray y, SharedArray x, const OpsWeight& w, float alpha,
         float beta, SharedArray scratch) {
        packed_gemm(c.ctx, {.y = tensor_of(y),
                            .x = tensor_of(x),
                            .w = w.weight,
                            .alpha = alpha,
                            .beta = beta,
                            .scratch = tensor_of(scratch)});
      },
      "ctx"_a, "y"_a, "x"_a, "w"_a, "alpha"_a = 1.f, "beta"_a = 0.f, "scratch"_a = SharedArray(),
      "csrc/kernels/gemm/packed/packed.h");
  const auto make = [](FusedGemm gemm, const SharedArray& y, const SharedArray& x,
                       SharedArray weights, float alpha, float beta, const SharedArray& scratch,
                       const SharedArray& normed, const SharedArray& norm_weight, float norm_eps,
                       float norm_offset) {
    gemm.y = tensor_of(y), gemm.x = tensor_of(x), gemm.alpha = alpha, gemm.beta = beta;
    gemm.scratch = tensor_of(scratch);
    gemm.normed = tensor_of(normed), gemm.norm_weight = tensor_of(norm_weight);
    gemm.norm_eps = norm_eps, gemm.norm_offset = norm_offset;
    return OpsFusedGemm{gemm, {y, x, std::move(weights), scratch, normed, norm_weight}};
  };
  py::class_<OpsFusedGemm>(m, "FusedGemm", "A GEMM of fused_layer.")
      .def(py::init([make](SharedArray y, SharedArray x, const OpsWeight& w, float alpha,
                           float beta, SharedArray scratch, SharedArray normed,
                           SharedArray norm_weight, float norm_eps, float norm_offset) {
             FusedGemm gemm;
             gemm.packed = w.weight;
             return make(gemm, y, x, w.blocks, alpha, beta, scratch, normed, norm_weight, norm_eps,
                         norm_offset);
           }),
           "y"_a, "x"_a, "w"_a, "alpha"_a = 1.f, "beta"_a = 0.f, "scratch"_a = SharedArray(),
           "normed"_a = SharedArray(), "norm_weight"_a = SharedArray(), "norm_eps"_a = 1e-5f,
           "norm_offset"_a = 0.f)
      .def(py::init([make](SharedArray y, SharedArray x, SharedArray w, bool gated, float alpha,
                           float beta, SharedArray scratch, SharedArray normed,
                           SharedArray norm_weight, float norm_eps, float norm_offset) {
             FusedGemm gemm;
             gemm.w = tensor_of(w), gemm.gated = gated;
             return make(gemm, y, x, w, alpha, beta, scratch, normed, norm_weight, norm_eps,
                         norm_offset);
           }),
           "y"_a, "x"_a, "w"_a, "gated"_a = false, "alpha"_a = 1.f, "beta"_a = 0.f,
           "scratch"_a = SharedArray(), "normed"_a = SharedArray(), "norm_weight"_a = SharedArray(),
           "norm_eps"_a = 1e-5f, "norm_offset"_a = 0.f);
  m.def(
      "fused_layer_prepare",
      [](const OpsContext& c, SharedArray memory) {
        fused_layer_prepare(c.ctx, tensor_of(memory));
      },
      "ctx"_a, "memory"_a, "csrc/kernels/gemm/fused_layer.h");
  m.def(
      "fused_layer",
      [](const OpsContext& c, const std::vector<OpsFusedGemm>& gemms, SharedArray memory,
         const OpsRotary* rotary, const OpsAttention* attention,
         const std::vector<OpsWeight>& following) {
        FusedLayerParams layer{.gemms = {}, .memory = tensor_of(memory)};
        if (rotary != nullptr) layer.rotary = rotary->params;
        if (attention != nullptr) layer.attention = attention->params;
        for (const OpsFusedGemm& gemm : gemms) layer.gemms.push_back(gemm.gemm);
        for (const OpsWeight& w : following) layer.following.push_back(w.weight);
        fused_layer(c.ctx, layer);
      },
      "ctx"_a, "gemms"_a, "memory"_a, "rotary"_a = nullptr, "attention"_a = nullptr,
      "following"_a = std::vector<OpsWeight>(), "csrc/kernels/gemm/fused_layer.h");
  m.def("fused_layer_bytes", &fused_layer_bytes, "max_rows"_a, "Size of fused_layer's memory.");
  m.def(
      "packed_scratch_floats",
      [](const OpsWeight& w, int64_t max_rows) {
        return packed_scratch_floats(w.weight, max_rows);
      },
      "w"_a, "max_rows"_a, "Size of packed_gemm's scratch.");
}

}  // namespace cpmcu
