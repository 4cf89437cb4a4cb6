// Defines the Python module. Host code only: compiled as C++.
#include "bindings.h"
#include "build_info.h"
#include "core/check.h"

namespace {

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const cpmcu::Error& error) {
    switch (error.kind()) {
      case cpmcu::ErrorKind::kInvalid:
        PyErr_SetString(PyExc_ValueError, error.what());
        break;
      case cpmcu::ErrorKind::kMemory:
        PyErr_SetString(PyExc_MemoryError, error.what());
        break;
      case cpmcu::ErrorKind::kRuntime:
        PyErr_SetString(PyExc_RuntimeError, error.what());
        break;
    }
  }
}

}  // namespace

PYBIND11_MODULE(C, m) {
  m.doc() = "The C++ extension: engine, model specification and kernels.";
  pybind11::register_exception_translator(&translate);
  cpmcu::bind_specs(m);
  cpmcu::bind_memory_plan(m);
  cpmcu::bind_engine(m);
  cpmcu::bind_ops(m);
  cpmcu::bind_ceilings(m);
  cpmcu::bind_trace(m);
  m.attr("build_info_json") = cpmcu::build_info_json();
}
