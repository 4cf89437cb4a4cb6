#include "state/model_state.h"

#include <algorithm>

namespace cpmcu {

int64_t SlotTensor::num_bytes() const {
  int64_t bytes = size_of(dtype);
  for (int64_t size : shape) bytes *= size;
  return bytes;
}

ModelState::PagedId ModelState::add_paged(const PagedPlane& plane) {
  CHECK_STATE(plane.rows_per_page >= 1 && plane.rows_per_page <= kPageSize &&
                  plane.num_heads >= 1 && plane.width >= 1,
              "a paged plane of {} heads, {} rows a page and width {}", plane.num_heads,
              plane.rows_per_page, plane.width);
  auto group = std::find_if(groups_.begin(), groups_.end(),
                            [&](const Group& other) { return other.plane == plane; });
  if (group == groups_.end()) group = groups_.insert(groups_.end(), {.plane = plane});
  return {static_cast<int>(group - groups_.begin()), group->count++};
}

ModelState::SlotId ModelState::add_slot(const SlotTensor& tensor) {
  CHECK_STATE(
      tensor.shape.size() < Tensor::kMaxDims && tensor.num_bytes() > 0,
      "the per-slot tensor {} has {} dimensions and {} bytes, expected at most 3 dimensions",
      tensor.name, tensor.shape.size(), tensor.num_bytes());
  slots_.push_back({.tensor = tensor});
  return {static_cast<int>(slots_.size()) - 1};
}

int64_t ModelState::page_bytes() const {
  int64_t bytes = 0;
  for (const Group& group : groups_) bytes += group.count * group.plane.page_bytes();
  return bytes;
}

int64_t ModelState::slot_bytes() const {
  int64_t bytes = 0;
  for (const Slots& slots : slots_) {
    if (!slots.tensor.transient) bytes += slots.tensor.num_bytes();
  }
  return bytes;
}

void ModelState::plan_slots(MemoryPlan& plan, int num_slots) {
  num_slots_ = num_slots;
  for (Slots& slots : slots_) {
    slots.id = plan.add(scope_ + slots.tensor.name, "state", num_slots * slots.tensor.num_bytes());
  }
}

void ModelState::plan_pages(MemoryPlan& plan, int num_pages) {
  num_pages_ = num_pages;
  for (Group& group : groups_) {
    group.id = plan.add(scope_ + "pages", "kv",
                        int64_t{num_pages} * group.count * group.plane.page_bytes());
  }
}

void ModelState::bind(const Context& ctx, const Arena& arena) {
  for (Group& group : groups_) {
    group.memory = arena.tensor(group.id, group.plane.dtype,
                                {group.count, num_pages_, group.plane.page_elements()});
    // CUDA kernels read whole tiles and multiply invisible rows by 0, which would not remove NaN.
    if (ctx.device.is_cuda() || has_gaps_) {
      fill_bytes(ctx.device, group.memory.data(), 0, group.memory.num_bytes(), ctx.stream);
    }
  }
  for (Slots& slots : slots_) {
    slots.memory = arena.array<char>(slots.id);
    fill_bytes(ctx.device, slots.memory, 0, num_slots_ * slots.tensor.num_bytes(), ctx.stream);
  }
}

Tensor ModelState::paged(PagedId id) const {
  const Group& group = groups_.at(static_cast<size_t>(id.group));
  const PagedPlane& plane = group.plane;
  return group.memory.rows(id.index, 1)
      .view({num_pages_, plane.num_heads, plane.rows_per_page, plane.width});
}

Tensor ModelState::per_slot(SlotId id) const {
  const Slots& slots = slots_.at(static_cast<size_t>(id.index));
  const std::vector<int64_t>& s = slots.tensor.shape;
  const DType dtype = slots.tensor.dtype;
  switch (s.size()) {
    case 0:
      return {slots.memory, dtype, {num_slots_}};
    case 1:
      return {slots.memory, dtype, {num_slots_, s[0]}};
    case 2:
      return {slots.memory, dtype, {num_slots_, s[0], s[1]}};
    default:
      return {slots.memory, dtype, {num_slots_, s[0], s[1], s[2]}};
  }
}

void ModelState::reset(const Context& ctx, int slot) const {
  for (const Slots& slots : slots_) {
    if (slots.tensor.transient) continue;
    const int64_t bytes = slots.tensor.num_bytes();
    fill_bytes(ctx.device, slots.memory + slot * bytes, 0, bytes, ctx.stream);
  }
}

// A page of a group is one contiguous range of bytes in each plane. In host memory the ranges are
// adjacent.
void ModelState::save_page(const Context& ctx, int page, char* host) const {
  for (const Group& group : groups_) {
    const int64_t width = group.plane.page_bytes();
    copy_strided(ctx.device,
                 {.dst = host,
                  .dst_pitch = width,
                  .src = static_cast<const char*>(group.memory.data()) + page * width,
                  .src_pitch = num_pages_ * width,
                  .width = width,
                  .height = group.count},
                 ctx.stream);
    host += group.count * width;
  }
}

void ModelState::load_page(const Context& ctx, int page, const char* host) const {
  for (const Group& group : groups_) {
    const int64_t width = group.plane.page_bytes();
    copy_strided(ctx.device,
                 {.dst = static_cast<char*>(group.memory.data()) + page * width,
                  .dst_pitch = num_pages_ * width,
                  .src = host,
                  .src_pitch = width,
                  .width = width,
                  .height = group.count},
                 ctx.stream);
    host += group.count * width;
  }
}

void ModelState::save_slot(const Context& ctx, int slot, char* host) const {
  for (const Slots& slots : slots_) {
    if (slots.tensor.transient) continue;
    const int64_t bytes = slots.tensor.num_bytes();
    copy_to_host(ctx.device, host, slots.memory + slot * bytes, bytes, ctx.stream);
    host += bytes;
  }
}

void ModelState::load_slot(const Context& ctx, int slot, const char* host) const {
  for (const Slots& slots : slots_) {
    if (slots.tensor.transient) continue;
    const int64_t bytes = slots.tensor.num_bytes();
    copy_to_device(ctx.device, slots.memory + slot * bytes, host, bytes, ctx.stream);
    host += bytes;
  }
}

void ModelState::commit(const Context& ctx, KeepAcceptedParams params) const {
  for (const Group& group : groups_) {
    if (!group.plane.is_per_token()) continue;
    params.pool = group.memory;
    params.num_heads = group.plane.num_heads;
    params.width = group.plane.width;
    keep_accepted(ctx, params);
    params.hidden = {};  // copied once
  }
  if (params.hidden.empty()) return;
  params.pool = {};
  keep_accepted(ctx, params);
}

}  // namespace cpmcu
