// Python bindings of the launches of a pass, as data.
#include "engine/bind_launches.h"

#include <pybind11/stl.h>

#include "engine/bind_ranks.h"

namespace py = pybind11;

namespace cpmcu {
namespace {

using LaunchDict = py::typing::Dict<py::str, py::object>;

std::vector<LaunchDict> launches(const Ranks& engine, bool prefill, std::optional<int> capability) {
  using namespace py::literals;
  std::vector<LaunchDict> rows;
  for (const LaunchRow& row :
       engine.first().launches(prefill ? Phase::kPrefill : Phase::kDecode, capability)) {
    rows.push_back(py::dict("layer"_a = row.layer, "kind"_a = row.kind, "ops"_a = row.parts,
                            "bytes"_a = row.weight_bytes));
  }
  return rows;
}

}  // namespace

void bind_launches(EngineClass& engine) {
  engine
      .def("launches", &launches, py::arg("prefill") = false, py::arg("capability") = py::none(),
           R"({layer, kind, ops, bytes} of each launch of a pass of the target.

           layer: of the first op, -1: before the first layer. ops: names; "next " precedes those of
           the next layer. bytes: of the weights that it reads for one token, 0: none or unknown.
           capability: of another device, 90 for sm_90, 0 for the CPU.)")
      .def("cut_for", on_each<&Engine::cut_for>, py::arg("capability"),
           R"(For tests: cuts the target's pass as for a device of this compute capability.

           On the CPU a fused layer then runs op by op.)");
}

}  // namespace cpmcu
