#include "stats.h"

#include "group.h"
#include "session_port.h"

#include <utility>

namespace epd::engine {
namespace {

constexpr std::uint64_t kSharedKey = ~std::uint64_t{0};

std::size_t index_of(StatusCode status) {
  const auto index = static_cast<std::size_t>(status);
  return index < abi::kStatusSlots ? index : abi::kStatusSlots - 1;
}

void add(abi::Histogram& histogram, std::uint32_t us) {
  count(histogram.buckets[abi::histogram_bucket(us)]);
}

// Clears all but key and owner.
void clear(abi::StatisticsRow& row) {
  const auto zero = [](auto& counters) {
    for (auto& counter : counters) counter.store(0, std::memory_order_relaxed);
  };
  row.bytes_dispatched.store(0, std::memory_order_relaxed);
  row.bytes_combined.store(0, std::memory_order_relaxed);
  zero(row.operations);
  zero(row.ended);
  zero(row.refused);
  zero(row.ran.buckets);
}

}  // namespace

template <std::size_t Rows>
void Statistics::claim(Page& page, abi::StatisticsTable<Rows>& table) {
  for (std::size_t i = 0; i < Rows && row_ == nullptr; ++i) {
    if (table.rows[i].key.load(std::memory_order_relaxed) == 0) row_ = &table.rows[i];
  }
  if (row_ != nullptr) {
    clear(*row_);
    std::atomic_thread_fence(std::memory_order_release);
    row_->key.store(++page->next_row_key, std::memory_order_release);
    return;
  }
  row_ = &table.rows[Rows];
  shared_ = true;
  count(table.unlisted);
  if (row_->key.load(std::memory_order_relaxed) == kSharedKey) return;
  clear(*row_);
  row_->key.store(kSharedKey, std::memory_order_release);
}

Statistics Statistics::of_session(Page& page, std::uint64_t session_id) {
  Statistics statistics;
  statistics.claim(page, page->sessions);
  statistics.row_->session_id.store(statistics.shared_ ? 0 : session_id, std::memory_order_relaxed);
  return statistics;
}

Statistics Statistics::of_member(Page& page, std::uint64_t session_id, std::uint64_t group_id,
                                 std::uint32_t rank) {
  Statistics statistics;
  statistics.claim(page, page->members);
  abi::StatisticsRow& row = *statistics.row_;
  row.session_id.store(statistics.shared_ ? 0 : session_id, std::memory_order_relaxed);
  row.group_id.store(statistics.shared_ ? 0 : group_id, std::memory_order_relaxed);
  row.rank.store(statistics.shared_ ? 0 : rank, std::memory_order_relaxed);
  return statistics;
}

Statistics::Statistics(Statistics&& other) noexcept
    : row_(std::exchange(other.row_, nullptr)), shared_(std::exchange(other.shared_, false)) {}

Statistics& Statistics::operator=(Statistics&& other) noexcept {
  release();
  row_ = std::exchange(other.row_, nullptr);
  shared_ = std::exchange(other.shared_, false);
  return *this;
}

void Statistics::release() {
  if (row_ == nullptr) return;
  if (!shared_) row_->key.store(0, std::memory_order_release);
  row_ = nullptr;
}

void Statistics::taken(abi::Op op) {
  if (row_ != nullptr) count(row_->operations[static_cast<std::size_t>(op) % abi::kNumOps]);
}

void Statistics::refused(StatusCode status) {
  if (row_ != nullptr) count(row_->refused[index_of(status)]);
}

void Statistics::moved(abi::Op op, std::uint64_t bytes) {
  if (row_ != nullptr) count(op == abi::Op::kDispatch ? row_->bytes_dispatched : row_->bytes_combined, bytes);
}

void Statistics::ended(StatusCode status) {
  if (row_ != nullptr) count(row_->ended[index_of(status)]);
}

void Statistics::ran(std::uint32_t us) {
  if (row_ == nullptr) return;
  add(row_->ran, us);
}

void count_taken(Member& member, abi::Op op) {
  member.statistics.taken(op);
  if (member.session != nullptr) member.session->statistics.taken(op);
}

void count_rows(Page& page, Member& member, abi::Op op, std::uint32_t flags, std::uint64_t rows) {
  const abi::GroupShape s = member.group.shape.with_format(abi::format_of(flags));
  const std::uint64_t row = op == abi::Op::kDispatch ? s.row_bytes() + s.scale_bytes() : s.hidden * 2ull;
  const std::uint64_t bytes = rows * row;
  count(op == abi::Op::kDispatch ? page->bytes_dispatched : page->bytes_combined, bytes);
  member.statistics.moved(op, bytes);
  if (op == abi::Op::kDispatch) count(member.waits().counts->rows, rows);
  if (member.session != nullptr) member.session->statistics.moved(op, bytes);
}

void count_ran(Member& member, std::uint32_t us) {
  member.statistics.ran(us);
  if (member.session != nullptr) member.session->statistics.ran(us);
}

void count_ended(Member& member, StatusCode status) {
  member.statistics.ended(status);
  if (member.session != nullptr) member.session->statistics.ended(status);
}

}  // namespace epd::engine
