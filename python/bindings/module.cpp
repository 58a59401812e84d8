#include <nanobind/nanobind.h>

#include "bindings.h"
#include "handover.h"
#include "topreduce/errors.h"
#include "topreduce/version.h"

namespace nb = nanobind;

namespace {

// Never thrown. In its place topreduce.torch makes torch.distributed.DistError the base of
// CommError, which Python allows between classes that both add what a class in Python has to
// RuntimeError.
class NetworkError : public std::exception {};

}  // namespace

std::string text_of(nb::handle text) {
  Py_ssize_t size = 0;
  const char* const bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (bytes == nullptr) throw nb::python_error();  // a UnicodeEncodeError, which is a ValueError
  return {bytes, static_cast<std::size_t>(size)};
}

std::string shown(nb::handle object) {
  constexpr std::size_t kMost = 60;
  try {
    const std::string text = text_of(nb::repr(object));
    if (text.size() <= kMost && text.find('\n') == text.npos) return text;
  } catch (nb::python_error& error) {  // its type says enough
    if (!error.matches(PyExc_Exception)) throw;
  }
  return text_of(nb::str(nb::type_name(object.type())));
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
  bind_handover(module);
  bind_reducer(module);
  bind_tuning(module);
}
