// What the engines count, read from their pages without asking them.
#include "node.h"

#include <optional>

namespace epd {
namespace {

template <typename Counters, typename Values>
void load(const Counters& counters, Values& values) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = counters[i].load(std::memory_order_relaxed);
}

// No value: free, or given to another owner while it was read.
std::optional<OwnedStatisticsView> read_row(const abi::StatisticsRow& row, const std::string& device) {
  const std::uint64_t key = row.key.load(std::memory_order_acquire);
  if (key == 0) return std::nullopt;
  OwnedStatisticsView view;
  view.device = device;
  view.session_id = row.session_id.load(std::memory_order_relaxed);
  view.group_id = row.group_id.load(std::memory_order_relaxed);
  view.rank = row.rank.load(std::memory_order_relaxed);
  StatisticsView& s = view.statistics;
  s.queue_depth = row.queue_depth.load(std::memory_order_relaxed);
  s.bytes_dispatched = row.bytes_dispatched.load(std::memory_order_relaxed);
  s.bytes_combined = row.bytes_combined.load(std::memory_order_relaxed);
  load(row.operations, s.operations);
  load(row.ended, s.ended);
  load(row.refused, s.refused);
  load(row.stalls, s.stalls);
  for (std::size_t i = 0; i < s.intervals.size(); ++i) load(row.intervals[i].buckets, s.intervals[i]);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (row.key.load(std::memory_order_relaxed) != key) return std::nullopt;
  return view;
}

template <std::size_t Rows>
void read_table(const abi::StatisticsTable<Rows>& table, const std::string& device,
                std::vector<OwnedStatisticsView>& views) {
  for (const abi::StatisticsRow& row : table.rows) {
    if (auto view = read_row(row, device)) views.push_back(std::move(*view));
  }
}

}  // namespace

AllStatisticsView Node::statistics_view() const {
  AllStatisticsView all;
  for (std::uint32_t device = 0; device < fleet_->size(); ++device) {
    const abi::EnginePage& page = fleet_->page(device);
    read_table(page.sessions, fleet_->name(device), all.sessions);
    read_table(page.members, fleet_->name(device), all.ranks);
  }
  return all;
}

}  // namespace epd
