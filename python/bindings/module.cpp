#include <nanobind/nanobind.h>

#include "bindings.h"
#include "topreduce/errors.h"
#include "topreduce/version.h"

namespace nb = nanobind;

namespace {

// Never thrown. In its place topreduce.torch makes torch.distributed.DistError the base of
// CommError, which Python allows between classes that both add what a class in Python has to
// RuntimeError.
class NetworkError : public std::exception {};

}  // namespace

std::string shown(nb::handle object) {
  constexpr std::size_t kMost = 60;
  const std::string text = nb::repr(object).c_str();
  if (text.size() <= kMost && text.find('\n') == text.npos) return text;
  return nb::str(nb::type_name(object.type())).c_str();
}

nb::builtin_exception wrong_type(const std::string& what, nb::handle object) {
  return nb::type_error((what + ", not " + shown(object)).c_str());
}

NB_MODULE(_core, module) {
  nb::set_leak_warnings(false);  // a library does not print, whatever is still alive at exit
  module.doc() = "topreduce's C++ core.";
  module.attr("__version__") = topreduce::version();
  const auto base = nb::exception<NetworkError>(module, "NetworkError", PyExc_RuntimeError);
  nb::exception<topreduce::CommError>(module, "CommError", base);
  nb::exception<topreduce::WireError>(module, "WireError", PyExc_RuntimeError);
  nb::exception<topreduce::DriftError>(module, "DriftError", PyExc_RuntimeError);
  bind_stats(module);
  bind_layout(module);
  bind_comm(module);
  bind_device(module);
  bind_catalog(module);
  bind_reducer(module);
  bind_tuning(module);
}
