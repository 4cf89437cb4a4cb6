#include "core/plugin.h"

#include <dlfcn.h>

#include "core/check.h"

namespace cpmcu {

void load_plugin(const std::string& path) {
  // Python loads extensions with local symbols. The plugin needs the symbols of this extension, so
  // they are made global here.
  Dl_info self{};
  const bool found = dladdr(reinterpret_cast<const void*>(&load_plugin), &self) != 0;
  CHECK_STATE(found && dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL) != nullptr,
              "the engine's own library was not found, so {} cannot be linked with it", path);
  CHECK(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr, "plugin {} cannot be loaded: {}",
        path, dlerror());
}

}  // namespace cpmcu
