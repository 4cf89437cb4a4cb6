// From a checkpoint's tensors to their places in device memory: an exact-name table and a streaming
// loader.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/context.h"
#include "core/tensor.h"

namespace cpmcu {

class WeightTable {
 public:
  struct Entry {
    Tensor destination;
    bool required = true;
    bool loaded = false;
  };

  void add(const std::string& name, const Tensor& destination, bool required = true);
  // Checks the name, the shape and that the dtype can become the destination's.
  Entry& find(const std::string& name, DType dtype, const std::vector<int64_t>& shape);
  const std::map<std::string, Entry>& entries() const { return entries_; }
  // Throws, naming the required tensors that were not loaded.
  void check_complete() const;

 private:
  std::map<std::string, Entry> entries_;
};

// One tensor's bytes in a file.
struct FileEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t offset = 0;
  int64_t num_bytes = 0;
};

// Streams tensors into place: several threads read blocks into pinned memory, look for NaN and
// infinities, convert where the dtypes differ, and copy to the device, so that disk, conversion and
// PCIe overlap and no second copy of the model is ever in host memory.
class WeightLoader {
 public:
  explicit WeightLoader(const Context& ctx);
  ~WeightLoader();

  // `progress` is called on the calling thread with the bytes done. On an error none of the entries
  // counts as loaded.
  void load_file(WeightTable& table, const std::string& path, const std::vector<FileEntry>& entries,
                 const std::function<void(int64_t)>& progress);
  // One tensor that is in host memory already.
  void load_array(WeightTable& table, const std::string& name, DType dtype,
                  const std::vector<int64_t>& shape, const void* data);

 private:
  class Reader;
  const Context& ctx_;
  std::vector<std::unique_ptr<Reader>> readers_;
};

}  // namespace cpmcu
