// The state of one model's sequences on the device: paged planes and per-slot tensors.
//
// A block declares its state in `plan` and keeps the handles. A paged plane has 1 to 64 rows for
// each page of 64 tokens: 64 for keys or values, fewer if a row summarises several tokens. All
// planes of a group of layers, of all models, share the page numbers of a slot
// (state/page_group.h). A per-slot tensor is state of a fixed size: that of a recurrence, the last
// inputs of a convolution.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/context.h"
#include "kernels/tree/tree.h"

namespace cpmcu {

struct PagedPlane {
  int rows_per_page = kPageSize;
  int num_heads = 1;
  int width = 0;  // elements in a row of one head
  DType dtype = DType::kBF16;

  int64_t page_elements() const { return int64_t{num_heads} * rows_per_page * width; }
  int64_t page_bytes() const { return page_elements() * size_of(dtype); }
  // A plane with a row for each token: rows of accepted tokens are moved into place by `commit`.
  bool is_per_token() const { return rows_per_page == kPageSize; }
  bool operator==(const PagedPlane&) const = default;
};

struct SlotTensor {
  std::string name;            // name in the memory plan
  std::vector<int64_t> shape;  // shape for one slot, up to 3 dimensions
  DType dtype = DType::kF32;
  // If true, `save_slot` leaves the tensor out and `reset` does not clear it. Another tensor says
  // whether its content counts.
  bool transient = false;

  int64_t num_bytes() const;  // bytes of one slot
};

class ModelState {
 public:
  // `scope`: "" for the target, a prefix such as "draft." for other models. `has_gaps`: attention
  // may read rows that were never written, so planes begin as zero. Such a model also writes
  // entries again, so all its planes are in group 0, which keeps the entries before a window.
  ModelState(std::string scope, bool has_gaps) : scope_(std::move(scope)), has_gaps_(has_gaps) {}
  const std::string& scope() const { return scope_; }
  ModelState(const ModelState&) = delete;
  ModelState& operator=(const ModelState&) = delete;

  // ---- declared while memory is planned
  struct PagedId {
    int planes = -1, index = -1;
  };
  struct SlotId {
    int index = -1;
  };
  // `window`: tokens to which the layer attends, itself included; 0: all. Other blocks of the model
  // may read a plane that has a name.
  PagedId add_paged(const PagedPlane& plane, int window = 0, const std::string& name = "");
  // The plane of this name, which an earlier block declared. It must equal `plane` and have this
  // window.
  PagedId find_paged(const PagedPlane& plane, int window, const std::string& name) const;
  SlotId add_slot(const SlotTensor& tensor);

  std::vector<int> windows() const;      // windows of all planes; a window may occur several times
  int64_t page_bytes(int window) const;  // bytes of one page in all planes with this window
  int64_t slot_bytes() const;  // bytes of a slot in all per-slot tensors, transient ones left out
  void plan_slots(MemoryPlan& plan, int num_slots);
  // One number of pages, and one page table on the device [slots, max_pages], for each window.
  void plan_pages(MemoryPlan& plan, const std::map<int, int>& num_pages);
  void bind(const Arena& arena, const std::map<int, const int*>& tables);
  void clear_slots(const Context& ctx);
  void clear_pages(const Context& ctx);  // called after the weights are loaded

  // ---- used by blocks
  Tensor paged(PagedId id) const;  // [pages, num_heads, rows_per_page, width]
  const int* page_table(PagedId id) const { return planes_of(id).table; }
  Tensor per_slot(SlotId id) const;  // [slots, shape…]

  // ---- verbs
  // A new sequence in `slot`: its per-slot tensors become zero. In stream order.
  void reset(const Context& ctx, int slot) const;
  // Copies a page of a group's planes to or from pinned memory [page_bytes]. In stream order.
  void save_page(const Context& ctx, int window, int page, char* host) const;
  void load_page(const Context& ctx, int window, int page, const char* host) const;
  // Copies a slot's per-slot tensors to or from pinned memory [slot_bytes]. In stream order.
  // Transient tensors are left out.
  void save_slot(const Context& ctx, int slot, char* host) const;
  void load_slot(const Context& ctx, int slot, const char* host) const;
  // After acceptance: rows of accepted tokens move into place in every per-token plane.
  // Sets pool, num_heads, width and page_table of `params`. Graph-safe.
  void commit(const Context& ctx, KeepAcceptedParams params) const;

 private:
  // Planes that are alike are one buffer, so that `commit` moves them in one launch.
  struct Planes {
    PagedPlane plane;
    int window = 0, count = 0;
    int num_pages = 0;
    const int* table = nullptr;
    MemoryPlan::Id id = 0;
    Tensor memory{};  // [count, pages, page_elements]
  };
  struct Slots {
    SlotTensor tensor;
    MemoryPlan::Id id = 0;
    char* memory = nullptr;  // [slots, num_bytes]
  };

  const Planes& planes_of(PagedId id) const { return planes_.at(static_cast<size_t>(id.planes)); }

  std::string scope_;
  bool has_gaps_;
  int num_slots_ = 0;
  std::vector<Planes> planes_;
  std::map<std::string, PagedId> named_;
  std::vector<Slots> slots_;
};

}  // namespace cpmcu
