// Gradients on a device: one that does just what device.h says gives the bits of main memory, with
// rows that can work there. (Those of torch are compared in python/tests/test_device.py.)

#include "topreduce/device.h"

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "cluster.h"
#include "topreduce/compensated_gradient.h"

namespace topreduce::laws {
namespace {

class PlainDevice final : public Device {
 public:
  std::map<std::size_t, Floats> gradients;  // by number of the parameter
  int commits_left = 1'000'000;             // until one fails
  bool refuses = false;                     // to move what is owed
  bool can_add_up = false;                  // over the ranks ...
  Communicator* comm = nullptr;             // ... by the all-reduce of this
  int brought = 0;                          // how often sums came to main memory

  void open(std::span<const Segment> segments, Base base, float scale) override {
    segments_.assign(segments.begin(), segments.end());
    base_ = base;
    scaled_.clear();
    x_.clear();
    for (const Segment& segment : segments) {
      for (std::size_t i = 0; i < segment.size(); ++i) {
        scaled_.push_back(scale * gradients.at(segment.number)[i]);
        const bool owes = base == Base::owed;
        x_.push_back(owes ? owed_[segment.offset + i] + scaled_.back() : scaled_.back());
      }
    }
  }
  void expect(const Questions&) override {}
  kernels::Summary summarize() override {
    kernels::Summary summary;
    kernels::scalar::summarize({{}, x_, 1}, summary);
    return summary;
  }
  void strongest(float floor, std::span<const std::size_t> limits,
                 SparseVector& selected) override {
    selected.clear();
    std::size_t first = 0;
    for (std::size_t s = 0; s < limits.size(); ++s) {
      const std::size_t end = limits.size() == 1 ? x_.size() : first + segments_[s].size();
      std::vector<std::size_t> places;
      for (std::size_t i = first; i < end; ++i) {
        if (std::abs(x_[i]) >= floor) places.push_back(i);
      }
      std::ranges::stable_sort(places, std::greater<>(),
                               [&](std::size_t i) { return std::abs(x_[i]); });
      places.resize(std::min(places.size(), limits[s]));
      std::ranges::sort(places);
      for (const std::size_t i : places) selected.push_back(static_cast<Index>(i), x_[i]);
      first = end;
    }
  }
  void sample(std::span<const std::size_t> firsts, std::size_t stride, Buffer<float>& values,
              Buffer<float>& sampled) override {
    values.clear();
    sampled.clear();
    std::size_t first = 0;
    for (std::size_t s = 0; s < firsts.size(); ++s) {
      for (std::size_t i = firsts[s]; i < segments_[s].size(); i += stride) {
        values.push_back(x_[first + i]);
        sampled.push_back(scaled_[first + i]);
      }
      first += segments_[s].size();
    }
  }
  void evaluate(std::span<float> values) override { std::ranges::copy(x_, values.begin()); }
  void commit(const SparseVector& settled, const SparseVector& mean) override {
    Floats all(x_.size()), means(x_.size());
    for (std::size_t i = 0; i < settled.size(); ++i) all[settled.indices[i]] = settled.values[i];
    for (std::size_t i = 0; i < mean.size(); ++i) means[mean.indices[i]] = mean.values[i];
    commit_whole(all, means);
  }
  void commit_whole(std::span<const float> settled, std::span<const float> mean) override {
    if (commits_left-- == 0) throw std::runtime_error("the device is gone");
    std::size_t next = 0;
    for (const Segment& segment : segments_) {
      for (std::size_t i = 0; i < segment.size(); ++i, ++next) {
        const float left = x_[next] - (settled.empty() ? x_[next] : settled[next]);
        gone_ += static_cast<double>(x_[next]) * x_[next] - static_cast<double>(left) * left;
        if (base_ == Base::owed) owed_[segment.offset + i] = left;
        gradients.at(segment.number)[i] = mean[next];
      }
    }
  }
  double settled_energy() override { return std::exchange(gone_, 0.0); }
  bool adds_up() const override { return can_add_up; }
  void project(Index start, std::size_t size, std::size_t width,
               std::span<const float> directions) override {
    for (std::size_t at = 0; at < size; at += width) {
      const std::size_t first = noted_.size();
      noted_.resize(first + directions.size() / width);
      const auto row = std::span(x_).subspan(start + at, std::min(width, size - at));
      kernels::project({{}, row, 1}, directions.data(), width, std::span(noted_).subspan(first));
    }
  }
  void add_up_noted(std::span<float> numbers, std::span<float> sums) override {
    reduce(numbers, noted_);
    ASSERT_EQ(sums.size(), noted_.size());
    std::ranges::copy(noted_, sums.begin());
    noted_.clear();
  }
  void add_up(std::span<float> numbers, std::span<const Run> runs, std::uint32_t key) override {
    Sums& sums = sums_[key];
    sums.places.clear();
    sums.values.clear();
    for (const Run& run : runs) {
      for (Index i = 0; i < run.size; ++i) sums.places.push_back(run.start + i);
    }
    if (runs.empty()) {
      for (std::size_t i = 0; i < x_.size(); ++i) sums.places.push_back(i);
    }
    for (const std::size_t place : sums.places) sums.values.push_back(x_[place]);
    reduce(numbers, sums.values);
  }
  bool add_up_best(std::span<float> numbers, std::span<const Ranked> parts,
                   std::span<const Index> picks, std::uint32_t key) override {
    std::size_t rows = 0;
    for (const Ranked& part : parts) rows += part.rows;
    const std::size_t sketch = noted_.size() / rows;
    reduce(numbers, noted_);
    const float* sum = noted_.data();
    std::vector<Run> runs;
    for (const Ranked& part : parts) {
      if (part.rows == 0) runs.push_back({part.start, part.width});
      std::vector<std::pair<double, Index>> order;
      for (Index row = 0; row < part.rows; ++row) {
        double energy = 0;
        for (std::size_t j = 0; j < sketch; ++j, ++sum) {
          energy += static_cast<double>(*sum) * static_cast<double>(*sum);
        }
        order.emplace_back(-energy / part.width, row);
      }
      std::ranges::sort(order);
      const std::size_t first = runs.size();
      for (const Index place : picks.first(part.picks)) {
        runs.push_back({part.start + order[place].second * part.width, part.width});
      }
      picks = picks.subspan(part.picks);
      std::ranges::sort(runs.begin() + static_cast<std::ptrdiff_t>(first), runs.end(), {},
                        &Run::start);
    }
    noted_.clear();
    add_up({}, runs, key);
    return true;
  }
  float largest_sum(std::uint32_t key) override {
    float largest = 0;
    for (const float each : sums_.at(key).values) {
      if (!(std::abs(each) <= largest)) largest = std::abs(each);
    }
    return largest;
  }
  void bring_sums(std::uint32_t key, std::span<Index> places, std::span<float> sums,
                  std::span<float> own) override {
    const Sums& kept = sums_.at(key);
    for (std::size_t i = 0; i < kept.places.size(); ++i) {
      if (!places.empty()) places[i] = static_cast<Index>(kept.places[i]);
      sums[i] = kept.values[i];
      own[i] = x_[kept.places[i]];
    }
    ++brought;
  }
  void commit_sums(std::uint32_t key, float divisor, float unit) override {
    const Sums& kept = sums_.at(key);
    Floats settled(x_.size()), mean(x_.size());
    for (std::size_t i = 0; i < kept.places.size(); ++i) {
      settled[kept.places[i]] = x_[kept.places[i]];
      mean[kept.places[i]] = kept.values[i] / divisor * unit;
    }
    if (!x_.empty()) commit_whole(settled, mean);
  }
  void spoil(std::span<const Segment> segments) override {
    for (const Segment& segment : segments) {
      std::ranges::fill(gradients.at(segment.number), std::numeric_limits<float>::quiet_NaN());
    }
  }
  void read(std::span<float> owed) override {
    expect_willing();
    std::ranges::copy(owed_, owed.begin());
  }
  void write(std::span<const float> owed) override {
    expect_willing();
    owed_.assign(owed.begin(), owed.end());
  }

 private:
  void expect_willing() const {
    if (refuses) throw std::runtime_error("the device is full");
  }

  // As the core's own: numbers and values in one all-reduce.
  void reduce(std::span<float> numbers, std::span<float> values) {
    Floats both(numbers.begin(), numbers.end());
    both.insert(both.end(), values.begin(), values.end());
    if (comm->size() > 1) comm->native_all_reduce(both);
    std::copy_n(both.begin(), numbers.size(), numbers.begin());
    std::ranges::copy(std::span(both).subspan(numbers.size()), values.begin());
  }

  struct Sums {
    std::vector<std::size_t> places;
    Floats values;
  };
  std::map<std::uint32_t, Sums> sums_;
  Floats noted_;
  std::vector<Segment> segments_;
  Base base_ = Base::none;
  Floats owed_, scaled_, x_;
  double gone_ = 0;
};

class OnDevice : public testing::TestWithParam<const char*> {
 protected:
  /// A step of `cluster`, whose reducers use `devices`.
  static std::vector<Outcome> step(Cluster& cluster, std::span<PlainDevice> devices,
                                   const std::vector<Floats>& gradients, const Cut& cut,
                                   float loss_scale) {
    return meet(cluster.reducers(), [&](Reducer& reducer, Communicator& comm) {
      const auto rank = static_cast<std::size_t>(comm.rank());
      PlainDevice& device = devices[rank];
      for (std::size_t id = 0; id < reducer.layout().count(); ++id) {
        const Parameter& parameter = reducer.layout()[id];
        const auto first = gradients[rank].begin() + static_cast<std::ptrdiff_t>(parameter.offset);
        device.gradients[id].assign(first, first + static_cast<std::ptrdiff_t>(parameter.size));
      }
      Outcome outcome;
      reducer.begin(comm, loss_scale);
      for (const auto& bucket : cut) reducer.add_on_device(bucket);
      outcome.stats = reducer.finish();
      for (const auto& [id, mean] : device.gradients) {
        outcome.gradient.insert(outcome.gradient.end(), mean.begin(), mean.end());
      }
      outcome.state = state_of(reducer);
      return outcome;
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Rows, OnDevice, testing::ValuesIn(fewer_rows()),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(OnDevice, GivesTheBitsOfMainMemory) {
  const Layout layout = small_model();
  const auto cuts = all_cuts(layout);
  const int ranks = 3;
  Cluster here(ranks, layout, GetParam()), there(ranks, layout, GetParam());
  std::vector<PlainDevice> devices(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) there[r].use(&devices[static_cast<std::size_t>(r)]);
  if (!there[0].on_device()) return;
  for (int s = 0; s < 8; ++s) {
    auto gradients = gradients_of(ranks, s, [&](int rank, int at) {
      return at % 2 == 0 ? integers(rank, at, layout.size()) : heavy_tailed(rank, at, layout);
    });
    if (s == 5) gradients.back()[40] = std::numeric_limits<float>::infinity();
    const Cut& cut = cuts[static_cast<std::size_t>(s) % cuts.size()];
    const float scale = s % 3 == 0 ? 1 : 24;
    const auto want = here.step(gradients, cut, scale);
    const auto got = step(there, devices, gradients, cut, scale);
    for (std::size_t r = 0; r < got.size(); ++r) {
      ASSERT_EQ(got[r].stats.finite, s != 5);
      ASSERT_EQ(got[r].stats.selected, want[r].stats.selected);
      ASSERT_EQ(got[r].stats.messages, want[r].stats.messages);
      ASSERT_EQ(got[r].stats.bytes_sent, want[r].stats.bytes_sent);
      ASSERT_NEAR(got[r].stats.kept_energy, want[r].stats.kept_energy, 1e-5);
      ASSERT_TRUE(s == 5 || same_bits(got[r].gradient, want[r].gradient)) << "step " << s;
      ASSERT_EQ(got[r].state, want[r].state) << "step " << s;
    }
  }
}

// ---- reduce=native -----------------------------------------------------------------------------

struct Circumstances {
  float loss_scale = 1;
  float most = std::numeric_limits<float>::max();
  std::vector<std::size_t> unused;
};

/// A step of both at a time, in main memory and on devices; gradients and states afterwards.
std::vector<Outcome> native_step(Cluster& cluster, std::vector<PlainDevice>* devices,
                                 const std::vector<Floats>& gradients, const Cut& cut,
                                 const Circumstances& how) {
  return meet(cluster.reducers(), [&](Reducer& reducer, Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    const Layout& layout = reducer.layout();
    std::map<std::size_t, Floats> own;
    auto& parts = devices != nullptr ? (*devices)[rank].gradients : own;
    for (std::size_t id = 0; id < layout.count(); ++id) {
      const auto first = gradients[rank].begin() + static_cast<std::ptrdiff_t>(layout[id].offset);
      parts[id].assign(first, first + static_cast<std::ptrdiff_t>(layout[id].size));
    }
    if (devices != nullptr) (*devices)[rank].comm = &comm;
    Outcome outcome;
    reducer.begin(comm, how.loss_scale);
    if (!how.unused.empty()) reducer.participate({.unused = how.unused});
    for (const auto& bucket : cut) {
      for (const std::size_t id : bucket) {
        devices != nullptr ? reducer.add_on_device(std::array{id}, how.most)
                           : reducer.add(std::array{id}, parts[id], how.most);
      }
    }
    outcome.stats = reducer.finish();
    for (const auto& [id, mean] : parts) {
      outcome.gradient.insert(outcome.gradient.end(), mean.begin(), mean.end());
    }
    outcome.state = state_of(reducer);
    return outcome;
  });
}

class NativeOnDevice : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(
    Methods, NativeOnDevice,
    testing::Values("dense:feedback=residual", "dense:granularity=model", "randk:density=0.1",
                    "randk:density=0.3,granularity=model,keep_dense=*bias",
                    "randk:density=0.1,feedback=none", "arc_topk:density=0.3",
                    "arc_topk:density=0.2,warmup_steps=2,random=0.5",
                    "arc_topk:density=0.3,granularity=model,exchange=(arc_topk:ranked=model)",
                    "arc_topk:density=0.3,exchange=(arc_topk:width=8,stream=signs)"),
    [](const auto& test) { return name_of(test.param); });

// Sums stay where they are, but for what nobody used, and means that their callers cannot hold.
TEST_P(NativeOnDevice, GivesTheBitsOfMainMemory) {
  const Layout layout = small_model();
  const auto cuts = all_cuts(layout);
  Spec spec = parse_spec(GetParam());
  spec.settings["reduce"] = "native";
  spec.settings["bucket_cap_mb"] = "0";
  for (const int ranks : {1, 2, 3, 5}) {
    Cluster here(ranks, layout, spec), there(ranks, layout, spec);
    std::vector<PlainDevice> devices(static_cast<std::size_t>(ranks));
    for (int r = 0; r < ranks; ++r) {
      PlainDevice& device = devices[static_cast<std::size_t>(r)];
      device.can_add_up = true;
      there[r].use(&device);
      ASSERT_TRUE(there[r].on_device());
    }
    for (int s = 0; s < 8; ++s) {
      auto gradients = gradients_of(ranks, s, [&](int rank, int at) {
        return at % 2 == 0 ? integers(rank, at, layout.size()) : heavy_tailed(rank, at, layout);
      });
      if (s == 5) gradients.back()[40] = std::numeric_limits<float>::infinity();
      Circumstances how;
      if (s % 3 == 1) how.loss_scale = 24;
      if (s == 3) how.unused = {3, 5};
      if (s == 4) how.most = 65504;
      if (s == 6) how = {.loss_scale = 24, .most = 1, .unused = {}};  // more than callers can hold
      const Cut& cut = cuts[static_cast<std::size_t>(s) % cuts.size()];
      const auto want = native_step(here, nullptr, gradients, cut, how);
      const auto got = native_step(there, &devices, gradients, cut, how);
      for (std::size_t r = 0; r < got.size(); ++r) {
        const bool lost = s == 5 || s == 6;
        ASSERT_EQ(got[r].stats.finite, !lost);
        ASSERT_EQ(want[r].stats.finite, !lost);
        ASSERT_EQ(got[r].stats.delivered, want[r].stats.delivered);
        // Rows that a device chooses need no word of all ranks that they are the same.
        ASSERT_LE(got[r].stats.rounds, want[r].stats.rounds);
        ASSERT_NEAR(got[r].stats.kept_energy, want[r].stats.kept_energy, 1e-5);
        ASSERT_TRUE(lost || same_bits(got[r].gradient, want[r].gradient)) << "step " << s;
        ASSERT_EQ(got[r].state, want[r].state) << "step " << s;
        const bool looked_at = s == 3 || s == 6;
        ASSERT_EQ(std::exchange(devices[r].brought, 0) > 0, looked_at) << "step " << s;
      }
    }
  }
}

/// A step on one rank, gradients of `seed`, a bucket for each parameter.
void step_alone(Reducer& reducer, PlainDevice& device, int seed) {
  const Layout& layout = reducer.layout();
  const Floats all = heavy_tailed(0, seed, layout);
  run_ranks(1, [&](Communicator& comm) {
    reducer.begin(comm);
    for (std::size_t id = 0; id < layout.count(); ++id) {
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(layout[id].offset);
      device.gradients[id].assign(first, first + static_cast<std::ptrdiff_t>(layout[id].size));
      reducer.add_on_device(std::array{id});
    }
    reducer.finish();
  });
}

// Part of the step is committed then: nothing goes on, and nothing is saved, until a state of one
// step is loaded.
TEST(Device, ThatBreaksACommitOffStopsTheRun) {
  const Layout layout = small_model();
  PlainDevice device, spared_device;
  const char* const method = "topk:density=0.1,bucket_cap_mb=0";
  Reducer reducer(layout, method), spared(layout, method);
  reducer.use(&device);
  spared.use(&spared_device);
  step_alone(reducer, device, 0);
  step_alone(spared, spared_device, 0);
  const State before = state_of(reducer);
  device.commits_left = 1;
  EXPECT_THROW(step_alone(reducer, device, 1), std::runtime_error);
  device.commits_left = 1'000'000;
  EXPECT_THROW(step_alone(reducer, device, 1), std::runtime_error);
  EXPECT_THROW(state_of(reducer), std::runtime_error);
  Loader loader(before);
  reducer.visit(loader);
  EXPECT_EQ(state_of(reducer), before);
  step_alone(reducer, device, 1);
  step_alone(spared, spared_device, 1);
  EXPECT_EQ(state_of(reducer), state_of(spared));
}

// Where what is owed cannot move, everything stays as it was, and the run goes on.
TEST(Device, ThatRefusesChangesNothing) {
  const Layout layout = small_model();
  PlainDevice device, spared_device;
  const char* const method = "topk:density=0.1,bucket_cap_mb=0";
  Reducer reducer(layout, method), spared(layout, method);
  device.refuses = true;
  EXPECT_THROW(reducer.use(&device), std::runtime_error);
  EXPECT_FALSE(reducer.on_device());
  device.refuses = false;
  reducer.use(&device);
  spared.use(&spared_device);
  step_alone(reducer, device, 0);
  step_alone(spared, spared_device, 0);
  const auto settings = reducer.spec().settings;
  device.refuses = true;
  for (const char* changes : {"randk", "arc_topk:density=0.5"}) {
    EXPECT_THROW(reducer.configure(parse_spec(changes)), std::runtime_error);
  }
  EXPECT_THROW(reducer.use(nullptr), std::runtime_error);
  device.refuses = false;
  EXPECT_TRUE(reducer.on_device());
  EXPECT_EQ(reducer.spec().name, "topk");
  EXPECT_EQ(reducer.spec().settings, settings);
  step_alone(reducer, device, 1);
  step_alone(spared, spared_device, 1);
  EXPECT_EQ(state_of(reducer), state_of(spared));
}

// Methods that choose alone, with a memory that can move, stay; others must say that they do not.
TEST(Device, IsForThoseThatCan) {
  const Layout layout = small_model();
  const auto stays = [&](const char* spec) {
    Reducer reducer(layout, spec);
    PlainDevice device;
    reducer.use(&device);
    return reducer.on_device();
  };
  for (const char* spec : {"topk", "topk:granularity=model", "topk_dsa", "gtopk", "ok_topk",
                           "ok_topk:granularity=model", "gaussiank", "dense"}) {
    EXPECT_TRUE(stays(spec)) << spec;
  }
  for (const char* spec : {"randk", "arc_topk", "dgc", "gaussiank:granularity=model",
                           "topk:feedback=ef21", "topk:feedback=momentum"}) {
    EXPECT_FALSE(stays(spec)) << spec;
  }
}

}  // namespace
}  // namespace topreduce::laws
