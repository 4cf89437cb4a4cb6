// Paged KV cache: a pool of pages of 64 tokens per layer, and a page table per sequence slot.
//
// Page p of every layer belongs to the same slot, so one table serves all layers. The table is in
// device memory; its host mirror is pinned, so uploads are ordered on the stream with the steps.
#pragma once

#include <vector>

#include "core/arena.h"
#include "core/context.h"
#include "kernels/step_rows.h"

namespace cpmcu {

class KvCache {
 public:
  struct Shape {
    int num_layers = 0;
    int num_kv_heads = 0;
    int head_dim = 0;
    DType dtype = DType::kBF16;
    // K and V of one page in all layers.
    int64_t page_bytes() const {
      return int64_t{2} * num_layers * num_kv_heads * kPageSize * head_dim * size_of(dtype);
    }
  };

  explicit KvCache(const Shape& shape) : shape_(shape) {}
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  void plan_table(MemoryPlan& plan, int num_slots, int max_model_len);
  void plan_pages(MemoryPlan& plan, int num_pages);
  void bind(const Context& ctx, const Arena& arena);

  Tensor keys(int layer) const { return pool(2 * layer); }  // [pages, Hkv, 64, D]
  Tensor values(int layer) const { return pool(2 * layer + 1); }
  const int* page_table() const { return table_; }
  int max_pages() const { return max_pages_; }
  int num_pages() const { return num_pages_; }
  int num_free_pages() const { return static_cast<int>(free_.size()); }

  // Cells that the slot's pages hold.
  int capacity(int slot) const {
    return static_cast<int>(pages_[static_cast<size_t>(slot)].size()) * kPageSize;
  }
  // Grows the slot to hold `num_cells`; false, and nothing taken, if too few pages are free.
  bool reserve(const Context& ctx, int slot, int num_cells);
  void release(int slot);

 private:
  Tensor pool(int index) const {
    return pool_.rows(index, 1).view({num_pages_, shape_.num_kv_heads, kPageSize, shape_.head_dim});
  }

  Shape shape_;
  Device device_;
  int num_slots_ = 0;
  int max_pages_ = 0;  // of one slot
  int num_pages_ = 0;
  MemoryPlan::Id pool_id_ = 0, table_id_ = 0;
  Tensor pool_;            // [2 * layers, pages * Hkv * 64 * D]
  int* table_ = nullptr;   // [slots, max_pages]
  int* mirror_ = nullptr;  // the same in pinned memory
  std::vector<int> free_;
  std::vector<std::vector<int>> pages_;  // of each slot
};

}  // namespace cpmcu
