// The allocator's expandable segments: one range of addresses per pool and stream, mapped from its beginning as needed.
#include "segments.h"

#include <algorithm>

namespace emu {

Piece* Segments::grow(int64_t size, int stream, bool small) {
  Piece* piece = find_growable(size, stream, small);
  if (!piece->mapped && !map(piece, std::min(piece->size, size))) return nullptr;
  while (piece->size < size) {
    Piece* next = piece->after;
    if (!map(next, std::min(size - piece->size, next->size))) return nullptr;
    piece = next;
  }
  cached(small).erase(piece);
  return piece;
}

Piece* Segments::find_growable(int64_t size, int stream, bool small) {
  for (Piece* hole : holes(small)) {
    if (hole->stream != stream) continue;
    Piece* start = hole->before && hole->before->usable() ? hole->before : hole;
    int64_t reach = 0;
    for (Piece* p = start; reach < size && p && p->usable(); p = p->after) reach += p->size;
    if (reach >= size) return start;
  }
  const int64_t space = up(total + total / 8, small ? SMALL_BUFFER : LARGE_BUFFER);
  Piece* made = make({.address = next_,
                      .size = space,
                      .stream = stream,
                      .small = small,
                      .base = next_,
                      .expandable = true,
                      .mapped = false});
  next_ += space;
  holes(small).insert(made);
  return made;
}

bool Segments::map(Piece* hole, int64_t size) {
  const int64_t unit = hole->small ? SMALL_BUFFER : LARGE_BUFFER, mapped = up(size, unit);
  if (mapped > room()) return false;
  holes(hole->small).erase(hole);
  hole->mapped = true;
  if (mapped < hole->size) {
    Piece* rest = make(*hole);
    rest->address += mapped;
    rest->size -= mapped;
    rest->mapped = false;
    rest->before = hole;
    if (hole->after) hole->after->before = rest;
    hole->after = rest;
    hole->size = mapped;
    holes(hole->small).insert(rest);
  }
  count(RESERVED_BYTES, hole->small, mapped);
  device_allocs++;
  log("segment_map", hole->address, mapped, hole->stream);
  merge(hole, hole->before);
  merge(hole, hole->after);
  cached(hole->small).insert(hole);
  return true;
}

// Only whole units can be taken away; what sticks out on either side stays cached.
void Segments::unmap(Piece* piece) {
  const int64_t unit = piece->small ? SMALL_BUFFER : LARGE_BUFFER, base = piece->base,
                end = piece->address + piece->size;
  const int64_t first = base + up(piece->address - base, unit), last = base + (end - base) / unit * unit;
  if (first >= last) return;
  cached(piece->small).erase(piece);
  auto leave = [&](int64_t address, int64_t size, bool before) {
    if (size == 0) return;
    Piece* left = make(*piece);
    left->address = address;
    left->size = size;
    (before ? left->after : left->before) = piece;
    Piece*& near = before ? piece->before : piece->after;
    if (near) (before ? near->after : near->before) = left;
    near = left;
    cached(piece->small).insert(left);
  };
  leave(piece->address, first - piece->address, true);
  leave(last, end - last, false);
  piece->address = first;
  piece->size = last - first;
  piece->mapped = false;
  count(RESERVED_BYTES, piece->small, -piece->size);
  device_frees++;
  log("segment_unmap", piece->address, piece->size, piece->stream);
  merge(piece, piece->before);
  merge(piece, piece->after);
  holes(piece->small).insert(piece);
}

}  // namespace emu
