// A trace of a real card's allocator (data/traces) through `Segments`: the same reserved peak, the same number of
// segments?
#include "segments.h"

#include <deque>

namespace emu {

using Rows = std::vector<std::pair<int64_t, int64_t>>;

static Rows pairs(at::IntArrayRef flat) {
  Rows rows;
  for (size_t i = 0; i + 1 < flat.size(); i += 2) rows.emplace_back(flat[i], flat[i + 1]);
  return rows;
}

// What was there before the first event. Of a 2 MiB segment with small pieces only, the pool is the small one.
static void adopt_all(Segments& segments, const Rows& ranges, const Rows& live, std::map<int64_t, Piece*>& pieces) {
  for (auto& [base, size] : ranges) {
    const int64_t end = base + size;
    Rows cuts;
    for (auto it = std::lower_bound(live.begin(), live.end(), std::make_pair(base, int64_t(0)));
         it != live.end() && it->first < end; ++it)
      cuts.push_back(*it);
    const bool small =
        size == 2 * MIB && std::all_of(cuts.begin(), cuts.end(), [](auto& cut) { return cut.second <= MIB; });
    for (Piece* piece : segments.adopt(base, size, small, cuts)) pieces[piece->address] = piece;
  }
}

// Events are triples: kind ('a' alloc, 'f' free, 's' new segment, 'r' segment given back), address, bytes.
// Returns reserved peak, new segments, reserved at the end; bytes beyond `limit` are refused (0: no limit).
std::vector<int64_t> replay(at::IntArrayRef ranges, at::IntArrayRef live, at::IntArrayRef events, int64_t limit) {
  Segments segments;
  if (limit) segments.cap = limit;
  std::map<int64_t, Piece*> old, made;
  adopt_all(segments, pairs(ranges), pairs(live), old);
  std::deque<std::pair<int64_t, int64_t>> chosen;  // where the card put its segments: ties are broken by address
  for (size_t i = 0; i + 2 < events.size(); i += 3)
    if (events[i] == 's') chosen.emplace_back(events[i + 1], events[i + 2]);
  int64_t beyond = int64_t(1) << 60, count = 0;
  segments.place = [&](int64_t size) {
    count++;
    if (chosen.empty() || chosen.front().second != size) return beyond += int64_t(1) << 40;
    const int64_t address = chosen.front().first;
    chosen.pop_front();
    return address;
  };
  for (size_t i = 0; i + 2 < events.size(); i += 3) {
    const int64_t kind = events[i], address = events[i + 1], size = events[i + 2];
    if (kind == 'a') {
      Piece* piece = segments.take(size, 0);
      TORCH_CHECK_WITH(OutOfMemoryError, piece, "replay: out of memory at event ", i / 3);
      made[address] = piece;
    } else if (kind == 'f') {
      auto& here = made.count(address) ? made : old;
      segments.give(here.at(address));
      here.erase(address);
    } else if (kind == 'r') {
      TORCH_CHECK(segments.drop_segment(address, size), "replay: the segment given back at event ", i / 3,
                  " is not cached");
    }
  }
  return {segments.stats[Segments::RESERVED_BYTES][Segments::ALL].peak, count, segments.reserved()};
}

}  // namespace emu
