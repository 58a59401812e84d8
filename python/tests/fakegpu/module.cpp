// What Python sees: a process group for the device, which is Gloo's behind streams, and what was
// counted.

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "device.h"

namespace fakegpu {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using c10d::Work;
using WorkPointer = c10::intrusive_ptr<Work>;

Tensors all_from_inside(const Tensors& tensors) {
  Tensors result;
  for (const Tensor& each : tensors) result.push_back(from_inside(each));
  return result;
}

// Like NCCL: the host goes on, collectives run in a stream of their own, in order.
class Backend final : public c10d::Backend {
 public:
  explicit Backend(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        stream_(lone_stream()) {}
  ~Backend() override { give_back(stream_); }

  const std::string getBackendName() const override { return "fakeccl"; }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run("broadcast", tensors, tensors,
               [=, inner = all_from_inside(tensors)](auto& gloo) mutable {
                 return gloo.broadcast(inner, options);
               });
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run("allreduce", tensors, tensors,
               [=, inner = all_from_inside(tensors)](auto& gloo) mutable {
                 return gloo.allreduce(inner, options);
               });
  }
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions& options) override {
    Tensors all;
    std::vector<Tensors> inner;
    for (const Tensors& each : outputs) {
      all.insert(all.end(), each.begin(), each.end());
      inner.push_back(all_from_inside(each));
    }
    return run(
        "allgather", inputs, all,
        [=, in = all_from_inside(inputs)](auto& gloo) mutable {
          return gloo.allgather(inner, in, options);
        },
        outputs);
  }
  WorkPointer _allgather_base(Tensor& output, Tensor& input,
                              const c10d::AllgatherOptions& options) override {
    return run("allgather_base", {input}, {output},
               [=, out = from_inside(output), in = from_inside(input)](auto& gloo) mutable {
                 return gloo._allgather_base(out, in, options);
               });
  }
  WorkPointer _reduce_scatter_base(Tensor& output, Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override {
    return run("reduce_scatter_base", {input}, {output},
               [=, out = from_inside(output), in = from_inside(input)](auto& gloo) mutable {
                 return gloo._reduce_scatter_base(out, in, options);
               });
  }
  WorkPointer alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                            std::vector<int64_t>& input_sizes,
                            const c10d::AllToAllOptions& options) override {
    return run("alltoall_base", {input}, {output},
               [=, out = from_inside(output), in = from_inside(input)](auto& gloo) mutable {
                 return gloo.alltoall_base(out, in, output_sizes, input_sizes, options);
               });
  }
  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    return run("barrier", {}, {}, [=](auto& gloo) mutable {
      auto on_cpu = options;
      on_cpu.device_ids.clear();
      on_cpu.device = std::nullopt;
      return gloo.barrier(on_cpu);
    });
  }
  void shutdown() override { gloo_->shutdown(); }
  void abort() override { gloo_->abort(); }

 private:
  template <class Collective>
  WorkPointer run(const char* name, const Tensors& reads, const Tensors& writes,
                  Collective collective, c10::IValue result = {}) {
    std::vector<Range> read, written;
    const auto note = [&](const Tensors& tensors, std::vector<Range>& ranges) {
      for (const Tensor& each : tensors) {
        TORCH_CHECK(each.is_contiguous(), "fakeccl: tensors must be contiguous");
        if (each.numel() > 0) ranges.push_back(range_of(each));
        keep(each.storage().data(), stream_);
      }
    };
    note(reads, read);
    note(writes, written);
    wait(stream_, mark(current_stream()));
    launch(stream_, name, read, written,
           [gloo = gloo_, collective]() mutable { collective(*gloo)->wait(); });
    const c10::Device device(c10::DeviceType::PrivateUse1, 0);
    const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device, stream_));
    if (result.isNone()) result = writes;
    auto future = c10::make_intrusive<c10::ivalue::Future>(result.type(), std::vector{device});
    future->markCompleted(result);
    return Work::create_from_future(future);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  int stream_;
};

}  // namespace
}  // namespace fakegpu

PYBIND11_MODULE(_fakegpu, m) {
  namespace py = pybind11;
  m.def("on_device", [](const c10::intrusive_ptr<c10d::Backend>& gloo) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<fakegpu::Backend>(gloo));
  });
  m.def("counters", &fakegpu::counters);
  m.def("reset_counters", &fakegpu::reset_counters);
  m.def("take_races", &fakegpu::take_races);
  m.def("priority_of", &fakegpu::priority_of);
}
