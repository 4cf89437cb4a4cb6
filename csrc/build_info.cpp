// What this module was built with. Only this file is compiled with the definition, so a new commit
// or compiler version rebuilds nothing else.
#include "build_info.h"

#ifndef CPMCU_BUILD_INFO
#define CPMCU_BUILD_INFO "{}"
#endif

namespace cpmcu {

const char* build_info_json() { return CPMCU_BUILD_INFO; }

}  // namespace cpmcu
