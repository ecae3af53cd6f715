// PyTorch's CUDA caching allocator, as arithmetic: what is reserved when tensors come and go like this.
//
// Addresses are numbers; nobody's bytes lie there. Own words for the algorithm of c10/cuda/CUDACachingAllocator.cpp, in
// both modes: classic segments, and expandable ones (PYTORCH_ALLOC_CONF=expandable_segments:True). Left out:
// max_split_size, garbage collection, rounding to powers of two (all off by default), private pools, graphs.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace emu {

constexpr int64_t MIB = 1 << 20, SMALL_BUFFER = 2 * MIB, LARGE_BUFFER = 20 * MIB;

inline int64_t up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

struct Stat {
  int64_t current = 0, peak = 0, gained = 0, lost = 0;
  void add(int64_t amount);
};

struct Piece {  // of a segment: in use, cached, or (expandable segments only) not mapped
  int64_t address, size;
  int stream;
  bool small;
  int64_t base;  // its segment's address
  bool expandable = false, mapped = true, taken = false, deferred = false;
  int64_t requested = 0;
  Piece *before = nullptr, *after = nullptr;

  bool split() const { return before || after; }
  bool usable() const { return !taken && !deferred; }
};

struct ByFit {  // best fit within a stream's pieces, the lowest address first among equals
  bool operator()(const Piece* a, const Piece* b) const {
    return std::tie(a->stream, a->size, a->address) < std::tie(b->stream, b->size, b->address);
  }
};
struct ByAddress {
  bool operator()(const Piece* a, const Piece* b) const {
    return std::tie(a->stream, a->address) < std::tie(b->stream, b->address);
  }
};

using Until = std::vector<std::pair<int, uint64_t>>;  // agents, and how far each must have come

struct Event {  // as in torch.cuda.memory's traces
  const char* action;
  int64_t address, size;
  int stream;
};

class Segments {
 public:
  enum Kind {
    ALLOCATION,
    SEGMENT,
    ACTIVE,
    INACTIVE_SPLIT,
    ALLOCATED_BYTES,
    RESERVED_BYTES,
    ACTIVE_BYTES,
    INACTIVE_SPLIT_BYTES,
    REQUESTED_BYTES,
    KINDS
  };
  enum Pool { ALL, SMALL, LARGE, POOLS };

  // Bytes that the driver still gives this process; whether the agents of a deferred piece are done with it.
  std::function<int64_t()> room = [] { return INT64_MAX; };
  std::function<bool(const Until&)> done = [](const Until&) { return true; };
  std::function<int64_t(int64_t)> place;  // where a new segment of this size goes, if a replay says so
  int64_t cap = INT64_MAX;                // of set_per_process_memory_fraction
  int64_t total = int64_t(8) << 30;
  bool expandable = false, recording = false;

  Stat stats[KINDS][POOLS];
  int64_t retries = 0, ooms = 0, device_allocs = 0, device_frees = 0, waited = 0;
  std::vector<Event> events;

  Piece* take(int64_t bytes, int stream);  // null: out of memory
  void give(Piece* piece, Until until = {});
  void give_back();  // torch.cuda.empty_cache
  void reset_peaks();
  int64_t reserved() const { return stats[RESERVED_BYTES][ALL].current; }
  int64_t allocated() const { return stats[ALLOCATED_BYTES][ALL].current; }
  std::vector<const Piece*> pieces() const;

  // For a replay: a segment that was there before, cut up as `cuts` says: (address, size) of what was in use.
  std::vector<Piece*> adopt(int64_t base, int64_t size, bool small,
                            const std::vector<std::pair<int64_t, int64_t>>& cuts);
  bool drop_segment(int64_t address, int64_t size);

  static int64_t rounded(int64_t size);
  static int64_t segment_size(int64_t size);

 private:
  using Free = std::set<Piece*, ByFit>;
  Free& cached(bool small) { return free_[small ? 0 : 1]; }
  std::set<Piece*, ByAddress>& holes(bool small) { return holes_[small ? 0 : 1]; }
  void count(Kind kind, bool small, int64_t amount);
  void log(const char* action, int64_t address, int64_t size, int stream);
  void settle(bool wait);
  Piece* make(const Piece& like);
  void forget(Piece* piece);
  Piece* best_fit(int64_t size, int stream, bool small);
  Piece* new_segment(int64_t size, int stream, bool small);
  Piece* cut(Piece* piece, int64_t size, int64_t requested);
  void release(Piece* piece);
  int64_t merge(Piece* into, Piece* other);
  void drop(Piece* piece);
  // expandable.cpp
  Piece* grow(int64_t size, int stream, bool small);
  Piece* find_growable(int64_t size, int stream, bool small);
  bool map(Piece* hole, int64_t size);
  void unmap(Piece* piece);

  Free free_[2];
  std::set<Piece*, ByAddress> holes_[2];
  std::map<Piece*, std::unique_ptr<Piece>> all_;
  std::vector<std::pair<Piece*, Until>> deferred_;
  int64_t next_ = int64_t(1) << 45;
};

}  // namespace emu
