#include "host_device.h"

#include "base/log.h"
#include "common/memory.h"

#include <sys/mman.h>
#include <algorithm>
#include <exception>

namespace epd {
namespace {

// A chunk is small enough that the loop stays responsive, large enough that claiming is free.
constexpr std::uint64_t kChunkBytes = std::uint64_t{512} * 1024;
constexpr std::uint32_t kMaxHostSms = 256;

std::uint32_t grain_for(std::uint64_t bytes_per_item) {
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(kChunkBytes / std::max<std::uint64_t>(bytes_per_item, 1), 1, 1024));
}

// Tokens cut into chunks by what each of them moves: some may have all the rows, and most none.
class TokenChunks {
 public:
  // Bytes for each row of a token, and for each token.
  TokenChunks(const kernels::RoutingPlan& plan, std::uint64_t row_bytes, std::uint64_t token_bytes)
      : plan_(plan), row_bytes_(std::max<std::uint64_t>(row_bytes, kLeastBytes)), token_bytes_(token_bytes) {}

  std::uint32_t count() const {
    return static_cast<std::uint32_t>((before(plan_.num_tokens()) + kChunkBytes - 1) / kChunkBytes);
  }
  // The first token of a chunk; behind the last chunk, the number of tokens.
  std::uint32_t first(std::uint32_t chunk) const {
    if (chunk >= count()) return plan_.num_tokens();
    std::uint32_t low = 0;
    std::uint32_t high = plan_.num_tokens();
    while (low < high) {
      const std::uint32_t middle = low + (high - low) / 2;
      if (before(middle) < chunk * kChunkBytes) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

 private:
  static constexpr std::uint64_t kLeastBytes = 512;  // a short row takes the time of so many

  std::uint64_t before(std::uint32_t token) const {
    return plan_.begin[token] * row_bytes_ + token * token_bytes_;
  }

  const kernels::RoutingPlan& plan_;
  const std::uint64_t row_bytes_;
  const std::uint64_t token_bytes_;
};

}  // namespace

HostWork::HostWork(HostDevice& device, Body body, std::uint32_t items, std::uint32_t grain,
                   const Share& share)
    : device_(device),
      body_(std::move(body)),
      items_(items),
      grain_(grain),
      max_helpers_(share.sms == 0 ? kMaxHostSms : share.sms - 1),
      priority_(share.priority) {}

HostWork::~HostWork() {
  next_.store(items_, std::memory_order_relaxed);  // nothing more to claim
  device_.withdraw(this);
}

bool HostWork::run_chunk() {
  const std::uint64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
  if (begin >= items_) return false;
  const std::uint64_t end = std::min<std::uint64_t>(begin + grain_, items_);
  body_(static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end));
  finished_.fetch_add(end - begin, std::memory_order_acq_rel);
  return true;
}

WorkState HostWork::advance() {
  const bool ran = run_chunk();
  if (done()) return WorkState::kDone;
  return ran ? WorkState::kAdvanced : WorkState::kWaiting;
}

HostDevice::HostDevice(std::string name, std::function<void()> notify)
    : name_(std::move(name)),
      notify_(std::move(notify)),
      max_sms_(std::clamp(std::thread::hardware_concurrency() * 4, 4u, kMaxHostSms)) {}

HostDevice::~HostDevice() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void HostDevice::set_num_sms(std::uint32_t sms) {
  {
    const std::lock_guard lock(mutex_);
    num_sms_ = std::clamp(sms, 1u, max_sms_);
  }
  while (helpers_.size() + 1 < num_sms_) {
    const auto index = static_cast<std::uint32_t>(helpers_.size());
    try {
      helpers_.emplace_back([this, index] { helper_main(index); });
    } catch (const std::exception& error) {  // with fewer threads operations are slower, and as right
      log_event(LogLevel::kError, "no further SM", {{"sms", index + 1}, {"reason", error.what()}});
      break;
    }
  }
  wake_.notify_all();
}

namespace {

class HostArena final : public Arena {
 public:
  explicit HostArena(Mapping mapping) : Arena(mapping.bytes()), mapping_(std::move(mapping)) {}

  bool give_back(std::uint64_t bytes) override { return !mapping_.shrink_by(bytes); }

 private:
  Mapping mapping_;
};

}  // namespace

Result<std::unique_ptr<Arena>> HostDevice::map_arena(int fd, std::uint64_t bytes) {
  Result<Mapping> mapping = Mapping::map(fd, bytes, Access::kReadWrite);
  if (!mapping.ok()) return mapping.status();
  // Fewer page faults and TLB misses where the kernel offers huge pages for shared memory; elsewhere
  // the advice is refused, which is fine.
  ::madvise(mapping->data(), bytes, MADV_HUGEPAGE);
  return std::unique_ptr<Arena>(std::make_unique<HostArena>(std::move(mapping).value()));
}

// What could be wrong with it has been seen by the supervisor; but its client may have sealed it since.
Result<std::unique_ptr<Arena>> HostDevice::map_client_memory(int fd, std::uint64_t bytes, bool /*here*/) {
  Result<std::unique_ptr<Arena>> mapped = map_arena(fd, bytes);
  if (mapped.ok() || mapped.status().code() == StatusCode::kResourceExhausted) return mapped;
  return invalid_argument("can't be used: " + mapped.status().message() +
                          "; allowed: memory that may be mapped for reading and writing");
}

std::unique_ptr<Work> HostDevice::dispatch(const kernels::DispatchArgs& args, const Share& share) {
  constexpr std::uint64_t kTokenBytes = 128;  // of the plan, whether it sends anything or not
  const TokenChunks chunks(*args.plan, args.format.row_bytes, kTokenBytes);
  return launch(
      [args, chunks](std::uint32_t begin, std::uint32_t end) {
        kernels::dispatch_rows(args, chunks.first(begin), chunks.first(end));
      },
      chunks.count(), kChunkBytes, share);
}

std::unique_ptr<Work> HostDevice::fill(const kernels::FillArgs& args, const Share& share) {
  std::uint32_t rows = 0;
  for (const kernels::RowRange& range : args.ranges) rows += range.count;
  return launch([args](std::uint32_t begin, std::uint32_t end) { kernels::fill_rows(args, begin, end); },
                rows, args.zero ? args.format.row_bytes : 64, share);
}

std::unique_ptr<Work> HostDevice::combine(const kernels::CombineArgs& args, const Share& share) {
  const std::uint64_t row_bytes = std::uint64_t{args.hidden} * 2;
  const TokenChunks chunks(*args.plan, row_bytes, row_bytes);
  return launch(
      [args, chunks](std::uint32_t begin, std::uint32_t end) {
        kernels::combine_rows(args, chunks.first(begin), chunks.first(end));
      },
      chunks.count(), kChunkBytes, share);
}

std::unique_ptr<Work> HostDevice::launch(HostWork::Body body, std::uint32_t items, std::uint64_t bytes,
                                         const Share& share) {
  const std::uint32_t grain = grain_for(bytes);
  auto work = std::make_unique<HostWork>(*this, std::move(body), items, grain, share);
  // Work of a single chunk is done sooner by the loop than by waking anybody.
  if (num_sms_ > 1 && share.sms != 1 && items > grain) {
    {
      const std::lock_guard lock(mutex_);
      const auto lower = std::find_if(works_.begin(), works_.end(), [&work](const HostWork* other) {
        return other->priority_ < work->priority_;
      });
      works_.insert(lower, work.get());
    }
    wake_.notify_all();
  }
  return work;
}

void HostDevice::withdraw(HostWork* work) {
  std::unique_lock lock(mutex_);
  std::erase(works_, work);
  released_.wait(lock, [work] { return work->helpers_ == 0; });
}

HostWork* HostDevice::claimable(std::uint32_t index) {
  if (index + 1 >= num_sms_) return nullptr;
  for (HostWork* work : works_) {
    if (work->unclaimed() && work->helpers_ < work->max_helpers_) return work;
  }
  return nullptr;
}

void HostDevice::helper_main(std::uint32_t index) {
  std::unique_lock lock(mutex_);
  while (true) {
    HostWork* work = nullptr;
    wake_.wait(lock, [&] { return stop_ || (work = claimable(index)) != nullptr; });
    if (stop_) return;
    ++work->helpers_;
    lock.unlock();
    const bool ran = work->run_chunk();
    const bool finished = ran && work->done();
    lock.lock();
    --work->helpers_;
    released_.notify_one();
    if (finished) {
      lock.unlock();
      notify_();
      lock.lock();
    }
  }
}

}  // namespace epd
