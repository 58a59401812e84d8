#pragma once

#include <memory>
#include <utility>
#include <vector>

namespace topreduce {

/// Objects that are lent, returned and lent again with the memory they have grown.
template <class T>
class Pool {
 public:
  class Loan {
   public:
    Loan(Pool& pool, std::unique_ptr<T> object) : pool_(&pool), object_(std::move(object)) {}
    Loan(Loan&&) noexcept = default;
    Loan& operator=(Loan&&) = delete;
    ~Loan() {
      if (object_) pool_->spares_.push_back(std::move(object_));
    }
    T& operator*() const { return *object_; }
    T* operator->() const { return object_.get(); }

   private:
    Pool* pool_;
    std::unique_ptr<T> object_;
  };

  /// With whatever its last user left in it.
  Loan take() {
    if (spares_.empty()) return {*this, std::make_unique<T>()};
    auto object = std::move(spares_.back());
    spares_.pop_back();
    return {*this, std::move(object)};
  }

 private:
  std::vector<std::unique_ptr<T>> spares_;
};

}  // namespace topreduce
