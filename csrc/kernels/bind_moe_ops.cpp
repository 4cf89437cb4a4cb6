// C.ops of the mixture of experts (kernels/moe). A Python Routing owns its arrays.
#include <pybind11/stl.h>

#include "kernels/bind_packed_weight.h"
#include "kernels/moe/expert_gemm.h"
#include "kernels/moe/moe_combine.h"
#include "kernels/moe/moe_router.h"
#include "kernels/moe/route_scores.h"
#include "kernels/moe/sorted_gemm.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace cpmcu {
namespace {

// The options of a norm. Its input and output are fields of the op.
auto norm_options() {
  using N = RmsNormParams;
  return fields_of<N>(option("norm_weight", &N::weight), option("norm_eps", &N::eps),
                      option("norm_offset", &N::weight_offset));
}

// The blocks of all experts: [experts, bytes]
template <typename P>
auto expert_blocks() {
  return field_of<P, SharedArray>("blocks", [](P& p, const SharedArray& blocks) {
    p.w.blocks = blocks->as<uint8_t>(DType::kU8);
    p.stride = blocks->tensor().size(1);
  });
}

void bind_routing(py::module_& m) {
  using Bound = OpsParams<Routing>;
  py::class_<Bound> routing(m, "Routing",
                            "The experts of tokens; see csrc/kernels/moe/moe_route.h.");
  routing.def(py::init([](SharedContext c, int64_t num_tokens, int num_experts, int top_k) {
                const int64_t num_pairs = num_tokens * top_k;
                Bound made{{.num_experts = num_experts, .top_k = top_k}};
                const auto array = [&](int64_t count, const char* dtype) {
                  made.arrays.push_back(
                      std::make_shared<Array>(c, std::vector<int64_t>{count}, dtype, false));
                  return made.arrays.back();
                };
                Routing& p = made.params;
                p.experts = pointer_to<int>(array(num_pairs, "int32"));
                p.weights = pointer_to<float>(array(num_pairs, "float32"));
                p.pairs = pointer_to<int>(array(num_pairs, "int32"));
                p.offsets = pointer_to<int>(array(num_experts + 1, "int32"));
                p.active = pointer_to<int>(array(num_experts, "int32"));
                p.num_active = pointer_to<int>(array(1, "int32"));
                p.spans = reinterpret_cast<ExpertSpan*>(
                    pointer_to<int>(array(4 * std::min<int64_t>(num_experts, num_pairs), "int32")));
                return made;
              }),
              "ctx"_a, py::kw_only(), "num_tokens"_a, "num_experts"_a, "top_k"_a);
  int i = 0;
  for (const char* name :
       {"experts", "weights", "pairs", "offsets", "active", "num_active", "spans"}) {
    routing.def_property_readonly(name, [at = i++](const Bound& r) { return r.arrays[at]; });
  }
}

void bind_routers(py::module_& m) {
  using Route = MoeRouteParams;
  bind_op(m, "moe_route", moe_route, "csrc/kernels/moe/moe_route.h",
          field("routing", &Route::routing), field("logits", &Route::logits), py::kw_only(),
          field("renormalise", &Route::renormalise));
  using Router = MoeRouterParams;
  const auto norm_x = [](Router& p, const SharedArray& x) {
    p.norm.x = tensor_of(x);
    p.norm.out = x ? p.x : Tensor();
  };
  bind_op(m, "moe_router", moe_router,
          "csrc/kernels/moe/moe_router.h. memory: [moe_router_bytes] uint8, zero",
          field("logits", &Router::logits), field("x", &Router::x), field("w", &Router::w),
          field("routing", &Router::routing), py::kw_only(), field("memory", &Router::memory),
          option("bias", &Router::bias), option("renormalise", &Router::renormalise),
          optional(field_of<Router, SharedArray>("norm_x", norm_x)),
          within(&Router::norm, norm_options()));
  m.def("moe_router_bytes", &moe_router_bytes, "num_tokens"_a, "num_rows"_a);
  using Score = ScoreExpertsParams;
  bind_op(m, "score_experts", score_experts, "csrc/kernels/moe/route_scores.h",
          field("scores", &Score::scores), field("logits", &Score::logits),
          option("bias", &Score::bias));
  using Mask = MaskGroupsParams;
  bind_op(m, "mask_groups", mask_groups, "csrc/kernels/moe/route_scores.h",
          field("logits", &Mask::logits), py::kw_only(), field("num_experts", &Mask::num_experts),
          within(&Mask::groups, fields_of<ExpertGroups>(field("count", &ExpertGroups::count),
                                                        field("top_k", &ExpertGroups::top_k))));
  using Weigh = WeighExpertsParams;
  bind_op(m, "weigh_experts", weigh_experts, "csrc/kernels/moe/route_scores.h",
          field("routing", &Weigh::routing), py::kw_only(), field("num_tokens", &Weigh::num_tokens),
          option("scores", &Weigh::scores), option("renormalise", &Weigh::renormalise),
          option("epsilon", &Weigh::epsilon), option("factor", &Weigh::factor),
          option("scale", &Weigh::scale));
}

void bind_sorted_gemms(py::module_& m) {
  m.def("has_sorted_gemm", [](const OpsContext& c) { return has_sorted_gemm(c.ctx); }, "ctx"_a);
  using Gather = GatherPairsParams;
  bind_op(m, "gather_pairs", gather_pairs, "csrc/kernels/moe/sorted_gemm.h",
          field("sorted", &Gather::sorted), field("x", &Gather::x),
          field("routing", &Gather::routing));
  const auto matrices =
      fields_of<SortedRows>(field("y", &SortedRows::y), field("x", &SortedRows::x));
  const auto routing = field("routing", &SortedRows::routing);
  const auto sorted_y = option("sorted_y", &SortedRows::sorted_y);
  using Dense = SortedGemmParams;
  bind_op(m, "sorted_gemm", sorted_gemm, "csrc/kernels/moe/sorted_gemm.h",
          within(&Dense::rows, matrices), field("w", &Dense::w), within(&Dense::rows, routing),
          py::kw_only(), within(&Dense::rows, sorted_y), option("gated", &Dense::gated));
  using Packed = PackedSortedGemmParams;
  bind_op(m, "packed_sorted_gemm", packed_sorted_gemm,
          "csrc/kernels/moe/sorted_gemm.h. blocks: [experts, bytes]",
          within(&Packed::rows, matrices), expert_blocks<Packed>(), within(&Packed::rows, routing),
          py::kw_only(), within(&Packed::rows, sorted_y),
          within(&Packed::w, packed_weight_fields()));
}

void bind_expert_gemms(py::module_& m) {
  const auto matrices =
      fields_of<ExpertRows>(field("y", &ExpertRows::y), field("x", &ExpertRows::x));
  const auto routing = field("routing", &ExpertRows::routing);
  const auto options = fields_of<ExpertRows>(
      option("pairs_per_x", &ExpertRows::pairs_per_x),
      option("routing_is_complete", &ExpertRows::routing_is_complete),
      option("bias", &ExpertRows::bias), option("swiglu_alpha", &ExpertRows::swiglu_alpha),
      option("swiglu_limit", &ExpertRows::swiglu_limit));
  using Dense = ExpertGemmParams;
  bind_op(m, "expert_gemm", expert_gemm, "csrc/kernels/moe/expert_gemm.h",
          within(&Dense::rows, matrices), field("w", &Dense::w), within(&Dense::rows, routing),
          py::kw_only(), within(&Dense::rows, options), option("gated", &Dense::gated));
  using Packed = PackedExpertGemmParams;
  bind_op(m, "packed_expert_gemm", packed_expert_gemm,
          "csrc/kernels/moe/expert_gemm.h. blocks: [experts, bytes]",
          within(&Packed::rows, matrices), expert_blocks<Packed>(), within(&Packed::rows, routing),
          py::kw_only(), within(&Packed::rows, options),
          within(&Packed::w, packed_weight_fields()));
}

}  // namespace

void bind_moe_ops(py::module_& m) {
  bind_routing(m);
  bind_routers(m);
  bind_expert_gemms(m);
  bind_sorted_gemms(m);
  using Combine = MoeCombineParams;
  const auto normed = [](Combine& p, const SharedArray& out) {
    p.norm.out = tensor_of(out);
    p.norm.x = out ? p.hidden : Tensor();
  };
  bind_op(m, "moe_combine", moe_combine, "csrc/kernels/moe/moe_combine.h",
          field("hidden", &Combine::hidden), field("y", &Combine::y),
          field("routing", &Combine::routing), py::kw_only(), option("bias", &Combine::bias),
          option("shared", &Combine::shared), option("shared_gate", &Combine::shared_gate),
          option("gate_column", &Combine::gate_column), option("scale", &Combine::scale),
          optional(field_of<Combine, SharedArray>("normed", normed)),
          within(&Combine::norm, norm_options()));
}

}  // namespace cpmcu
