// Every operator that has no card's version of its own: its CPU kernel, on the same bytes.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>

#include "blas.h"
#include "host.h"
#include "launch.h"

namespace emu {

using Stack = torch::jit::Stack;

// Operators whose result's size depends on values: the host waits for them.
static bool waits_for_values(const std::string& op) {
  static const std::set<std::string> names = {"aten::nonzero",    "aten::masked_select",      "aten::_unique2",
                                              "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
                                              "aten::histc"};
  return names.count(op) > 0;
}

struct Call {
  const c10::OperatorHandle& op;
  Stack* stack;
  Launch launch;
  Aliases aliases;
  std::vector<std::pair<Tensor, Tensor>> growing = {};  // outputs of no size: (the card's, a CPU tensor that may grow)
  bool waits, indexes, product;
  std::vector<size_t> copies = {};  // bytes of matrices that cuBLAS wants otherwise laid out

  Call(const c10::OperatorHandle& op, Stack* stack, int card)
      : op(op),
        stack(stack),
        launch(op.schema().name(), card),
        waits(waits_for_values(launch.what)),
        indexes(launch.what == "aten::index" || launch.what == "aten::index_put_" ||
                launch.what == "aten::_index_put_impl_"),
        product(multiplies(launch.what)) {}

  void refuse_host_tensor(const Tensor& t, const c10::Argument& argument, bool writes) {
    TORCH_CHECK(t.dim() == 0 || indexes || t.device().is_meta(),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:", launch.card,
                " and ", t.device().str(), "! (emucuda: argument ", argument.name(), " of ", launch.what, ", shape ",
                t.sizes(), ")");
    TORCH_CHECK(!writes || t.dim() != 0 || op.schema().arguments().size() == 1, "emucuda: ", launch.what,
                " writes the CPU tensor ", argument.name());
  }

  Tensor argument(const Tensor& t, const c10::Argument& argument, bool in_list) {
    if (!t.defined()) return t;
    const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    if (!t.is_cuda()) {
      refuse_host_tensor(t, argument, writes);
      if (indexes && in_list) waits = true, counts["cpu_index"]++;
      return t;
    }
    TORCH_CHECK(card_of(t) == launch.card,
                "Expected all tensors to be on the same device, but found at least two devices, cuda:", launch.card,
                " and cuda:", card_of(t), "! (emucuda: argument ", argument.name(), " of ", launch.what, ", shape ",
                t.sizes(), ")");
    if (indexes && in_list && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte)) waits = true;
    launch.touch(t, writes);
    if (product && needs_copy(t)) copies.push_back(t.numel() * t.element_size());
    if (writes && argument.kwarg_only() && t.numel() == 0) {
      growing.emplace_back(t, at::empty({0}, t.options().device(at::kCPU)));
      return growing.back().second;
    }
    return aliases.of(t);
  }

  Tensor result(const Tensor& t) {
    for (auto& [card, grown] : growing)
      if (grown.is_same(t)) return card;
    return aliases.back(t, launch);
  }

  // `change` on every tensor of a value, alone or in a list.
  template <class Change>
  static void each(c10::IValue& value, Change change) {
    if (value.isTensor()) {
      value = change(value.toTensor(), false);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(change(t, true));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
        list.push_back(t ? std::optional<Tensor>(change(*t, true)) : t);
      value = list;
    }
  }

  void convert_arguments() {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++) {
      auto& value = (*stack)[stack->size() - arguments.size() + i];
      each(value, [&](const Tensor& t, bool in_list) { return argument(t, arguments[i], in_list); });
      if (value.isDevice() && value.toDevice().is_cuda()) value = c10::Device(c10::DeviceType::CPU);
    }
  }

  void compute() {
    const bool random = op.hasTag(at::Tag::nondeterministic_seeded);
    if (!random) return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    auto cpu = at::detail::getDefaultCPUGenerator();
    auto& own = generator_of(launch.card);
    const Tensor kept = cpu.get_state();
    cpu.set_state(own.get_state());
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    } catch (...) {
      cpu.set_state(kept);
      throw;
    }
    own.set_state(cpu.get_state());
    cpu.set_state(kept);
  }

  void hold_product_memory() {
    std::vector<c10::DataPtr> for_now;
    for (size_t bytes : copies) for_now.push_back(allocator.allocate_on(launch.card, bytes));
    hold_workspace(launch.card, current_stream[launch.card]);
  }

  void convert_results() {
    for (auto& [card, grown] : growing) {
      card.resize_(grown.sizes());
      launch.touch(card, true);
      copy_bytes(card, grown.contiguous());
    }
    const size_t m = op.schema().returns().size();
    for (size_t i = 0; i < m; i++) {
      auto& value = (*stack)[stack->size() - m + i];
      if (!value.isTensor() && !value.isTensorList() && !value.isNone()) waits = true;  // a number on the host
      each(value, [&](const Tensor& t, bool) { return result(t); });
    }
  }
};

// The card of the first tensor that is on one, as CUDA's kernels choose it; else the one that is asked for.
static int card_of_call(const c10::OperatorHandle& op, const Stack& stack) {
  std::optional<int> asked;
  const size_t n = op.schema().arguments().size();
  for (size_t i = stack.size() - n; i < stack.size(); i++) {
    const auto& value = stack[i];
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) return card_of(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& t : value.toTensorVector())
        if (t.defined() && t.is_cuda()) return card_of(t);
    if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index())
      asked = value.toDevice().index();
  }
  return asked.value_or(current_card);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  raise_reports();
  TORCH_CHECK(!options.no_kernel, "CUDA error: no kernel image is available for execution on the device");
  Call call(op, stack, card_of_call(op, *stack));
  call.convert_arguments();
  raise_reports();
  call.compute();
  call.convert_results();
  if (call.product) call.hold_product_memory();
  if (call.waits) host_waits_for(call.launch.agent);
  raise_reports();
}

}  // namespace emu

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&emu::fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (const char* name : {"convolution", "convolution_backward", "native_group_norm", "native_layer_norm",
                           "native_batch_norm", "embedding_renorm_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&emu::fallback>());
}
