// The device as torch knows it: memory, streams, events.

#include "device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace fakegpu {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

thread_local int current = 0;

c10::Stream stream_of(int number) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, number);
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size) override {
    void* memory = size == 0 ? nullptr : fakegpu::allocate(size, current);
    return {memory, memory, size == 0 ? nullptr : &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    const auto range = [size](const void* at) {
      const auto* begin = static_cast<const char*>(at);
      return std::vector<Range>{{begin, begin + size}};
    };
    launch(current, "copy_data", range(from), range(to),
           [=] { default_copy_data(inside(to), inside(from), size); });
  }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size) override {
    void* memory = size == 0 ? nullptr : allocate_pinned(size);
    return {memory, memory, size == 0 ? nullptr : &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    default_copy_data(to, from, size);
  }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t size) const override {
    c10::DataPtr fresh = device_memory.allocate(size);
    if (const std::size_t kept = std::min(size, storage.nbytes())) {
      device_memory.copy_data(fresh.get(), storage.data(), kept);
    }
    storage.set_data_ptr(std::move(fresh));
    storage.set_nbytes(size);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool high) const override {
    return stream_of(new_stream(high ? -1 : 0));
  }
  c10::Stream getNewStream(c10::Device, int priority) const override {
    return stream_of(new_stream(priority));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, static_cast<int>(stream.id())));
  }
  void* getStreamNativeHandle(const c10::Stream) const override { return nullptr; }
  bool queryStream(const c10::Stream& stream) const override {
    return has_passed(mark(static_cast<int>(stream.id())));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(mark(static_cast<int>(stream.id())), "stream");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_all("device"); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    keep(memory.get(), static_cast<int>(stream.id()));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Mark;
    *static_cast<Mark*>(*event) = mark(static_cast<int>(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait(static_cast<int>(stream.id()), *static_cast<Mark*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || has_passed(*static_cast<Mark*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize(*static_cast<Mark*>(event), "event");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }
};

const bool registered = [] {
  c10::SetAllocator(kType, &device_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

int current_stream() {
  return current;
}

}  // namespace fakegpu
