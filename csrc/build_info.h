#pragma once

namespace cpmcu {

// A JSON object: tag, archs, cxx, nvcc, commit. Unknown values are empty strings.
const char* build_info_json();

}  // namespace cpmcu
