// Loads the tensors of a checkpoint: a table from exact names to device memory, and a streaming
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
  struct Range {
    int64_t begin = 0, size = 0;
  };
  struct Entry {
    Tensor destination;
    bool required = true;
    bool loaded = false;
    std::vector<int64_t> shape{};     // shape of the stored tensor
    std::vector<int64_t> sections{};  // numbers of rows, as in set_sections
    // The destination takes `ranges` of dimension cut_dim of the stored tensor, in order. If
    // cut_dim is -1, it takes the whole tensor.
    int cut_dim = -1;
    std::vector<Range> ranges{};
  };

  void add(const std::string& name, const Tensor& destination, bool required = true);
  // The tensors of `module` are stacks of sections with these numbers of rows, such as q, k and v.
  // Each section is divided by itself.
  void set_sections(const std::string& module, const std::vector<int64_t>& rows);
  // Sets which elements of a stored tensor its destination takes. `whole`: the table of the
  // undivided model; `divided`: that of a rank's part. If the tensor is larger in `whole` than
  // here, the destination takes the part of `rank`. If it is as large as in `whole` but smaller in
  // `divided`, the destination takes all: first the part of `rank`, then the rest. Throws if a
  // tensor cannot be divided.
  void take_parts(const WeightTable& whole, const WeightTable& divided, int rank, int num_ranks);
  // Throws if the name is unknown, the shape differs, or the dtype cannot be converted.
  Entry& find(const std::string& name, DType dtype, const std::vector<int64_t>& shape);
  const std::map<std::string, Entry>& entries() const { return entries_; }
  // Throws if required tensors were not loaded; the message names them.
  void check_complete() const;

 private:
  std::map<std::string, Entry> entries_;
};

// The location of one tensor in a file.
struct FileEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t offset = 0;
  int64_t num_bytes = 0;
};

// Streams tensors to the device. Several threads read chunks of them into pinned memory, reject NaN
// and infinities, convert the dtype if necessary, and copy to the device. So disk reads, conversion
// and PCIe copies overlap, and host memory never holds a copy of the model.
class WeightLoader {
 public:
  explicit WeightLoader(const Context& ctx);
  ~WeightLoader();

  // Calls `progress` on the calling thread with the bytes done. If an error occurs, none of the
  // entries counts as loaded.
  void load_file(WeightTable& table, const std::string& path, const std::vector<FileEntry>& entries,
                 const std::function<void(int64_t)>& progress);
  // Loads one tensor from host memory.
  void load_array(WeightTable& table, const std::string& name, DType dtype,
                  const std::vector<int64_t>& shape, const void* data);

 private:
  class Reader;
  const Context& ctx_;
  std::vector<std::unique_ptr<Reader>> readers_;
};

}  // namespace cpmcu
