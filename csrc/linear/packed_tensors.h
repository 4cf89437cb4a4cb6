// The table of layouts: the tensors of a checkpoint that make up one packed matrix
// (kernels/gemm/packed/packed.h), and how they become its weight blocks.
//
// A layout is one file that ends in REGISTER_LAYOUT("name", Class), here or in a plugin. The linear
// method "packed" and its experts find the class by LinearOptions::layout.
#pragma once

#include <memory>
#include <string>

#include "core/registry.h"
#include "kernels/gemm/packed/packed.h"
#include "linear/linear.h"

namespace cpmcu {

class PackedTensors {
 public:
  virtual ~PackedTensors() = default;
  // The matrix in weight blocks, without memory.
  virtual PackedWeight weight() const = 0;
  // Size of the buffer that holds the tensors while they are loaded.
  virtual int64_t num_bytes() const = 0;
  // Lists the tensors at their places in `buffer`. `prefix` precedes the names.
  virtual void list(WeightTable& table, char* buffer, const std::string& prefix) const = 0;
  // Packs the tensors in `buffer` into the blocks of `weight`.
  virtual void pack(const Context& ctx, const PackedWeight& weight, char* buffer) const = 0;
};

using LayoutRegistry = Registry<PackedTensors, const LinearConfig&>;

inline std::unique_ptr<PackedTensors> make_packed_tensors(const LinearConfig& config) {
  return LayoutRegistry::instance().create("layout of packed weights", config.options.layout,
                                           config);
}

}  // namespace cpmcu

#define REGISTER_LAYOUT(name, Class)                                                       \
  static const bool registered_##Class = ::cpmcu::LayoutRegistry::instance().add(          \
      name,                                                                                \
      [](const ::cpmcu::LinearConfig& config) -> std::unique_ptr<::cpmcu::PackedTensors> { \
        return std::make_unique<Class>(config);                                            \
      },                                                                                   \
      __FILE__)
