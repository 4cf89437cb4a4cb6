#include "state/model_state.h"

#include <algorithm>

#include "kernels/step/step.h"

namespace cpmcu {

int64_t SlotTensor::num_bytes() const {
  int64_t bytes = size_of(dtype);
  for (int64_t size : shape) bytes *= size;
  return bytes;
}

ModelState::PagedId ModelState::add_paged(const PagedPlane& plane, int window,
                                          const std::string& name) {
  CHECK_STATE(plane.rows_per_page >= 1 && plane.rows_per_page <= kPageSize &&
                  plane.num_heads >= 1 && plane.width >= 1,
              "a paged plane of {} heads, {} rows a page and width {}", plane.num_heads,
              plane.rows_per_page, plane.width);
  if (has_gaps_) window = 0;
  auto planes = std::find_if(planes_.begin(), planes_.end(), [&](const Planes& other) {
    return other.plane == plane && other.window == window;
  });
  if (planes == planes_.end()) {
    planes = planes_.insert(planes_.end(), {.plane = plane, .window = window});
  }
  const PagedId id{static_cast<int>(planes - planes_.begin()), planes->count++};
  if (!name.empty()) named_[name] = id;
  return id;
}

ModelState::PagedId ModelState::find_paged(const PagedPlane& plane, int window,
                                           const std::string& name) const {
  const auto found = named_.find(name);
  CHECK(found != named_.end() && planes_of(found->second).plane == plane &&
            planes_of(found->second).window == (has_gaps_ ? 0 : window),
        "no earlier layer has a plane {} of {} heads of {} and a window of {}, expected one to "
        "share",
        name, plane.num_heads, plane.width, window);
  return found->second;
}

ModelState::SlotId ModelState::add_slot(const SlotTensor& tensor) {
  CHECK_STATE(
      tensor.shape.size() < Tensor::kMaxDims && tensor.num_bytes() > 0,
      "the per-slot tensor {} has {} dimensions and {} bytes, expected at most 3 dimensions",
      tensor.name, tensor.shape.size(), tensor.num_bytes());
  slots_.push_back({.tensor = tensor});
  return {static_cast<int>(slots_.size()) - 1};
}

std::vector<int> ModelState::windows() const {
  std::vector<int> windows;
  for (const Planes& planes : planes_) windows.push_back(planes.window);
  return windows;
}

int64_t ModelState::page_bytes(int window) const {
  int64_t bytes = 0;
  for (const Planes& planes : planes_) {
    if (planes.window == window) bytes += planes.count * planes.plane.page_bytes();
  }
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

void ModelState::plan_pages(MemoryPlan& plan, const std::map<int, int>& num_pages) {
  for (Planes& planes : planes_) {
    planes.num_pages = num_pages.at(planes.window);
    const std::string name =
        planes.window == 0 ? "pages" : format_text("pages.window_{}", planes.window);
    // Pages are empty until the weights are loaded, so buffers of loading may lie there.
    planes.id = plan.add_until(scope_ + name, "kv",
                               int64_t{planes.num_pages} * planes.count * planes.plane.page_bytes(),
                               kLoad - 1);
  }
}

void ModelState::bind(const Arena& arena, const std::map<int, const int*>& tables) {
  for (Planes& planes : planes_) {
    planes.table = tables.at(planes.window);
    planes.memory = arena.tensor(planes.id, planes.plane.dtype,
                                 {planes.count, planes.num_pages, planes.plane.page_elements()});
  }
  for (Slots& slots : slots_) slots.memory = arena.array<char>(slots.id);
}

void ModelState::clear_slots(const Context& ctx) {
  for (const Slots& slots : slots_) {
    fill_bytes(ctx.device, slots.memory, 0, num_slots_ * slots.tensor.num_bytes(), ctx.stream);
  }
}

void ModelState::clear_pages(const Context& ctx) {
  // CUDA kernels read whole tiles and multiply invisible rows by 0, which would not remove NaN.
  if (!ctx.device.is_cuda() && !has_gaps_) return;
  for (const Planes& planes : planes_) {
    fill_bytes(ctx.device, planes.memory.data(), 0, planes.memory.num_bytes(), ctx.stream);
  }
}

Tensor ModelState::paged(PagedId id) const {
  const Planes& planes = planes_of(id);
  const PagedPlane& plane = planes.plane;
  return planes.memory.rows(id.index, 1)
      .view({planes.num_pages, plane.num_heads, plane.rows_per_page, plane.width});
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

// A page is one contiguous range of bytes in each plane. In host memory the ranges are adjacent.
void ModelState::save_page(const Context& ctx, int window, int page, char* host) const {
  for (const Planes& planes : planes_) {
    if (planes.window != window) continue;
    const int64_t width = planes.plane.page_bytes();
    copy_strided(ctx.device,
                 {.dst = host,
                  .dst_pitch = width,
                  .src = static_cast<const char*>(planes.memory.data()) + page * width,
                  .src_pitch = planes.num_pages * width,
                  .width = width,
                  .height = planes.count},
                 ctx.stream);
    host += planes.count * width;
  }
}

void ModelState::load_page(const Context& ctx, int window, int page, const char* host) const {
  for (const Planes& planes : planes_) {
    if (planes.window != window) continue;
    const int64_t width = planes.plane.page_bytes();
    copy_strided(ctx.device,
                 {.dst = static_cast<char*>(planes.memory.data()) + page * width,
                  .dst_pitch = planes.num_pages * width,
                  .src = host,
                  .src_pitch = width,
                  .width = width,
                  .height = planes.count},
                 ctx.stream);
    host += planes.count * width;
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
  for (const Planes& planes : planes_) {
    if (!planes.plane.is_per_token()) continue;
    params.pool = planes.memory;
    params.num_heads = planes.plane.num_heads;
    params.width = planes.plane.width;
    params.page_table = planes.table;
    keep_accepted(ctx, params);
    params.hidden = {};  // hidden states are copied only once
  }
  if (params.hidden.empty()) return;
  params.pool = {};
  keep_accepted(ctx, params);
}

}  // namespace cpmcu
