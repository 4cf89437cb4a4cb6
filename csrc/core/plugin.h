// Linear methods, blocks and drafters from outside the package.
//
// A plugin is a shared library, compiled against csrc/ with the same REGISTER_* lines as the files
// of the engine. Loading the library runs these registrations. The library is not linked with the
// engine: it uses the symbols of the extension that is already loaded.
#pragma once

#include <string>

namespace cpmcu {

// Throws if the library is missing or was built for another version of the engine.
void load_plugin(const std::string& path);

}  // namespace cpmcu
