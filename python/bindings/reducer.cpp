#include "topreduce/reducer.h"

#include <chrono>
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
#include "handover.h"
#include "state.h"
#include "topreduce/device.h"
#include "topreduce/wire/checksum.h"

namespace nb = nanobind;
using namespace nb::literals;
using topreduce::Communicator;
using topreduce::Layout;
using topreduce::Parameter;
using topreduce::RebuildPlan;
using topreduce::Reducer;
using topreduce::Spec;
using topreduce::StepStats;

namespace {

constexpr float kAnyFloat = std::numeric_limits<float>::max();

// ---- what goes in ------------------------------------------------------------------------------

nb::builtin_exception mistake(const char* caller, const std::string& words) {
  return nb::value_error((std::string(caller) + ": " + words).c_str());
}

Communicator& communicator_of(const char* caller, const nb::object& object) {
  if (nb::isinstance<Communicator>(object)) return nb::cast<Communicator&>(object);
  throw wrong_type(std::string(caller) + ": comm must be a topreduce.Communicator", object);
}

void expect_named(const char* caller, const nb::args& positional) {
  if (positional.size() == 0) return;
  throw nb::type_error((std::string(caller) + ": write settings by name, as in density=0.01, not " +
                        shown(positional[0]))
                           .c_str());
}

std::vector<std::size_t> parameter_numbers(const char* caller, const nb::object& object) {
  std::vector<std::size_t> numbers;
  if (!nb::try_cast(object, numbers)) {
    throw mistake(caller, "parameters must be a list of numbers of parameters in the layout");
  }
  return numbers;
}

// The array's own memory, or a ValueError that says what is wrong with it: never a silent copy.
std::span<float> writable_floats(const char* caller, const nb::handle& object) {
  nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> array;
  if (nb::try_cast(object, array, false)) return {array.data(), array.size()};
  nb::ndarray<nb::ro> any;
  if (!nb::try_cast(object, any, false)) {
    throw mistake(caller, "the gradient must be a float32 NumPy array or CPU tensor");
  }
  if (any.device_type() != nb::device::cpu::value) {
    throw mistake(caller, "the gradient must be in main memory (CPU)");
  }
  if (any.dtype() != nb::dtype<float>()) {
    throw mistake(caller, "the gradient must be float32: convert it, and the mean back");
  }
  if (any.ndim() != 1) {
    throw mistake(caller,
                  "the gradient must have one dimension, not " + std::to_string(any.ndim()));
  }
  if (any.size() > 1 && any.stride(0) != 1) {
    throw mistake(caller, "the gradient must be contiguous");
  }
  throw mistake(caller, "the gradient is read-only; the mean is written into it");
}

// As a spec has it; the words of a list with spaces between.
std::string setting_text(const nb::handle& value) {
  std::string text;
  if (nb::isinstance<nb::list>(value) || nb::isinstance<nb::tuple>(value)) {
    for (const nb::handle each : value) text += text_of(nb::str(each)) + " ";
  } else {
    text = text_of(nb::str(value));
  }
  constexpr const char* kBlank = " \t\n";
  text.erase(text.find_last_not_of(kBlank) + 1);
  text.erase(0, text.find_first_not_of(kBlank));
  return text;
}

Spec with_settings(Spec spec, const std::string& method, const nb::kwargs& settings) {
  for (const auto& [key, value] : settings) {
    const std::string name = nb::cast<std::string>(key), text = setting_text(value);
    if (value.is_none() || name == "method") continue;
    if (!spec.settings.emplace(name, text).second) {
      throw std::invalid_argument(name + " is given twice: in '" + method + "', and as " + name +
                                  "=" + text);
    }
  }
  return spec;
}

Spec spec_of(const nb::object& method, const nb::kwargs& settings) {
  std::string text;
  if (!nb::isinstance<nb::str>(method)) {
    throw wrong_type("method must be a name such as 'topk'", method);
  }
  text = text_of(method);
  return with_settings(topreduce::parse_spec(text), text, settings);
}

// In a handler: what the exception says.
std::string current_words() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "";
  }
}

// A Reducer that keeps the arrays of an open step, and its communicator, alive.
struct Owner {
  Owner(const Layout& layout, const Spec& method) : reducer(layout, method) {}

  void begin(nb::object communicator, float loss_scale) {
    Communicator& comm = communicator_of("begin", communicator);
    {
      const nb::gil_scoped_release release;
      reducer.begin(comm, loss_scale);
    }
    held.assign(reducer.layout().count(), {});
    comm_held = std::move(communicator);
  }

  // Whatever is wrong with a gradient drops the step, as a failed exchange does.
  void add(const nb::object& numbers, const nb::object& gradient, float most) {
    try {
      const std::vector<std::size_t> parameters = parameter_numbers("add", numbers);
      const std::span<float> floats = writable_floats("add", gradient);
      hold(parameters, gradient);
      brought = true;
      const nb::gil_scoped_release release;
      reducer.add(parameters, floats, most);
    } catch (...) {
      abandon(current_words());
      throw;
    }
  }

  StepStats average(const nb::object& communicator, const nb::object& gradient) {
    Communicator& comm = communicator_of("average", communicator);
    const std::span<float> floats = writable_floats("average", gradient);
    const nb::gil_scoped_release release;
    return reducer.average(comm, floats);
  }

  void add_many(const nb::sequence& gradients, bool lent) {
    struct Added {
      std::size_t parameter;
      std::span<float> floats;
      float most;
    };
    try {
      std::vector<Added> all;
      for (nb::handle each : gradients) {
        nb::tuple parts;
        std::size_t parameter = 0;
        float most = 0;
        if (!nb::try_cast(each, parts) || parts.size() != 3 || !nb::try_cast(parts[0], parameter) ||
            !nb::try_cast(parts[2], most)) {
          throw mistake("add_many",
                        "give triples of a parameter's number, its gradient and `most`");
        }
        all.push_back({parameter, writable_floats("add_many", parts[1]), most});
        hold({&parameter, 1}, nb::borrow(parts[1]));
      }
      brought = true;
      const nb::gil_scoped_release release;
      for (const Added& one : all) {
        if (lent) {
          reducer.lend({&one.parameter, 1}, one.floats, one.most);
        } else {
          reducer.add({&one.parameter, 1}, one.floats, one.most);
        }
      }
    } catch (...) {
      abandon(current_words());
      throw;
    }
  }

  void take_from(nb::object from) {
    handover = nb::cast<Handover*>(from);
    handover_held = std::move(from);
  }

  // What was put there since; whether anything was.
  bool take_in() {
    if (handover == nullptr || !handover->take(coming)) return false;
    for (const auto& [parameter, entries, lent] : coming) {
      if (lent) {
        reducer.lend({&parameter, 1}, entries);
      } else {
        reducer.add({&parameter, 1}, entries);
      }
    }
    brought = true;
    return true;
  }

  void relocate(const nb::object& numbers, const nb::object& gradient) {
    try {
      const std::vector<std::size_t> parameters = parameter_numbers("relocate", numbers);
      const std::span<float> floats = writable_floats("relocate", gradient);
      {
        const nb::gil_scoped_release release;
        take_in();
        reducer.relocate(parameters, floats);
      }
      hold(parameters, gradient);  // and no longer what was there before
    } catch (...) {
      abandon(current_words());
      throw;
    }
  }

  void deliver_to(const nb::object& numbers, nb::object means) {
    try {
      const std::vector<std::size_t> parameters = parameter_numbers("deliver_to", numbers);
      const std::span<float> floats = writable_floats("deliver_to", means);
      places_held.push_back(std::move(means));
      const nb::gil_scoped_release release;
      take_in();
      reducer.deliver_to(parameters, floats);
    } catch (...) {
      abandon(current_words());
      throw;
    }
  }

  void add_on_device(const nb::object& numbers, float most) {
    try {
      const std::vector<std::size_t> parameters = parameter_numbers("add_on_device", numbers);
      brought = true;
      const nb::gil_scoped_release release;
      reducer.add_on_device(parameters, most);
    } catch (...) {
      abandon(current_words());
      throw;
    }
  }

  void commit_with(nb::object wanted) {
    reducer.commit_with(wanted.is_none() ? nullptr : &nb::cast<Communicator&>(wanted));
    others = std::move(wanted);
  }

  void commit_if(nb::object wanted) {
    if (wanted.is_none()) {
      reducer.commit_if({});
    } else {
      reducer.commit_if([asked = nb::handle(wanted)] {
        const nb::gil_scoped_acquire gil;
        return nb::cast<bool>(nb::bool_(asked()));
      });
    }
    allows = std::move(wanted);
  }

  void use(nb::object wanted) {
    reducer.use(wanted.is_none() ? nullptr : &nb::cast<topreduce::Device&>(wanted));
    device = std::move(wanted);
  }

  void participate(const std::vector<std::size_t>& unused, std::string_view presence,
                   std::string_view divisor) {
    using topreduce::Participation;
    if (presence != "present" && presence != "joined") {
      throw nb::value_error("participate: presence must be 'present' or 'joined'");
    }
    if (divisor != "ranks" && divisor != "present") {
      throw nb::value_error("participate: divisor must be 'ranks' or 'present'");
    }
    reducer.participate({.presence = presence == "joined" ? Participation::Presence::joined
                                                          : Participation::Presence::present,
                         .divisor = divisor == "present" ? Participation::Divisor::present
                                                         : Participation::Divisor::ranks,
                         .unused = unused});
  }

  bool progress() {
    try {
      const nb::gil_scoped_release release;
      return reducer.progress();
    } catch (...) {
      abandon(current_words());
      throw;
    }
  }

  // Returns now and then, so that whoever has dropped this is noticed.
  bool attend() {
    constexpr std::chrono::milliseconds kPatience(20);
    try {
      if (!comm_held.is_valid()) return false;
      const nb::object until_over = comm_held;  // whoever abandons the step meanwhile
      auto& comm = nb::cast<Communicator&>(until_over);
      const nb::gil_scoped_release release;
      take_in();
      if (comm.size() == 1) return reducer.progress();  // nothing comes, and nobody can wake this
      const std::chrono::duration<double> pace(reducer.pace());
      const Clock::time_point until = Clock::now() + kPatience;
      do {
        const auto left = std::chrono::duration_cast<Clock::duration>(looked + pace - Clock::now());
        const bool woken = (left > Clock::duration::zero() && wait_for_wake(comm, left)) ||
                           (!brought && wait_for_news(comm, kPatience));
        // One wake may stand for gradients and for something else to do.
        if (woken && (!take_in() || handover->was_interrupted())) return true;
        if (woken) continue;
        const bool busy = reducer.progress();
        looked = Clock::now();
        brought = false;
        if (!busy) return false;
      } while (Clock::now() < until);
      return true;
    } catch (...) {
      abandon(current_words());
      throw;
    }
  }

  StepStats finish() {
    try {
      const nb::gil_scoped_release release;
      take_in();
    } catch (...) {
      abandon(current_words());
      throw;
    }
    const std::vector<nb::object> until_finished = std::exchange(held, {});
    const std::vector<nb::object> places = std::exchange(places_held, {});
    const nb::object comm = std::exchange(comm_held, {});
    const nb::object from = std::exchange(handover_held, {});
    const nb::gil_scoped_release release;
    handover = nullptr;
    return reducer.finish();
  }

  void abandon(std::string_view why = {}) {
    reducer.abandon(why);
    held.clear();
    places_held.clear();
    comm_held.reset();
    handover = nullptr;
    handover_held.reset();
  }

  // Keeps the array of these parameters alive; the reducer finds out about numbers that are wrong.
  void hold(std::span<const std::size_t> parameters, const nb::object& gradient) {
    for (const std::size_t id : parameters) {
      if (id < held.size()) held[id] = gradient;
    }
  }

  Reducer reducer;
  std::vector<nb::object> held;         // by parameter
  std::vector<nb::object> places_held;  // where means go
  nb::object comm_held;
  nb::object handover_held;  // until the step is over
  Handover* handover = nullptr;
  std::vector<Handover::Gradient> coming;
  nb::object others;
  nb::object allows;
  nb::object device;

  // For `attend`.
  using Clock = std::chrono::steady_clock;
  Clock::time_point looked;  // when it did last
  bool brought = false;      // anything since then
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

std::string described(const Owner& self) {
  const Reducer& reducer = self.reducer;
  return "<topreduce.Reducer: " + reducer.spec().name + ", next step sends " + reducer.level() +
         " (" + reducer.reason() + "), " + std::to_string(reducer.layout().size()) +
         " entries, step " + std::to_string(reducer.step()) + ">";
}

const char* name_of(RebuildPlan::Role role) {
  switch (role) {
    case RebuildPlan::Role::on_time: return "on_time";
    case RebuildPlan::Role::late: return "late";
    case RebuildPlan::Role::joins: break;
  }
  return "joins";
}

}  // namespace

// What a type checker knows of them; the catalog has all of them.
#define TOPREDUCE_SETTINGS                                                                       \
  "density: float | str | collections.abc.Sequence[float | str] | None = None, "                 \
  "overhead: float | None = None, min_density: float | None = None, "                            \
  "max_density: float | None = None, budget_bytes: float | None = None, "                        \
  "granularity: str | None = None, bucket_cap_mb: float | None = None, "                         \
  "values: str | None = None, feedback: str | None = None, select: str | None = None, "          \
  "exchange: str | None = None, keep_dense: str | collections.abc.Sequence[str] | None = None, " \
  "warmup_steps: int | None = None, ramp_steps: int | None = None, seed: int | None = None, "    \
  "threads: int | None = None, **settings: object"

void bind_reducer(nb::module_& module) {
  module.def(
      "fingerprint",
      [](const nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& bytes,
         std::uint64_t seed) {
        const nb::gil_scoped_release release;
        return topreduce::wire::xxh64(std::as_bytes(std::span(bytes.data(), bytes.size())), seed);
      },
      "bytes"_a.noconvert(), "seed"_a = 0,
      nb::sig("def fingerprint(bytes: numpy.typing.NDArray[numpy.uint8], seed: int = 0) -> int"),
      "XXH64 of these bytes.");
  nb::class_<RebuildPlan>(module, "RebuildPlan", "What ranks have to do to go on in another group.")
      .def_prop_ro(
          "roles",
          [](const RebuildPlan& self) {
            std::vector<std::string> names;
            for (const auto role : self.roles) names.emplace_back(name_of(role));
            return names;
          },
          "By rank: 'on_time', 'late' (commits the last step too) or 'joins' (owes nothing).")
      .def_ro("step", &RebuildPlan::step, "That all of them make next.")
      .def_ro("leader", &RebuildPlan::leader, "The first rank that is on time.")
      .def_ro("ranks_before", &RebuildPlan::ranks_before, "In the leader's last step.")
      .def_ro("lost", &RebuildPlan::lost, "Ranks of that step whose debts are lost.")
      .def_ro("lost_norm", &RebuildPlan::lost_norm, "About how much these are.")
      .def_prop_ro("scale", &RebuildPlan::scale, "What is owed is multiplied by it.");
  nb::class_<Owner>(module, "Reducer",
                    "Averages a model's gradients over the ranks, one step at a time.\n\n"
                    "A step is begin, add for gradients as they become ready, finish; whatever\n"
                    "raises in between leaves what is owed as it was.")
      .def(
          "__init__",
          [](Owner* self, const nb::object& layout, const nb::object& method,
             const nb::args& positional, const nb::kwargs& settings) {
            if (!nb::isinstance<Layout>(layout)) {
              throw wrong_type("Reducer: layout must be a topreduce.Layout", layout);
            }
            expect_named("Reducer", positional);
            new (self) Owner(nb::cast<const Layout&>(layout), spec_of(method, settings));
          },
          "layout"_a = nb::none(), "method"_a = nb::none(), "positional"_a, "settings"_a,
          nb::sig("def __init__(self, layout: Layout, method: str, *, " TOPREDUCE_SETTINGS
                  ") -> None"))
      .def("__repr__", &described)
      .def(
          "agree",
          [](Owner& self, const nb::object& communicator) {
            Communicator& comm = communicator_of("agree", communicator);
            const nb::gil_scoped_release release;
            self.reducer.agree(comm);
          },
          "comm"_a.none(), nb::sig("def agree(self, comm: Communicator) -> None"),
          "Compare version, model and settings over the ranks; ValueError on all if they differ.")
      .def("commit_with", &Owner::commit_with, "others"_a.none(),
           nb::sig("def commit_with(self, others: Communicator | None) -> None"),
           "For a model whose parts are averaged apart from each other: a step commits only if it\n"
           "does on all these ranks, one for each part. None: this is the whole model.")
      .def(
          "commit_if", &Owner::commit_if, "allows"_a.none(),
          nb::sig("def commit_if(self, allows: collections.abc.Callable[[], bool] | None) -> None"),
          "Ask this before a step is committed on this rank; if it says no, `finish` raises "
          "CommError,\nand other ranks may have committed: see `rebuild`. None: nobody is asked.")
      .def("average", &Owner::average, "comm"_a.none(), "gradient"_a.none(),
           nb::sig("def average(self, comm: Communicator, gradient: "
                   "numpy.typing.NDArray[numpy.float32]) -> StepStats"),
           "A whole step, for gradients that lie in one float32 array in the order of the layout:\n"
           "each becomes the mean over the ranks.")
      .def("begin", &Owner::begin, "comm"_a.none(), "loss_scale"_a = 1.0f,
           nb::sig("def begin(self, comm: Communicator, loss_scale: float = 1.0) -> None"),
           "Open a step; gradients come, and leave, multiplied by `loss_scale`; 0 where that is\n"
           "not known.")
      .def("add", &Owner::add, "parameters"_a.none(), "gradient"_a.none(), "most"_a = kAnyFloat,
           nb::sig("def add(self, parameters: collections.abc.Sequence[int], gradient: "
                   "numpy.typing.NDArray[numpy.float32], most: float = 3.4028234663852886e+38) -> "
                   "None"),
           "Hand over gradients of some parameters, one after the other in one float32 array that\n"
           "stays untouched until `finish` writes the mean into it. Any grouping and order will "
           "do.\n"
           "A mean above `most` counts as not finite.")
      .def("add_many", &Owner::add_many, "gradients"_a, "lent"_a = false,
           nb::sig("def add_many(self, gradients: collections.abc.Sequence[tuple[int, "
                   "numpy.typing.NDArray[numpy.float32], float]], lent: bool = False) -> None"),
           "The same for several parameters at once: number, gradient and `most` of each. `lent`: "
           "nobody\nelse needs these arrays, so the reducer may write to them before the step is "
           "sure; if it fails,\nzeros are left there, or nothing of use.")
      .def_prop_ro(
          "borrows", [](const Owner& self) { return self.reducer.borrows(); },
          "Whether arrays that are lent save time.")
      .def("deliver_to", &Owner::deliver_to, "parameters"_a.none(), "means"_a.none(),
           nb::sig("def deliver_to(self, parameters: collections.abc.Sequence[int], means: "
                   "numpy.typing.NDArray[numpy.float32]) -> None"),
           "Between add_many(lent=True) and `finish`: the means of these parameters are to go to "
           "this\narray, where zeros are now. They may be written before `finish`; after a step "
           "that "
           "failed,\nwhat is there is of no use.")
      .def(
          "relocate", &Owner::relocate, "parameters"_a.none(), "gradient"_a.none(),
          nb::sig("def relocate(self, parameters: collections.abc.Sequence[int], gradient: "
                  "numpy.typing.NDArray[numpy.float32]) -> None"),
          "Between `add` and `finish`: these gradients, unchanged, now lie one after the other in\n"
          "this array, and their means are to go there.")
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
      .def("participate", &Owner::participate, "unused"_a = std::vector<std::size_t>(),
           "presence"_a = "present", "divisor"_a = "ranks",
           nb::sig(
               "def participate(self, unused: collections.abc.Sequence[int] = (), presence: str = "
               "'present', divisor: str = 'ranks') -> None"),
           "Say, before the last `add`, once or bit by bit, which parameters this rank left "
           "`unused`, whether it has\n"
           "'joined' (is out of data), and if means are over all ranks or those 'present'.\n"
           "What no rank used is not delivered.")
      .def("take_from", &Owner::take_from, "handover"_a,
           "Of the open step: gradients that another thread puts there are added, by `attend` and\n"
           "before anything else that needs them, without Python's lock.")
      .def("progress", &Owner::progress,
           "Go on with exchanges whose messages have come, without waiting, as `add` does: for "
           "long\ncomputations between two gradients. Whether more are under way.")
      .def("attend", &Owner::attend,
           "The same now and then, until there are none, another thread calls `wake` on the\n"
           "communicator, or nothing has come for a while.")
      .def(
          "verify",
          [](Owner& self, std::uint64_t fingerprint) { self.reducer.verify(fingerprint); },
          "fingerprint"_a,
          "Have the open step compare this fingerprint of the parameters, and the sums of "
          "gradients, over\nthe ranks: `finish` raises DriftError on all of them, with those that "
          "differ.")
      .def("finish", &Owner::finish, "Replace every gradient with the mean over the ranks.")
      .def(
          "abandon", [](Owner& self) { self.abandon(); }, "Drop an open step.")
      .def(
          "plan_rebuild",
          [](Owner& self, Communicator& comm) { return self.reducer.plan_rebuild(comm); }, "comm"_a,
          nb::call_guard<nb::gil_scoped_release>(),
          "What the ranks of a new group have to do to go on together. If a rebuild failed here "
          "that "
          "others went through with, it is carried out now; else nothing changes. Collective.")
      .def(
          "rebuild",
          [](Owner& self, Communicator& comm, const RebuildPlan& plan) {
            std::vector<float> mean;
            {
              const nb::gil_scoped_release release;
              const auto late = self.reducer.rebuild(comm, plan);
              mean.assign(late.begin(), late.end());
            }
            return copy_of(mean, {mean.size()});
          },
          "comm"_a, "plan"_a,
          nb::sig("def rebuild(self, comm: Communicator, plan: RebuildPlan) -> "
                  "numpy.typing.NDArray[numpy.float32]"),
          "Carry it out. Returns the mean of the step that a late rank has now committed, in "
          "layout\n"
          "order; empty on others. Collective.")
      .def(
          "skip_to", [](Owner& self, std::uint64_t step) { self.reducer.skip_to(step); }, "step"_a,
          "Go on as if this were the number of the next step; what is owed stays.")
      .def(
          "configure",
          [](Owner& self, const nb::args& positional, const nb::kwargs& changes) {
            expect_named("configure", positional);
            const nb::object method = changes.get("method", nb::none());
            self.reducer.configure(method.is_none() ? with_settings({}, "", changes)
                                                    : spec_of(method, changes));
          },
          "positional"_a, "changes"_a,
          nb::sig("def configure(self, *, method: str | None = None, " TOPREDUCE_SETTINGS
                  ") -> None"),
          "Change settings, or the method, between steps, the same on all ranks; what is owed "
          "stays.")
      .def(
          "bypass", [](Owner& self) { self.reducer.set_mode(Reducer::Mode::bypass); },
          "From the next step on average densely; what is owed waits.")
      .def(
          "compress", [](Owner& self) { self.reducer.set_mode(Reducer::Mode::compress); },
          "End `bypass`: from the next step on compress again.")
      .def_prop_ro("bypassed",
                   [](const Owner& self) { return self.reducer.mode() == Reducer::Mode::bypass; })
      .def(
          "state", [](Owner& self) { return save_state(self.reducer); },
          nb::sig("def state(self) -> dict[str, dict[str, typing.Any]]"),
          "Everything that the next step depends on, by parameter name; copies.")
      .def(
          "load_state",
          [](Owner& self, const nb::object& state) { load_state(self.reducer, state); },
          "state"_a.none(),
          nb::sig("def load_state(self, state: dict[str, dict[str, typing.Any]]) -> None"),
          "Take over a state; ValueError, and no change, if it does not fit.")
      .def("owed", &owed, "name"_a,
           nb::sig("def owed(self, name: str) -> numpy.typing.NDArray[numpy.float32]"),
           "A copy of what this rank owes of one parameter.")
      .def_prop_ro(
          "buckets", [](const Owner& self) { return self.reducer.buckets(); },
          "Parameters that are exchanged together, in the order of the next step; `begin` may\n"
          "change it.")
      .def_prop_ro("layout", [](const Owner& self) { return self.reducer.layout(); })
      .def_prop_ro("spec", &spec, "Every setting, defaults included, and the method.")
      .def_prop_ro(
          "stats", [](const Owner& self) { return self.reducer.stats(); },
          "Of the last finished step; zeros before the first.")
      .def_prop_ro(
          "unused", [](const Owner& self) { return self.reducer.unused(); },
          "Parameters that no rank used in the last finished step: their gradients stayed.")
      .def_prop_ro(
          "step", [](const Owner& self) { return self.reducer.step(); }, "Number of the next step.")
      .def_prop_ro(
          "density", [](const Owner& self) { return self.reducer.density(); },
          "Of the next step: 1 while warming up, falling in the ramp.")
      .def_prop_ro(
          "level", [](const Owner& self) { return self.reducer.level(); },
          "What the next step sends, in a word: its density, or for all entries their format.")
      .def_prop_ro(
          "reason", [](const Owner& self) { return self.reducer.reason(); }, "Why that, in words.")
      .def_prop_ro(
          "choices", [](const Owner& self) { return self.reducer.choices(); },
          "The levels of all steps so far, as a list that `density` takes.")
      .def(
          "timed",
          [](Owner& self, double computed, double waited) { self.reducer.timed(computed, waited); },
          "computed"_a, "waited"_a,
          "After `finish`, for density='auto': the seconds from the start of that step to its "
          "last\n"
          "gradient, and from then until the caller had the means; instead of begin to the last\n"
          "`add`, and from there to the end of `finish`.");
}
