// C.ops of the mixture of experts (kernels/moe). A Python Routing owns its arrays.
#include <pybind11/stl.h>

#include "kernels/bind_ops.h"
#include "kernels/moe/expert_gemm.h"
#include "kernels/moe/moe_combine.h"
#include "kernels/moe/moe_router.h"
#include "kernels/moe/route_scores.h"
#include "kernels/moe/sorted_gemm.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace cpmcu {
namespace {

struct OpsRouting {
  Routing routing;
  SharedArray experts, weights, pairs, offsets, active, num_active, spans;
};

ExpertRows rows_of(SharedArray y, SharedArray x, int pairs_per_x, const OpsRouting& routing,
                   bool routing_is_complete) {
  return {.y = tensor_of(y),
          .x = tensor_of(x),
          .pairs_per_x = pairs_per_x,
          .routing = routing.routing,
          .routing_is_complete = routing_is_complete};
}

// A norm of x to `out`; empty: none.
RmsNormParams norm_of(SharedArray out, SharedArray x, SharedArray weight, float eps, float offset) {
  if (weight == nullptr) return {};
  return {.out = tensor_of(out),
          .x = tensor_of(x),
          .weight = tensor_of(weight),
          .eps = eps,
          .weight_offset = offset};
}

SortedRows sorted_rows_of(SharedArray y, SharedArray x, const OpsRouting& routing, bool sorted_y) {
  return {.y = tensor_of(y), .x = tensor_of(x), .routing = routing.routing, .sorted_y = sorted_y};
}

// blocks: [experts, bytes]
PackedWeight packed_experts_of(SharedArray blocks, const OpsRouting& routing, int64_t n, int64_t k,
                               const PackedLayout& layout, bool gated) {
  const Tensor all = blocks->tensor();
  CHECK(all.num_dims() == 2 && all.size(0) == routing.routing.num_experts,
        "the blocks are {}, expected [{} experts, bytes]", all.shape_text(),
        routing.routing.num_experts);
  return {
      .blocks = blocks->as<uint8_t>(DType::kU8), .n = n, .k = k, .layout = layout, .gated = gated};
}

void bind_sorted_gemms(py::module_& m) {
  m.def("has_sorted_gemm", [](const OpsContext& c) { return has_sorted_gemm(c.ctx); }, "ctx"_a);
  m.def(
      "gather_pairs",
      [](const OpsContext& c, SharedArray sorted, SharedArray x, const OpsRouting& routing) {
        gather_pairs(c.ctx,
                     {.sorted = tensor_of(sorted), .x = tensor_of(x), .routing = routing.routing});
      },
      "ctx"_a, "sorted"_a, "x"_a, "routing"_a, "csrc/kernels/moe/sorted_gemm.h");
  m.def(
      "sorted_gemm",
      [](const OpsContext& c, SharedArray y, SharedArray x, SharedArray w,
         const OpsRouting& routing, bool sorted_y, bool gated) {
        sorted_gemm(
            c.ctx,
            {.rows = sorted_rows_of(y, x, routing, sorted_y), .w = tensor_of(w), .gated = gated});
      },
      "ctx"_a, "y"_a, "x"_a, "w"_a, "routing"_a, py::kw_only(), "sorted_y"_a = false,
      "gated"_a = false, "csrc/kernels/moe/sorted_gemm.h");
  m.def(
      "packed_sorted_gemm",
      [](const OpsContext& c, SharedArray y, SharedArray x, SharedArray blocks,
         const OpsRouting& routing, bool sorted_y, int64_t n, int64_t k, const std::string& codes,
         bool zero_points, bool minimum, const std::string& scale_dtype, int scale_rows, int group,
         bool gated) {
        packed_sorted_gemm(c.ctx, {.rows = sorted_rows_of(y, x, routing, sorted_y),
                                   .w = packed_experts_of(blocks, routing, n, k,
                                                          layout_of(codes, 1, zero_points, minimum,
                                                                    scale_dtype, scale_rows, group),
                                                          gated),
                                   .stride = blocks->tensor().size(1)});
      },
      "ctx"_a, "y"_a, "x"_a, "blocks"_a, "routing"_a, py::kw_only(), "sorted_y"_a = false, "n"_a,
      "k"_a, "codes"_a = "int4", "zero_points"_a = false, "minimum"_a = false,
      "scale_dtype"_a = "float16", "scale_rows"_a = 1, "group"_a = 0, "gated"_a = false,
      "csrc/kernels/moe/sorted_gemm.h. blocks: [experts, bytes]");
}

void bind_route_scores(py::module_& m) {
  m.def(
      "score_experts",
      [](const OpsContext& c, SharedArray scores, SharedArray logits, SharedArray bias) {
        score_experts(
            c.ctx,
            {.scores = tensor_of(scores), .logits = tensor_of(logits), .bias = tensor_of(bias)});
      },
      "ctx"_a, "scores"_a, "logits"_a, "bias"_a = SharedArray(), "csrc/kernels/moe/route_scores.h");
  m.def(
      "weigh_experts",
      [](const OpsContext& c, const OpsRouting& routing, int64_t num_tokens, SharedArray scores,
         bool renormalise, float epsilon, float factor, SharedArray scale) {
        weigh_experts(c.ctx, {.routing = routing.routing,
                              .num_tokens = num_tokens,
                              .scores = tensor_of(scores),
                              .renormalise = renormalise,
                              .epsilon = epsilon,
                              .factor = factor,
                              .scale = tensor_of(scale)});
      },
      "ctx"_a, "routing"_a, py::kw_only(), "num_tokens"_a, "scores"_a = SharedArray(),
      "renormalise"_a = false, "epsilon"_a = 0.f, "factor"_a = 1.f, "scale"_a = SharedArray(),
      "csrc/kernels/moe/route_scores.h");
}

}  // namespace

void bind_moe_ops(py::module_& m) {
  py::class_<OpsRouting>(m, "Routing", "The experts of tokens; see csrc/kernels/moe/moe_route.h.")
      .def(py::init([](SharedContext c, int64_t num_tokens, int num_experts, int top_k) {
             const auto array = [&](int64_t count, const char* dtype) {
               return std::make_shared<Array>(c, std::vector<int64_t>{count}, dtype, false);
             };
             const int64_t num_pairs = num_tokens * top_k;
             OpsRouting made{{.num_experts = num_experts, .top_k = top_k},
                             array(num_pairs, "int32"),
                             array(num_pairs, "float32"),
                             array(num_pairs, "int32"),
                             array(num_experts + 1, "int32"),
                             array(num_experts, "int32"),
                             array(1, "int32"),
                             array(4 * std::min<int64_t>(num_experts, num_pairs), "int32")};
             made.routing.experts = ints(made.experts);
             made.routing.weights = floats(made.weights);
             made.routing.pairs = ints(made.pairs);
             made.routing.offsets = ints(made.offsets);
             made.routing.active = ints(made.active);
             made.routing.num_active = ints(made.num_active);
             made.routing.spans = reinterpret_cast<ExpertSpan*>(ints(made.spans));
             return made;
           }),
           "ctx"_a, py::kw_only(), "num_tokens"_a, "num_experts"_a, "top_k"_a)
      .def_readonly("experts", &OpsRouting::experts)
      .def_readonly("weights", &OpsRouting::weights)
      .def_readonly("pairs", &OpsRouting::pairs)
      .def_readonly("offsets", &OpsRouting::offsets)
      .def_readonly("active", &OpsRouting::active)
      .def_readonly("num_active", &OpsRouting::num_active)
      .def_readonly("spans", &OpsRouting::spans);
  m.def(
      "moe_route",
      [](const OpsContext& c, const OpsRouting& routing, SharedArray logits, bool renormalise) {
        moe_route(
            c.ctx,
            {.logits = tensor_of(logits), .renormalise = renormalise, .routing = routing.routing});
      },
      "ctx"_a, "routing"_a, "logits"_a, py::kw_only(), "renormalise"_a,
      "csrc/kernels/moe/moe_route.h");
  m.def(
      "moe_router",
      [](const OpsContext& c, SharedArray logits, SharedArray x, SharedArray w,
         const OpsRouting& routing, SharedArray memory, bool renormalise, SharedArray norm_x,
         SharedArray norm_weight, float norm_eps, float norm_offset) {
        moe_router(c.ctx, {.logits = tensor_of(logits),
                           .x = tensor_of(x),
                           .w = tensor_of(w),
                           .norm = norm_of(x, norm_x, norm_weight, norm_eps, norm_offset),
                           .renormalise = renormalise,
                           .routing = routing.routing,
                           .memory = tensor_of(memory)});
      },
      "ctx"_a, "logits"_a, "x"_a, "w"_a, "routing"_a, py::kw_only(), "memory"_a,
      "renormalise"_a = false, "norm_x"_a = SharedArray(), "norm_weight"_a = SharedArray(),
      "norm_eps"_a = 1e-6f, "norm_offset"_a = 0.f,
      "csrc/kernels/moe/moe_router.h. memory: [moe_router_bytes] uint8, zero");
  m.def("moe_router_bytes", &moe_router_bytes, "num_tokens"_a, "num_rows"_a);
  m.def(
      "expert_gemm",
      [](const OpsContext& c, SharedArray y, SharedArray x, SharedArray w,
         const OpsRouting& routing, int pairs_per_x, bool gated, bool routing_is_complete) {
        expert_gemm(c.ctx, {.rows = rows_of(y, x, pairs_per_x, routing, routing_is_complete),
                            .w = tensor_of(w),
                            .gated = gated});
      },
      "ctx"_a, "y"_a, "x"_a, "w"_a, "routing"_a, py::kw_only(), "pairs_per_x"_a = 1,
      "gated"_a = false, "routing_is_complete"_a = false, "csrc/kernels/moe/expert_gemm.h");
  m.def(
      "packed_expert_gemm",
      [](const OpsContext& c, SharedArray y, SharedArray x, SharedArray blocks,
         const OpsRouting& routing, int pairs_per_x, int64_t n, int64_t k, const std::string& codes,
         bool zero_points, bool minimum, const std::string& scale_dtype, int scale_rows, int group,
         bool gated, bool routing_is_complete) {
        packed_expert_gemm(c.ctx, {.rows = rows_of(y, x, pairs_per_x, routing, routing_is_complete),
                                   .w = packed_experts_of(blocks, routing, n, k,
                                                          layout_of(codes, 1, zero_points, minimum,
                                                                    scale_dtype, scale_rows, group),
                                                          gated),
                                   .stride = blocks->tensor().size(1)});
      },
      "ctx"_a, "y"_a, "x"_a, "blocks"_a, "routing"_a, py::kw_only(), "pairs_per_x"_a = 1, "n"_a,
      "k"_a, "codes"_a = "int4", "zero_points"_a = false, "minimum"_a = false,
      "scale_dtype"_a = "float16", "scale_rows"_a = 1, "group"_a = 0, "gated"_a = false,
      "routing_is_complete"_a = false, "csrc/kernels/moe/expert_gemm.h. blocks: [experts, bytes]");
  bind_route_scores(m);
  bind_sorted_gemms(m);
  m.def(
      "moe_combine",
      [](const OpsContext& c, SharedArray hidden, SharedArray y, const OpsRouting& routing,
         SharedArray shared, SharedArray shared_gate, int64_t gate_column, float scale,
         SharedArray normed, SharedArray norm_weight, float norm_eps, float norm_offset) {
        moe_combine(c.ctx, {.hidden = tensor_of(hidden),
                            .y = tensor_of(y),
                            .routing = routing.routing,
                            .shared = tensor_of(shared),
                            .shared_gate = tensor_of(shared_gate),
                            .gate_column = gate_column,
                            .scale = scale,
                            .norm = norm_of(normed, hidden, norm_weight, norm_eps, norm_offset)});
      },
      "ctx"_a, "hidden"_a, "y"_a, "routing"_a, py::kw_only(), "shared"_a = SharedArray(),
      "shared_gate"_a = SharedArray(), "gate_column"_a = 0, "scale"_a = 1.f,
      "normed"_a = SharedArray(), "norm_weight"_a = SharedArray(), "norm_eps"_a = 1e-6f,
      "norm_offset"_a = 0.f, "csrc/kernels/moe/moe_combine.h");
}

}  // namespace cpmcu
