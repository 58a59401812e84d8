#include "topreduce/catalog.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "bindings.h"

namespace nb = nanobind;

namespace {

using topreduce::Granularity;
using topreduce::Setting;

nb::list to_list(std::span<const Setting> settings) {
  static constexpr const char* kinds[] = {"number", "integer", "choice", "text", "density"};
  nb::list list;
  for (const Setting& setting : settings) {
    nb::dict item;
    item["name"] = setting.name;
    item["kind"] = kinds[static_cast<int>(setting.kind)];
    item["default"] = setting.fallback;
    item["meaning"] = setting.meaning;
    if (setting.kind == Setting::Kind::choice) item["choices"] = setting.choices;
    if (setting.kind != Setting::Kind::choice && setting.kind != Setting::Kind::text) {
      item["low"] = setting.low;
      item["high"] = setting.high;
      item["above_low"] = setting.above_low;
    }
    list.append(item);
  }
  return list;
}

template <class Entries>
nb::list stages(const Entries& entries) {
  nb::list list;
  for (const auto& entry : entries) {
    nb::dict item;
    item["name"] = entry.name;
    item["summary"] = entry.summary;
    item["granularity"] = entry.granularity == Granularity::model    ? "model"
                          : entry.granularity == Granularity::bucket ? "bucket"
                                                                     : "any";
    item["settings"] = to_list(entry.settings);
    list.append(item);
  }
  return list;
}

nb::dict catalog() {
  nb::list methods;
  for (const topreduce::Method& method : topreduce::methods()) {
    nb::dict item;
    item["name"] = method.name;
    item["summary"] = method.summary;
    item["feedback"] = method.feedback;
    item["select_model"] = method.select_model;
    item["select_bucket"] = method.select_bucket;
    item["exchange"] = method.exchange;
    item["density"] = method.density;
    item["paper"] = method.paper;
    methods.append(item);
  }
  nb::dict all;
  all["methods"] = methods;
  all["feedback"] = stages(topreduce::feedbacks());
  all["select"] = stages(topreduce::selectors());
  all["exchange"] = stages(topreduce::exchanges());
  all["settings"] = to_list(topreduce::common_settings());
  return all;
}

}  // namespace

void bind_catalog(nb::module_& module) {
  module.def("catalog", &catalog,
             nb::sig("def catalog() -> dict[str, list[dict[str, typing.Any]]]"),
             "Every method and stage, as topreduce/catalog.def lists them.");
}
