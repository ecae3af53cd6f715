// The few operators that make memory, or look at it in another way.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>

#include "launch.h"

namespace emu {

static int chosen(std::optional<at::Device> device) {
  return device && device->has_index() ? device->index() : current_card;
}

static Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator_of(chosen(device)),
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return empty_on(chosen(device), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                  c10::dtype_or_default(dtype));
}

static void move_bytes(const c10::DataPtr& to, c10::StorageImpl* from) {
  Lock guard(big_lock);
  Block *target = block_of(to.get()), *source = block_of(from->data());
  open_block(source, true), open_block(target, true);
  std::memcpy(to.get(), from->data(), from->nbytes());
  open_block(source, false), open_block(target, false);
}

static const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;
  const size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    auto made = allocator.allocate_on(card_of(self), bytes);
    if (storage->nbytes()) move_bytes(made, storage);
    storage->set_data_ptr_noswap(std::move(made));
    storage->set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

static std::vector<int64_t> contiguous_strides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (int64_t i = (int64_t)sizes.size() - 1; i >= 0; i--) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

static Tensor& set_storage_(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                            c10::SymIntArrayRef stride) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto strides = contiguous_strides(sizes);
  impl->set_sizes_and_strides(sizes, stride.empty() ? at::IntArrayRef(strides) : C10_AS_INTARRAYREF_SLOW(stride),
                              offset.guard_int(__FILE__, __LINE__));
  return self;
}

static Tensor& set_whole_storage_(Tensor& self, at::Storage source) {
  const c10::SymInt count(int64_t(source.nbytes() / self.itemsize()));
  return set_storage_(self, source, 0, c10::SymIntArrayRef(&count, 1), {});
}

static Tensor& set_nothing_(Tensor& self) {
  auto& own = allocator_of(card_of(self));
  return set_whole_storage_(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, own.allocate(0), &own, true));
}

static bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
         self.strides() == other.strides();
}

}  // namespace emu

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", emu::empty);
  m.impl("empty_strided", emu::empty_strided);
  m.impl("resize_", emu::resize_);
  m.impl("is_set_to", emu::is_set_to);
  m.impl("set_.source_Storage_storage_offset", emu::set_storage_);
  m.impl("set_", emu::set_nothing_);
  m.impl("set_.source_Storage", emu::set_whole_storage_);
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
}
