// torch's operations: every one is queued, and done by the CPU's kernel in a thread of the device.
// What the host must know to go on (an entry, a size that depends on entries) is waited for, as on
// other devices; operations whose results have no known shape are waited for too, and counted.

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Stream.h>
#include <torch/library.h>

#include "device.h"

namespace fakegpu {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

Range range_of(const Tensor& tensor) {
  if (tensor.numel() == 0) return {nullptr, nullptr};
  std::int64_t last = 1;
  for (std::int64_t axis = 0; axis < tensor.dim(); ++axis) {
    last += (tensor.size(axis) - 1) * tensor.stride(axis);
  }
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + last * static_cast<std::int64_t>(tensor.element_size())};
}

Tensor from_inside(const Tensor& tensor) {
  const auto options = tensor.options().device(c10::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(inside(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

namespace {

// A value of an operation's stack with another tensor in place of each.
template <class Change>
IValue with_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(change(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector()) {
      list.push_back(each ? std::optional(change(*each)) : std::nullopt);
    }
    return list;
  }
  return value;
}

template <class Visit>
void for_tensors(const IValue& value, const Visit& visit) {
  with_tensors(value, [&](const Tensor& tensor) {
    if (is_ours(tensor)) visit(tensor);
    return tensor;
  });
}

void add_range(std::vector<Range>& ranges, const Tensor& tensor) {
  if (tensor.numel() > 0) ranges.push_back(range_of(tensor));
}

Tensor to_meta(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().is_cpu()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

Tensor to_device_like(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto options = tensor.options().device(c10::DeviceType::PrivateUse1, 0);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

// In a thread of the device, which has no use for autograd.
Stack on_cpu(const c10::OperatorHandle& op, Stack stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(&stack);
  return stack;
}

// The results' shapes, if they can be known without entries; nothing otherwise.
std::optional<Stack> shapes_of(const c10::OperatorHandle& op, const Stack& arguments) {
  for (const c10::Argument& each : op.schema().returns()) {
    const auto kind = each.type()->kind();
    const bool known =
        kind == c10::TypeKind::TensorType || each.type()->isSubtypeOf(*c10::ListType::ofTensors());
    if (!known) return std::nullopt;
  }
  Stack stack;
  for (const IValue& each : arguments) {
    stack.push_back(each.isDevice() ? IValue(c10::Device(c10::kMeta))
                                    : with_tensors(each, to_meta));
  }
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return stack;
}

// Results that were handed in without a size get theirs, as kernels do it that run at once.
void resize_results(const c10::OperatorHandle& op, const Stack& arguments) {
  std::vector<Tensor> results;
  bool empty = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!op.schema().arguments()[i].is_out() || !arguments[i].isTensor()) continue;
    results.push_back(arguments[i].toTensor());
    empty |= results.back().numel() == 0;
  }
  if (!empty) return;
  const std::optional<Stack> shapes = shapes_of(op, arguments);
  for (std::size_t i = 0; shapes && i < std::min(results.size(), shapes->size()); ++i) {
    const auto size = (*shapes)[i].toTensor().sizes();
    if (results[i].sizes() != size) results[i].resize_(size);
  }
}

// Anything that has no kernel of its own here.
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = op.operator_name().name;
  const std::size_t count = schema.arguments().size();
  Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  resize_results(op, arguments);

  std::vector<Range> reads, writes;
  Stack inner;
  bool changes = false;
  for (std::size_t i = 0; i < count; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    changes |= written;
    for_tensors(arguments[i],
                [&](const Tensor& each) { add_range(written ? writes : reads, each); });
    inner.push_back(arguments[i].isDevice() ? IValue(c10::Device(c10::kCPU))
                                            : with_tensors(arguments[i], [](const Tensor& each) {
                                                if (is_ours(each)) return from_inside(each);
                                                return each.defined() ? each.clone() : each;
                                              }));
  }

  if (changes) {
    launch(current_stream(), name, reads, writes, [op, inner] { on_cpu(op, inner); });
    std::size_t next = 0;
    for (std::size_t i = 0; i < count && next < schema.returns().size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite()) stack->push_back(arguments[i]), ++next;
    }
    return;
  }

  if (std::optional<Stack> shapes = shapes_of(op, arguments)) {
    Stack results, targets;
    for (const IValue& each : *shapes) {
      results.push_back(with_tensors(each, to_device_like));
      for_tensors(results.back(), [&](const Tensor& one) { add_range(writes, one); });
      targets.push_back(with_tensors(results.back(), [](const Tensor& one) {
        return one.defined() ? from_inside(one) : one;
      }));
    }
    launch(current_stream(), name, reads, writes, [op, inner, targets] {
      const Stack made = on_cpu(op, inner);
      const at::AutoDispatchBelowADInplaceOrView guard;
      for (std::size_t i = 0; i < made.size(); ++i) {
        std::vector<Tensor> from, to;
        with_tensors(made[i], [&](const Tensor& each) { return from.push_back(each), each; });
        with_tensors(targets[i], [&](const Tensor& each) { return to.push_back(each), each; });
        for (std::size_t j = 0; j < from.size(); ++j) {
          if (from[j].defined() && to[j].defined()) to[j].copy_(from[j]);
        }
      }
    });
    for (IValue& each : results) stack->push_back(std::move(each));
    return;
  }

  auto made = std::make_shared<Stack>();
  launch(current_stream(), name, reads, {}, [=] { *made = on_cpu(op, inner); });
  synchronize(mark(current_stream()), name);
  for (const IValue& each : *made) {
    stack->push_back(with_tensors(each, [&](const Tensor& one) {
      const Tensor result = to_device_like(one);
      if (!result.defined()) return result;
      std::vector<Range> range;
      add_range(range, result);
      launch(current_stream(), name, {}, range,
             [target = from_inside(result), one] { target.copy_(one); });
      return result;
    }));
  }
}

// ---- memory ----

Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout>, std::optional<at::Device>,
                           std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, c10::GetAllocator(c10::DeviceType::PrivateUse1),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(c10::DeviceType::PrivateUse1),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  const std::int64_t entries = c10::multiply_integers(size);
  const auto bytes = static_cast<std::size_t>((self.storage_offset() + entries) *
                                              static_cast<std::int64_t>(self.element_size()));
  if (entries > 0 && bytes > self.storage().nbytes()) {
    at::native::resize_bytes_nocuda(self.storage(), static_cast<std::int64_t>(bytes));
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_source(Tensor& self, at::Storage source, std::int64_t offset, at::IntArrayRef size,
                   at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto entries =
      static_cast<std::int64_t>(source.nbytes()) / static_cast<std::int64_t>(self.element_size());
  return set_source(self, std::move(source), 0, entries, {});
}

void record_stream(Tensor& self, at::Stream stream) {
  keep(self.storage().data(), static_cast<int>(stream.id()));
}

// ---- between the memories ----

std::int64_t bytes_of(const Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.nbytes());
}

void to_host(const Tensor& source, const Tensor& target, bool later) {
  std::vector<Range> reads;
  add_range(reads, source);
  count("bytes_to_host", bytes_of(source));
  const Tensor from = from_inside(source);
  if (later) {
    std::memset(target.data_ptr(), kPoison, target.is_contiguous() ? target.nbytes() : 0);
    launch(current_stream(), "copy to the host", reads, {}, [from, target] {
      const at::AutoDispatchBelowADInplaceOrView guard;
      deliver_when_waited_for([staged = from.to(target.scalar_type(), false, true), target] {
        const at::AutoDispatchBelowADInplaceOrView inner;
        target.copy_(staged);
      });
    });
    return;
  }
  launch(current_stream(), "copy to the host", reads, {}, [from, target] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    target.copy_(from);
  });
  synchronize(mark(current_stream()), "copy to the host");
}

void to_device(const Tensor& source, const Tensor& target, bool later) {
  std::vector<Range> writes;
  add_range(writes, target);
  count("bytes_to_device", bytes_of(source));
  launch(current_stream(), "copy to the device", {}, writes,
         [from = later ? source : source.clone(), to = from_inside(target)] {
           const at::AutoDispatchBelowADInplaceOrView guard;
           to.copy_(from);
         });
  if (!later) synchronize(mark(current_stream()), "copy to the device");
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  const Tensor wide = source.expand_as(target);
  const auto is_later = [&](const Tensor& host) {
    return non_blocking && is_pinned(host.const_data_ptr());
  };
  if (!is_ours(target)) {
    to_host(wide, target, is_later(target));
  } else if (!is_ours(source)) {
    to_device(wide, target, is_later(source));
  } else {
    std::vector<Range> reads, writes;
    add_range(reads, wide);
    add_range(writes, target);
    launch(current_stream(), "copy_", reads, writes,
           [from = from_inside(wide), to = from_inside(target)] {
             const at::AutoDispatchBelowADInplaceOrView guard;
             to.copy_(from);
           });
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar item(const Tensor& self) {
  std::vector<Range> reads;
  add_range(reads, self);
  count("bytes_to_host", bytes_of(self));
  auto value = std::make_shared<at::Scalar>();
  launch(current_stream(), "item", reads, {},
         [from = from_inside(self), value] { *value = from.item(); });
  synchronize(mark(current_stream()), "item");
  return *value;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_source);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  // One launch each, as on a device that has kernels for them.
  for (const char* each :
       {"_foreach_copy_", "_foreach_add_.List", "_foreach_mul_.Scalar", "native_layer_norm"}) {
    m.impl(each, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace fakegpu
