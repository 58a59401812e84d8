#pragma once

#include "topreduce/comm/communicator.h"

namespace topreduce::comm {

/// One rank, alone: nothing travels.
class TOPREDUCE_API Self final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }

 protected:
  void do_all_to_all(std::span<const std::byte> send, std::span<const std::size_t> counts,
                     Inbox& inbox) override;
  void do_all_gather(std::span<const std::byte> mine, Inbox& inbox) override;
};

}  // namespace topreduce::comm
