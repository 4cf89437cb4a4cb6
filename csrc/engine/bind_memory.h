// Code that several bindings of memory plans use.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <vector>

#include "core/arena.h"

namespace cpmcu {

using PlanRow = pybind11::typing::Dict<pybind11::str, pybind11::object>;

// {name, group, offset, bytes, first, last} of each buffer.
std::vector<PlanRow> plan_rows(const MemoryPlan& plan);

}  // namespace cpmcu
