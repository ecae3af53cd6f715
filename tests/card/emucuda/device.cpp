// What a CPU-only libtorch leaves empty for CUDA: device guard (cards, streams, events), hooks, and the allocator's
// place.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "host.h"
#include "launch.h"

namespace emu {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct Mark {  // an event
  Clock clock{};
};

static Device device(int card) { return Device(DeviceType::CUDA, DeviceIndex(card)); }
static Stream stream(int card, int id) { return Stream(Stream::UNSAFE, device(card), id); }
static int agent_of(const Stream& s) { return agent_of(s.device_index(), int(s.id())); }
static int card_or_current(Device d) { return d.has_index() ? d.index() : current_card; }

void set_card(int card) {
  TORCH_CHECK(card >= 0 && card < options.cards, "CUDA error: invalid device ordinal (", card, " of ", options.cards,
              ")");
  current_card = card;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(options.cards); }

  Device getDevice() const override { return device(current_card); }
  void setDevice(Device d) const override { set_card(card_or_current(d)); }
  void uncheckedSetDevice(Device d) const noexcept override { current_card = card_or_current(d); }
  Device exchangeDevice(Device d) const override {
    const int before = current_card;
    set_card(card_or_current(d));
    return device(before);
  }

  Stream getStream(Device d) const override { return stream(card_or_current(d), current_stream[card_or_current(d)]); }
  Stream getDefaultStream(Device d) const override { return stream(card_or_current(d), 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return next(card_or_current(d)); }
  Stream getNewStream(Device d, int) const override { return next(card_or_current(d)); }
  static Stream next(int card) {
    static std::array<int, MAX_CARDS> last{};
    Lock guard(big_lock);
    use_card(card, "a stream");
    counts["streams"]++;
    last[card] = last[card] % (STREAMS - 1) + 1;
    return stream(card, last[card]);
  }
  Stream exchangeStream(Stream s) const override {
    int& current = current_stream[s.device_index()];
    const int before = current;
    current = int(s.id());
    return stream(s.device_index(), before);
  }
  bool queryStream(const Stream& s) const override { return synchronizeStream(s), true; }
  void synchronizeStream(const Stream& s) const override { host_waits_for(agent_of(s)); }
  void synchronizeDevice(const DeviceIndex card) const override { host_waits_for_card(card < 0 ? current_card : card); }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (Mark*)event; }
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    Lock guard(big_lock);
    if (!*event) *event = new Mark;
    Clock& own = clocks[agent_of(s)];
    join(own, clocks[HOST]);
    ((Mark*)*event)->clock = own;
    counts["events"]++;
  }
  void block(void* event, const Stream& s) const override {
    Lock guard(big_lock);
    if (event) join(clocks[agent_of(s)], ((Mark*)event)->clock);
  }
  bool queryEvent(void* event) const override { return synchronizeEvent(event), true; }
  void synchronizeEvent(void* event) const override {
    Lock guard(big_lock);
    if (event) host_joins(((Mark*)event)->clock);
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }  // ms: there is no time here

  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    record_stream(data.get(), agent_of(s));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex card) const override { return has_context(card); }
  DeviceIndex deviceCount() const override { return DeviceIndex(options.cards); }
  int getNumGPUs() const override { return options.cards; }
  DeviceIndex current_device() const override { return DeviceIndex(current_card); }
  void setCurrentDevice(DeviceIndex card) const override { set_card(card); }
  DeviceIndex getCurrentDevice() const override { return DeviceIndex(current_card); }
  DeviceIndex exchangeDevice(DeviceIndex card) const override { return maybeExchangeDevice(card); }
  DeviceIndex maybeExchangeDevice(DeviceIndex card) const override {
    const int before = current_card;
    if (card >= 0) set_card(card);
    return DeviceIndex(before);
  }
  bool isPinnedPtr(const void* at) const override {
    Lock guard(big_lock);
    return is_locked(at);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  Device getDeviceFromPtr(void* at) const override {
    Lock guard(big_lock);
    Block* block = block_of(at);
    return device(block ? block->card : current_card);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex card) const override {
    return generator_of(card < 0 ? current_card : card);
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  void deviceSynchronize(DeviceIndex card) const override { host_waits_for_card(card); }
};

static const int placed = (c10::SetAllocator(DeviceType::CUDA, &allocator), 0);

}  // namespace emu

namespace at {
using EmuHooks = emu::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, EmuHooks)
}  // namespace at
