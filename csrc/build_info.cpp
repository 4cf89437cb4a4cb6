// The compilers and the commit of this build. Only this file is compiled with CPMCU_BUILD_INFO, so
// a new commit or compiler version recompiles nothing else.
#include "build_info.h"

#ifndef CPMCU_BUILD_INFO
#define CPMCU_BUILD_INFO "{}"
#endif

namespace cpmcu {

const char* build_info_json() { return CPMCU_BUILD_INFO; }

}  // namespace cpmcu
