#include "layers/kv_cache.h"

#include <cstring>

namespace cpmcu {

KvCache::KvCache(std::vector<Shape> shapes) {
  for (const Shape& shape : shapes) pools_.push_back({.shape = shape, .id = 0, .memory = {}});
}

KvCache::~KvCache() {
  if (mirror_ != nullptr) release_pinned(device_, mirror_);
}

void KvCache::plan_table(MemoryPlan& plan, int num_slots, int max_model_len) {
  num_slots_ = num_slots;
  max_pages_ = (max_model_len + kPageSize - 1) / kPageSize;
  table_id_ = plan.add("page_table", "state", int64_t{4} * num_slots_ * max_pages_);
}

void KvCache::plan_pages(MemoryPlan& plan, int num_pages) {
  num_pages_ = num_pages;
  for (Pool& pool : pools_)
    pool.id = plan.add("kv_pages", "kv", num_pages * pool.shape.page_bytes());
}

int64_t KvCache::page_bytes() const {
  int64_t bytes = 0;
  for (const Pool& pool : pools_) bytes += pool.shape.page_bytes();
  return bytes;
}

Tensor KvCache::part(int layer, int which) const {
  for (const Pool& pool : pools_) {
    if (layer < pool.shape.num_layers) {
      return pool.memory.rows(2 * layer + which, 1)
          .view({num_pages_, pool.shape.num_kv_heads, kPageSize, pool.shape.head_dim});
    }
    layer -= pool.shape.num_layers;
  }
  throw Error(ErrorKind::kRuntime, format("the KV cache has {} layers too few", layer + 1));
}

void KvCache::bind(const Context& ctx, const Arena& arena) {
  device_ = ctx.device;
  for (Pool& pool : pools_) {
    const bool is_drafts = &pool != &pools_.front();
    const int64_t page_elements =
        int64_t{pool.shape.num_kv_heads} * kPageSize * pool.shape.head_dim;
    pool.memory = arena.tensor(pool.id, pool.shape.dtype,
                               {2 * pool.shape.num_layers, num_pages_, page_elements});
    // No NaN where nobody wrote: CUDA kernels read whole tiles and weigh the other cells with zero,
    // and a draft sees the cells of the plain steps that it was left out of.
    if (ctx.device.is_cuda() || is_drafts) {
      fill_bytes(ctx.device, pool.memory.data(), 0, pool.memory.num_bytes(), ctx.stream);
    }
  }
  table_ = arena.array<int>(table_id_);
  const int64_t table_bytes = int64_t{4} * num_slots_ * max_pages_;
  mirror_ = static_cast<int*>(allocate_pinned(ctx.device, table_bytes));
  std::memset(mirror_, 0, static_cast<size_t>(table_bytes));
  copy_to_device(ctx.device, table_, mirror_, table_bytes, ctx.stream);
  pages_.resize(static_cast<size_t>(num_slots_));
  for (int page = num_pages_ - 1; page >= 0; --page) free_.push_back(page);
}

bool KvCache::reserve(const Context& ctx, int slot, int num_cells) {
  std::vector<int>& pages = pages_[static_cast<size_t>(slot)];
  const int have = static_cast<int>(pages.size());
  const int need = (num_cells + kPageSize - 1) / kPageSize;
  CHECK_STATE(need <= max_pages_, "slot {} asks for {} cells, the page table holds {}", slot,
              num_cells, max_pages_ * kPageSize);
  if (need <= have) return true;
  if (need - have > num_free_pages()) return false;
  int* row = mirror_ + int64_t{slot} * max_pages_;
  for (int i = have; i < need; ++i) {
    row[i] = free_.back();
    pages.push_back(free_.back());
    free_.pop_back();
  }
  // NOTE: an upload still in flight may pick up newer numbers of the mirror. That is harmless:
  // pages change hands only through `release`, and what earlier steps write there is overwritten by
  // the new owner, whose steps come later on the stream, before it is read.
  copy_to_device(ctx.device, table_ + int64_t{slot} * max_pages_ + have, row + have,
                 int64_t{4} * (need - have), ctx.stream);
  return true;
}

void KvCache::release(int slot) {
  std::vector<int>& pages = pages_[static_cast<size_t>(slot)];
  free_.insert(free_.end(), pages.rbegin(), pages.rend());
  pages.clear();
}

}  // namespace cpmcu
