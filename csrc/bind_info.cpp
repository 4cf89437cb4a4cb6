// C.build_info_json: what this module was built with. Only this file is compiled with the
// definition, so a new commit or compiler version rebuilds nothing else.
#include <pybind11/pybind11.h>

#ifndef CPMCU_BUILD_INFO
#define CPMCU_BUILD_INFO "{}"
#endif

namespace cpmcu {

void bind_info(pybind11::module_& m) {
  // A JSON object: tag, archs, cxx, nvcc, commit; unknown entries are empty strings.
  m.attr("build_info_json") = CPMCU_BUILD_INFO;
}

}  // namespace cpmcu
