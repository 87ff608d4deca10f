#include "fake_cuda/watching.h"

#include "fake_cuda/memory.h"
#include "fake_cuda/played_thread.h"
#include "fake_cuda/stream.h"

namespace epd::fake_cuda {
namespace {

std::atomic<Watcher*> the_watcher{nullptr};

}  // namespace

Watcher* watcher() {
  return the_watcher.load();
}

}  // namespace epd::fake_cuda

using namespace epd::fake_cuda;

void cuFakeWatch(Watcher* watcher) {
  the_watcher.store(watcher);
}

void cuFakeHoldings(Holdings* holdings) {
  *holdings = {};
  if (driver() == nullptr) return;
  memory().count(*holdings);
  count_allocations(*holdings);
  count_libraries(*holdings);
  driver()->contexts.visit([&](Context& context) {
    const std::lock_guard lock(context.mutex);
    holdings->streams += context.streams.size();
  });
  const std::lock_guard lock(driver()->mutex);
  for (const Primary& primary : driver()->primaries) holdings->retained += primary.retained;
  holdings->faults = driver()->faults.load();
}

void cuFakeHold(CUstream stream, bool held) {
  if (const auto found = find_stream(stream); found != nullptr) found->hold(held);
}

void cuFakeSettle() {
  if (driver() != nullptr) settle_streams();
}

std::size_t cuFakePending(CUstream stream) {
  const auto found = find_stream(stream);
  return found == nullptr ? 0 : found->pending();
}

void cuFakePassTime(std::uint64_t nanoseconds) {
  pass_time(nanoseconds);
}
