#include "host_rows.h"

#include "base/log.h"

#include <algorithm>
#include <exception>

namespace epd::device {
namespace {

// A chunk is small enough to keep the loop responsive, and large enough to make claiming cheap.
constexpr std::uint64_t kChunkBytes = std::uint64_t{512} * 1024;

std::uint32_t grain_for(std::uint64_t bytes_per_item) {
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(kChunkBytes / std::max<std::uint64_t>(bytes_per_item, 1), 1, 1024));
}

// Divides tokens into chunks by the bytes that they move: a few tokens may have all the rows.
class TokenChunks {
 public:
  // `row_bytes` is per row of a token, `token_bytes` per token.
  TokenChunks(const kernels::RoutingPlan& plan, std::uint64_t row_bytes, std::uint64_t token_bytes)
      : plan_(plan), row_bytes_(std::max<std::uint64_t>(row_bytes, kLeastBytes)), token_bytes_(token_bytes) {}

  std::uint32_t count() const {
    return static_cast<std::uint32_t>((before(plan_.num_tokens()) + kChunkBytes - 1) / kChunkBytes);
  }
  // The first token of a chunk. After the last chunk: the number of tokens.
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
  static constexpr std::uint64_t kLeastBytes = 512;  // a shorter row takes as long as one of so many

  std::uint64_t before(std::uint32_t token) const {
    return plan_.begin[token] * row_bytes_ + token * token_bytes_;
  }

  const kernels::RoutingPlan& plan_;
  const std::uint64_t row_bytes_;
  const std::uint64_t token_bytes_;
};

}  // namespace

std::unique_ptr<RowWork> RowWork::dispatch(const kernels::DispatchArgs& args, const Share& share) {
  constexpr std::uint64_t kTokenBytes = 128;  // of the plan, whether the token sends rows or not
  const TokenChunks chunks(*args.plan, args.format.row_bytes, kTokenBytes);
  return std::make_unique<RowWork>(
      [args, chunks](std::uint32_t begin, std::uint32_t end) {
        kernels::dispatch_rows(args, chunks.first(begin), chunks.first(end));
      },
      chunks.count(), kChunkBytes, share);
}

std::unique_ptr<RowWork> RowWork::fill(const kernels::FillArgs& args, const Share& share) {
  std::uint32_t rows = 0;
  for (const kernels::RowRange& range : args.ranges) rows += range.count;
  return std::make_unique<RowWork>(
      [args](std::uint32_t begin, std::uint32_t end) { kernels::fill_rows(args, begin, end); }, rows,
      args.zero ? args.format.row_bytes : 64, share);
}

std::unique_ptr<RowWork> RowWork::combine(const kernels::CombineArgs& args, const Share& share) {
  const std::uint64_t row_bytes = std::uint64_t{args.hidden} * 2;
  const TokenChunks chunks(*args.plan, row_bytes, row_bytes);
  return std::make_unique<RowWork>(
      [args, chunks](std::uint32_t begin, std::uint32_t end) {
        kernels::combine_rows(args, chunks.first(begin), chunks.first(end));
      },
      chunks.count(), kChunkBytes, share);
}

RowWork::RowWork(Body body, std::uint32_t items, std::uint64_t bytes, const Share& share)
    : body_(std::move(body)),
      items_(items),
      grain_(grain_for(bytes)),
      share_(share),
      // The loop runs a single chunk sooner than it could wake a helper.
      shared_(share.of != nullptr && share.of->num() > 1 && share.sms != 1 && items_ > grain_) {
  if (shared_) share_.of->add(*this);
}

RowWork::~RowWork() {
  next_.store(items_, std::memory_order_relaxed);  // nothing is left to claim
  if (shared_) share_.of->withdraw(*this);
}

bool RowWork::run_chunk() {
  const std::uint64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
  if (begin >= items_) return false;
  const std::uint64_t end = std::min<std::uint64_t>(begin + grain_, items_);
  body_(static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end));
  finished_.fetch_add(end - begin, std::memory_order_acq_rel);
  return true;
}

HostSms::HostSms(std::function<void()> notify)
    : notify_(std::move(notify)), max_(std::clamp(std::thread::hardware_concurrency() * 4, 4u, kMost)) {}

HostSms::~HostSms() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void HostSms::set_num(std::uint32_t sms) {
  {
    const std::lock_guard lock(mutex_);
    num_ = std::clamp(sms, 1u, max_);
  }
  while (helpers_.size() + 1 < num_) {
    const auto index = static_cast<std::uint32_t>(helpers_.size());
    try {
      helpers_.emplace_back([this, index] { helper_main(index); });
    } catch (const std::exception& error) {  // with fewer threads operations are slower, and as correct
      log_event(LogLevel::kError, "cannot start another helper thread",
                {{"sms", index + 1}, {"reason", error.what()}});
      break;
    }
  }
  wake_.notify_all();
}

void HostSms::add(RowWork& work) {
  {
    const std::lock_guard lock(mutex_);
    const auto lower = std::find_if(works_.begin(), works_.end(), [&work](const RowWork* other) {
      return other->share_.priority < work.share_.priority;
    });
    works_.insert(lower, &work);
  }
  wake_.notify_all();
}

void HostSms::withdraw(RowWork& work) {
  std::unique_lock lock(mutex_);
  std::erase(works_, &work);
  released_.wait(lock, [&work] { return work.helpers_ == 0; });
}

RowWork* HostSms::claimable(std::uint32_t index) {
  if (index + 1 >= num_) return nullptr;
  for (RowWork* work : works_) {
    const std::uint32_t most = work->share_.sms == 0 ? kMost : work->share_.sms - 1;
    if (work->unclaimed() && work->helpers_ < most) return work;
  }
  return nullptr;
}

void HostSms::helper_main(std::uint32_t index) {
  std::unique_lock lock(mutex_);
  while (true) {
    RowWork* work = nullptr;
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

}  // namespace epd::device
