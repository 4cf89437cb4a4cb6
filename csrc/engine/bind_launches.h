// The bindings of Engine that are in bind_launches.cpp.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

#include "engine/ranks.h"

namespace cpmcu {

using EngineClass = pybind11::class_<Ranks>;

void bind_launches(EngineClass& engine);

}  // namespace cpmcu
