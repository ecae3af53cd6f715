#include "launch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>

#include <cstring>

namespace emu {

int card_of(const Tensor& tensor) { return tensor.device().index(); }

Launch::Launch(std::string name, int on) : card(on), agent(current_agent(on)), what(std::move(name)) {
  Lock guard(big_lock);
  use_card(card, what.c_str());
  join(clocks[agent], clocks[HOST]);
  clocks[agent][agent]++;
  counts["launches"]++;
  doing = what;
}

Launch::~Launch() {
  Lock guard(big_lock);
  for (char* base : opened_) {
    Block* block = block_of(base);
    if (block && block->base == base) open_block(block, false);
  }
}

void Launch::check_order(const Block& block, bool writes) const {
  const Clock& seen = clocks[agent];
  auto check = [&](int other, const Access& access, const char* how) {
    if (other != agent && seen[other] < access.when)
      report("race", c10::str(what, writes ? " writes" : " reads", " block ", block.id, " (", block.size,
                              " bytes) on the ", name_of(agent), ", but nothing orders it after ", access.what,
                              ", which ", how, " it on the ", name_of(other)));
  };
  if (block.writer >= 0) check(block.writer, block.write, "writes");
  if (!writes) return;
  for (auto& [other, access] : block.reads) check(other, access, "reads");
}

void Launch::touch(const Tensor& tensor, bool writes) {
  if (!tensor.defined() || !tensor.is_cuda() || !tensor.has_storage() || !tensor.storage().data()) return;
  Lock guard(big_lock);
  Block* block = block_of(tensor.storage().data());
  if (!block) return report("no-block", what + " uses device memory that is not allocated");
  open_block(block, true);
  opened_.push_back(block->base);
  check_order(*block, writes);
  const Access access{clocks[agent][agent], what};
  if (!writes) {
    block->reads[agent] = access;
    return;
  }
  block->reads.clear();
  block->writer = agent;
  block->write = access;
}

// -- tensors

Tensor empty_on(int card, at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_generic(sizes, &allocator_of(card), c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype,
                                   std::nullopt);
}

Tensor empty_on(int card, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator_of(card),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
}

void copy_bytes(const Tensor& to, const Tensor& from) {
  if (to.nbytes()) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
}

static void mark_lazy(const Tensor& to, const Tensor& from) {
  if (from.is_conj()) to._set_conj(true);
  if (from.is_neg()) to._set_neg(true);
}

Tensor Aliases::of(const Tensor& tensor) {
  for (auto& [card, alias] : pairs_)
    if (card.is_same(tensor)) return alias;
  auto* impl = tensor.storage().unsafeGetStorageImpl();
  auto found = storages_.find(impl);
  if (found == storages_.end()) {
    c10::DataPtr bytes(impl->mutable_data(), c10::Device(c10::DeviceType::CPU));
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(bytes), nullptr, false);
    found = storages_.emplace(impl, std::move(storage)).first;
  }
  Tensor alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second),
                                                          c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  mark_lazy(alias, tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  pairs_.emplace_back(tensor, alias);
  return alias;
}

// Of the base's storage and keys: whether autograd follows, inference mode or not, is the base's to say.
static Tensor view_of(const Tensor& base, const Tensor& result) {
  const auto lazy = c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                         base.key_set() - lazy, result.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
  mark_lazy(view, result);
  return view;
}

Tensor Aliases::back(const Tensor& result, Launch& launch) {
  if (!result.defined() || result.is_cuda()) return result;
  for (auto& [card, alias] : pairs_)
    if (alias.is_same(result)) return card;
  for (auto& [card, alias] : pairs_)
    if (result.has_storage() && result.storage().is_alias_of(alias.storage())) return view_of(card, result);
  const Tensor dense = result.is_non_overlapping_and_dense() ? result : result.contiguous();
  Tensor made = empty_on(launch.card, dense.sizes(), dense.strides(), dense.scalar_type());
  launch.touch(made, true);
  copy_bytes(made, dense);
  return made;
}

at::Generator& generator_of(int card) {
  static constexpr uint64_t SEED = 67280421310721ull;  // torch's default
  static std::array<at::Generator, MAX_CARDS> made = [] {
    std::array<at::Generator, MAX_CARDS> all;
    for (auto& one : all) one = at::make_generator<at::CPUGeneratorImpl>(SEED);
    return all;
  }();
  return made[card];
}

}  // namespace emu
