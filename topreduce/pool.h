#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace topreduce {

/// Objects that are lent, returned and lent again with the memory they have grown. Each goes back
/// to the one who had it, so that no growth depends on who comes first.
template <class T>
class Pool {
 private:
  struct Owned {
    std::uint64_t owner;
    std::unique_ptr<T> object;
  };

 public:
  class Loan {
   public:
    Loan(Pool& pool, Owned owned) : pool_(&pool), owned_(std::move(owned)) {}
    Loan(Loan&&) noexcept = default;
    Loan& operator=(Loan&&) = delete;
    ~Loan() {
      if (owned_.object) pool_->spares_.push_back(std::move(owned_));
    }
    T& operator*() const { return *owned_.object; }
    T* operator->() const { return owned_.object.get(); }

   private:
    Pool* pool_;
    Owned owned_;
  };

  /// With whatever `owner` left in it.
  Loan take(std::uint64_t owner) {
    // Who takes several in one order, and returns them in the other, gets the same ones again.
    const auto last = std::find_if(spares_.rbegin(), spares_.rend(),
                                   [owner](const Owned& spare) { return spare.owner == owner; });
    if (last == spares_.rend()) return {*this, {owner, std::make_unique<T>()}};
    Owned taken = std::move(*last);
    spares_.erase(std::next(last).base());
    return {*this, std::move(taken)};
  }

 private:
  std::vector<Owned> spares_;
};

}  // namespace topreduce
