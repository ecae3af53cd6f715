#include "state.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <cstdlib>

namespace emu {

static int64_t number(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

static int64_t capability() {
  const char* text = std::getenv("EMU_CAPABILITY");
  return text ? int64_t(std::atof(text) * 10 + 0.5) : 75;
}

// As PYTORCH_ALLOC_CONF, by its old name too, says it.
static bool expandable_segments() {
  for (const char* name : {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})
    if (const char* text = std::getenv(name))
      return std::string(text).find("expandable_segments:True") != std::string::npos;
  return false;
}

Options options = {
    .cards = std::clamp(int(number("EMU_CARDS", 1)), 1, MAX_CARDS),
    .capability = capability(),
    .total = number("EMU_TOTAL", int64_t(8) << 30),
    .context = number("EMU_CONTEXT", 300 << 20),
    .others = number("EMU_OTHERS", 0),
    .oom_min = number("EMU_OOM_MIN", 0),
    .raises = number("EMU_RAISE", 1) != 0,
    .protects = number("EMU_PROTECT", 1) != 0,
    .no_kernel = number("EMU_NO_KERNEL", 0) != 0,
    .lags = number("EMU_LAG", 0) != 0,
    .expandable = expandable_segments(),
    .forbidden = uint64_t(number("EMU_FORBIDDEN", 0)),
};

std::recursive_mutex big_lock;
std::array<Clock, AGENTS> clocks{};
std::map<std::string, int64_t> counts;
std::vector<std::string> reports;
thread_local int current_card = 0;
thread_local std::array<int, MAX_CARDS> current_stream{};

static std::string unraised;
static std::array<bool, MAX_CARDS> contexts{};

std::string name_of(int agent) {
  if (agent == HOST) return "host";
  const std::string card = options.cards > 1 ? " of card " + std::to_string(card_of(agent)) : "";
  const int stream = agent % STREAMS;
  return (stream == 0 ? "default stream" : "side stream " + std::to_string(stream)) + card;
}

void join(Clock& to, const Clock& from) {
  for (int i = 0; i < AGENTS; i++) to[i] = std::max(to[i], from[i]);
}

void report(const std::string& kind, const std::string& text) {
  Lock guard(big_lock);
  counts["report." + kind]++;
  if (reports.size() < 1000) reports.push_back(kind + ": " + text);
  // An unregistered source is only collected: cudaHostUnregister waits in practice, though nothing says that it must.
  if (options.raises && unraised.empty() && kind != "unlocked-source") unraised = kind + ": " + text;
}

void raise_reports() {
  Lock guard(big_lock);
  if (unraised.empty()) return;
  const auto text = std::move(unraised);
  unraised.clear();
  TORCH_CHECK(false, "emucuda: ", text);
}

void clear_reports() {
  reports.clear();
  unraised.clear();
}

void use_card(int card, const char* what) {
  contexts[card] = true;
  if (options.forbidden >> card & 1)
    report("wrong-card", std::string(what) + " on card " + std::to_string(card) + ", which the program was not to use");
}

bool has_context(int card) { return contexts[card]; }

}  // namespace emu
