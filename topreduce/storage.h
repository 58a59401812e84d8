#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace topreduce {

/// Leaves new elements uninitialised: our buffers are always written before they are read.
template <class T>
struct Uninitialised : std::allocator<T> {
  template <class U>
  struct rebind {
    using other = Uninitialised<U>;
  };
  template <class U>
  void construct(U* place) noexcept {
    ::new (static_cast<void*>(place)) U;
  }
  template <class U, class... Args>
  void construct(U* place, Args&&... args) {
    ::new (static_cast<void*>(place)) U(std::forward<Args>(args)...);
  }
};

/// A vector that grows without zeroing, reused from step to step.
template <class T>
using Buffer = std::vector<T, Uninitialised<T>>;

using Bytes = Buffer<std::byte>;

/// Reserves for `size` elements and half as many more: sizes that vary a little from step to step
/// soon allocate no more.
template <class T>
void make_room(Buffer<T>& buffer, std::size_t size) {
  if (size > buffer.capacity()) buffer.reserve(size + size / 2);
}

}  // namespace topreduce
