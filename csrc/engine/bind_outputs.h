// Python bindings of the results of a step.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "engine/engine.h"

namespace cpmcu {

// The results of a step, one for each sequence that was not released meanwhile.
struct StepOutputs {
  std::vector<Engine::SlotOutput> outputs{};
};

void bind_outputs(pybind11::module_& m);

}  // namespace cpmcu
