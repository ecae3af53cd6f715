// Fused attention: torch's own choice among flash, memory-efficient and math, and the first two as operators of the
// card.
//
// They compute by the CPU's flash kernel and allocate what the card's do: no matrix of scores; log-sum-exp kept for the
// backward pass; there, float32 sums (attention_memory.h). Left out, so in math form: dropout, a mask that wants a
// gradient, values of another head dimension, cuDNN's attention (Hopper may prefer it), split keys of flash's forward
// pass.
#include "attention_memory.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "launch.h"

namespace emu {

using Mask = std::optional<Tensor>;

// -- which kernel

struct Asked {
  const Tensor &q, &k, &v;
  const Mask& mask;
  double dropout;
  bool causal, gqa;

  bool masked() const { return mask && mask->defined(); }
  bool wants_gradients() const {
    return at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
  }
  bool half() const { return q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16; }
};

// What either kernel asks, and what this card leaves out.
static bool fusable(const Asked& a) {
  for (const Tensor* t : {&a.q, &a.k, &a.v})
    if (t->dim() != 4 || t->size(2) == 0 || (t->stride(3) != 1 && t->size(3) != 1) ||
        t->scalar_type() != a.q.scalar_type())
      return false;
  const bool same_heads = a.q.size(1) == a.k.size(1) && a.k.size(1) == a.v.size(1);
  const bool grouped = a.gqa && a.k.size(1) == a.v.size(1) && a.q.size(1) % a.k.size(1) == 0;
  const bool same_dims = a.q.size(3) == a.k.size(3) && a.k.size(3) == a.v.size(3);
  return (same_heads || grouped) && same_dims && a.q.size(0) == a.k.size(0) && a.k.size(0) == a.v.size(0) &&
         a.dropout == 0 && !(a.masked() && a.mask->requires_grad());
}

static bool takes_flash(const Asked& a) {
  const int64_t dim = a.q.size(3);
  const bool narrow = options.capability == 86 || options.capability == 89 || options.capability == 120;
  return at::globalContext().userEnabledFlashSDP() && options.capability >= 80 && a.half() && !a.masked() &&
         dim <= 256 && !(narrow && a.wants_gradients() && dim > 192 && dim <= 224) &&
         !(a.causal && a.q.size(2) != a.k.size(2));
}

static bool takes_efficient(const Asked& a) {
  const bool tensor_cores = options.capability >= 80 || (options.capability >= 70 && a.half());
  const int64_t least = options.capability >= 80 ? 4 : 1,
                alignment = tensor_cores ? std::max<int64_t>(least, a.half() ? 8 : 4) : least;
  const auto dtype = a.q.scalar_type();
  return at::globalContext().userEnabledMemEfficientSDP() &&
         (dtype == at::kHalf || dtype == at::kFloat || (dtype == at::kBFloat16 && options.capability >= 80)) &&
         a.q.size(1) == a.k.size(1) && a.q.size(3) % alignment == 0;
}

static at::SDPBackend choose(const Asked& a) {
  if (!fusable(a)) return at::SDPBackend::math;
  return takes_flash(a)       ? at::SDPBackend::flash_attention
         : takes_efficient(a) ? at::SDPBackend::efficient_attention
                              : at::SDPBackend::math;
}

static int64_t choice(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask, double dropout, bool causal,
                      std::optional<double>, bool gqa) {
  const auto chosen = choose({q, k, v, mask, dropout, causal, gqa});
  Lock guard(big_lock);
  counts[chosen == at::SDPBackend::flash_attention       ? "attention.flash"
         : chosen == at::SDPBackend::efficient_attention ? "attention.efficient"
                                                         : "attention.math"]++;
  return int64_t(chosen);
}

bool can_use(int64_t backend, const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask, double dropout,
             bool causal, bool gqa) {
  const Asked asked{q, k, v, mask, dropout, causal, gqa};
  return fusable(asked) &&
         (backend == int64_t(at::SDPBackend::flash_attention) ? takes_flash(asked) : takes_efficient(asked));
}

static const int stub_filled = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choice), 0);

// -- numbers, on the host

static Tensor rows(const Tensor& t) { return t.stride(3) == 1 ? t : t.contiguous(); }

// Keys and values of grouped heads, once for each query head.
static Tensor ungrouped(const Tensor& t, int64_t heads) {
  return rows(t.size(1) == heads ? t : t.repeat_interleave(heads / t.size(1), 1));
}

static Tensor grouped(const Tensor& gradient, int64_t heads) {
  if (gradient.size(1) == heads) return gradient;
  return gradient.unflatten(1, {heads, gradient.size(1) / heads}).sum(2);
}

struct Host {  // CPU tensors (B, H, L, D)
  Tensor q, k, v;
  Mask mask;
  bool causal;
  std::optional<double> scale;

  std::tuple<Tensor, Tensor> forward() const {
    return at::_scaled_dot_product_flash_attention_for_cpu(rows(q), ungrouped(k, q.size(1)), ungrouped(v, q.size(1)),
                                                           0.0, causal, mask, scale);
  }
  std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& gradient, const Tensor& out, const Tensor& lse) const {
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        rows(gradient), rows(q), ungrouped(k, q.size(1)), ungrouped(v, q.size(1)), rows(out),
        lse.transpose(1, 2).contiguous().transpose(1, 2), 0.0, causal, mask, scale);
    return {dq, grouped(dk, k.size(1)), grouped(dv, k.size(1))};
  }
};

// -- the card's operators

static Shape shape_of(const Tensor& q, const Tensor& k) {
  return {q.size(0), q.size(1), q.size(2), k.size(2), q.size(3), q.element_size() == 2};
}

static Tensor floats(const Launch& launch, at::IntArrayRef sizes) { return empty_on(launch.card, sizes, at::kFloat); }

static Tensor like(const Launch& launch, const Tensor& t) {  // at::empty_like: the strides of a dense tensor are kept
  if (t.is_non_overlapping_and_dense()) return empty_on(launch.card, t.sizes(), t.strides(), t.scalar_type());
  return empty_on(launch.card, t.sizes(), t.scalar_type());
}

static Tensor by_tokens(const Launch& launch, const Tensor& t) {  // (B, H, L, D), laid out as (B, L, H, D)
  return empty_on(launch.card, {t.size(0), t.size(2), t.size(1), t.size(3)}, t.scalar_type()).transpose(1, 2);
}

struct Work {
  Launch launch;
  Aliases aliases = {};

  Tensor in(const Tensor& t) {
    launch.touch(t, false);
    return t.defined() && t.is_cuda() ? aliases.of(t) : t;
  }
  Mask in_mask(const Mask& t) { return t && t->defined() ? Mask(in(*t)) : std::nullopt; }
  void out(const Tensor& t, const Tensor& value) {
    launch.touch(t, true);
    raise_reports();
    aliases.of(t).copy_(value);
  }
  Host host(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask, bool causal,
            std::optional<double> scale) {
    Host made{in(q), in(k), in(v), in_mask(mask), causal, scale};
    raise_reports();
    return made;
  }
};

using Nine = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

static Nine flash(const Tensor& q, const Tensor& k, const Tensor& v, double, bool causal, bool,
                  std::optional<double> scale) {
  Work work{{"_scaled_dot_product_flash_attention", card_of(q)}};
  Tensor out = like(work.launch, q), lse = floats(work.launch, {q.size(0), q.size(1), q.size(2)});
  Tensor rng_state = empty_on(work.launch.card, {2}, at::kUInt64), unused = empty_on(work.launch.card, {}, at::kUInt64);
  auto [value, sums] = work.host(q, k, v, std::nullopt, causal, scale).forward();
  work.out(out, value);
  work.out(lse, sums);
  return {out,       lse,       Tensor(),
          Tensor(),  q.size(2), k.size(2),
          rng_state, unused,    empty_on(work.launch.card, {0}, q.scalar_type())};
}

static std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& gradient_, const Tensor& q, const Tensor& k,
                                                         const Tensor& v, const Tensor& out_, const Tensor& lse,
                                                         const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double,
                                                         bool causal, const Tensor&, const Tensor&,
                                                         std::optional<double> scale) {
  if (!gradient_.defined()) return {};
  const Tensor gradient = gradient_.transpose(1, 2).contiguous().transpose(1, 2),
               out = out_.transpose(1, 2).contiguous().transpose(1, 2);
  const Shape s = shape_of(q, k);
  Work work{{"_scaled_dot_product_flash_attention_backward", card_of(q)}};
  Tensor dq = like(work.launch, q), dk = like(work.launch, k), dv = like(work.launch, v);
  const Tensor delta = floats(work.launch, {s.batch, s.heads, flash_queries(s.queries)});
  const Tensor dq_sum = floats(work.launch, {s.batch, flash_queries(s.queries), s.heads, flash_dim(s.dim)});
  const bool grouped = k.size(1) != s.heads;
  const Tensor dk_each =
      grouped ? empty_on(work.launch.card, {s.batch, s.keys, s.heads, s.dim}, k.scalar_type()) : Tensor();
  const Tensor dv_each =
      grouped ? empty_on(work.launch.card, {s.batch, s.keys, s.heads, s.dim}, k.scalar_type()) : Tensor();
  auto [a, b, c] =
      work.host(q, k, v, std::nullopt, causal, scale).backward(work.in(gradient), work.in(out), work.in(lse));
  work.out(dq, a), work.out(dk, b), work.out(dv, c);
  return {dq, dk, dv};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k, const Tensor& v,
                                                            const Mask& mask, bool keeps, double, bool causal,
                                                            std::optional<double> scale) {
  const Shape s = shape_of(q, k);
  Work work{{"_scaled_dot_product_efficient_attention", card_of(q)}};
  Tensor out = by_tokens(work.launch, q), lse = floats(work.launch, {s.batch, s.heads, keeps ? up(s.queries, 32) : 0});
  const Tensor gathered = gathers_output(s) ? floats(work.launch, {s.batch, s.queries, s.heads, s.dim}) : Tensor();
  auto [value, sums] = work.host(q, k, v, mask, causal, scale).forward();
  work.out(out, value);
  if (keeps) work.out(lse.slice(2, 0, s.queries), sums);
  return {out, lse, at::empty({}, at::kLong), at::empty({}, at::kLong)};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& gradient_, const Tensor& q,
                                                                     const Tensor& k, const Tensor& v,
                                                                     const Tensor& mask, const Tensor& out,
                                                                     const Tensor& lse, const Tensor&, const Tensor&,
                                                                     double, std::array<bool, 4>, bool causal,
                                                                     std::optional<double> scale) {
  if (!gradient_.defined()) return {};
  const Tensor gradient = gradient_.transpose(1, 2).contiguous().transpose(1, 2);
  const Shape s = shape_of(q, k);
  const int card = card_of(q);
  Tensor dq, dk, dv, delta;
  {
    const Launch launch("_efficient_attention_backward", card);
    dq = by_tokens(launch, q), dk = by_tokens(launch, k), dv = by_tokens(launch, v);
    delta = s.half ? floats(launch, {s.batch, s.heads, s.queries}) : Tensor();
  }
  if (!s.half) delta = gradient.mul(out).sum(-1).contiguous();  // the float32 kernels leave it to operators
  Work work{{"_scaled_dot_product_efficient_attention_backward", card}};
  const int64_t bytes = efficient_workspace(s, options.capability);
  const Tensor workspace = bytes ? empty_on(card, {bytes}, at::kByte) : Tensor();
  auto [a, b, c] = work.host(q, k, v, mask.defined() ? Mask(mask) : std::nullopt, causal, scale)
                       .backward(work.in(gradient), work.in(out), work.in(lse.slice(2, 0, s.queries)));
  work.out(dq, a), work.out(dk, b), work.out(dv, c);
  return {dq, dk, dv, Tensor()};
}

}  // namespace emu

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_scaled_dot_product_flash_attention", emu::flash);
  m.impl("_scaled_dot_product_flash_attention_backward", emu::flash_backward);
  m.impl("_scaled_dot_product_efficient_attention", emu::efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", emu::efficient_backward);
}
