// The engines' counts, read from their pages without asking them.
#include "messages.h"

#include <atomic>
#include <map>
#include <tuple>

namespace epd::supervisor {
namespace {

std::uint64_t value(const std::atomic<std::uint64_t>& counter) {
  return counter.load(std::memory_order_relaxed);
}

template <std::size_t Size>
void add_each(std::atomic<std::uint64_t> (&sum)[Size], const std::atomic<std::uint64_t> (&more)[Size]) {
  for (std::size_t i = 0; i < Size; ++i)
    sum[i].store(value(sum[i]) + value(more[i]), std::memory_order_relaxed);
}

// `sum` belongs to the caller: a copy of one row, or a sum of several. Its owner becomes that of `more`.
void add(abi::StatisticsRow& sum, const abi::StatisticsRow& more) {
  sum.session_id = value(more.session_id);
  sum.group_id = value(more.group_id);
  sum.rank = more.rank.load(std::memory_order_relaxed);
  sum.bytes_dispatched += value(more.bytes_dispatched);
  sum.bytes_combined += value(more.bytes_combined);
  add_each(sum.operations, more.operations);
  add_each(sum.ended, more.ended);
  add_each(sum.refused, more.refused);
  add_each(sum.ran.buckets, more.ran.buckets);
}

void fill(google::protobuf::RepeatedPtrField<v1::StatusCount>& messages,
          const std::atomic<std::uint64_t> (&counts)[abi::kStatusSlots], std::size_t first) {
  for (std::size_t code = first; code < abi::kStatusSlots; ++code) {
    if (counts[code] == 0) continue;
    v1::StatusCount& out = *messages.Add();
    out.set_status(status_name(static_cast<StatusCode>(code)));
    out.set_count(counts[code]);
  }
}

void fill(v1::Statistics& message, const abi::StatisticsRow& row) {
  const auto operations = [&](abi::Op op) { return value(row.operations[static_cast<std::size_t>(op)]); };
  message.set_noops(operations(abi::Op::kNoop));
  message.set_dispatches(operations(abi::Op::kDispatch));
  message.set_combines(operations(abi::Op::kCombine));
  message.set_completed(row.ended[0]);
  fill(*message.mutable_failed(), row.ended, 1);
  fill(*message.mutable_refused(), row.refused, 0);
  message.set_bytes_dispatched(row.bytes_dispatched);
  message.set_bytes_combined(row.bytes_combined);
  *message.mutable_done() = message_of(row.ran);
}

// Calls use(copy) for each row that is not free and was not given to another owner while it was read.
template <std::size_t Rows, typename Use>
void for_each_row(const abi::StatisticsTable<Rows>& table, const Use& use) {
  for (const abi::StatisticsRow& row : table.rows) {
    const std::uint64_t key = row.key.load(std::memory_order_acquire);
    if (key == 0) continue;
    abi::StatisticsRow copy{};
    add(copy, row);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (row.key.load(std::memory_order_relaxed) == key) use(copy);
  }
}

}  // namespace

v1::GetStatisticsResponse message_of(const std::vector<DevicePage>& pages) {
  v1::GetStatisticsResponse message;
  std::map<std::uint64_t, abi::StatisticsRow> groups;
  for (const DevicePage& of : pages) {
    for_each_row(of.page.sessions, [&](const abi::StatisticsRow& row) {
      v1::SessionStatistics& out = *message.add_sessions();
      out.set_session_id(row.session_id);
      out.set_device(of.device);
      fill(*out.mutable_statistics(), row);
    });
    for_each_row(of.page.members, [&](const abi::StatisticsRow& row) {
      v1::RankStatistics& out = *message.add_ranks();
      out.set_group_id(row.group_id);
      out.set_rank(row.rank);
      out.set_session_id(row.session_id);
      out.set_device(of.device);
      fill(*out.mutable_statistics(), row);
      add(groups[row.group_id], row);
    });
  }
  for (const auto& [id, sum] : groups) {
    v1::GroupStatistics& out = *message.add_groups();
    out.set_group_id(id);
    fill(*out.mutable_statistics(), sum);
  }
  sort_by(*message.mutable_sessions(),
          [](const v1::SessionStatistics& of) { return std::tuple(of.session_id(), of.device()); });
  sort_by(*message.mutable_ranks(),
          [](const v1::RankStatistics& of) { return std::tuple(of.group_id(), of.rank(), of.device()); });
  return message;
}

}  // namespace epd::supervisor
