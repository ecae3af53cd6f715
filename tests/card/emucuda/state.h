// What every part of the pretended card shares: its options, agents and their clocks, counts, and reports of faults.
//
// Ordering is tracked, not timed. Every stream of every card, and the host, is an agent with a vector clock: entry j of
// agent i says up to which piece of j's work i is known to come after. Events carry clocks, waits join them.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace emu {

constexpr int MAX_CARDS = 2;
constexpr int STREAMS = 33;  // of a card. 0: the default stream; 1..32: the pool that torch takes side streams from
constexpr int HOST = MAX_CARDS * STREAMS;
constexpr int AGENTS = HOST + 1;
using Clock = std::array<uint64_t, AGENTS>;

struct Options {  // from the environment: EMU_TOTAL and so on, see README.md
  int cards;
  int64_t capability;  // 7.5 is 75
  int64_t total, context, others, oom_min;
  bool raises, protects, no_kernel, lags, expandable;
  uint64_t forbidden;  // bit n: nothing may be done on card n
};

extern Options options;
extern std::recursive_mutex big_lock;
extern std::array<Clock, AGENTS> clocks;
extern std::map<std::string, int64_t> counts;
extern std::vector<std::string> reports;

using Lock = std::lock_guard<std::recursive_mutex>;

// The thread's: its card, and its stream on each.
extern thread_local int current_card;
extern thread_local std::array<int, MAX_CARDS> current_stream;

inline int agent_of(int card, int stream) { return card * STREAMS + stream; }
inline int card_of(int agent) { return agent / STREAMS; }
inline int current_agent(int card) { return agent_of(card, current_stream[card]); }
std::string name_of(int agent);

void join(Clock& to, const Clock& from);

// A fault. It is raised at the thread's next operator (EMU_RAISE=0: only kept), for destructors may not raise.
void report(const std::string& kind, const std::string& text);
void raise_reports();
void clear_reports();

// From the first use of a card on, this process has a context there.
void use_card(int card, const char* what);
bool has_context(int card);

}  // namespace emu
