#include "topreduce/reducer.h"

#include <limits>
#include <map>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "state.h"
#include "topreduce/device.h"

namespace nb = nanobind;
using namespace nb::literals;
using topreduce::Communicator;
using topreduce::Layout;
using topreduce::Parameter;
using topreduce::Reducer;
using topreduce::Spec;
using topreduce::StepStats;

namespace {

constexpr float kAnyFloat = std::numeric_limits<float>::max();

// ---- what goes in ------------------------------------------------------------------------------

std::vector<std::size_t> parameter_numbers(const nb::object& object) {
  std::vector<std::size_t> numbers;
  if (!nb::try_cast(object, numbers)) {
    throw nb::value_error("add: parameters must be a list of numbers of parameters in the layout");
  }
  return numbers;
}

// The array's own memory, or a ValueError that says what is wrong with it: never a silent copy.
std::span<float> writable_floats(const nb::object& object) {
  nb::ndarray<nb::ro> any;
  if (!nb::try_cast(object, any, false)) {
    throw nb::value_error("add: the gradient must be a float32 NumPy array or CPU tensor");
  }
  if (any.device_type() != nb::device::cpu::value) {
    throw nb::value_error("add: the gradient must be in main memory (CPU)");
  }
  if (any.dtype() != nb::dtype<float>()) {
    throw nb::value_error("add: the gradient must be float32; convert it yourself, and back");
  }
  if (any.ndim() != 1) {
    const std::string text =
        "add: the gradient must have one dimension, not " + std::to_string(any.ndim());
    throw nb::value_error(text.c_str());
  }
  if (any.size() > 1 && any.stride(0) != 1) {
    throw nb::value_error("add: the gradient must be contiguous");
  }
  nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> array;
  if (!nb::try_cast(object, array, false)) {
    throw nb::value_error("add: the gradient is read-only; the mean is written into it");
  }
  return {array.data(), array.size()};
}

Spec with_settings(Spec spec, const nb::kwargs& settings) {
  for (const auto& [name, value] : settings) {
    if (value.is_none()) continue;
    spec.settings.insert_or_assign(nb::cast<std::string>(name), nb::str(value).c_str());
  }
  return spec;
}

// A Reducer that keeps the arrays of an open step, and its communicator, alive.
struct Owner {
  Owner(const Layout& layout, std::string_view method, const nb::kwargs& settings)
      : reducer(layout, with_settings(topreduce::parse_spec(method), settings)) {}

  void begin(nb::object communicator, float loss_scale) {
    auto& comm = nb::cast<Communicator&>(communicator);
    {
      const nb::gil_scoped_release release;
      reducer.begin(comm, loss_scale);
    }
    held = {std::move(communicator)};
  }

  // Whatever is wrong with a bucket drops the step, as a failed exchange does.
  void add(const nb::object& numbers, const nb::object& gradient, float most) {
    try {
      const std::vector<std::size_t> parameters = parameter_numbers(numbers);
      const std::span<float> floats = writable_floats(gradient);
      held.push_back(gradient);
      const nb::gil_scoped_release release;
      reducer.add(parameters, floats, most);
    } catch (...) {
      abandon();
      throw;
    }
  }

  void add_on_device(const nb::object& numbers, float most) {
    try {
      const std::vector<std::size_t> parameters = parameter_numbers(numbers);
      const nb::gil_scoped_release release;
      reducer.add_on_device(parameters, most);
    } catch (...) {
      abandon();
      throw;
    }
  }

  void use(nb::object wanted) {
    reducer.use(wanted.is_none() ? nullptr : &nb::cast<topreduce::Device&>(wanted));
    device = std::move(wanted);
  }

  void attend(const std::vector<std::size_t>& unused, std::string_view presence,
              std::string_view divisor) {
    using topreduce::Attendance;
    if (presence != "present" && presence != "joined") {
      throw nb::value_error("attend: presence must be 'present' or 'joined'");
    }
    if (divisor != "ranks" && divisor != "present") {
      throw nb::value_error("attend: divisor must be 'ranks' or 'present'");
    }
    reducer.attend({.presence = presence == "joined" ? Attendance::Presence::joined
                                                     : Attendance::Presence::present,
                    .divisor = divisor == "present" ? Attendance::Divisor::present
                                                    : Attendance::Divisor::ranks,
                    .unused = unused});
  }

  StepStats finish() {
    const std::vector<nb::object> until_finished = std::exchange(held, {});
    const nb::gil_scoped_release release;
    return reducer.finish();
  }

  void abandon() {
    reducer.abandon();
    held.clear();
  }

  Reducer reducer;
  std::vector<nb::object> held;
  nb::object device;
};

// ---- what comes out -----------------------------------------------------------------------------

nb::object owed(const Owner& self, std::string_view name) {
  const Layout& remembered = self.reducer.remembered();
  const auto all = self.reducer.layout().find(name);
  if (!all) {
    throw nb::value_error(("owed: no parameter is called '" + std::string(name) + "'").c_str());
  }
  const auto id = remembered.find(name);
  const std::span<const float> flat = self.reducer.owed();
  const Parameter& parameter = self.reducer.layout()[*all];
  if (!id || flat.empty()) return copy_of(std::vector<float>(parameter.size), parameter.shape);
  return copy_of(flat.subspan(remembered[*id].offset, parameter.size), parameter.shape);
}

std::map<std::string, std::string> spec(const Owner& self) {
  const Spec& spec = self.reducer.spec();
  std::map<std::string, std::string> settings(spec.settings.begin(), spec.settings.end());
  settings.emplace("method", spec.name);
  return settings;
}

}  // namespace

void bind_reducer(nb::module_& module) {
  nb::class_<Owner>(module, "Reducer",
                    "Averages a model's gradients over the ranks, one step at a time.\n\n"
                    "A step is begin, add for every bucket, finish; whatever raises in between\n"
                    "leaves what is owed as it was.")
      .def(nb::init<const Layout&, std::string_view, const nb::kwargs&>(), "layout"_a, "method"_a,
           "settings"_a,
           nb::sig("def __init__(self, layout: Layout, method: str, **settings: object) -> None"))
      .def(
          "agree", [](Owner& self, Communicator& comm) { self.reducer.agree(comm); }, "comm"_a,
          nb::call_guard<nb::gil_scoped_release>(),
          "Compare version, model and settings over the ranks; ValueError on all if they differ.")
      .def("begin", &Owner::begin, "comm"_a, "loss_scale"_a = 1.0f,
           nb::sig("def begin(self, comm: Communicator, loss_scale: float = 1.0) -> None"),
           "Open a step; gradients come, and leave, multiplied by `loss_scale`; 0 where that is\n"
           "not known.")
      .def("add", &Owner::add, "parameters"_a.none(), "gradient"_a.none(), "most"_a = kAnyFloat,
           nb::sig("def add(self, parameters: collections.abc.Sequence[int], gradient: "
                   "numpy.typing.NDArray[numpy.float32], most: float = 3.4028234663852886e+38) -> "
                   "None"),
           "Hand over gradients of some parameters, one after the other in one float32 array that\n"
           "stays untouched until `finish` writes the mean into it. A mean above `most` counts as\n"
           "not finite.")
      .def("add_on_device", &Owner::add_on_device, "parameters"_a.none(), "most"_a = kAnyFloat,
           nb::sig("def add_on_device(self, parameters: collections.abc.Sequence[int], most: float "
                   "= 3.4028234663852886e+38) -> None"),
           "The same for gradients that the device of `use` holds.")
      .def("use", &Owner::use, "device"_a.none(),
           nb::sig("def use(self, device: Device | None) -> None"),
           "From now on gradients live on this device, and what is owed with them, if the method\n"
           "can work there: see `on_device`. None: in main memory.")
      .def_prop_ro(
          "on_device", [](const Owner& self) { return self.reducer.on_device(); },
          "Whether gradients stay on the device, or must come to main memory.")
      .def("attend", &Owner::attend, "unused"_a = std::vector<std::size_t>(),
           "presence"_a = "present", "divisor"_a = "ranks",
           nb::sig("def attend(self, unused: collections.abc.Sequence[int] = (), presence: str = "
                   "'present', divisor: str = 'ranks') -> None"),
           "Say, before the last `add`, which parameters this rank left `unused`, whether it has\n"
           "'joined' (is out of data), and if means are over all ranks or those 'present'.\n"
           "What no rank used is not delivered.")
      .def("finish", &Owner::finish, "Replace every gradient with the mean over the ranks.")
      .def("abandon", &Owner::abandon, "Drop an open step.")
      .def(
          "skip_to", [](Owner& self, std::uint64_t step) { self.reducer.skip_to(step); }, "step"_a,
          "Go on as if this were the number of the next step; what is owed stays.")
      .def(
          "configure",
          [](Owner& self, const nb::kwargs& changes) {
            Spec spec = with_settings({}, changes);
            if (const auto method = spec.settings.find("method"); method != spec.settings.end()) {
              spec.name = method->second;
              spec.settings.erase(method);
            }
            self.reducer.configure(spec);
          },
          "changes"_a, nb::sig("def configure(self, **changes: object) -> None"),
          "Change settings, or the method, between steps, the same on all ranks; what is owed "
          "stays.")
      .def(
          "bypass", [](Owner& self) { self.reducer.set_mode(Reducer::Mode::bypass); },
          "From the next step on average densely; what is owed waits.")
      .def(
          "resume", [](Owner& self) { self.reducer.set_mode(Reducer::Mode::compress); },
          "Compress again after `bypass`.")
      .def_prop_ro("bypassed",
                   [](const Owner& self) { return self.reducer.mode() == Reducer::Mode::bypass; })
      .def(
          "state", [](Owner& self) { return save_state(self.reducer); },
          nb::sig("def state(self) -> dict[str, dict[str, typing.Any]]"),
          "Everything that the next step depends on, by parameter name; copies.")
      .def(
          "load_state", [](Owner& self, const nb::dict& state) { load_state(self.reducer, state); },
          "state"_a,
          nb::sig("def load_state(self, state: dict[str, dict[str, typing.Any]]) -> None"),
          "Take over a state; ValueError, and no change, if it does not fit.")
      .def("owed", &owed, "name"_a,
           nb::sig("def owed(self, name: str) -> numpy.typing.NDArray[numpy.float32]"),
           "A copy of what this rank owes of one parameter.")
      .def_prop_ro("layout", [](const Owner& self) { return self.reducer.layout(); })
      .def_prop_ro("spec", &spec, "Every setting, defaults included, and the method.")
      .def_prop_ro(
          "stats", [](const Owner& self) { return self.reducer.stats(); },
          "Of the last finished step.")
      .def_prop_ro(
          "step", [](const Owner& self) { return self.reducer.step(); }, "Number of the next step.")
      .def_prop_ro(
          "density", [](const Owner& self) { return self.reducer.density(); },
          "Of the next step: 1 while warming up, falling in the ramp.");
}
