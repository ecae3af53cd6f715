// The card's memory: PyTorch's caching allocator above (segments.h), and for each tensor bytes of its own below.
//
// A tensor's bytes are an mmap of their own, so that a look at freed memory, or at the card's from the host, is a
// SIGSEGV: outside of kernels the pages are locked away. data_ptr() is that mmap's; the allocator's addresses are
// numbers only.
#pragma once
#include <c10/core/Allocator.h>

#include <set>

#include "segments.h"
#include "state.h"

namespace emu {

struct Access {
  uint64_t when = 0;
  std::string what;
};

struct Block {
  uint64_t id;
  char* base;
  size_t size, mapped;
  int card, agent;  // the stream it was allocated on
  Piece* piece;
  int open = 0;
  std::set<int> recorded;  // agents, by record_stream
  int writer = -1;
  Access write;
  std::map<int, Access> reads;
};

struct CardAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_card, bytes); }
  c10::DataPtr allocate_on(int card, size_t bytes);
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;
};

// As c10::Allocator wants it: allocates on one card, whatever the thread's is.
struct OneCardsAllocator final : c10::Allocator {
  int card = 0;
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;
};

extern CardAllocator allocator;
OneCardsAllocator& allocator_of(int card);
Segments& segments_of(int card);

Block* block_of(const void* at);
void open_block(Block* block, bool on);
void record_stream(const void* at, int agent);
void count_allocations_down(int64_t n);
int64_t free_bytes(int card);
std::vector<std::string> live_blocks();

}  // namespace emu
