// A state may come from any file. Its numbers are refused, and then nothing has changed, or they
// are taken over, and the ranks that did so make steps or tell each other that they differ. The
// first byte chooses the method; entries are as loaders hand them on, finite and not too large.

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/fuzz/input.h"
#include "tests/laws.h"
#include "topreduce/comm/thread.h"
#include "topreduce/reducer.h"

namespace topreduce {
namespace {

constexpr int kRanks = 2;

/// Numbers of which many can be: small, whole, or anything.
double number_of(Input& input) {
  const unsigned kind = input.byte();
  if (kind < 96) return kind % 3;
  if (kind < 160) return input.word();
  if (kind < 192) return input.word() / 1024.0 - 8;
  std::uint64_t bits = 0;
  for (int i = 0; i < 8; ++i) bits = bits << 8 | input.byte();
  return std::bit_cast<double>(bits);
}

float entry_of(Input& input) {
  const auto value = static_cast<float>(number_of(input));
  return std::abs(value) <= kLargestRemembered ? value : 0;
}

/// Fills in what the input says, the same in both visits.
class Loader final : public StateVisitor {
 public:
  Loader(const Input& input, Purpose purpose) : input_(input), purpose_(purpose) {}
  Purpose purpose() const override { return purpose_; }
  void entries(std::string_view, std::span<float> values) override {
    const std::size_t some = 1 + input_.byte() % 8;
    std::vector<float> few;
    for (std::size_t i = 0; i < some; ++i) few.push_back(entry_of(input_));
    if (purpose_ == Purpose::check) return;
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = few[i % some];
  }
  void parameters(std::string_view, std::span<double> values) override {
    for (double& value : values) value = number_of(input_);
  }
  void number(std::string_view, double& value) override { value = number_of(input_); }

 private:
  Input input_;
  Purpose purpose_;
};

class Saver final : public StateVisitor {
 public:
  Purpose purpose() const override { return Purpose::save; }
  void entries(std::string_view, std::span<float> values) override {
    for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
  }
  void parameters(std::string_view, std::span<double> values) override {
    for (const double value : values) bits.push_back(std::bit_cast<std::uint64_t>(value));
  }
  void number(std::string_view, double& value) override { parameters({}, {&value, 1}); }

  std::vector<std::uint64_t> bits;
};

std::vector<std::uint64_t> bits_of(Reducer& reducer) {
  Saver saver;
  reducer.visit(saver);
  return saver.bits;
}

/// False if the state is refused.
bool load(Reducer& reducer, const Input& input) {
  const auto before = bits_of(reducer);
  try {
    Loader check(input, StateVisitor::Purpose::check);
    reducer.visit(check);
  } catch (const std::invalid_argument&) {
    require(bits_of(reducer) == before);
    return false;
  }
  Loader loader(input, StateVisitor::Purpose::load);
  reducer.visit(loader);  // what was checked is not refused
  return true;
}

void step_together(std::vector<Reducer>& reducers) {
  const std::size_t size = reducers[0].layout().size();
  run_ranks(kRanks, [&](Communicator& comm) {
    comm.set_timeout(std::chrono::seconds(5));
    Reducer& reducer = reducers[static_cast<std::size_t>(comm.rank())];
    for (int step = 0; step < 3; ++step) {
      std::vector<float> gradient(size, static_cast<float>(comm.rank() + step));
      const auto before = bits_of(reducer);
      try {
        const StepStats& stats = reducer.average(comm, gradient);
        for (const float x : gradient) require(std::isfinite(x) == stats.finite);
        if (!stats.finite) require(bits_of(reducer) == before);
      } catch (const WireError&) {
        require(bits_of(reducer) == before);
        return;
      } catch (const CommError& error) {
        require(std::strstr(error.what(), "is silent") == nullptr);  // nobody waits in vain
        require(bits_of(reducer) == before);
        return;
      } catch (const std::invalid_argument&) {  // other steps
        return;
      }
    }
  });
}

void fuzz(Input input) {
  const char* const row = laws::kRows[input.byte() % std::size(laws::kRows)];
  const bool alike = input.byte() % 4 != 0;
  static const Layout layout(
      {{"embed.weight", {6, 5}}, {"nothing", {0, 4}}, {"scale", {}}, {"head.bias", {9}}});
  std::vector<Reducer> reducers;
  for (int r = 0; r < kRanks; ++r) reducers.emplace_back(layout, row);
  for (Reducer& reducer : reducers) {
    if (!load(reducer, input)) return;
    if (!alike) input = Input(input.rest().subspan(input.rest().size() / 2));
  }
  step_together(reducers);
}

}  // namespace
}  // namespace topreduce

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  topreduce::fuzz(topreduce::Input(std::as_bytes(std::span(data, size))));
  return 0;
}
