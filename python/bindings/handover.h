#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <span>
#include <vector>

#include <nanobind/nanobind.h>

/// Gradients of one step on their way from the thread that computes them to the one that exchanges
/// them. The latter takes them without Python's lock, and keeps them until the step is over.
class Handover {
 public:
  struct Gradient {
    std::size_t parameter;
    std::span<float> entries;
    bool lent;
  };

  /// `keeps`: what keeps their memory. With Python's lock.
  void put(const std::vector<std::size_t>& parameters, const std::vector<std::size_t>& addresses,
           const std::vector<std::size_t>& sizes, bool lent, nanobind::object keeps);

  /// Moves to `gradients` what was put since, in that order; false if nothing was.
  bool take(std::vector<Gradient>& gradients);
  bool empty();

  /// Has whoever takes them look for other work too.
  void interrupt() { interrupted_ = true; }
  /// Since this was last asked.
  bool was_interrupted() { return interrupted_.exchange(false); }

  /// Nothing is kept from here on, and what is put is dropped. With Python's lock.
  void close();

 private:
  std::mutex mutex_;
  std::vector<Gradient> waiting_;
  std::vector<nanobind::object> kept_;
  bool closed_ = false;
  std::atomic<bool> interrupted_ = false;
};

void bind_handover(nanobind::module_& module);
