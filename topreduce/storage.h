#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>
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

/// Elements start as zeros that the system lends: memory is taken where one is written.
template <class T>
struct LentZeros {
  using value_type = T;
  LentZeros() = default;
  template <class U>
  LentZeros(const LentZeros<U>&) noexcept {}

  T* allocate(std::size_t count) {
    if (void* memory = std::calloc(count, sizeof(T))) return static_cast<T*>(memory);
    throw std::bad_alloc();
  }
  void deallocate(T* memory, std::size_t) noexcept { std::free(memory); }
  void construct(T*) noexcept {}
  bool operator==(const LentZeros&) const = default;
};

/// What a model's state is kept in, of one size for life: a rank that never steps pays nothing.
template <class T>
using Zeros = std::vector<T, LentZeros<T>>;

/// Reserves for `size` elements and half as many more: sizes that vary a little from step to step
/// soon allocate no more.
template <class T>
void make_room(Buffer<T>& buffer, std::size_t size) {
  if (size > buffer.capacity()) buffer.reserve(size + size / 2);
}

/// Faster than `insert`, which takes them one by one.
inline void append(Bytes& buffer, std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const std::size_t before = buffer.size();
  make_room(buffer, before + bytes.size());
  buffer.resize(before + bytes.size());
  std::memcpy(buffer.data() + before, bytes.data(), bytes.size());
}

/// Whether a buffer holds memory for much more than `used` bytes.
inline bool is_far_larger(const Bytes& buffer, std::size_t used) {
  constexpr std::size_t kSmall = std::size_t{1} << 16;
  return buffer.capacity() > 2 * used + kSmall;
}

/// Buffers that wait for their next use.
class Spares {
 public:
  /// An empty one that holds `size` bytes: the smallest that can, or else the largest, made larger.
  Bytes take(std::size_t size) {
    Bytes taken;
    if (!buffers_.empty()) {
      const auto better = [size](const Bytes& a, const Bytes& b) {
        if (a.capacity() < size || b.capacity() < size) return a.capacity() > b.capacity();
        return a.capacity() < b.capacity();
      };
      std::swap(*std::ranges::min_element(buffers_, better), buffers_.back());
      taken = std::move(buffers_.back());
      buffers_.pop_back();
    }
    taken.clear();
    make_room(taken, size);
    return taken;
  }
  /// Frees those that are far larger than `used` bytes.
  void trim(std::size_t used) {
    std::erase_if(buffers_, [used](const Bytes& each) { return is_far_larger(each, used); });
  }
  void give(Bytes&& buffer) {
    if (buffer.capacity() > 0) buffers_.push_back(std::move(buffer));
  }

 private:
  std::vector<Bytes> buffers_;
};

}  // namespace topreduce
