#include "memory.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <sys/mman.h>

#include <cstring>

namespace emu {

CardAllocator allocator;
thread_local std::string doing = "?";  // the operator at work, for messages

static std::map<char*, Block> blocks;
static uint64_t block_count = 0;
static int64_t fails_after = 0;

// -- what a card has

static bool host_has_seen(const Until& until) {
  for (auto& [agent, when] : until)
    if (clocks[HOST][agent] < when) return false;
  return true;
}

static std::vector<Segments> make_cards() {
  std::vector<Segments> made(options.cards);
  for (int card = 0; card < options.cards; card++) {
    made[card].total = options.total;
    made[card].expandable = options.expandable;
    made[card].room = [card] { return free_bytes(card); };
    made[card].done = [](const Until& until) { return !options.lags || host_has_seen(until); };
  }
  return made;
}

Segments& segments_of(int card) {
  static std::vector<Segments> cards = make_cards();
  return cards.at(card);
}

OneCardsAllocator& allocator_of(int card) {
  static std::array<OneCardsAllocator, MAX_CARDS> made = [] {
    std::array<OneCardsAllocator, MAX_CARDS> all;
    for (int i = 0; i < MAX_CARDS; i++) all[i].card = i;
    return all;
  }();
  return made[card];
}

// What the driver has left: other processes' memory and this one's context lie outside the allocator.
int64_t free_bytes(int card) {
  return options.total - options.others - (has_context(card) ? options.context : 0) - segments_of(card).reserved();
}

// -- coming

static std::string gib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, bytes >= int64_t(1) << 30 ? "%.2f GiB" : "%.2f MiB",
                bytes / (bytes >= int64_t(1) << 30 ? 1073741824.0 : 1048576.0));
  return text;
}

[[noreturn]] static void out_of_memory(int card, size_t bytes, bool injected) {
  const Segments& segments = segments_of(card);
  counts["ooms"]++;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", gib(bytes), ". GPU ", card,
                   " has a total capacity of ", gib(options.total), " of which ", gib(free_bytes(card)), " is free. ",
                   segments.cap == INT64_MAX ? "" : gib(segments.cap) + " allowed; ", "Of the allocated memory ",
                   gib(segments.allocated()), " is allocated by PyTorch, and ",
                   gib(segments.reserved() - segments.allocated()), " is reserved by PyTorch but unallocated.",
                   injected ? " (injected)" : "", " (emucuda: in ", doing, ")");
}

static bool fails_now(size_t bytes) {
  if ((int64_t)bytes < options.oom_min) return false;
  counts["allocations"]++;
  if (fails_after == 0 || --fails_after != 0) return false;
  counts["injected"]++;
  return true;
}

// Fresh memory is NaN (0xFF), and nobody may look at it outside of kernels.
static char* map_bytes(size_t bytes, size_t mapped) {
  char* base = (char*)mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(base != MAP_FAILED, "emucuda: the host has no memory left");
  std::memset(base, 0xFF, bytes);
  if (options.protects) mprotect(base, mapped, PROT_NONE);
  return base;
}

static void let_go(void* at);

c10::DataPtr CardAllocator::allocate_on(int card, size_t bytes) {
  Lock guard(big_lock);
  const c10::Device device(c10::DeviceType::CUDA, c10::DeviceIndex(card));
  if (bytes == 0) return {nullptr, nullptr, &let_go, device};
  use_card(card, "an allocation");
  const int agent = current_agent(card);
  if (fails_now(bytes)) out_of_memory(card, bytes, true);
  Piece* piece = segments_of(card).take(bytes, current_stream[card]);
  if (!piece) out_of_memory(card, bytes, false);
  const size_t mapped = (bytes + 4095) / 4096 * 4096;
  char* base = map_bytes(bytes, mapped);
  Block block{
      .id = ++block_count, .base = base, .size = bytes, .mapped = mapped, .card = card, .agent = agent, .piece = piece};
  // Memory comes from its stream's pool: earlier tenants' kernels there may still run. As a write of that stream.
  join(clocks[agent], clocks[HOST]);
  block.writer = agent;
  block.write = {++clocks[agent][agent], "an earlier tenant of the memory (allocated in " + doing + ")"};
  blocks.emplace(base, std::move(block));
  return {base, base, &let_go, device};
}

// -- going

static void check_unused(const Block& block) {
  Clock seen = clocks[block.agent];
  join(seen, clocks[HOST]);
  auto check = [&](int agent, const Access& access) {
    if (agent != block.agent && !block.recorded.count(agent) && seen[agent] < access.when)
      report("freed-in-use", c10::str("block ", block.id, " (", block.size, " bytes, of the ", name_of(block.agent),
                                      ") was freed while ", access.what, " on the ", name_of(agent),
                                      " may still use it: no record_stream and no wait before"));
  };
  if (block.writer >= 0) check(block.writer, block.write);
  for (auto& [agent, access] : block.reads) check(agent, access);
}

static void let_go(void* at) {
  Lock guard(big_lock);
  auto found = blocks.find((char*)at);
  if (found == blocks.end()) return;
  Block& block = found->second;
  check_unused(block);
  Until until;  // PyTorch records an event on each stream that record_stream named
  for (int agent : block.recorded)
    if (agent != block.agent) until.emplace_back(agent, clocks[agent][agent]);
  segments_of(block.card).give(block.piece, std::move(until));
  munmap(block.base, block.mapped);
  blocks.erase(found);
}

c10::DeleterFnPtr CardAllocator::raw_deleter() const { return &let_go; }
void CardAllocator::copy_data(void* to, const void* from, std::size_t bytes) const { std::memmove(to, from, bytes); }
c10::DataPtr OneCardsAllocator::allocate(size_t bytes) { return allocator.allocate_on(card, bytes); }
c10::DeleterFnPtr OneCardsAllocator::raw_deleter() const { return &let_go; }
void OneCardsAllocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  std::memmove(to, from, bytes);
}

// -- looking at it

Block* block_of(const void* at) {
  auto found = blocks.upper_bound((char*)at);
  if (found == blocks.begin()) return nullptr;
  --found;
  return (char*)at < found->first + found->second.mapped ? &found->second : nullptr;
}

void open_block(Block* block, bool on) {
  if (!block || !options.protects) return;
  if (on ? block->open++ == 0 : --block->open == 0)
    mprotect(block->base, block->mapped, on ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void record_stream(const void* at, int agent) {
  Lock guard(big_lock);
  if (Block* block = block_of(at)) block->recorded.insert(agent);
}

void count_allocations_down(int64_t n) { fails_after = n; }

std::vector<std::string> live_blocks() {
  std::vector<std::string> out;
  for (auto& [at, block] : blocks) out.push_back(c10::str(block.id, " ", block.size, " ", block.write.what));
  return out;
}

}  // namespace emu
