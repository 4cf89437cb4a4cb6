#include "core/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace cpmcu {
namespace {

int64_t align_up(int64_t bytes) {
  return (bytes + MemoryPlan::kAlignment - 1) / MemoryPlan::kAlignment * MemoryPlan::kAlignment;
}

bool lifetimes_overlap(const MemoryPlan::Buffer& a, const MemoryPlan::Buffer& b) {
  return a.persistent() || b.persistent() || (a.first <= b.last && b.first <= a.last);
}

}  // namespace

MemoryPlan::Id MemoryPlan::add(const std::string& name, const std::string& group, int64_t bytes) {
  CHECK_STATE(bytes >= 0, "buffer {} has {} bytes, expected at least 0", name, bytes);
  buffers_.push_back({.name = name, .group = group, .bytes = bytes});
  return static_cast<Id>(buffers_.size()) - 1;
}

MemoryPlan::Id MemoryPlan::add_scratch(const std::string& name, int64_t bytes, int first,
                                       int last) {
  CHECK_STATE(
      bytes >= 0 && 0 <= first && first <= last,
      "scratch {} has {} bytes in phases {}-{}, expected at least 0 bytes and ordered phases", name,
      bytes, first, last);
  for (size_t i = 0; i < buffers_.size(); ++i) {
    Buffer& buffer = buffers_[i];
    if (buffer.persistent() || buffer.name != name) continue;
    buffer.bytes = std::max(buffer.bytes, bytes);
    buffer.first = std::min(buffer.first, first);
    buffer.last = std::max(buffer.last, last);
    return static_cast<Id>(i);
  }
  buffers_.push_back(
      {.name = name, .group = "scratch", .bytes = bytes, .first = first, .last = last});
  return static_cast<Id>(buffers_.size()) - 1;
}

MemoryPlan::Id MemoryPlan::add_until(const std::string& name, const std::string& group,
                                     int64_t bytes, int last) {
  CHECK_STATE(bytes >= 0 && last >= 0, "buffer {} has {} bytes up to phase {}, expected at least 0",
              name, bytes, last);
  buffers_.push_back({.name = name, .group = group, .bytes = bytes, .first = 0, .last = last});
  return static_cast<Id>(buffers_.size()) - 1;
}

int64_t MemoryPlan::bytes_before(int phase) const {
  MemoryPlan part = *this;
  std::erase_if(part.buffers_, [&](const Buffer& buffer) { return buffer.first >= phase; });
  return part.assign();
}

// First fit: each buffer takes the lowest offset that is free for its lifetime. The order is:
// buffers that live in all phases, other groups than scratch, scratch; large buffers first. So
// pages and buffers of the last phase begin at the same offset.
int64_t MemoryPlan::assign() {
  int64_t persistent_end = 0;
  std::vector<Buffer*> scratch;
  for (Buffer& buffer : buffers_) {
    if (buffer.persistent()) {
      buffer.offset = persistent_end;
      persistent_end += align_up(buffer.bytes);
    } else {
      scratch.push_back(&buffer);
    }
  }
  int last_phase = 0;
  for (const Buffer* buffer : scratch) last_phase = std::max(last_phase, buffer->last);
  const auto order = [&](const Buffer* buffer) {
    const bool always = buffer->first == 0 && buffer->last == last_phase;
    return std::pair(always ? 0 : buffer->group != "scratch" ? 1 : 2, -buffer->bytes);
  };
  std::stable_sort(scratch.begin(), scratch.end(),
                   [&](const Buffer* a, const Buffer* b) { return order(a) < order(b); });
  total_bytes_ = persistent_end;
  std::vector<Buffer*> placed;  // in the order of their offsets
  for (Buffer* buffer : scratch) {
    int64_t offset = persistent_end;
    for (const Buffer* other : placed) {
      if (!lifetimes_overlap(*buffer, *other)) continue;
      if (offset + align_up(buffer->bytes) <= other->offset) break;
      offset = std::max(offset, other->offset + align_up(other->bytes));
    }
    buffer->offset = offset;
    placed.insert(
        std::upper_bound(placed.begin(), placed.end(), buffer,
                         [](const Buffer* a, const Buffer* b) { return a->offset < b->offset; }),
        buffer);
    total_bytes_ = std::max(total_bytes_, offset + align_up(buffer->bytes));
  }
  return total_bytes_;
}

int64_t MemoryPlan::group_bytes(const std::string& group) const {
  return std::accumulate(buffers_.begin(), buffers_.end(), int64_t{0},
                         [&](int64_t sum, const Buffer& buffer) {
                           return sum + (buffer.group == group ? buffer.bytes : 0);
                         });
}

Arena::Arena(Device device, const MemoryPlan& plan)
    : device_(device),
      plan_(&plan),
      base_(static_cast<char*>(allocate(device, plan.total_bytes()))) {}

std::unique_ptr<Arena> Arena::of_addresses(const MemoryPlan& plan) {
  auto arena = std::make_unique<Arena>();
  void* base = mmap(nullptr, static_cast<size_t>(plan.total_bytes()), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK_STATE(base != MAP_FAILED, "the system has no {} addresses", plan.total_bytes());
  arena->plan_ = &plan;
  arena->base_ = static_cast<char*>(base);
  arena->is_mapped_ = true;
  return arena;
}

Arena::~Arena() {
  is_mapped_ ? static_cast<void>(munmap(base_, static_cast<size_t>(plan_->total_bytes())))
             : release(device_, base_);
}

void* Arena::pointer(MemoryPlan::Id id) const {
  const MemoryPlan::Buffer& buffer = plan_->buffers().at(static_cast<size_t>(id));
  CHECK_STATE(base_ != nullptr && buffer.offset >= 0, "buffer {} is used before it has memory",
              buffer.name);
  return base_ + buffer.offset;
}

Tensor Arena::tensor(MemoryPlan::Id id, DType dtype, std::initializer_list<int64_t> shape) const {
  Tensor tensor(pointer(id), dtype, shape);
  const MemoryPlan::Buffer& buffer = plan_->buffers()[static_cast<size_t>(id)];
  CHECK_STATE(tensor.num_bytes() <= buffer.bytes,
              "tensor {} has {} bytes, but its buffer {} has {} bytes", tensor.shape_text(),
              tensor.num_bytes(), buffer.name, buffer.bytes);
  return tensor;
}

}  // namespace cpmcu
