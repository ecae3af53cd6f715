// What Python asks: plain numbers by ctypes (no dispatcher, so no dispatch mode sees them), the rest as operators
// `emu::…`.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <sstream>

#include "attention_memory.h"
#include "blas.h"
#include "host.h"
#include "launch.h"

namespace emu {

void set_card(int card);
bool can_use(int64_t backend, const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
             double dropout, bool causal, bool gqa);
std::vector<int64_t> replay(at::IntArrayRef ranges, at::IntArrayRef live, at::IntArrayRef events, int64_t limit);

static int64_t* option(const std::string& name) {
  static const std::map<std::string, int64_t*> all = {{"total", &options.total},
                                                      {"capability", &options.capability},
                                                      {"context", &options.context},
                                                      {"others", &options.others},
                                                      {"oom_min", &options.oom_min}};
  return all.at(name);
}

static bool* flag(const std::string& name) {
  static const std::map<std::string, bool*> all = {
      {"raises", &options.raises}, {"no_kernel", &options.no_kernel}, {"lags", &options.lags}};
  return all.at(name);
}

// Of each statistic and pool: now, peak, gained, lost; then the counters, as torch.cuda.memory_stats names them.
static std::vector<int64_t> memory_stats(int64_t card) {
  Lock guard(big_lock);
  const Segments& segments = segments_of(int(card));
  std::vector<int64_t> out;
  for (auto& kind : segments.stats)
    for (auto& stat : kind) out.insert(out.end(), {stat.current, stat.peak, stat.gained, stat.lost});
  out.insert(out.end(),
             {segments.retries, segments.ooms, segments.waited, segments.device_allocs, segments.device_frees});
  return out;
}

// Eight numbers for each piece that is mapped: its segment, stream, small, expandable, address, size, requested, state.
static std::vector<int64_t> pieces(int64_t card) {
  Lock guard(big_lock);
  std::vector<int64_t> out;
  for (const Piece* p : segments_of(int(card)).pieces())
    if (p->mapped)
      out.insert(out.end(), {p->base, p->stream, p->small, p->expandable, p->address, p->size, p->requested,
                             p->taken      ? 2
                             : p->deferred ? 1
                                           : 0});
  return out;
}

static std::vector<std::string> events(int64_t card) {
  Lock guard(big_lock);
  std::vector<std::string> out;
  for (auto& e : segments_of(int(card)).events)
    out.push_back(c10::str(e.action, " ", e.address, " ", e.size, " ", e.stream));
  return out;
}

static void record_events(int64_t card, bool on) {
  Lock guard(big_lock);
  segments_of(int(card)).recording = on;
  if (on) segments_of(int(card)).events.clear();
}

static std::string counts_as_text() {
  Lock guard(big_lock);
  std::ostringstream text;
  for (auto& [name, count] : counts) text << name << " " << count << "\n";
  return text.str();
}

}  // namespace emu

extern "C" {
using namespace emu;

int emu_device_count() { return options.cards; }
int emu_capability() { return int(options.capability); }
int emu_get_device() { return current_card; }
int emu_exchange_device(int card) {  // -1: that card does not exist
  const int before = current_card;
  if (card >= options.cards) return -1;
  if (card >= 0) current_card = card;
  return before;
}
void emu_touch_device(const char* what) {
  Lock guard(big_lock);
  use_card(current_card, what);
}
void emu_synchronize(int card) { host_waits_for_card(card < 0 ? current_card : card); }
void emu_empty_cache() {
  Lock guard(big_lock);
  for (int card = 0; card < options.cards; card++) segments_of(card).give_back();
}
void emu_set_cap(int card, int64_t bytes) {
  Lock guard(big_lock);
  segments_of(card).cap = bytes;
}
void emu_reset_peaks(int card) {
  Lock guard(big_lock);
  segments_of(card).reset_peaks();
}
int64_t emu_free(int card) {
  Lock guard(big_lock);
  return free_bytes(card);
}
int64_t emu_total() { return options.total; }
int64_t emu_allocated(int card) {
  Lock guard(big_lock);
  return segments_of(card).allocated();
}
int64_t emu_process_bytes(int card) {
  Lock guard(big_lock);
  return segments_of(card).reserved() + (has_context(card) ? options.context : 0);
}
void emu_lock_host(int64_t at, int64_t size) { lock_host((char*)at, size); }
void emu_unlock_host(int64_t at) { unlock_host((char*)at, false); }
void emu_oom_after(int64_t n) {
  Lock guard(big_lock);
  count_allocations_down(n);
}
void emu_drop_workspaces() { drop_workspaces(); }
void emu_clear() {
  Lock guard(big_lock);
  clear_reports();
}
int64_t emu_count(const char* name) {
  Lock guard(big_lock);
  return counts[name];
}
void emu_forbid(uint64_t cards) {
  Lock guard(big_lock);
  options.forbidden = cards;
}
void emu_option(const char* name, int64_t value) {
  Lock guard(big_lock);
  *option(name) = value;
}
int64_t emu_option_value(const char* name) {
  Lock guard(big_lock);
  return *option(name);
}
void emu_flag(const char* name, int value) {
  Lock guard(big_lock);
  *flag(name) = value;
}
void emu_seed(int card, int64_t value) { generator_of(card).set_current_seed(uint64_t(value)); }
}

TORCH_LIBRARY(emu, m) {
  m.def("counts() -> str", emu::counts_as_text);
  m.def("reports() -> str[]", [] {
    Lock guard(big_lock);
    return emu::reports;
  });
  m.def("live() -> str[]", [] {
    Lock guard(big_lock);
    return emu::live_blocks();
  });
  m.def("memory_stats(int card) -> int[]", emu::memory_stats);
  m.def("pieces(int card) -> int[]", emu::pieces);
  m.def("events(int card) -> str[]", emu::events);
  m.def("record_events(int card, bool on) -> ()", emu::record_events);
  m.def("replay(int[] ranges, int[] live, int[] events, int limit) -> int[]", emu::replay);
  m.def("efficient_workspace(int[] shape, bool half, int capability) -> int",
        [](at::IntArrayRef shape, bool half, int64_t capability) {
          return efficient_workspace({shape[0], shape[1], shape[2], shape[3], shape[4], half}, int(capability));
        });
  m.def("rng_state(int card) -> Tensor", [](int64_t card) { return generator_of(int(card)).get_state(); });
  m.def("set_rng_state(int card, Tensor state) -> ()",
        [](int64_t card, at::Tensor state) { generator_of(int(card)).set_state(state); });
  m.def(
      "can_use(int backend, Tensor q, Tensor k, Tensor v, Tensor? mask, float dropout, bool causal, bool gqa) -> bool",
      emu::can_use);
}
