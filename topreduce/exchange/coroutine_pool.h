#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace topreduce::exchange {

/// Memory of the coroutines of one exchange, kept from step to step: a steady step allocates
/// nothing, whatever comes first. It must outlive them.
class CoroutinePool {
 public:
  CoroutinePool() = default;
  CoroutinePool(const CoroutinePool&) = delete;
  CoroutinePool& operator=(const CoroutinePool&) = delete;
  ~CoroutinePool() {
    for (const Spare& spare : spares_) ::operator delete(spare.memory);
  }

  /// From `pool`, or, if that is null, from the heap.
  static void* allocate(std::size_t size, CoroutinePool* pool) {
    void* const memory = pool != nullptr ? pool->take(size) : ::operator new(kHead + size);
    *static_cast<CoroutinePool**>(memory) = pool;
    return static_cast<std::byte*>(memory) + kHead;
  }
  static void release(void* frame, std::size_t size) {
    void* const memory = static_cast<std::byte*>(frame) - kHead;
    CoroutinePool* const pool = *static_cast<CoroutinePool**>(memory);
    if (pool == nullptr) return ::operator delete(memory);
    pool->spares_.push_back({memory, size});
  }

 private:
  struct Spare {
    void* memory;
    std::size_t size;
  };
  static constexpr std::size_t kHead = __STDCPP_DEFAULT_NEW_ALIGNMENT__;  // whose it is
  static_assert(kHead >= sizeof(CoroutinePool*));

  void* take(std::size_t size) {
    for (Spare& spare : spares_) {
      if (spare.size != size) continue;
      void* const memory = spare.memory;
      spare = spares_.back();
      spares_.pop_back();
      return memory;
    }
    ++frames_;
    spares_.reserve(frames_);  // so that to release one never throws
    return ::operator new(kHead + size);
  }

  std::vector<Spare> spares_;
  std::size_t frames_ = 0;
};

}  // namespace topreduce::exchange
