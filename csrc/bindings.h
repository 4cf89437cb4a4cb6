// The parts of the Python module. Each is defined in the folder of its subject.
#pragma once

#include <pybind11/pybind11.h>

namespace cpmcu {

void bind_specs(pybind11::module_& m);        // engine/bind_specs.cpp
void bind_memory_plan(pybind11::module_& m);  // engine/bind_memory.cpp
void bind_engine(pybind11::module_& m);       // engine/bind_engine.cpp
void bind_ops(pybind11::module_& m);          // kernels/bind_ops.cpp
void bind_ceilings(pybind11::module_& m);     // kernels/bind_ceilings.cpp
void bind_trace(pybind11::module_& m);        // kernels/bind_trace.cpp

}  // namespace cpmcu
