#include "topreduce/comm/self.h"

namespace topreduce::comm {

void Self::do_all_to_all(std::span<const std::byte> send, std::span<const std::size_t>,
                         Inbox& inbox) {
  do_all_gather(send, inbox);
}

void Self::do_all_gather(std::span<const std::byte> mine, Inbox& inbox) {
  inbox.counts.assign(1, mine.size());
  inbox.bytes.assign(mine.begin(), mine.end());
}

}  // namespace topreduce::comm
