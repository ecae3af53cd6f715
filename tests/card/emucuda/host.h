// Page-locked host memory, and the copies between it and the card that the host has not waited for.
//
// A copy from the card leaves poison (0xFF: NaN) behind until the host has waited; what was copied is shown then. A
// copy to the card may read its source until then: if the bytes have changed meanwhile, that is reported.
#pragma once
#include <c10/core/Allocator.h>

#include "state.h"

namespace emu {

struct Pending {
  bool to_host;
  char* host;
  size_t size;
  int agent;
  uint64_t when;
  std::vector<char> bytes;  // to be shown
  uint64_t hash;            // of the source
  bool closed = false;

  bool overlaps(const char* at, size_t length) const { return !closed && host < at + length && at < host + size; }
};

struct Span {
  char* at;
  size_t size;
  bool locked;
};

extern std::vector<Pending> pending;
c10::Allocator* pinned_allocator();

bool is_locked(const void* at, size_t size = 1);
void lock_host(char* at, size_t size);
void unlock_host(char* at, bool deferred);
uint64_t hash_of(const char* data, size_t size);

// The host has waited for all that `clock` covers.
void host_joins(const Clock& clock);
void host_waits_for(int agent);
void host_waits_for_card(int card);

}  // namespace emu
