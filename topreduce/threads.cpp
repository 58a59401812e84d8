#include "topreduce/threads.h"

#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "topreduce/floating.h"

namespace topreduce {
namespace {

// A helper looks for the next job for about 20 us before it sleeps: passes follow each other, and
// to wake it takes longer than that.
constexpr int kGlances = 500;

void pause_a_little() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace

Threads::Threads(std::size_t count) {
  if (count == 0) count = std::max(1u, std::thread::hardware_concurrency());
  try {
    while (helpers_.size() + 1 < count) helpers_.emplace_back([this] { help(); });
  } catch (const std::system_error& error) {
    const std::size_t got = helpers_.size() + 1;
    end();
    throw std::invalid_argument("threads: the system gave " + std::to_string(got) + " of " +
                                std::to_string(count) + " threads (" + error.what() +
                                "); choose fewer");
  }
}

Threads::~Threads() {
  end();
}

void Threads::end() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

Threads& Threads::none() {
  static Threads alone(1);
  return alone;
}

void Threads::share(std::size_t parts, Call call, const void* body) {
  {
    const std::lock_guard lock(mutex_);
    call_ = call;
    body_ = body;
    parts_ = parts;
    next_ = 0;
    ++job_;
  }
  wake_.notify_all();
  take_parts();
  std::unique_lock lock(mutex_);
  ++job_;  // who comes late finds it closed
  done_.wait(lock, [&] { return busy_ == 0; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Threads::take_parts() {
  for (std::size_t part; (part = next_++) < parts_;) {
    try {
      call_(body_, part);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      error_ = std::current_exception();
    }
  }
}

void Threads::help() {
  const FloatMode mode;
  std::uint64_t last = 0;
  const auto is_new = [&] { return job_ % 2 == 1 && job_ != last; };
  for (;;) {
    for (int i = 0; i < kGlances && !is_new(); ++i) pause_a_little();
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return ends_ || is_new(); });
      if (ends_) return;
      last = job_;
      ++busy_;
    }
    take_parts();
    const std::lock_guard lock(mutex_);
    if (--busy_ == 0) done_.notify_one();
  }
}

}  // namespace topreduce
