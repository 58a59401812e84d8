#pragma once

#include <coroutine>
#include <cstddef>
#include <exception>
#include <utility>

#include "topreduce/exchange/coroutine_pool.h"

namespace topreduce::exchange {

/// An exchange, or a part of one, that is written as one text and stops wherever it waits for
/// peers. It starts when it is first resumed or awaited. Destroying it breaks it off.
class [[nodiscard]] Task {
 public:
  struct promise_type {
    Task get_return_object() {
      return Task(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept { return {}; }
    auto final_suspend() noexcept {
      struct Final {
        bool await_ready() const noexcept { return false; }
        std::coroutine_handle<> await_suspend(
            std::coroutine_handle<promise_type> ended) const noexcept {
          return ended.promise().caller;
        }
        void await_resume() const noexcept {}
      };
      return Final{};
    }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }

    // Among the arguments of the coroutine is the channel, which has memory for it.
    template <class... Arguments>
    static void* operator new(std::size_t size, Arguments&... arguments) {
      CoroutinePool* pool = nullptr;
      (find_pool(arguments, pool), ...);
      return CoroutinePool::allocate(size, pool);
    }
    static void operator delete(void* memory, std::size_t size) {
      CoroutinePool::release(memory, size);
    }

    template <class Argument>
    static void find_pool(Argument& argument, CoroutinePool*& pool) {
      if constexpr (requires { pool = &argument.coroutine_pool(); })
        pool = &argument.coroutine_pool();
    }

    std::coroutine_handle<> caller = std::noop_coroutine();
    std::exception_ptr error;
  };

  Task() = default;
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Task& operator=(Task&& other) noexcept {
    if (handle_) handle_.destroy();
    handle_ = std::exchange(other.handle_, {});
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  bool done() const { return !handle_ || handle_.done(); }
  /// Runs until it first waits, or ends.
  void start() {
    handle_.resume();
    rethrow();
  }
  /// What it ended with.
  void rethrow() const {
    if (handle_ && handle_.done() && handle_.promise().error) {
      std::rethrow_exception(handle_.promise().error);
    }
  }

  // Awaited by another: that one goes on when this has ended.
  bool await_ready() const noexcept { return done(); }
  std::coroutine_handle<> await_suspend(std::coroutine_handle<> caller) noexcept {
    handle_.promise().caller = caller;
    return handle_;
  }
  void await_resume() const { rethrow(); }

 private:
  explicit Task(std::coroutine_handle<promise_type> handle) : handle_(handle) {}

  std::coroutine_handle<promise_type> handle_;
};

}  // namespace topreduce::exchange
