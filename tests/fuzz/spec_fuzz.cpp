// Any text is a spec, or std::invalid_argument says why not. What was read is written and read back
// as it was; a reducer that can be made of it takes a step.

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/fuzz/input.h"
#include "topreduce/comm/self.h"
#include "topreduce/reducer.h"
#include "topreduce/spec.h"

namespace topreduce {
namespace {

bool same(const Spec& a, const Spec& b) {
  return a.name == b.name && a.settings == b.settings;
}

const Layout& model() {
  static const Layout layout(
      {{"embed.weight", {6, 5}}, {"nothing", {0, 4}}, {"scale", {}}, {"head.bias", {9}}});
  return layout;
}

void take_step(const Spec& spec) {
  Reducer reducer(model(), spec);
  const Reducer again(model(), reducer.spec());
  require(same(again.spec(), reducer.spec()));  // resolved once, it stays as it is
  comm::Self alone;
  std::vector<float> gradient(model().size());
  for (std::size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>(i % 7) - 3;
  require(reducer.average(alone, gradient).finite);
  for (const float x : gradient) require(std::isfinite(x));
  reducer.configure(spec);
  reducer.average(alone, gradient);
}

void fuzz(std::string_view text) {
  try {
    const Spec spec = parse_spec(text);
    require(same(parse_spec(to_string(spec)), spec));
    if (spec.settings.contains("threads")) return;  // would be started
    take_step(spec);
  } catch (const std::invalid_argument& error) {
    require(!std::string(error.what()).empty());
  }
}

}  // namespace
}  // namespace topreduce

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  topreduce::fuzz({reinterpret_cast<const char*>(data), size});
  return 0;
}
