#include "topreduce/device.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "topreduce/compensated_gradient.h"

namespace nb = nanobind;
using namespace nb::literals;
using topreduce::Buffer;
using topreduce::Device;
using topreduce::Index;
using topreduce::Segment;
using topreduce::SparseVector;
using topreduce::kernels::Summary;

namespace {

// A view that lives as long as the call it is handed to.
template <class T>
nb::object view(const T* data, std::size_t size) {
  using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  return nb::cast(Array(const_cast<T*>(data), {size}), nb::rv_policy::reference);
}

template <class T>
nb::object view(std::span<const T> values) {
  return view(values.data(), values.size());
}

template <class T>
nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu> array_of(
    const nb::handle& object) {
  nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu> array;
  if (!nb::try_cast(object, array, false)) {
    throw nb::value_error("a device must return contiguous arrays of one dimension, of its types");
  }
  return array;
}

// Fills `target` with an array of just that size.
void fill(std::span<float> target, const nb::handle& object) {
  const auto array = array_of<float>(object);
  if (array.size() != target.size()) {
    throw nb::value_error("a device returned an array of another size than asked for");
  }
  if (!target.empty()) std::memcpy(target.data(), array.data(), target.size_bytes());
}

void fill(Buffer<float>& target, const nb::handle& object) {
  target.resize(array_of<float>(object).size());
  fill(std::span<float>(target), object);
}

nb::list numbers_of(std::span<const Segment> segments) {
  nb::list numbers;
  for (const Segment& segment : segments) numbers.append(segment.number);
  return numbers;
}

nb::list list_of(std::span<const std::size_t> values) {
  nb::list list;
  for (const std::size_t value : values) list.append(value);
  return list;
}

// A device written in Python: it subclasses Device and implements every method. They are called
// with the GIL, from whichever thread runs the step.
class PythonDevice : public Device {
 public:
  void open(std::span<const Segment> segments, Base base, float scale) override {
    const nb::gil_scoped_acquire gil;
    nb::list offsets;
    for (const Segment& segment : segments) {
      if (base == Base::owed) offsets.append(segment.offset);
    }
    nb::object places = base == Base::owed ? nb::object(offsets) : nb::none();
    call("open", numbers_of(segments), places, scale);
  }
  void expect(const Questions& questions) override {
    const nb::gil_scoped_acquire gil;
    call("expect", questions.floor, list_of(questions.limits), list_of(questions.firsts),
         questions.stride);
  }
  Summary summarize() override {
    const nb::gil_scoped_acquire gil;
    const auto [energy, largest] = nb::cast<std::pair<double, float>>(call("survey"));
    return {energy, std::bit_cast<std::uint32_t>(largest) & 0x7fffffffu};
  }
  void strongest(float floor, std::span<const std::size_t> limits,
                 SparseVector& selected) override {
    const nb::gil_scoped_acquire gil;
    const nb::object found = call("strongest", floor, list_of(limits));
    const auto indices = array_of<Index>(found[0]);
    selected.resize(indices.size());
    std::copy_n(indices.data(), indices.size(), selected.indices.begin());
    fill(std::span<float>(selected.values), found[1]);
  }
  void sample(std::span<const std::size_t> firsts, std::size_t stride, Buffer<float>& values,
              Buffer<float>& gradients) override {
    const nb::gil_scoped_acquire gil;
    const nb::object taken = call("sample", list_of(firsts), stride);
    fill(values, taken[0]);
    fill(gradients, taken[1]);
  }
  void evaluate(std::span<float> values) override {
    const nb::gil_scoped_acquire gil;
    fill(values, call("evaluate"));
  }
  void commit(const SparseVector& settled, const SparseVector& mean) override {
    const nb::gil_scoped_acquire gil;
    call("commit", view<Index>(settled.indices), view<float>(settled.values),
         view<Index>(mean.indices), view<float>(mean.values));
  }
  void commit_whole(std::span<const float> settled, std::span<const float> mean) override {
    const nb::gil_scoped_acquire gil;
    const bool all = settled.empty();
    call("commit_whole", all ? nb::none() : view(settled), view(mean));
  }
  double settled_energy() override {
    const nb::gil_scoped_acquire gil;
    return nb::cast<double>(call("settled_energy"));
  }
  bool adds_up() const override {
    const nb::gil_scoped_acquire gil;
    const nb::object self = nb::find(static_cast<const Device&>(*this));
    return nb::cast<bool>(nb::getattr(self, "adds_up")());
  }
  void project(Index start, std::size_t size, std::size_t width,
               std::span<const float> directions) override {
    const nb::gil_scoped_acquire gil;
    call("project", start, size, width, view(directions));
  }
  void add_up_noted(std::span<float> numbers, std::span<float> sums) override {
    const nb::gil_scoped_acquire gil;
    const nb::object summed = call("add_up_noted", view<float>(numbers.data(), numbers.size()));
    fill(numbers, summed[0]);
    fill(sums, summed[1]);
  }
  void add_up(std::span<float> numbers, std::span<const Run> runs, std::uint32_t key) override {
    const nb::gil_scoped_acquire gil;
    std::vector<Index> starts, sizes;
    for (const Run& run : runs) {
      starts.push_back(run.start);
      sizes.push_back(run.size);
    }
    fill(numbers, call("add_up", view<float>(numbers.data(), numbers.size()), view<Index>(starts),
                       view<Index>(sizes), key));
  }
  bool add_up_best(std::span<float> numbers, std::span<const Ranked> parts,
                   std::span<const Index> picks, std::uint32_t key) override {
    const nb::gil_scoped_acquire gil;
    nb::list told;
    for (const Ranked& part : parts) {
      told.append(nb::make_tuple(part.start, part.rows, part.width, part.picks));
    }
    const nb::object summed = call("add_up_best", view<float>(numbers.data(), numbers.size()), told,
                                   view<Index>(picks.data(), picks.size()), key);
    fill(numbers, summed[0]);
    return nb::cast<bool>(summed[1]);
  }
  float largest_sum(std::uint32_t key) override {
    const nb::gil_scoped_acquire gil;
    return nb::cast<float>(call("largest_sum", key));
  }
  void bring_sums(std::uint32_t key, std::span<Index> places, std::span<float> sums,
                  std::span<float> own) override {
    const nb::gil_scoped_acquire gil;
    const nb::object brought = call("bring_sums", key);
    if (!places.empty()) {
      const auto found = array_of<Index>(brought[0]);
      std::copy_n(found.data(), std::min(found.size(), places.size()), places.begin());
    }
    fill(sums, brought[1]);
    fill(own, brought[2]);
  }
  void commit_sums(std::uint32_t key, float divisor, float unit) override {
    const nb::gil_scoped_acquire gil;
    call("commit_sums", key, divisor, unit);
  }
  void spoil(std::span<const Segment> segments) override {
    const nb::gil_scoped_acquire gil;
    call("spoil", numbers_of(segments));
  }
  void read(std::span<float> owed) override {
    const nb::gil_scoped_acquire gil;
    fill(owed, call("read"));
  }
  void write(std::span<const float> owed) override {
    const nb::gil_scoped_acquire gil;
    call("write", view(owed));
  }

 private:
  template <class... Arguments>
  nb::object call(const char* name, Arguments&&... arguments) {
    const nb::object self = nb::find(static_cast<const Device&>(*this));
    return nb::getattr(self, name)(std::forward<Arguments>(arguments)...);
  }
};

}  // namespace

void bind_device(nb::module_& module) {
  nb::class_<Device, PythonDevice>(
      module, "Device",
      "The memory of an accelerator, where gradients and what is owed of them lie. Subclass it;\n"
      "topreduce/device.h says what each method must do.")
      .def(nb::init<>());
}
