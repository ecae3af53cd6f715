#include "host.h"

#include <c10/util/StringUtil.h>

#include <cstdlib>
#include <cstring>

namespace emu {

std::vector<Pending> pending;
static std::map<char*, size_t> locked_ranges;

uint64_t hash_of(const char* data, size_t size) {
  uint64_t hash = 1469598103934665603ull, word;
  size_t i = 0;
  for (; i + 8 <= size; i += 8) {
    std::memcpy(&word, data + i, 8);
    hash = (hash ^ word) * 1099511628211ull;
    hash ^= hash >> 29;
  }
  for (; i < size; i++) hash = (hash ^ (unsigned char)data[i]) * 1099511628211ull;
  return hash;
}

// -- waiting

static void show(Pending& copy) {
  for (size_t i = 0; i < copy.size; i++)
    if ((unsigned char)copy.host[i] != 0xFF) {
      report("host-wrote-in-flight", "host memory was written while a copy from the card into it was under way");
      break;
    }
  std::memcpy(copy.host, copy.bytes.data(), copy.size);
  copy.closed = true;
}

static void check_source(Pending& copy) {
  if (hash_of(copy.host, copy.size) != copy.hash)
    report("host-source-changed", "host memory changed while a copy from it to the card was under way");
  copy.closed = true;
}

void host_joins(const Clock& clock) {
  counts["host_syncs"]++;
  join(clocks[HOST], clock);
  for (bool to_host : {true, false})
    for (auto& copy : pending)
      if (copy.to_host == to_host && !copy.closed && clocks[HOST][copy.agent] >= copy.when)
        to_host ? show(copy) : check_source(copy);
  std::erase_if(pending, [](const Pending& copy) { return copy.closed; });
}

void host_waits_for(int agent) {
  Lock guard(big_lock);
  host_joins(clocks[agent]);
}

void host_waits_for_card(int card) {
  Lock guard(big_lock);
  for (int stream = 0; stream < STREAMS; stream++) host_joins(clocks[agent_of(card, stream)]);
}

// -- page-locking

bool is_locked(const void* at, size_t size) {
  auto found = locked_ranges.upper_bound((char*)at);
  if (found == locked_ranges.begin()) return false;
  --found;
  return (char*)at >= found->first && (char*)at + size <= found->first + found->second;
}

void lock_host(char* at, size_t size) {
  Lock guard(big_lock);
  locked_ranges[at] = size;
  counts["locked"] += size;
  counts["locks"]++;
  counts["peak_locked"] = std::max(counts["peak_locked"], counts["locked"]);
}

// `deferred`: by an allocator that waits for the copies itself, as torch's does.
void unlock_host(char* at, bool deferred) {
  Lock guard(big_lock);
  auto found = locked_ranges.find(at);
  if (found == locked_ranges.end()) return;
  for (auto& copy : pending)
    if (copy.overlaps(found->first, found->second)) {
      if (!deferred)
        report(copy.to_host ? "unlocked-in-flight" : "unlocked-source",
               c10::str("page-locked memory (", found->second, " bytes) was unregistered while a copy ",
                        copy.to_host ? "into" : "from", " it was under way"));
      copy.closed = true;
    }
  counts["locked"] -= found->second;
  locked_ranges.erase(found);
}

static void free_pinned(void* at) {
  unlock_host((char*)at, true);
  std::free(at);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    if (bytes) {
      use_card(current_card, "page-locking");
      lock_host((char*)at, bytes);
      counts["torch_pinned"] += bytes;
    }
    return {at, at, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

c10::Allocator* pinned_allocator() {
  static PinnedAllocator made;
  return &made;
}

}  // namespace emu
