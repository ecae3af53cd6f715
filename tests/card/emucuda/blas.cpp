#include "blas.h"

#include "memory.h"

namespace emu {

// ATen/cuda/CublasHandlePool.cpp: ":4096:2:16:8", from Hopper on 32 MiB; cuBLASLt shares it (unified, as of
// torch 2.13).
static size_t workspace_size() { return options.capability >= 90 ? 32 * MIB : (4096 * 2 + 16 * 8) * 1024; }

bool multiplies(const std::string& op) {
  static const std::set<std::string> names = {
      "aten::mm",    "aten::addmm", "aten::bmm",  "aten::baddbmm",           "aten::addbmm",  "aten::mv",
      "aten::addmv", "aten::dot",   "aten::vdot", "aten::_addmm_activation", "aten::_int_mm", "aten::_scaled_mm"};
  return names.count(op) > 0;
}

bool needs_copy(const at::Tensor& matrix) {
  if (matrix.dim() < 2 || matrix.is_non_overlapping_and_dense()) return false;
  const int64_t rows = matrix.size(-2), columns = matrix.size(-1), down = matrix.stride(-2), along = matrix.stride(-1);
  const bool by_rows = along == 1 && down >= std::max<int64_t>(1, columns);
  const bool by_columns = down == 1 && along >= std::max<int64_t>(1, rows);
  return !by_rows && !by_columns;
}

static std::set<int> idle_handles[MAX_CARDS];
static int handles_made[MAX_CARDS];

// A thread keeps its handle until it ends; then another takes it over, workspaces and all.
struct Handles {
  std::array<int, MAX_CARDS> own;
  Handles() { own.fill(-1); }
  ~Handles() {
    Lock guard(big_lock);
    for (int card = 0; card < MAX_CARDS; card++)
      if (own[card] >= 0) idle_handles[card].insert(own[card]);
  }
  int on(int card) {
    auto& idle = idle_handles[card];
    if (own[card] < 0 && !idle.empty()) own[card] = idle.extract(idle.begin()).value();
    if (own[card] < 0) own[card] = handles_made[card]++;
    return own[card];
  }
};

using Workspaces = std::map<std::tuple<int, int, int>, c10::DataPtr>;
static Workspaces& workspaces() {
  static auto* made = new Workspaces;  // never destroyed: at exit the allocator may be gone first
  return *made;
}

void hold_workspace(int card, int stream) {
  Lock guard(big_lock);
  static thread_local Handles handles;
  auto& place = workspaces()[{handles.on(card), card, stream}];
  if (!place) place = allocator.allocate_on(card, workspace_size());
}

void drop_workspaces() {
  Lock guard(big_lock);
  workspaces().clear();
}

}  // namespace emu
