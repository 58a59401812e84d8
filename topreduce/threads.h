#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace topreduce {

/// A small pool that shares out passes over long vectors. The caller works too, and takes over what
/// helpers do not get to. Which thread takes which part is left open, so results must depend on the
/// parts alone.
class Threads {
 public:
  /// `count` threads, the caller among them; 0: one for each core.
  explicit Threads(std::size_t count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  /// The caller alone. Any number of threads may use it at once.
  static Threads& none();

  std::size_t count() const { return helpers_.size() + 1; }

  /// Calls body(part) for every part below `parts`, and returns when all are done; rethrows what a
  /// part threw. Allocates nothing. One caller at a time.
  template <class Body>
  void for_each(std::size_t parts, const Body& body) {
    if (parts < 2 || helpers_.empty()) {
      for (std::size_t part = 0; part < parts; ++part) body(part);
    } else {
      share(
          parts, [](const void* it, std::size_t part) { (*static_cast<const Body*>(it))(part); },
          &body);
    }
  }

 private:
  using Call = void (*)(const void* body, std::size_t part);
  void share(std::size_t parts, Call call, const void* body);
  void help();
  void end();  // of all helpers
  void take_parts();

  std::vector<std::thread> helpers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<std::uint64_t> job_ = 0;  // its number; odd while it is open to helpers
  bool ends_ = false;
  std::size_t busy_ = 0;  // helpers at work

  // The open job.
  Call call_ = nullptr;
  const void* body_ = nullptr;
  std::size_t parts_ = 0;
  std::atomic<std::size_t> next_ = 0;
  std::exception_ptr error_;
};

/// How a pass over `size` entries is cut. Depends on the size alone: whoever adds up stretch by
/// stretch, in order, gets the same bits with any number of threads. Short vectors are one stretch,
/// since waking a helper would cost more than it saves.
class Chunks {
 public:
  static constexpr std::size_t kMost = 64;

  /// `cost`: of an entry, where a look is 1. Entries that belong together, `whole` from each
  /// multiple of it on, stay together.
  explicit Chunks(std::size_t size, std::size_t cost = 1, std::size_t whole = 64)
      : size_(size), length_(std::max({grain / cost, (size + kMost - 1) / kMost, whole})) {
    length_ = (length_ + whole - 1) / whole * whole;
  }

  std::size_t count() const { return (size_ + length_ - 1) / length_; }
  std::size_t begin(std::size_t chunk) const { return std::min(size_, chunk * length_); }
  std::size_t length(std::size_t chunk) const { return begin(chunk + 1) - begin(chunk); }

  /// The shortest stretch. Tests lower it, while nobody looks at it, to cut small models too.
  static inline std::size_t grain = std::size_t{1} << 17;

 private:
  std::size_t size_, length_;
};

}  // namespace topreduce
