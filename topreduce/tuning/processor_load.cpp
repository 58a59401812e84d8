#include "topreduce/tuning/processor_load.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <fcntl.h>
#include <unistd.h>

namespace topreduce::tuning {
namespace {

constexpr std::string_view kAll = "cpu ";          // the line of all processors together
constexpr std::size_t kIdle = 3, kDisk = 4;        // columns: idle, and idle until a disk answers
constexpr std::size_t kColumns = 8;                // further ones are parts of others
constexpr std::chrono::milliseconds kWindow{400};  // ticks are 10 ms, so less would tell little

// Where all are busy. Four ranks on two cores lose up to twice that by a second of work.
constexpr double kWhereAllAreBusy = 1.5;
// Where a fifth is busy it is 0.2 s: ranks work at the same time, and so meet.
constexpr double kSteepness = 1.25;

}  // namespace

std::optional<ProcessorTimes> ProcessorTimes::parse(std::string_view text) {
  if (!text.starts_with(kAll)) return {};
  text = text.substr(kAll.size(), text.find('\n') - kAll.size());
  ProcessorTimes times;
  std::size_t column = 0;
  for (; column < kColumns; ++column) {
    text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
    std::uint64_t ticks = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), ticks);
    if (error != std::errc()) break;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    (column == kIdle || column == kDisk ? times.idle : times.busy) += ticks;
  }
  if (column <= kIdle) return {};
  return times;
}

std::optional<ProcessorTimes> ProcessorTimes::now() {
  const int file = open("/proc/stat", O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  std::array<char, 256> text;
  const ssize_t size = read(file, text.data(), text.size());
  close(file);
  if (size <= 0) return {};
  return parse({text.data(), static_cast<std::size_t>(size)});
}

double ProcessorLoad::share() {
  const Clock::time_point now = Clock::now();
  if (now - looked_ < kWindow) return share_;
  const std::optional<ProcessorTimes> times = ProcessorTimes::now();
  if (last_ && times && times->busy >= last_->busy && times->idle >= last_->idle) {
    const auto busy = static_cast<double>(times->busy - last_->busy);
    const auto idle = static_cast<double>(times->idle - last_->idle);
    const double share = busy + idle > 0 ? busy / (busy + idle) : share_;
    share_ = known_ ? (share_ + share) / 2 : share;
    known_ = true;
  }
  last_ = times;
  looked_ = now;
  return share_;
}

double ProcessorLoad::taken_by_work(double share) {
  return kWhereAllAreBusy * std::pow(share, kSteepness);
}

}  // namespace topreduce::tuning
