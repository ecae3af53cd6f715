// RMS norm, which is fused on a card and made of parts on the CPU: here, too, only its input and 1/rms are kept.
#include <ATen/ops/_fused_rms_norm.h>
#include <torch/library.h>

#include "launch.h"

namespace emu {

using Maybe = std::optional<Tensor>;

static std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, at::IntArrayRef shape, const Maybe& weight,
                                           std::optional<double> eps) {
  Launch launch("_fused_rms_norm", card_of(x));
  Aliases aliases;
  launch.touch(x, false);
  if (weight && weight->defined()) launch.touch(*weight, false);
  raise_reports();
  const Maybe w = weight && weight->defined() ? Maybe(aliases.of(*weight)) : std::nullopt;
  auto [out, rstd] = at::_fused_rms_norm(aliases.of(x), shape, w, eps);
  Tensor on_card = aliases.back(out.contiguous(), launch);
  return {on_card, aliases.back(rstd.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).clone(), launch)};
}

// With h = x / rms and g = gradient * weight: dx = (g - h * mean(g * h)) / rms, dweight = sum(gradient * h) over rows.
static std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& gradient, const Tensor& x, at::IntArrayRef shape,
                                                    const Tensor& rstd, const Maybe& weight,
                                                    std::array<bool, 2> wanted) {
  Launch launch("_fused_rms_norm_backward", card_of(x));
  Aliases aliases;
  for (const Tensor* t : {&gradient, &x, &rstd}) launch.touch(*t, false);
  const bool weighted = weight && weight->defined();
  if (weighted) launch.touch(*weight, false);
  raise_reports();
  std::vector<int64_t> inner, outer;
  for (int64_t i = 0; i < x.dim(); i++) (i < x.dim() - int64_t(shape.size()) ? outer : inner).push_back(i);
  const Tensor r = aliases.of(rstd), given = aliases.of(gradient).to(r.scalar_type());
  const Tensor h = aliases.of(x).to(r.scalar_type()).mul(r);
  const Tensor g = weighted ? given.mul(aliases.of(*weight)) : given;
  const Tensor dx = g.sub(h.mul(g.mul(h).mean(inner, true))).mul(r).to(x.scalar_type());
  Tensor dweight;
  if (weighted && wanted[1])
    dweight = (outer.empty() ? given.mul(h) : given.mul(h).sum(outer)).to(weight->scalar_type());
  return {wanted[0] ? aliases.back(dx, launch) : Tensor(), aliases.back(dweight, launch)};
}

}  // namespace emu

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_fused_rms_norm", emu::rms_norm);
  m.impl("_fused_rms_norm_backward", emu::rms_norm_backward);
}
