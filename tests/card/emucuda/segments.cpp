#include "segments.h"

#include <algorithm>

namespace emu {

constexpr int64_t BLOCK = 512, SMALL_LIMIT = MIB, MIN_LARGE = 10 * MIB, ROUND_LARGE = 2 * MIB;

void Stat::add(int64_t amount) {
  current += amount;
  peak = std::max(peak, current);
  (amount > 0 ? gained : lost) += std::abs(amount);
}

int64_t Segments::rounded(int64_t size) { return std::max(BLOCK, up(size, BLOCK)); }

int64_t Segments::segment_size(int64_t size) {
  return size <= SMALL_LIMIT ? SMALL_BUFFER : size < MIN_LARGE ? LARGE_BUFFER : up(size, ROUND_LARGE);
}

void Segments::count(Kind kind, bool small, int64_t amount) {
  if (amount == 0) return;
  stats[kind][ALL].add(amount);
  stats[kind][small ? SMALL : LARGE].add(amount);
}

void Segments::log(const char* action, int64_t address, int64_t size, int stream) {
  if (recording) events.push_back({action, address, size, stream});
}

Piece* Segments::make(const Piece& like) {
  auto made = std::make_unique<Piece>(like);
  Piece* piece = made.get();
  all_[piece] = std::move(made);
  return piece;
}

void Segments::forget(Piece* piece) { all_.erase(piece); }

// -- a request

Piece* Segments::take(int64_t bytes, int stream) {
  settle(false);
  const int64_t size = rounded(bytes);
  const bool small = size <= SMALL_LIMIT;
  Piece* piece = best_fit(size, stream, small);
  if (!piece) piece = new_segment(size, stream, small);
  if (!piece) {
    retries++;
    settle(true);
    give_back();
    piece = new_segment(size, stream, small);
  }
  if (!piece) {
    ooms++;
    log("oom", 0, size, stream);
    return nullptr;
  }
  piece = cut(piece, size, bytes);
  log("alloc", piece->address, bytes, stream);
  return piece;
}

Piece* Segments::best_fit(int64_t size, int stream, bool small) {
  Free& pool = cached(small);
  Piece key{.address = 0, .size = size, .stream = stream};
  auto found = pool.lower_bound(&key);
  if (found == pool.end() || (*found)->stream != stream) return nullptr;
  if (expandable) {  // a piece that can grow counts as large as it can become: better keep it
    auto reach = [](const Piece* p) { return p->size + (p->after && !p->after->mapped ? p->after->size : 0); };
    for (auto next = std::next(found); next != pool.end() && (*next)->stream == stream && reach(*next) < reach(*found);
         ++next)
      found = next;
  }
  Piece* piece = *found;
  pool.erase(found);
  return piece;
}

Piece* Segments::new_segment(int64_t size, int stream, bool small) {
  const int64_t segment = segment_size(size);
  if (reserved() + segment > cap) return nullptr;
  if (expandable) return grow(size, stream, small);
  if (segment > room()) return nullptr;
  int64_t address = place ? place(segment) : next_;
  next_ += up(segment, SMALL_BUFFER);
  count(SEGMENT, small, 1);
  count(RESERVED_BYTES, small, segment);
  device_allocs++;
  log("segment_alloc", address, segment, stream);
  return make({.address = address, .size = segment, .stream = stream, .small = small, .base = address});
}

// Splits off what is left, if it is worth keeping; the piece's beginning is handed out.
Piece* Segments::cut(Piece* piece, int64_t size, int64_t requested) {
  const bool was_split = piece->split();
  const int64_t rest = piece->size - size;
  const bool splits = piece->small || expandable ? rest >= BLOCK : rest > SMALL_LIMIT;
  if (!piece->expandable && was_split) {
    count(INACTIVE_SPLIT_BYTES, piece->small, splits ? -size : -piece->size);
    count(INACTIVE_SPLIT, piece->small, splits ? 0 : -1);
  } else if (!piece->expandable && splits) {
    count(INACTIVE_SPLIT_BYTES, piece->small, rest);
    count(INACTIVE_SPLIT, piece->small, 1);
  }
  if (splits) {
    Piece* other = make(*piece);
    other->address += size;
    other->size = rest;
    other->before = piece;
    if (piece->after) piece->after->before = other;
    piece->after = other;
    piece->size = size;
    cached(piece->small).insert(other);
  }
  piece->taken = true;
  piece->requested = requested;
  count(ALLOCATION, piece->small, 1);
  count(ALLOCATED_BYTES, piece->small, piece->size);
  count(ACTIVE, piece->small, 1);
  count(ACTIVE_BYTES, piece->small, piece->size);
  count(REQUESTED_BYTES, piece->small, requested);
  return piece;
}

// -- coming back

void Segments::give(Piece* piece, Until until) {
  piece->taken = false;
  count(ALLOCATION, piece->small, -1);
  count(ALLOCATED_BYTES, piece->small, -piece->size);
  log("free_requested", piece->address, piece->requested, piece->stream);
  if (until.empty()) {
    release(piece);
    return;
  }
  piece->deferred = true;
  deferred_.emplace_back(piece, std::move(until));
}

// Pieces that other streams used come back once these are done; when memory is short, PyTorch waits for them.
void Segments::settle(bool wait) {
  auto waiting = std::move(deferred_);
  deferred_.clear();
  for (auto& [piece, until] : waiting) {
    if (!wait && !done(until)) {
      deferred_.emplace_back(piece, std::move(until));
      continue;
    }
    waited += wait;
    piece->deferred = false;
    release(piece);
  }
}

void Segments::release(Piece* piece) {
  const int64_t size = piece->size;
  log("free_completed", piece->address, piece->requested, piece->stream);
  count(ACTIVE, piece->small, -1);
  count(ACTIVE_BYTES, piece->small, -size);
  count(REQUESTED_BYTES, piece->small, -piece->requested);
  piece->requested = 0;
  int64_t pieces = 0, bytes = 0;
  for (Piece* near : {piece->before, piece->after})
    if (int64_t gained = merge(piece, near)) pieces--, bytes -= gained;
  cached(piece->small).insert(piece);
  if (piece->expandable) return;
  if (piece->split()) pieces++, bytes += piece->size;
  count(INACTIVE_SPLIT, piece->small, pieces);
  count(INACTIVE_SPLIT_BYTES, piece->small, bytes);
}

// Returns the bytes gained: none where the neighbour is in use, or mapped where this is not.
int64_t Segments::merge(Piece* into, Piece* other) {
  if (!other || !other->usable() || into->mapped != other->mapped) return 0;
  if (other->mapped)
    cached(into->small).erase(other);
  else
    holes(into->small).erase(other);
  if (into->before == other) {
    into->address = other->address;
    into->before = other->before;
    if (into->before) into->before->after = into;
  } else {
    into->after = other->after;
    if (into->after) into->after->before = into;
  }
  const int64_t gained = other->size;
  into->size += gained;
  forget(other);
  return gained;
}

void Segments::give_back() {
  settle(true);
  for (bool small : {false, true}) {
    const std::vector<Piece*> waiting(cached(small).begin(), cached(small).end());
    for (Piece* piece : waiting) {
      if (piece->expandable)
        unmap(piece);
      else if (!piece->split())
        drop(piece);
    }
  }
}

void Segments::drop(Piece* piece) {
  cached(piece->small).erase(piece);
  count(SEGMENT, piece->small, -1);
  count(RESERVED_BYTES, piece->small, -piece->size);
  device_frees++;
  log("segment_free", piece->address, piece->size, piece->stream);
  forget(piece);
}

void Segments::reset_peaks() {
  for (auto& kind : stats)
    for (auto& stat : kind) stat.peak = stat.current;
}

// -- looking at it, and putting it into a state

std::vector<const Piece*> Segments::pieces() const {
  std::vector<const Piece*> out;
  for (auto& [piece, _] : all_) out.push_back(piece);
  std::sort(out.begin(), out.end(), [](auto a, auto b) { return a->address < b->address; });
  return out;
}

std::vector<Piece*> Segments::adopt(int64_t base, int64_t size, bool small,
                                    const std::vector<std::pair<int64_t, int64_t>>& cuts) {
  count(RESERVED_BYTES, small, size);
  std::vector<Piece*> in_use;
  Piece* last = nullptr;
  auto lay = [&](int64_t address, int64_t length, bool taken) {
    if (length <= 0) return;
    Piece* piece = make({.address = address,
                         .size = length,
                         .stream = 0,
                         .small = small,
                         .base = base,
                         .taken = taken,
                         .before = last});
    if (last) last->after = piece;
    last = piece;
    if (taken)
      in_use.push_back(piece), count(ALLOCATED_BYTES, small, length);
    else
      cached(small).insert(piece);
  };
  int64_t at = base;
  for (auto& [address, length] : cuts) {
    lay(at, address - at, false);
    lay(address, length, true);
    at = address + length;
  }
  lay(at, base + size - at, false);
  return in_use;
}

bool Segments::drop_segment(int64_t address, int64_t size) {
  for (bool small : {false, true})
    for (Piece* piece : cached(small))
      if (piece->address == address && piece->size == size) {
        drop(piece);
        return true;
      }
  return false;
}

}  // namespace emu
