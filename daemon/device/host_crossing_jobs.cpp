// The jobs of a crossing: what moves rows, asks and sums. RowWork carries them out in short steps.
#include "host_crossing.h"

#include <algorithm>
#include <atomic>

namespace epd::device {

using abi::FarHeader;
using abi::FarType;
using far::Arrival;
using far::Drop;
using kernels::FarStream;

namespace {

constexpr std::uint32_t kMergeChunks = 32;  // per job
constexpr std::uint64_t kMergeBytes = std::uint64_t{512} * 1024;

Drop drop_for(kernels::FarField bad) {
  return bad == kernels::FarField::kCrc ? Drop::kChecksum : Drop::kContent;
}

}  // namespace

// ---- rows and asks that leave

void HostCrossing::pack(const Target& target, std::uint32_t first, std::uint32_t count,
                        std::byte* records) const {
  const auto node = static_cast<std::uint32_t>(&target - targets_.data());
  if (!is_dispatch()) {
    kernels::make_asks({shape_, plan_, nodes_, node, target.tokens, needs_.op.topk_weights}, first,
                       first + count, records);
    return;
  }
  kernels::FarPackArgs args;
  args.shape = shape_;
  args.plan = plan_;
  args.nodes = nodes_;
  args.node = node;
  args.tokens = target.tokens;
  args.x = needs_.op.x;
  args.x_scales = needs_.op.x_scales;
  args.topk_weights = needs_.op.topk_weights;
  kernels::pack_rows(args, first, first + count, records);
}

void HostCrossing::begin_pack(Target& target) {
  const far::FarSizes& sizes = group_.sizes();
  const auto stride = is_dispatch() ? static_cast<std::uint32_t>(shape_.row_stride()) : sizes.ask_stride;
  const std::uint32_t per_batch = is_dispatch() ? sizes.rows_per_batch(stride) : sizes.asks_per_batch();
  const std::uint32_t first = target.packed;
  const auto left = static_cast<std::uint32_t>(target.tokens.size()) - first;
  const std::uint32_t batches = std::min(group_.room_for_rows(needs_.op.rank, target.gateway, tag()),
                                         (left + per_batch - 1) / per_batch);
  const std::uint32_t tokens = std::min(left, batches * per_batch);
  auto buffers = std::make_shared<std::vector<far::Buffer>>();
  for (std::uint32_t i = 0; i < batches; ++i)
    buffers->push_back(group_.take_rows(needs_.op.rank, target.gateway, tag()));
  target.packing = true;
  target.packed += tokens;
  if (target.packed == target.tokens.size()) group_.rows_window(needs_.op.rank, target.gateway).leave(tag());
  run(
      [=, this, &target](std::uint32_t begin, std::uint32_t end) {
        while (begin < end) {
          const std::uint32_t in_batch = begin % per_batch;
          const std::uint32_t count = std::min(end - begin, per_batch - in_batch);
          pack(target, first + begin, count,
               (*buffers)[begin / per_batch].data() + std::size_t{in_batch} * stride);
          begin += count;
        }
      },
      tokens, stride,
      [=, this, &target] {
        for (std::uint32_t i = 0; i < batches; ++i) {
          FarHeader h = header(is_dispatch() ? FarType::kRows : FarType::kAsk, target.gateway);
          h.batch = target.batches++;
          h.records = std::min(per_batch, tokens - i * per_batch);
          h.body_bytes = h.records * stride;
          group_.post(h, std::move((*buffers)[i]));
        }
        target.packing = false;
      });
}

// ---- rows that come

void HostCrossing::begin_forward(std::size_t index) {
  struct Forward {
    kernels::FarForwardArgs args;
    std::vector<kernels::DispatchTarget> targets;
    std::atomic<kernels::FarField> bad = kernels::FarField::kNone;
  };
  Source& source = sources_[index];
  auto forward = std::make_shared<Forward>();
  std::uint32_t records = 0;
  for (const auto& [batch, arrival] : source.held) {
    if (batch >= source.seen.size()) {  // it came before the announcement
      group_.drop_content(arrival.header, Drop::kBatch);
      group_.settle(arrival);
      continue;
    }
    records += arrival.header.records;
    source.seen[batch] = true;
    source.forwarding.push_back(arrival);
  }
  source.held.clear();
  source.busy = true;
  forward->targets.resize(shape_.num_ranks);
  for (const std::uint32_t rank : span_.near_ranks()) forward->targets[rank] = needs_.peers.peer(rank).target;
  forward->args.shape = shape_;
  forward->args.targets = forward->targets;
  forward->args.places = &places_[index];
  forward->args.num_tokens = source.announcement.operation.num_tokens;
  forward->args.volume = std::size_t{source.announcement.num_tokens} * shape_.format.row_bytes;
  run(
      [forward, &source](std::uint32_t begin, std::uint32_t end) {
        std::uint32_t before = 0;
        for (const Arrival& arrival : source.forwarding) {
          const std::uint32_t count = arrival.header.records;
          const std::uint32_t first = std::max(begin, before) - before;
          const std::uint32_t last = std::min(end, before + count) - std::min(before, end);
          if (first < last) {
            const auto fault = kernels::forward_rows(forward->args, arrival.body.data, first, last);
            if (fault) forward->bad = fault.field;
          }
          before += count;
        }
      },
      records, shape_.row_stride(),
      [this, &source, forward, records] {
        const kernels::FarField bad = forward->bad;
        // The source then stays busy, so the operation waits until its deadline, or until the group breaks.
        if (bad != kernels::FarField::kNone)
          group_.drop_content(source.forwarding.front().header, drop_for(bad));
        for (const Arrival& arrival : source.forwarding) group_.settle(arrival);
        source.forwarding.clear();
        if (bad != kernels::FarField::kNone) return;
        source.busy = false;
        source.done += records;
        if (source.done == source.announcement.num_tokens) {
          pass_arrival(source);
        }
      });
}

// ---- asks that come

// The most records that one ask may lead to.
std::uint32_t HostCrossing::sums_of_ask() const {
  std::uint32_t most = 0;
  std::uint32_t last = ~std::uint32_t{0};
  for (const std::uint32_t rank : span_.near_ranks()) {
    const std::uint32_t domain = span_.domain_of(rank);
    if (domain != last || !span_.is_whole(domain)) ++most;
    last = domain;
  }
  return std::max(1u, std::min(most, shape_.topk));
}

void HostCrossing::begin_serve(std::size_t index) {
  struct Batch {
    far::Buffer sums;
    std::uint32_t begin;
    std::uint32_t end;
    kernels::FarSummed made;
  };
  struct Serve {
    kernels::FarSumArgs args;
    std::vector<Batch> batches;
  };
  Source& source = sources_[index];
  const Arrival asks = source.held.begin()->second;
  const std::uint32_t flags = source.announcement.operation.flags;
  auto serve = std::make_shared<Serve>();
  serve->args.shape = shape_;
  serve->args.sources = source.sources;
  serve->args.places = &places_[index];
  serve->args.num_tokens = source.announcement.operation.num_tokens;
  serve->args.sum_ranks = span_.sum_ranks();
  serve->args.whole_domains = whole_domains_;
  serve->args.weighted = (flags & abi::kFlagWeights) != 0;
  serve->args.return_weights = returns_weights(flags);
  serve->args.sum_weights = (flags & abi::kFlagSumWeights) != 0;
  const std::uint32_t stride = group_.sizes().sum_stride[serve->args.return_weights ? 1 : 0];
  const std::uint32_t room = group_.sizes().batch_bytes / stride;
  const std::uint32_t per_batch = std::max(1u, room / sums_of_ask());
  std::uint32_t left = group_.room_for_sums(needs_.op.rank, source.rank, tag());
  std::uint32_t at = source.served;
  for (; left != 0 && at < asks.header.records; --left) {
    const std::uint32_t end = std::min(asks.header.records, at + per_batch);
    serve->batches.push_back({group_.take_sums(needs_.op.rank, source.rank, tag()), at, end, {}});
    at = end;
  }
  source.busy = true;
  run(
      [serve, asks, room](std::uint32_t begin, std::uint32_t end) {
        for (; begin < end; ++begin) {
          Batch& batch = serve->batches[begin];
          batch.made = kernels::sum_rows_for(serve->args, asks.body.data, batch.begin, batch.end,
                                             batch.sums.data(), room);
        }
      },
      static_cast<std::uint32_t>(serve->batches.size()), 2 * group_.sizes().batch_bytes,
      [=, this, &source] {
        for (Batch& batch : serve->batches) {
          if (batch.made.fault || batch.made.asks != batch.end - batch.begin) {
            // And the operation waits until its deadline, or until the group breaks.
            group_.drop_content(asks.header, drop_for(batch.made.fault.field));
            return;
          }
          FarHeader h = header(FarType::kSums, source.rank);
          h.batch = source.batches++;
          h.records = batch.made.records;
          h.body_bytes = h.records * stride;
          group_.post(h, std::move(batch.sums));
        }
        source.busy = false;
        source.done += at - source.served;
        source.served = at;
        if (at == asks.header.records) {
          group_.settle(asks);
          source.held.erase(source.held.begin());
          source.served = 0;
          ++source.next_asks;
        }
        if (source.done == source.announcement.num_tokens) pass_arrival(source);
      });
}

// ---- sums that come

// Cuts the tokens whose sums have all come into ranges. Each range has the positions of the streams at its
// beginning.
void HostCrossing::begin_merge() {
  struct Range {
    std::uint32_t begin;
    std::uint32_t end;
    std::vector<FarStream> streams;
  };
  struct Merge {
    std::vector<std::vector<kernels::FarBatch>> batches;  // by far node
    std::vector<Range> ranges;
    std::atomic<const Target*> corrupt = nullptr;
  };
  more_sums_ = false;
  auto merge = std::make_shared<Merge>();
  std::vector<FarStream> streams;
  for (const Target& target : targets_) {
    std::vector<kernels::FarBatch>& batches = merge->batches.emplace_back();
    for (const Arrival& arrival : target.sums) batches.push_back({arrival.body.data, arrival.header.records});
    streams.push_back({{}, 0, target.used});
  }
  for (std::size_t i = 0; i < streams.size(); ++i) streams[i].batches = merge->batches[i];
  const std::uint64_t token_bytes = std::uint64_t{shape_.hidden} * 2 * (shape_.topk + 1);
  const auto piece = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, kMergeBytes / token_bytes));
  const std::uint32_t tokens = needs_.op.num_tokens;
  std::uint32_t at = merged_;
  while (at < tokens && merge->ranges.size() < kMergeChunks) {
    Range range{at, std::min(tokens, at + piece), streams};
    const kernels::FarMerged judged = kernels::judge_sums(*merge_, streams, range.begin, range.end);
    if (judged.fault) {
      // The operation then waits until its deadline, or until the group breaks.
      group_.drop_content(targets_[judged.node].sums.front().header, drop_for(judged.fault.field));
      return;
    }
    range.end = at + judged.tokens;
    if (judged.tokens == 0) break;
    at = range.end;
    merge->ranges.push_back(std::move(range));
  }
  if (merge->ranges.empty()) return;
  more_sums_ = merge->ranges.size() == kMergeChunks;
  merging_ = true;
  run(
      [this, merge](std::uint32_t begin, std::uint32_t end) {
        for (; begin < end; ++begin) {
          Range& range = merge->ranges[begin];
          const kernels::FarMerged merged =
              kernels::merge_sums(*merge_, range.streams, range.begin, range.end);
          if (merged.fault) merge->corrupt = &targets_[merged.node];
        }
      },
      static_cast<std::uint32_t>(merge->ranges.size()), kMergeBytes,
      [this, at, streams, merge] {
        // The job then stays the last one.
        if (const Target* const target = merge->corrupt)
          return group_.drop_content(target->sums.front().header, Drop::kChecksum);
        end_merge(at, streams);
      });
}

void HostCrossing::end_merge(std::uint32_t merged, const std::vector<FarStream>& streams) {
  merging_ = false;
  merged_ = merged;
  for (std::size_t i = 0; i < streams.size(); ++i) {
    Target& target = targets_[i];
    std::uint32_t used = streams[i].batch;
    target.used = streams[i].record;
    if (used < target.sums.size() && target.used >= target.sums[used].header.records) {
      ++used;
      target.used = 0;
    }
    for (; used > 0; --used) {
      group_.settle(target.sums.front());
      target.sums.pop_front();
    }
  }
}

}  // namespace epd::device
