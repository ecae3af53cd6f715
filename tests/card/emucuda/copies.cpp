// copy_ between host and card, on the card, and from card to card.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstring>

#include "host.h"
#include "launch.h"

namespace emu {

static Span span_of(const Tensor& t) {
  const size_t size = t.numel() ? at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize()) : 0;
  char* at = (char*)t.const_data_ptr();
  return {at, size, size && is_locked(at, size)};
}

static std::string kind_of(bool asynchronous, bool locked, bool non_blocking) {
  if (asynchronous) return "async";
  if (!locked) return non_blocking ? "pageable_nonblocking" : "pageable";
  return non_blocking ? "locked_indirect" : "locked_blocking";
}

static void host_race(const char* direction, int agent, const Pending& other, const char* does) {
  report("host-race", c10::str("a copy ", direction, " on the ", name_of(agent), does, name_of(other.agent),
                               other.to_host ? " still writes" : " still reads"));
}

struct Copy {
  Launch& launch;
  const Tensor &to, &from;  // CPU tensors: one the host's, one an alias of the card's
  Span host;
  bool asynchronous, non_blocking;

  const Clock& seen() const { return clocks[launch.agent]; }
  uint64_t now() const { return seen()[launch.agent]; }

  void to_card() {
    std::vector<Pending*> shown;  // copies from the card that this stream comes after: their bytes are what is read
    for (auto& other : pending) {
      if (!other.to_host || !other.overlaps(host.at, host.size)) continue;
      if (seen()[other.agent] < other.when) {
        host_race("to the card", launch.agent, other, " reads host memory that a copy on the ");
        continue;
      }
      std::memcpy(other.host, other.bytes.data(), other.size);
      shown.push_back(&other);
    }
    if (!asynchronous && !shown.empty())
      report("host-read-in-flight",
             "the host reads page-locked memory that a copy from the card is still to fill (blocking or staged copy "
             "from it)");
    to.copy_(from);
    const uint64_t hash = asynchronous ? hash_of(host.at, host.size) : 0;
    for (Pending* other : shown) std::memset(other->host, 0xFF, other->size);
    if (asynchronous) pending.push_back({false, host.at, host.size, launch.agent, now(), {}, hash});
    if (!non_blocking) host_joins(seen());
  }

  void to_host() {
    for (auto& other : pending) {
      if (!other.overlaps(host.at, host.size)) continue;
      if (seen()[other.agent] < other.when)
        host_race("to the host", launch.agent, other, " writes host memory that a copy on the ");
      const bool covered = host.at <= other.host && other.host + other.size <= host.at + host.size;
      if (other.to_host && !covered) std::memcpy(other.host, other.bytes.data(), other.size);
      other.closed = true;
    }
    if (!asynchronous) host_joins(seen());  // what waits there comes first
    to.copy_(from);
    if (!asynchronous) return;
    pending.push_back(
        {true, host.at, host.size, launch.agent, now(), std::vector<char>(host.at, host.at + host.size), 0});
    std::memset(host.at, 0xFF, host.size);
  }
};

// Both cards' streams wait for each other, as CUDA's copy_device_to_device makes them.
static void between_cards(const Tensor& self, const Tensor& src) {
  const int there = current_agent(card_of(self)), here = current_agent(card_of(src));
  {
    Lock guard(big_lock);
    join(clocks[here], clocks[there]);
  }
  Launch launch("copy_ to another card", card_of(src));
  Aliases aliases;
  launch.touch(src, false);
  launch.touch(self, true);
  raise_reports();
  aliases.of(self).copy_(aliases.of(src));
  Lock guard(big_lock);
  join(clocks[there], clocks[here]);
}

static Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  raise_reports();
  if (!self.defined() || self.numel() == 0 || self.is_same(src) || src.is_meta() || self.is_meta()) return self;
  const bool both = self.is_cuda() && src.is_cuda(), to_host = src.is_cuda();
  if (both && card_of(self) != card_of(src)) {
    between_cards(self, src);
    return self;
  }
  Launch launch(both             ? "copy_"
                : self.is_cuda() ? "copy_ to the card"
                                 : "copy_ to the host",
                card_of(to_host ? src : self));
  Aliases aliases;
  launch.touch(src, false);
  launch.touch(self, true);
  raise_reports();
  const Tensor to = self.is_cuda() ? aliases.of(self) : self, from = src.is_cuda() ? aliases.of(src) : src;
  if (both) {
    to.copy_(from);
    return self;
  }
  const Span host = span_of(to_host ? self : src);
  const bool direct = self.scalar_type() == src.scalar_type() && self.sizes() == src.sizes() && self.is_contiguous() &&
                      src.is_contiguous();
  Copy copy{launch, to, from, host, non_blocking && host.locked && direct, non_blocking};
  {
    Lock guard(big_lock);
    const std::string kind = (to_host ? "d2h." : "h2d.") + kind_of(copy.asynchronous, host.locked, non_blocking);
    counts[kind]++;
    counts[kind + ".bytes"] += self.nbytes();
    to_host ? copy.to_host() : copy.to_card();
  }
  raise_reports();
  return self;
}

static void record(Tensor& self, c10::Stream stream) {
  if (self.has_storage()) record_stream(self.storage().data(), agent_of(stream.device_index(), int(stream.id())));
}

}  // namespace emu

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", emu::copy_);
  m.impl("record_stream", emu::record);
}
