#include "translate.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace epd {

void translate_histogram(const HistogramView& counts, v1::Histogram& message) {
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) continue;
    total += counts[i];
    v1::HistogramBucket& bucket = *message.add_buckets();
    bucket.set_from_us(abi::histogram_floor(i));
    bucket.set_count(counts[i]);
  }
  message.set_count(total);
  message.set_p50_us(abi::histogram_percentile(counts, 500));
  message.set_p99_us(abi::histogram_percentile(counts, 990));
}

namespace {

void translate(const std::array<std::uint64_t, abi::kStatusSlots>& counts, std::size_t first,
               google::protobuf::RepeatedPtrField<v1::StatusCount>& messages) {
  for (std::size_t code = first; code < counts.size(); ++code) {
    if (counts[code] == 0) continue;
    v1::StatusCount& out = *messages.Add();
    out.set_status(status_name(static_cast<StatusCode>(code)));
    out.set_count(counts[code]);
  }
}

void translate(const StatisticsView& view, v1::Statistics& message) {
  const auto operations = [&](abi::Op op) { return view.operations[static_cast<std::size_t>(op)]; };
  const auto stalls = [&](abi::Stall why) { return view.stalls[static_cast<std::size_t>(why)]; };
  const auto interval = [&](abi::Interval which) -> const HistogramView& {
    return view.intervals[static_cast<std::size_t>(which)];
  };
  message.set_queue_depth(view.queue_depth);
  message.set_noops(operations(abi::Op::kNoop));
  message.set_dispatches(operations(abi::Op::kDispatch));
  message.set_combines(operations(abi::Op::kCombine));
  message.set_completed(view.ended[0]);
  translate(view.ended, 1, *message.mutable_failed());
  translate(view.refused, 0, *message.mutable_refused());
  message.set_bytes_dispatched(view.bytes_dispatched);
  message.set_bytes_combined(view.bytes_combined);
  message.set_stalls_completions(stalls(abi::Stall::kCompletions));
  message.set_stalls_depth(stalls(abi::Stall::kDepth));
  message.set_stalls_group(stalls(abi::Stall::kGroup));
  translate_histogram(interval(abi::Interval::kSeen), *message.mutable_seen());
  translate_histogram(interval(abi::Interval::kLaunched), *message.mutable_launched());
  translate_histogram(interval(abi::Interval::kDone), *message.mutable_done());
  translate_histogram(interval(abi::Interval::kTotal), *message.mutable_total());
}

template <typename Array>
void add_each(Array& sum, const Array& more) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += more[i];
}

void add(StatisticsView& sum, const StatisticsView& more) {
  sum.queue_depth += more.queue_depth;
  sum.bytes_dispatched += more.bytes_dispatched;
  sum.bytes_combined += more.bytes_combined;
  add_each(sum.operations, more.operations);
  add_each(sum.ended, more.ended);
  add_each(sum.refused, more.refused);
  add_each(sum.stalls, more.stalls);
  for (std::size_t i = 0; i < sum.intervals.size(); ++i) add_each(sum.intervals[i], more.intervals[i]);
}

}  // namespace

void translate(AllStatisticsView views, v1::GetStatisticsResponse& message) {
  std::sort(views.sessions.begin(), views.sessions.end(), [](const auto& a, const auto& b) {
    return std::tie(a.session_id, a.device) < std::tie(b.session_id, b.device);
  });
  std::sort(views.ranks.begin(), views.ranks.end(), [](const auto& a, const auto& b) {
    return std::tie(a.group_id, a.rank, a.device) < std::tie(b.group_id, b.rank, b.device);
  });
  for (const OwnedStatisticsView& view : views.sessions) {
    v1::SessionStatistics& out = *message.add_sessions();
    out.set_session_id(view.session_id);
    out.set_device(clean_text(view.device));
    translate(view.statistics, *out.mutable_statistics());
  }
  std::map<std::uint64_t, StatisticsView> groups;
  for (const OwnedStatisticsView& view : views.ranks) {
    v1::RankStatistics& out = *message.add_ranks();
    out.set_group_id(view.group_id);
    out.set_rank(view.rank);
    out.set_session_id(view.session_id);
    out.set_device(clean_text(view.device));
    translate(view.statistics, *out.mutable_statistics());
    add(groups[view.group_id], view.statistics);
  }
  for (const auto& [id, statistics] : groups) {
    v1::GroupStatistics& out = *message.add_groups();
    out.set_group_id(id);
    translate(statistics, *out.mutable_statistics());
  }
}

}  // namespace epd
