#pragma once

// A device that bites. Its memory is mapped twice: torch sees addresses that no one may touch, the
// device's own threads use the other mapping. Streams are threads that work later, in order, after
// random delays. Who may touch what is decided when work is queued, by the events between streams
// and never by luck: work that no event orders behind what it reads finds poison.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fakegpu {

constexpr int kStreams = 128, kShared = 64;
constexpr unsigned char kPoison = 0xff;  // NaN in every floating type

/// A part of the device's memory, in addresses that torch sees.
struct Range {
  const char* begin;
  const char* end;
};

/// How much of each stream is known to be done before something.
using Clock = std::vector<std::uint64_t>;

/// A place in a stream.
struct Mark {
  int stream = 0;
  std::uint64_t place = 0;
  Clock before;
};

// ---- memory ----

/// For use by the current stream of the caller.
void* allocate(std::size_t size, int stream);
/// At its place in the stream that it was allocated for, after those that `keep` named.
void release(void* memory);
/// `record_stream`: the memory is used there too.
void keep(const void* memory, int stream);
/// The same memory, for the device's own threads.
char* inside(const void* memory);
bool is_device_memory(const void* memory);

void* allocate_pinned(std::size_t size);
void release_pinned(void* memory);
bool is_pinned(const void* memory);

// ---- streams and events ----

/// Stream 0 is the default one. Others are reused once there are as many as can be.
int new_stream(int priority);
/// One that nobody else has, for work that waits for other processes: those behind it would too.
int lone_stream();
void give_back(int stream);
int priority_of(int stream);

/// Queues work. `writes` become poison instead if no event orders it behind earlier work there.
void launch(int stream, const std::string& name, const std::vector<Range>& reads,
            const std::vector<Range>& writes, std::function<void()> work);

Mark mark(int stream);
/// What is queued in `stream` from now on waits.
void wait(int stream, const Mark& mark);
bool has_passed(const Mark& mark);

/// The host waits. These are the stops that are counted, under the name.
void synchronize(const Mark& mark, const std::string& name);
void synchronize_all(const std::string& name);

/// Done for the host as soon as it waits for the work that is being done, and no earlier.
void deliver_when_waited_for(std::function<void()> delivery);

// ---- what is counted ----

/// launches, stops, bytes_to_host, bytes_to_device, and each kind of stop as "stop: name".
std::map<std::string, std::int64_t> counters();
void count(const std::string& name, std::int64_t amount);
void reset_counters();

/// Work that no event ordered, in words; forgets it.
std::vector<std::string> take_races();

}  // namespace fakegpu
