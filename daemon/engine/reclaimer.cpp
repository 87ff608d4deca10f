#include "reclaimer.h"

#include "group.h"

#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <cstddef>
#include <utility>

namespace epd::engine {
namespace {

constexpr std::uint64_t kShortNs = 10'000;
constexpr std::uint64_t kLongNs = 40'000;
constexpr std::uint64_t kLeastPiece = std::uint64_t{1} << 20;
constexpr std::uint64_t kLargestPiece = std::uint64_t{1} << 40;  // of memory with hardly any pages

// A board is small, so it is unmapped at once.
class OneMapping final : public device::Arena {
 public:
  explicit OneMapping(Mapping mapping) : device::Arena(mapping.bytes()), mapping_(std::move(mapping)) {}

 private:
  const Mapping mapping_;
};

// Frees the pages that lie entirely in the range. Their contents are lost.
void drop_pages(std::byte* begin, std::size_t bytes) {
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::uintptr_t first = (address + page - 1) / page * page;
  const std::uintptr_t end = (address + bytes) / page * page;
  if (first < end) ::madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);  // NOLINT
}

}  // namespace

void Reclaimer::take(GroupRankMemory& rank) {
  const auto add = [this](std::shared_ptr<device::Arena> arena) {
    if (arena != nullptr) things_.push_back({std::move(arena), {}, {}});
  };
  add(std::exchange(rank.user, {}));
  add(std::move(rank.exchange));
  for (auto& mapped : rank.mapped) add(std::move(mapped.arena));
  rank.mapped.clear();
}

void Reclaimer::take(device::Lane& lane) {
  for (auto& plan : lane.take_plans()) things_.push_back({{}, std::move(plan), {}});
}

void Reclaimer::take(Member& member) {
  if (member.lane != nullptr) take(*member.lane);
  if (member.board_mapping.valid())
    things_.push_back({std::make_shared<OneMapping>(std::move(member.board_mapping)), {}, {}});
}

void Reclaimer::step() {
  const std::uint64_t start = clock_.now_ns();
  if (give_back(things_.front())) {
    const std::function<void()> call = std::move(things_.front().call);
    things_.pop_front();
    done_bytes_ = 0;
    if (call) call();
  }
  const std::uint64_t took = clock_.now_ns() - start;
  if (took < kShortNs) piece_bytes_ = std::min(piece_bytes_ * 2, kLargestPiece);
  if (took > kLongNs) piece_bytes_ = std::max(piece_bytes_ / 2, kLeastPiece);
}

bool Reclaimer::give_back(Thing& thing) {
  // Memory that a kernel shares is freed by its last owner.
  if (thing.arena != nullptr) return thing.arena.use_count() > 1 || thing.arena->give_back(piece_bytes_);
  return thing.plan == nullptr || thing.plan.use_count() > 1 || give_back(*thing.plan);
}

bool Reclaimer::give_back(kernels::RoutingPlan& plan) {
  const std::uint64_t bytes = std::min<std::uint64_t>(piece_bytes_, std::uint64_t{4} << 20);
  std::uint64_t begin = done_bytes_;
  const auto drop = [&](auto& array) {
    const std::uint64_t size = array.capacity() * sizeof(array[0]);
    if (begin >= size) {
      begin -= size;
      return false;
    }
    const std::uint64_t piece = std::min(bytes, size - begin);
    drop_pages(reinterpret_cast<std::byte*>(array.data()) + begin, piece);
    done_bytes_ += piece;
    return true;
  };
  return !drop(plan.entries) && !drop(plan.topk) && !drop(plan.begin);
}

}  // namespace epd::engine
