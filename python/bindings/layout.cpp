#include "topreduce/layout.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;
using topreduce::Layout;
using topreduce::Parameter;

namespace {

using NameAndShape = std::pair<std::string, std::vector<std::size_t>>;

void make_layout(Layout* self, const nb::object& given) {
  std::vector<NameAndShape> named;
  if (!nb::try_cast(given, named)) {
    throw wrong_type("Layout: give a list of names and shapes, as in [('weight', (4, 5))]", given);
  }
  std::vector<Parameter> parameters;
  for (const auto& [name, shape] : named) parameters.push_back({name, shape});
  new (self) Layout(std::move(parameters));
}

template <class Field>
auto list_of(Field field) {
  return [field](const Layout& self) {
    std::vector<std::remove_cvref_t<decltype(Parameter().*field)>> values;
    for (const Parameter& parameter : self.parameters()) values.push_back(parameter.*field);
    return values;
  };
}

}  // namespace

void bind_layout(nb::module_& module) {
  nb::class_<Layout>(module, "Layout",
                     "The model's map: every parameter's name and shape, in registration order.")
      .def("__init__", &make_layout, "parameters"_a.none(),
           nb::sig("def __init__(self, parameters: collections.abc.Sequence[tuple[str, "
                   "collections.abc.Sequence[int]]]) -> None"))
      .def("__repr__",
           [](const Layout& self) {
             return "<topreduce.Layout: " + std::to_string(self.count()) + " parameters, " +
                    std::to_string(self.size()) + " entries>";
           })
      .def("__len__", &Layout::count)
      .def_prop_ro("names", list_of(&Parameter::name))
      .def_prop_ro("shapes", list_of(&Parameter::shape))
      .def_prop_ro("sizes", list_of(&Parameter::size), "Entries of each parameter.")
      .def_prop_ro("size", &Layout::size, "Entries in the whole model.");
}
