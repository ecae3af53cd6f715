// cuBLAS' workspaces: one per handle (a host thread's) and stream, taken through the caching allocator at the first
// product.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

namespace emu {

bool multiplies(const std::string& op);
// A matrix, or a batch of them, whose strides cuBLAS does not take: it is copied for the product's time.
bool needs_copy(const at::Tensor& matrix);
void hold_workspace(int card, int stream);
void drop_workspaces();

}  // namespace emu
