#include "rank_device.h"

#include "bench/kernel_arguments.h"
#include "kit/error.h"
#include "kit/session.h"

#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <limits>
#include <thread>

namespace epd::bench {

// ---- rank device

namespace {

constexpr std::size_t kMinEvictBytes = std::size_t{8} << 20;

std::size_t evict_bytes() {
  const long l2 = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
  return std::max(kMinEvictBytes, 2 * static_cast<std::size_t>(std::max(l2, 0L)));
}

// Values from cuda.h.
constexpr int kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDefault = 0;
constexpr int kCaptureGlobal = 0;
constexpr unsigned kRecordExternal = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr int kL2CacheSize = 38;
constexpr int kMpsEnabled = 133;
constexpr unsigned kPortableMapped = 3;

constexpr double kPatienceUs = 60e6;
constexpr double kSpinUs = 2000;

GpuAddress address(const void* pointer) {
  return static_cast<GpuAddress>(reinterpret_cast<std::uintptr_t>(pointer));
}

}  // namespace

HostRank::HostRank(bool flushes) : evict_(flushes ? evict_bytes() : 0, 1) {}

void HostRank::put(void* region, const void* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(region, from, bytes);
}

void HostRank::get(void* to, const void* region, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, region, bytes);
}

void HostRank::fill(void* region, int byte, std::size_t bytes) {
  if (bytes != 0) std::memset(region, byte, bytes);
}

void HostRank::flush_cache() {
  constexpr std::size_t kLine = 64;
  volatile char* bytes = evict_.data();
  for (std::size_t i = 0; i < evict_.size(); i += kLine) bytes[i] = static_cast<char>(bytes[i] + 1);
}

GpuRank::GpuRank(std::uint32_t ordinal, bool flushes) : driver_(gpu_driver()) {
  driver_.require(driver_.device(&device_, static_cast<int>(ordinal)), "cuDeviceGet");
  driver_.require(driver_.retain_primary(&context_, device_), "cuDevicePrimaryCtxRetain");
  use();
  driver_.require(driver_.create_stream(&stream_, kStreamNonBlocking), "cuStreamCreate");
  for (void** const event : {&begin_, &end_, &inner_begin_, &inner_end_})
    driver_.require(driver_.create_event(event, kEventDefault), "cuEventCreate");
  driver_.require(driver_.create_event(&settled_, kEventDisableTiming), "cuEventCreate");
  if (!flushes) return;
  fill_bytes_ = 2 * static_cast<std::size_t>(attribute(kL2CacheSize));
  driver_.require(driver_.allocate(&fills_, fill_bytes_), "cuMemAlloc for flushing the L2 cache");
}

GpuRank::~GpuRank() {
  for (void* const graph : graphs_) driver_.destroy_executable(graph);
  if (fills_ != 0) driver_.free(fills_);
  for (void* const event : {begin_, end_, inner_begin_, inner_end_, settled_}) {
    if (event != nullptr) driver_.destroy_event(event);
  }
  if (stream_ != nullptr) driver_.destroy_stream(stream_);
  if (context_ != nullptr) driver_.release_primary(device_);
}

void GpuRank::use() const {
  driver_.require(driver_.set_current(context_), "cuCtxSetCurrent");
}

void GpuRank::put(void* region, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  driver_.require(driver_.put(address(region), from, bytes, stream_), "cuMemcpyHtoDAsync");
  settle();  // then `from` has been read
}

void GpuRank::get(void* to, const void* region, std::size_t bytes) {
  if (bytes != 0) driver_.require(driver_.get(to, address(region), bytes, stream_), "cuMemcpyDtoHAsync");
}

void GpuRank::fill(void* region, int byte, std::size_t bytes) {
  if (bytes == 0) return;
  driver_.require(driver_.fill(address(region), static_cast<unsigned char>(byte), bytes, stream_),
                  "cuMemsetD8Async");
}

void* GpuRank::capture(const std::function<void()>& enqueue) {
  driver_.require(driver_.begin_capture(stream_, kCaptureGlobal), "cuStreamBeginCapture");
  capturing_ = true;
  enqueue();
  capturing_ = false;
  void* graph = nullptr;
  driver_.require(driver_.end_capture(stream_, &graph), "cuStreamEndCapture");
  void* executable = nullptr;
  driver_.require(driver_.instantiate(&executable, graph, 0), "cuGraphInstantiate");
  graphs_.push_back(executable);
  driver_.require(driver_.destroy_graph(graph), "cuGraphDestroy");
  return executable;
}

void GpuRank::launch(void* graph) {
  driver_.require(driver_.launch_graph(graph, stream_), "cuGraphLaunch");
}

void GpuRank::flush_cache() {
  if (fills_ == 0) return;
  driver_.require(driver_.fill(fills_, ++fill_value_, fill_bytes_, stream_), "cuMemsetD8Async");
}

void GpuRank::settle() {
  record(settled_);
  wait_for(settled_);
}

// In a graph it becomes a part of it, and each launch records it.
void GpuRank::record(void* event) {
  driver_.require(capturing_ ? driver_.record_event_as(event, stream_, kRecordExternal)
                             : driver_.record_event(event, stream_),
                  "cuEventRecord");
}

void GpuRank::record_begin() {
  record(begin_);
}

void GpuRank::record_end() {
  record(end_);
}

double GpuRank::elapsed_us() {
  return between(begin_, end_);
}

void GpuRank::record_inner_begin() {
  record(inner_begin_);
}

void GpuRank::record_inner_end() {
  record(inner_end_);
}

double GpuRank::inner_us() {
  return between(inner_begin_, inner_end_);
}

double GpuRank::between(void* begin, void* end) const {
  wait_for(end);
  float milliseconds = 0;
  driver_.require(driver_.elapsed(&milliseconds, begin, end), "cuEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e3;
}

// Polls instead of blocking, so that the wait has a limit.
void GpuRank::wait_for(void* event) const {
  const double begin = kit::now_us();
  for (;;) {
    const int result = driver_.query_event(event);
    if (result == 0) return;
    if (result != kNotReady) driver_.require(result, "waiting for the stream");
    const double waited = kit::now_us() - begin;
    if (waited > kPatienceUs) kit::fail("the stream of this rank has not come to an end within a minute");
    if (waited > kSpinUs) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

int GpuRank::attribute(int which) const {
  int value = 0;
  driver_.require(driver_.attribute(&value, which, device_), "cuDeviceGetAttribute");
  return value;
}

std::string GpuRank::name() const {
  char text[128] = "";
  driver_.require(driver_.device_name(text, sizeof(text) - 1, device_), "cuDeviceGetName");
  return text;
}

bool GpuRank::mps() const {
  return attribute(kMpsEnabled) != 0;
}

// ---- start barrier

BarrierWords::BarrierWords(std::uint32_t ranks) : ranks_(ranks), words_(std::size_t{1 + ranks} * kLine) {
  static_assert(gpu_test::kMaxBarrierDevices <= kLine);
}

StartBarrier::StartBarrier(const GpuRank& gpu, const BarrierWords& words, std::uint32_t rank)
    : gpu_(gpu),
      words_(words),
      rank_(rank),
      image_(gpu_driver()),
      kernel_(image_.kernel("start_barrier_kernel")) {
  const GpuDriver& driver = gpu_driver();
  driver.require(driver.register_host(words_.come(), words_.bytes(), kPortableMapped), "cuMemHostRegister");
}

// A rank that fails before it has opened the start barrier leaves its stream there. The stream has to go on,
// and the words must stay where it looks at them until the process ends. Ranks that end well end together.
StartBarrier::~StartBarrier() {
  constexpr std::uint64_t kAlways = std::numeric_limits<std::uint64_t>::max();
  const auto set = [](std::uint64_t* word) {
    std::atomic_ref(*word).store(kAlways, std::memory_order_release);
  };
  set(words_.opened(rank_));
  for (std::uint32_t rank = 0; rank < words_.ranks(); ++rank) set(words_.come() + rank);
  if (std::uncaught_exceptions() == 0) gpu_driver().unregister_host(words_.come());
}

void StartBarrier::enqueue() {
  gpu_test::BarrierLines lines{};
  lines.count = words_.ranks();
  for (std::uint32_t rank = 0; rank < words_.ranks(); ++rank) lines.at[rank] = words_.come();
  std::uint32_t rank = rank_;
  const std::uint64_t* opened = words_.opened(rank_);
  void* arguments[] = {&lines, &rank, &opened};
  image_.launch(kernel_, {.threads = gpu_test::kBarrierThreads}, gpu_.stream(), arguments);
}

void StartBarrier::open() {
  std::atomic_ref(*words_.opened(rank_)).store(++times_, std::memory_order_release);
}

}  // namespace epd::bench
