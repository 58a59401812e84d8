#include "machine.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string_view>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <unordered_map>
#include <utility>

namespace fakegpu {
namespace {

constexpr std::size_t kArena = std::size_t{1} << 36;  // addresses, not memory
constexpr std::size_t kSmallest = 512;
constexpr std::string_view kFreed = " (of memory that was freed without record_stream)";

struct Access {
  Range range;
  int stream;
  std::uint64_t place;
  bool writes;
  std::string name;
};

struct Block {
  char* memory;
  std::size_t size;
  int stream;
  std::set<int> others;
  std::vector<Access> accesses;
};

struct Task {
  std::function<void()> work;
  std::uint64_t place;
};

struct Stream {
  std::deque<Task> tasks;
  std::uint64_t issued = 0, done = 0;
  Clock clock = Clock(kStreams, 0);  // what its next work comes after
  std::vector<Access> left;  // by other streams, to memory that was freed and may be used anew here
  int priority = 0;
  bool runs = false;
  std::condition_variable queued, finished;  // one of its own: others need not wake
};

struct Delivery {
  int stream;
  std::uint64_t place;
  std::function<void()> bring;
};

thread_local int own_stream = -1;  // of a device's thread
thread_local std::uint64_t own_place = 0;

class Machine {
 public:
  Machine() {
    const int file = memfd_create("fakegpu", 0);
    if (file < 0 || ftruncate(file, kArena) != 0) throw std::runtime_error("fakegpu: no memory");
    const auto map = [&](int protection) {
      void* at = mmap(nullptr, kArena, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
      if (at == MAP_FAILED) throw std::runtime_error("fakegpu: no addresses");
      return static_cast<char*>(at);
    };
    outside_ = map(PROT_NONE);
    inside_ = map(PROT_READ | PROT_WRITE);
    close(file);
  }

  std::mutex mutex;

  bool has(const void* memory) const {
    const auto* at = static_cast<const char*>(memory);
    return at >= outside_ && at < outside_ + kArena;
  }
  char* inside(const void* memory) const {
    return inside_ + (static_cast<const char*>(memory) - outside_);
  }

  void* allocate(std::size_t size, int stream) {
    std::size_t rounded = kSmallest;
    while (rounded < size) rounded *= 2;
    const std::lock_guard lock(mutex);
    auto& spare = spare_[rounded];
    char* memory = nullptr;
    if (!spare.empty()) {
      memory = spare.back();
      spare.pop_back();
    } else {
      if (used_ + rounded > kArena) throw std::runtime_error("fakegpu: out of memory");
      memory = outside_ + used_;
      used_ += rounded;
      std::memset(inside(memory), kPoison, rounded);
    }
    // As allocators do that keep memory by stream: any of it may be what was freed there.
    auto& left = streams_[stream].left;
    const Clock clock = known_by(stream);
    std::erase_if(left, [&](const Access& each) { return each.place <= clock[each.stream]; });
    Block block{memory, rounded, stream, {}, left};
    for (Access& each : block.accesses) each.range = {memory, memory + rounded};
    blocks_.emplace(memory, std::move(block));
    return memory;
  }

  void release(void* memory) {
    std::unique_lock lock(mutex);
    const auto found = blocks_.find(static_cast<char*>(memory));
    Block block = std::move(found->second);
    blocks_.erase(found);
    Stream& stream = start(block.stream);
    const Clock clock = known_by(block.stream);
    std::vector<Mark> marks;
    for (const int other : block.others) marks.push_back({other, streams_[other].issued, {}});
    for (Access each : block.accesses) {
      const bool known = each.stream == block.stream || each.place <= clock[each.stream];
      if (known || block.others.contains(each.stream) || each.name.ends_with(kFreed)) continue;
      each.name += kFreed;
      stream.left.push_back(std::move(each));
    }
    // The block comes back once nobody can touch it any more, ordered or not.
    for (const Access& each : block.accesses) marks.push_back({each.stream, each.place, {}});
    queue(stream, [this, block = std::move(block), marks = std::move(marks)] {
      for (const Mark& each : marks) await(each);
      std::memset(inside(block.memory), kPoison, block.size);
      const std::lock_guard inner(mutex);
      spare_[block.size].push_back(block.memory);
    });
  }

  void keep(const void* memory, int stream) {
    const std::lock_guard lock(mutex);
    if (Block* block = find(static_cast<const char*>(memory))) block->others.insert(stream);
  }

  int new_stream(int priority) {
    const std::lock_guard lock(mutex);
    const int stream = 1 + next_stream_++ % (kShared - 1);
    streams_[stream].priority = priority;
    return stream;
  }
  int lone_stream() {
    const std::lock_guard lock(mutex);
    for (int stream = kShared; stream < kStreams; ++stream) {
      if (!std::exchange(owned_[stream], true)) return stream;
    }
    throw std::runtime_error("fakegpu: too many process groups are alive");
  }
  void give_back(int stream) {
    const std::lock_guard lock(mutex);
    owned_[stream] = false;
  }
  int priority_of(int stream) { return streams_[stream].priority; }

  void launch(int number, const std::string& name, const std::vector<Range>& reads,
              const std::vector<Range>& writes, std::function<void()> work) {
    const std::lock_guard lock(mutex);
    ++counters_["launches"];
    Stream& stream = start(number);
    const Clock clock = known_by(number);
    bool ordered = true;
    for (const auto& ranges : {&reads, &writes}) {
      for (const Range& range : *ranges) {
        if (Block* block = find(range.begin)) {
          ordered &= check(*block, range, number, clock, ranges == &writes, name);
        }
      }
    }
    if (ordered) {
      queue(stream, std::move(work));
    } else {
      queue(stream, [this, writes] {
        for (const Range& range : writes) {
          std::memset(inside(range.begin), kPoison,
                      static_cast<std::size_t>(range.end - range.begin));
        }
      });
    }
    for (const auto& ranges : {&reads, &writes}) {
      for (const Range& range : *ranges) {
        if (Block* block = find(range.begin)) {
          note(*block, {range, number, stream.issued, ranges == &writes, name}, clock);
        }
      }
    }
  }

  Mark mark(int number) {
    const std::lock_guard lock(mutex);
    Clock before = streams_[number].clock;
    before[number] = streams_[number].issued;
    return {number, streams_[number].issued, std::move(before)};
  }

  void wait(int number, const Mark& mark) {
    const std::lock_guard lock(mutex);
    Stream& stream = start(number);
    merge(stream.clock, mark.before);
    if (mark.stream != number) queue(stream, [this, mark] { await(mark); });
  }

  bool has_passed(const Mark& mark) {
    std::unique_lock lock(mutex);
    if (streams_[mark.stream].done < mark.place) return false;
    return arrive(lock, mark.before), true;
  }

  void synchronize(const Mark& mark, const std::string& name) {
    await(mark);
    std::unique_lock lock(mutex);
    ++counters_["stops"];
    ++counters_["stop: " + name];
    arrive(lock, mark.before);
  }

  void synchronize_all(const std::string& name) {
    Clock all(kStreams, 0);
    for (int number = 0; number < kStreams; ++number) {
      const Mark here = mark(number);
      await(here);
      all[number] = here.place;
    }
    std::unique_lock lock(mutex);
    ++counters_["stops"];
    ++counters_["stop: " + name];
    arrive(lock, all);
  }

  void deliver(std::function<void()> bring) {
    const std::lock_guard lock(mutex);
    deliveries_.push_back({own_stream, own_place, std::move(bring)});
  }

  std::map<std::string, std::int64_t> counters() {
    const std::lock_guard lock(mutex);
    return counters_;
  }
  void count(const std::string& name, std::int64_t amount) {
    const std::lock_guard lock(mutex);
    counters_[name] += amount;
  }
  void reset() {
    const std::lock_guard lock(mutex);
    counters_.clear();
  }
  std::vector<std::string> take_races() {
    const std::lock_guard lock(mutex);
    return std::exchange(races_, {});
  }

 private:
  static void merge(Clock& into, const Clock& other) {
    for (std::size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
  }

  Clock known_by(int stream) const {
    Clock clock = streams_[stream].clock;
    merge(clock, host_);
    return clock;
  }

  Stream& start(int number) {
    Stream& stream = streams_[number];
    if (!stream.runs) {
      stream.runs = true;
      std::thread([this, number] { run(number); }).detach();
    }
    return stream;
  }

  void queue(Stream& stream, std::function<void()> work) {
    stream.tasks.push_back({std::move(work), ++stream.issued});
    stream.queued.notify_one();
  }

  void run(int number) {
    own_stream = number;
    std::minstd_rand rng(static_cast<unsigned>(number) + 1);
    Stream& stream = streams_[number];
    std::unique_lock lock(mutex);
    while (true) {
      stream.queued.wait(lock, [&] { return !stream.tasks.empty(); });
      Task task = std::move(stream.tasks.front());
      stream.tasks.pop_front();
      own_place = task.place;
      lock.unlock();
      if (rng() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng() % 300));
      try {
        task.work();
      } catch (const std::exception& error) {
        const std::lock_guard inner(mutex);
        races_.push_back(std::string("work failed: ") + error.what());
      }
      task.work = nullptr;
      lock.lock();
      stream.done = task.place;
      stream.finished.notify_all();
    }
  }

  void await(const Mark& mark) {
    std::unique_lock lock(mutex);
    Stream& stream = streams_[mark.stream];
    stream.finished.wait(lock, [&] { return stream.done >= mark.place; });
  }

  // The host knows that all before `clock` is done.
  void arrive(std::unique_lock<std::mutex>& lock, const Clock& clock) {
    merge(host_, clock);
    std::vector<Delivery> due;
    const auto is_due = [&](const Delivery& each) { return each.place <= clock[each.stream]; };
    std::ranges::copy_if(deliveries_, std::back_inserter(due), is_due);
    std::erase_if(deliveries_, is_due);
    lock.unlock();
    for (Delivery& each : due) each.bring();
  }

  Block* find(const char* memory) {
    auto above = blocks_.upper_bound(const_cast<char*>(memory));
    if (above == blocks_.begin()) return nullptr;
    Block& block = std::prev(above)->second;
    return memory < block.memory + block.size ? &block : nullptr;
  }

  bool check(const Block& block, const Range& range, int stream, const Clock& clock, bool writes,
             const std::string& name) {
    for (const Access& each : block.accesses) {
      const bool meets = each.range.begin < range.end && range.begin < each.range.end;
      if (!meets || each.stream == stream || each.place <= clock[each.stream]) continue;
      if (!writes && !each.writes) continue;
      races_.push_back(name + " in stream " + std::to_string(stream) + " meets " + each.name +
                       " in stream " + std::to_string(each.stream) + ", and no event orders them");
      return false;
    }
    return true;
  }

  // Forgets what everyone who comes after this one comes after, too.
  void note(Block& block, Access access, const Clock& clock) {
    std::erase_if(block.accesses, [&](const Access& each) {
      const bool before = each.stream == access.stream || each.place <= clock[each.stream];
      const bool within =
          access.range.begin <= each.range.begin && each.range.end <= access.range.end;
      const bool known = each.place <= host_[each.stream];
      return known || (before && within && (access.writes || !each.writes) &&
                       (access.writes || each.stream == access.stream));
    });
    block.accesses.push_back(std::move(access));
  }

  char* outside_ = nullptr;
  char* inside_ = nullptr;
  std::size_t used_ = 0;
  std::map<char*, Block> blocks_;
  std::unordered_map<std::size_t, std::vector<char*>> spare_;
  Stream streams_[kStreams];
  int next_stream_ = 0;
  bool owned_[kStreams] = {};
  Clock host_ = Clock(kStreams, 0);
  std::vector<Delivery> deliveries_;
  std::map<std::string, std::int64_t> counters_;
  std::vector<std::string> races_;
};

// Its threads may outlive everything else.
Machine& machine() {
  static Machine& only = *new Machine;
  return only;
}

std::mutex pinned_mutex;
std::map<const char*, std::size_t> pinned;

}  // namespace

void* allocate(std::size_t size, int stream) {
  return machine().allocate(size, stream);
}
void release(void* memory) {
  machine().release(memory);
}
void keep(const void* memory, int stream) {
  machine().keep(memory, stream);
}
char* inside(const void* memory) {
  return machine().inside(memory);
}
bool is_device_memory(const void* memory) {
  return machine().has(memory);
}

void* allocate_pinned(std::size_t size) {
  auto* memory = static_cast<char*>(std::aligned_alloc(64, (size + 63) / 64 * 64));
  std::memset(memory, kPoison, size);
  const std::lock_guard lock(pinned_mutex);
  pinned[memory] = size;
  return memory;
}

void release_pinned(void* memory) {
  {
    const std::lock_guard lock(pinned_mutex);
    const auto found = pinned.find(static_cast<char*>(memory));
    std::memset(memory, kPoison, found->second);
    pinned.erase(found);
  }
  std::free(memory);
}

bool is_pinned(const void* memory) {
  const std::lock_guard lock(pinned_mutex);
  const auto* at = static_cast<const char*>(memory);
  auto above = pinned.upper_bound(at);
  return above != pinned.begin() && at < std::prev(above)->first + std::prev(above)->second;
}

int new_stream(int priority) {
  return machine().new_stream(priority);
}
int lone_stream() {
  return machine().lone_stream();
}
void give_back(int stream) {
  machine().give_back(stream);
}
int priority_of(int stream) {
  return machine().priority_of(stream);
}

void launch(int stream, const std::string& name, const std::vector<Range>& reads,
            const std::vector<Range>& writes, std::function<void()> work) {
  machine().launch(stream, name, reads, writes, std::move(work));
}

Mark mark(int stream) {
  return machine().mark(stream);
}
void wait(int stream, const Mark& mark) {
  machine().wait(stream, mark);
}
bool has_passed(const Mark& mark) {
  return machine().has_passed(mark);
}
void synchronize(const Mark& mark, const std::string& name) {
  machine().synchronize(mark, name);
}
void synchronize_all(const std::string& name) {
  machine().synchronize_all(name);
}
void deliver_when_waited_for(std::function<void()> bring) {
  machine().deliver(std::move(bring));
}

std::map<std::string, std::int64_t> counters() {
  return machine().counters();
}
void count(const std::string& name, std::int64_t amount) {
  machine().count(name, amount);
}
void reset_counters() {
  machine().reset();
}
std::vector<std::string> take_races() {
  return machine().take_races();
}

}  // namespace fakegpu
