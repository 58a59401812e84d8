#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "bindings.h"
#include "topreduce/tuning/forecast.h"

namespace nb = nanobind;
using namespace nb::literals;
using topreduce::Layout;
using topreduce::Pipeline;
using topreduce::tuning::Forecast;
using topreduce::tuning::Level;
using topreduce::tuning::Site;

namespace {

Site site_of(double entries, int ranks, double computed, double bytes_per_second, double delay) {
  return {entries, ranks, computed, bytes_per_second, delay};
}

nb::dict told(const Forecast& forecast) {
  nb::dict dict;
  dict["bytes"] = forecast.bytes;
  dict["messages"] = forecast.messages;
  dict["waited"] = forecast.waited;
  dict["seconds"] = forecast.seconds;
  return dict;
}

// The method's own density, or what density=auto would find.
nb::dict forecast(std::string_view method, const Layout& layout, double entries, int ranks,
                  double computed, double bytes_per_second, double delay) {
  const Site site = site_of(entries, ranks, computed, bytes_per_second, delay);
  const Pipeline pipeline(layout, topreduce::with_exchange(topreduce::parse_spec(method), ranks));
  const bool found = pipeline.rule == Pipeline::Rule::found;
  const Level level =
      found ? topreduce::tuning::advise(pipeline, site) : Level{pipeline.density, pipeline.values};
  nb::dict dict = told(topreduce::tuning::forecast(pipeline, level, site));
  dict["level"] = topreduce::tuning::to_word(level);
  dict["density"] = level.density;
  return dict;
}

nb::dict forecast_ddp(double bits, double entries, int ranks, double computed,
                      double bytes_per_second, double delay) {
  return told(topreduce::tuning::forecast_ddp(
      bits, site_of(entries, ranks, computed, bytes_per_second, delay)));
}

}  // namespace

void bind_tuning(nb::module_& module) {
  module.def("forecast", &forecast, "method"_a, "layout"_a, "entries"_a, "ranks"_a, "computed"_a,
             "bytes_per_second"_a, "delay"_a,
             nb::sig("def forecast(method: str, layout: Layout, entries: float, ranks: int, "
                     "computed: float, bytes_per_second: float, delay: float) -> dict[str, "
                     "typing.Any]"),
             "What a step would cost: level, density, bytes, messages, waited, seconds. `layout`: "
             "of a model like\nthe one that has so many entries.");
  module.def("forecast_ddp", &forecast_ddp, "bits"_a, "entries"_a, "ranks"_a, "computed"_a,
             "bytes_per_second"_a, "delay"_a,
             nb::sig("def forecast_ddp(bits: float, entries: float, ranks: int, computed: float, "
                     "bytes_per_second: float, delay: float) -> dict[str, typing.Any]"),
             "The same of PyTorch's own all-reduce, with so many bits for a value.");
}
