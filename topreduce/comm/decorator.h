#pragma once

#include "topreduce/comm/communicator.h"

namespace topreduce::comm {

/// Passes everything through another communicator, which must outlive it and is not to be used
/// meanwhile: for those who count messages, or change them.
class TOPREDUCE_API Decorator : public Communicator {
 public:
  explicit Decorator(Communicator& inner)
      : Communicator(inner.rank(), inner.size(), inner.mailbox_), inner_(&inner) {}

  void drain() override { inner_->drain(); }
  void set_timeout(std::chrono::milliseconds timeout) override { inner_->set_timeout(timeout); }
  bool has_native_all_reduce() const override { return inner_->has_native_all_reduce(); }

 protected:
  void send_frame(int peer, std::span<const std::byte> frame) override {
    inner_->send_frame(peer, frame);
  }
  bool receive_frames() override { return inner_->receive_frames(); }
  void do_native_all_reduce(std::span<float> values) override {
    inner_->do_native_all_reduce(values);
  }
  std::size_t frame_limit() const override { return inner_->frame_limit(); }
  std::chrono::microseconds spin() const override { return inner_->spin(); }
  void pause(const Backoff& backoff) override { inner_->pause(backoff); }
  void still_waiting(Backoff::Clock::duration waited) override { inner_->still_waiting(waited); }

 private:
  Communicator* inner_;
};

}  // namespace topreduce::comm
