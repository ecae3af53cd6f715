// cuBLAS' workspaces: one per handle (a host thread's) and stream, taken through the caching allocator at the first
// product.
#pragma once
#include <string>

namespace emu {

bool multiplies(const std::string& op);
void hold_workspace(int card, int stream);
void drop_workspaces();

}  // namespace emu
