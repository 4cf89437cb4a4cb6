// Hands out consecutive arrays of one buffer. Without a buffer it only counts.
//
// A layout is one function over a Carver: run once to learn the size, once to hand out. So the two
// cannot disagree.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpmcu {

class Carver {
 public:
  explicit Carver(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  // `count` elements of T, aligned to T. Null without a buffer.
  template <typename T>
  T* take(int64_t count) {
    constexpr int64_t alignment = alignof(T);
    num_bytes_ = (num_bytes_ + alignment - 1) / alignment * alignment;
    T* array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + num_bytes_);
    num_bytes_ += count * static_cast<int64_t>(sizeof(T));
    return array;
  }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  char* base_;
  int64_t num_bytes_ = 0;
};

// Bytes of a layout.
template <typename Layout>
int64_t carved_bytes(const Layout& layout) {
  Carver counter;
  layout(counter);
  return counter.num_bytes();
}

}  // namespace cpmcu
