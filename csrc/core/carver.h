// Divides one buffer into consecutive arrays. Without a buffer a Carver only counts bytes.
//
// A layout is one function over a Carver. The function runs once to count the bytes and once to
// assign the arrays, so size and assignment always agree.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpmcu {

class Carver {
 public:
  explicit Carver(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  // Takes an array of `count` elements, aligned to T. Returns null if there is no buffer.
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

// The size of a layout.
template <typename Layout>
int64_t carved_bytes(const Layout& layout) {
  Carver counter;
  layout(counter);
  return counter.num_bytes();
}

}  // namespace cpmcu
