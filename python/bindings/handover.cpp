#include "handover.h"

#include <utility>

#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;

void Handover::put(const std::vector<std::size_t>& parameters,
                   const std::vector<std::size_t>& addresses, const std::vector<std::size_t>& sizes,
                   bool lent, nb::object keeps) {
  if (parameters.size() != addresses.size() || parameters.size() != sizes.size()) {
    throw nb::value_error("put: give one address and one size for each parameter");
  }
  if (closed_) return;
  kept_.push_back(std::move(keeps));
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    waiting_.push_back({parameters[i], {reinterpret_cast<float*>(addresses[i]), sizes[i]}, lent});
  }
}

bool Handover::take(std::vector<Gradient>& gradients) {
  gradients.clear();
  const std::lock_guard lock(mutex_);
  gradients.swap(waiting_);
  return !gradients.empty();
}

bool Handover::empty() {
  const std::lock_guard lock(mutex_);
  return waiting_.empty();
}

void Handover::close() {
  closed_ = true;
  {
    const std::lock_guard lock(mutex_);
    waiting_.clear();
  }
  // Whatever these let go of may run any code.
  const std::vector<nb::object> kept = std::exchange(kept_, {});
}

void bind_handover(nb::module_& module) {
  nb::class_<Handover>(
      module, "Handover",
      "Gradients of one step, on their way to the thread that exchanges them; see\n"
      "Reducer.take_from.")
      .def(nb::init<>())
      .def("put", &Handover::put, "parameters"_a, "addresses"_a, "sizes"_a, "lent"_a, "keeps"_a,
           nb::sig("def put(self, parameters: list[int], addresses: list[int], sizes: list[int], "
                   "lent: bool, keeps: object) -> None"),
           "Gradients of these parameters lie at these addresses, with so many entries in fp32 and "
           "in one\npiece, as long as `keeps` is there. `lent`: nobody else needs their memory "
           "(`add_many`).")
      .def("interrupt", &Handover::interrupt,
           "Before `wake`: there is other work, so `attend` is to end.")
      .def("close", &Handover::close, "Let go of them, and drop what is put from now on.")
      .def_prop_ro("empty", &Handover::empty, "Whether all that was put has been taken.");
}
