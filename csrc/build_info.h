#pragma once

namespace cpmcu {

// A JSON object: tag, archs, cxx, nvcc, commit; unknown entries are empty strings.
const char* build_info_json();

}  // namespace cpmcu
