#include "state.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

namespace nb = nanobind;
using topreduce::Layout;
using topreduce::Parameter;
using topreduce::Reducer;

nb::object copy_of(std::span<const float> values, const std::vector<std::size_t>& shape) {
  auto* copy = new std::vector<float>(values.begin(), values.end());
  nb::capsule owner(copy, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, float>(copy->data(), shape.size(), shape.data(), owner));
}

namespace {

// {"numbers": {name: float}, "parameters": {name: {parameter: float}}, "entries": {... arrays}}
class Saver final : public topreduce::StateVisitor {
 public:
  explicit Saver(const Layout& layout) : layout_(layout) {
    for (const char* part : {"numbers", "parameters", "entries"}) state[part] = nb::dict();
  }
  Purpose purpose() const override { return Purpose::save; }
  void entries(std::string_view name, std::span<float> values) override {
    nb::dict by_parameter;
    for (const Parameter& parameter : layout_.parameters()) {
      by_parameter[parameter.name.c_str()] =
          copy_of(values.subspan(parameter.offset, parameter.size), parameter.shape);
    }
    put("entries", name, by_parameter);
  }
  void parameters(std::string_view name, std::span<double> values) override {
    nb::dict by_parameter;
    for (std::size_t p = 0; p < layout_.count(); ++p) {
      by_parameter[layout_[p].name.c_str()] = values[p];
    }
    put("parameters", name, by_parameter);
  }
  void number(std::string_view name, double& value) override {
    put("numbers", name, nb::float_(value));
  }
  void text(std::string_view name, std::string& text) override {
    if (!state.contains("texts")) state["texts"] = nb::dict();
    put("texts", name, nb::str(text.data(), text.size()));
  }

  nb::dict state;

 private:
  void put(const char* part, std::string_view name, const nb::object& value) {
    nb::object group = state[part];
    group[nb::str(name.data(), name.size())] = value;
  }
  const Layout& layout_;
};

std::string shape_text(const std::size_t* extents, std::size_t dimensions) {
  std::string text;
  for (std::size_t d = 0; d < dimensions; ++d) text += (d ? ", " : "") + std::to_string(extents[d]);
  return "(" + text + ")";
}

// Compares a state with what the reducer would save, and takes it over in a second visit, so that a
// state that does not fit changes nothing.
class Loader final : public topreduce::StateVisitor {
 public:
  Loader(const Layout& layout, const nb::object& state, Purpose purpose)
      : layout_(layout), state_(as_dict(state, "state")), purpose_(purpose) {}

  Purpose purpose() const override { return purpose_; }

  void entries(std::string_view name, std::span<float> values) override {
    const nb::dict saved = by_parameter("entries", name);
    for (const Parameter& parameter : layout_.parameters()) {
      const std::string what = std::string(name) + " of '" + parameter.name + "'";
      nb::ndarray<const float, nb::c_contig, nb::device::cpu> array;
      if (!nb::try_cast(get(saved, parameter.name, name), array, false)) {
        fail(what + " is not a contiguous float32 array");
      }
      const std::vector<std::size_t> shape(array.shape_ptr(), array.shape_ptr() + array.ndim());
      if (shape != parameter.shape) {
        fail(what + " has shape " + shape_text(shape.data(), shape.size()) + ", the parameter " +
             shape_text(parameter.shape.data(), parameter.shape.size()));
      }
      const std::span<const float> all(array.data(), array.size());
      const auto can_be = [](float x) { return std::abs(x) <= topreduce::kLargestRemembered; };
      if (!std::ranges::all_of(all, can_be)) {
        fail(what + " holds an infinity, NaN, or a magnitude above 2^102, which no step leaves");
      }
      if (purpose_ == Purpose::load) {
        std::ranges::copy(all, values.begin() + static_cast<std::ptrdiff_t>(parameter.offset));
      }
    }
  }
  void parameters(std::string_view name, std::span<double> values) override {
    const nb::dict saved = by_parameter("parameters", name);
    for (std::size_t p = 0; p < layout_.count(); ++p) {
      set(get(saved, layout_[p].name, name), name, values[p]);
    }
  }
  void number(std::string_view name, double& value) override {
    set(get(group("numbers"), name, "numbers"), name, value);
    asked_["numbers"].emplace(name);
  }
  void text(std::string_view name, std::string& text) override {
    if (!state_.contains("texts")) return;
    const nb::dict texts = as_dict(state_["texts"], "texts");
    const std::string key(name);
    if (texts.contains(key.c_str()) && !nb::try_cast(nb::object(texts[key.c_str()]), text)) {
      fail(key + " is no text");
    }
  }

  // What no stage asked for was kept by another method; to drop it would lose what is owed.
  void expect_nothing_else() const {
    for (const auto& [part, names] : asked_) {
      for (const auto& [key, value] : group(part)) {
        const std::string name = nb::str(key).c_str();
        if (!names.contains(name)) {
          fail(part + " hold '" + name + "', which this method does not keep" + kAnother);
        }
      }
    }
  }

  [[noreturn]] static void fail(const std::string& what) {
    throw nb::value_error(("load_state: " + what + "; nothing was changed").c_str());
  }

 private:
  static constexpr const char* kAnother =
      " (a state fits the method, settings and model that it was saved with)";

  static nb::object get(const nb::dict& dict, std::string_view key, std::string_view where) {
    const std::string name(key);
    if (!dict.contains(name.c_str())) {
      fail(std::string(where) + " has no '" + name + "'" + kAnother);
    }
    return dict[name.c_str()];
  }
  static nb::dict as_dict(const nb::object& object, std::string_view name) {
    if (!nb::isinstance<nb::dict>(object)) fail(std::string(name) + " is not a dict");
    return nb::borrow<nb::dict>(object);
  }
  nb::dict group(std::string_view part) const { return as_dict(get(state_, part, "state"), part); }
  nb::dict by_parameter(const char* part, std::string_view name) {
    asked_[part].emplace(name);
    nb::dict saved = as_dict(get(group(part), name, part), name);
    if (nb::len(saved) != layout_.count()) {
      fail(std::string(name) + " is of " + std::to_string(nb::len(saved)) +
           " parameters, this model remembers " + std::to_string(layout_.count()) + kAnother);
    }
    return saved;
  }
  void set(const nb::object& item, std::string_view name, double& value) const {
    double number = 0;
    if (!nb::try_cast(item, number) || !std::isfinite(number)) {
      fail(std::string(name) + " is not a number");
    }
    value = number;
  }

  const Layout& layout_;
  nb::dict state_;
  Purpose purpose_;
  std::map<std::string, std::set<std::string, std::less<>>> asked_ = {
      {"numbers", {}}, {"parameters", {}}, {"entries", {}}};
};

}  // namespace

nb::dict save_state(Reducer& reducer) {
  Saver saver(reducer.remembered());
  reducer.visit(saver);
  return saver.state;
}

void load_state(Reducer& reducer, const nb::object& state) {
  using Purpose = topreduce::StateVisitor::Purpose;
  for (const auto purpose : {Purpose::check, Purpose::load}) {
    Loader loader(reducer.remembered(), state, purpose);
    try {
      reducer.visit(loader);
    } catch (const std::invalid_argument& error) {
      Loader::fail(error.what());
    }
    loader.expect_nothing_else();
  }
}
