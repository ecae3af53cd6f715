// What the fused attention kernels allocate beside their results. Sources: aten/src/ATen/native/transformers/cuda,
// flash_attn (flash_api.cpp) and mem_eff_attention (kernel_backward.h, kernels/cutlassB.h, which torch's wheel
// carries).
#pragma once
#include <algorithm>
#include <cstdint>

#include "segments.h"

namespace emu {

struct Shape {  // of one attention: batch, heads, queries, keys, dimension of a head
  int64_t batch, heads, queries, keys, dim;
  bool half;  // 16-bit inputs
};

// flash: dq is summed in float32, in (B, L rounded to 128, H, D rounded).
inline int64_t flash_dim(int64_t dim) { return up(dim, dim <= 128 ? 32 : 64); }
inline int64_t flash_queries(int64_t queries) { return up(queries, 128); }

// Memory-efficient, forward: 16-bit results of heads over 128 are gathered in float32 (no kernel holds them in
// registers).
inline bool gathers_output(const Shape& s) { return s.half && s.dim > 128; }

// Memory-efficient, backward: the kernel that PyTorch chooses is the first of its list whose shared memory the card
// has. What each needs was worked out from kernel_backward.h: 128 x 128 takes 160 KiB, the others less than 64 (16
// bits).
struct EfficientKernel {
  int64_t rows, columns;  // kBlockSizeI, kBlockSizeJ
  bool keeps_sums;        // kOutputInRF: dk and dv are summed in registers
};

inline EfficientKernel efficient_kernel(const Shape& s, int capability) {
  const bool wide = capability == 80 || capability == 90 || capability == 100;  // 160 KiB of shared memory and more
  if (s.dim <= 64) return {64, 64, s.half};
  if (!s.half) return {wide ? 128 : 64, 64, false};
  if (s.dim > 128) return {capability >= 70 ? 128 : 64, 64, false};
  if (capability < 70) return {64, 64, false};
  if (capability < 80) return {128, 64, true};
  if (s.dim <= 96 && (capability == 86 || capability == 89)) return {128, 64, true};
  return wide ? EfficientKernel{128, 128, true} : EfficientKernel{64, 64, false};
}

inline int64_t efficient_splits(const Shape& s, const EfficientKernel& kernel, bool stages) {
  int64_t splits = (s.keys + kernel.columns - 1) / kernel.columns;
  if (s.batch * s.heads >= 256 && s.keys <= 2 * kernel.columns) splits = 1;
  if (stages) splits = std::min(splits, 200 / (s.batch * s.heads));
  return std::max<int64_t>(splits, 1);
}

// Bytes of float32 for the sums of dq, and of dk and dv where registers do not hold them.
inline int64_t efficient_workspace(const Shape& s, int capability) {
  const EfficientKernel kernel = efficient_kernel(s, capability);
  const bool stages = s.half && !kernel.keeps_sums, sums_dq = s.half || capability >= 70;
  int64_t floats = 0;
  if (stages) floats += 2 * efficient_splits(s, kernel, true) * kernel.columns * up(s.dim, kernel.rows);
  if (sums_dq) {
    const int64_t tile = kernel.rows * kernel.columns + 4;  // a lock, a counter and padding before each tile
    floats += (s.queries + kernel.rows - 1) / kernel.rows * ((s.dim + kernel.columns - 1) / kernel.columns) * tile;
  }
  return s.batch * s.heads * up(floats, 4) * int64_t(sizeof(float));
}

}  // namespace emu
