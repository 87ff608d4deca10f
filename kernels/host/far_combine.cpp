#include "host/far_rows.h"
#include "host/rank_of_expert.h"
#include "host/store_policy.h"
#include "host/token_entries.h"
#include "host/token_sum.h"
#include "host/weight_sum.h"
#include "host/weights.h"
#include "kernels/far.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

namespace epd::kernels {
namespace {

// Which ranks' rows cross as one sum.
class WholeDomains {
 public:
  WholeDomains(std::uint32_t sum_ranks, std::span<const std::uint8_t> whole)
      : sum_ranks_(sum_ranks), whole_(whole) {}

  std::uint32_t domain_of(std::uint32_t rank) const { return sum_ranks_ == 0 ? 0 : rank / sum_ranks_; }
  bool is_whole(std::uint32_t domain) const { return !whole_.empty() && whole_[domain] != 0; }

 private:
  const std::uint32_t sum_ranks_;
  const std::span<const std::uint8_t> whole_;
};

// ---- the gateway

// An entry of an ask, judged.
struct AskedRow {
  std::uint32_t rank;
  std::size_t row;
  std::uint32_t choices;
  float weight;
};

class SumMaker {
 public:
  SumMaker(host::Choice choice, const FarSumArgs& args)
      : choice_(choice),
        args_(args),
        shape_(args.shape),
        num_targets_(args.shape.num_targets()),
        row_bytes_(std::size_t{args.shape.hidden} * sizeof(std::uint16_t)),
        stride_(args.shape.sum_stride(args.return_weights)),
        rank_of_expert_(args.shape.experts_per_rank),
        domains_(args.sum_ranks, args.whole_domains),
        sum_(args.shape.per_expert, 0, 0, args.shape.num_ranks, args.shape.topk),
        weight_sum_(args.shape.topk, 0, 0, args.shape.num_ranks) {
    rows_.reserve(shape_.topk);
    sums_.reserve(shape_.topk);
  }

  // Reads and judges an ask.
  FarFault take(std::uint32_t number, const std::byte* asks) {
    const std::size_t ask_stride = shape_.ask_stride();
    const std::byte* const ask = asks + number * ask_stride;
    if (shape_.crc && !host::is_whole(ask, ask_stride)) return {FarField::kCrc, number, 0, 0};
    const auto head = host::read_far<abi::FarAsk>(ask);
    token_ = head.token;
    rows_.clear();
    sums_.clear();
    if (token_ >= args_.num_tokens) return {FarField::kToken, number, 0, token_};
    if (head.num_entries - 1 >= shape_.topk) return {FarField::kNumEntries, number, 0, head.num_entries};
    for (std::uint32_t i = 0; i < head.num_entries; ++i) {
      const auto entry = host::read_far<abi::FarAskEntry>(ask + sizeof(head) + i * sizeof(abi::FarAskEntry));
      if (const FarFault fault = take_entry({FarField::kNone, number, i, 0}, entry)) return fault;
    }
    return {};
  }

  std::uint32_t num_sums() const { return static_cast<std::uint32_t>(sums_.size()); }

  // Makes the records of the ask.
  std::byte* make(std::byte* record) {
    std::size_t first = 0;
    for (const Sum& sum : sums_) {
      make_sum(sum, std::span(rows_).subspan(first, sum.num_rows), record);
      first += sum.num_rows;
      record += stride_;
    }
    return record;
  }

 private:
  // A record to be made, of consecutive rows.
  struct Sum {
    std::uint32_t domain;
    bool whole;
    std::size_t num_rows;
  };

  FarFault take_entry(FarFault fault, const abi::FarAskEntry& entry) {
    const auto bad = [&fault](FarField field, std::uint32_t value) {
      fault.field = field;
      fault.value = value;
      return fault;
    };
    if (entry.target >= num_targets_) return bad(FarField::kTarget, entry.target);
    const std::uint32_t rank = shape_.per_expert ? rank_of_expert_(entry.target) : entry.target;
    const std::uint32_t least = rows_.empty() ? 0 : rows_.back().rank + (shape_.per_expert ? 0 : 1);
    if (args_.sources[rank].y == nullptr || rank < least) return bad(FarField::kTarget, entry.target);
    if (entry.position >= args_.places->counts[entry.target]) return bad(FarField::kPosition, entry.position);
    if (std::uint64_t{entry.choices} >> shape_.topk != 0) return bad(FarField::kChoices, entry.choices);
    const std::size_t row = static_cast<std::uint32_t>(args_.places->base[entry.target]) + entry.position;
    add(rank);
    rows_.push_back({rank, row, entry.choices, host::canonical(entry.weight)});
    return fault;
  }

  void add(std::uint32_t rank) {
    const std::uint32_t domain = domains_.domain_of(rank);
    const bool whole = domains_.is_whole(domain);
    const bool same = !sums_.empty() && (whole ? sums_.back().domain == domain : rows_.back().rank == rank);
    if (!same) sums_.push_back({domain, whole, 0});
    ++sums_.back().num_rows;
  }

  const std::uint16_t* row(const AskedRow& asked) const {
    return args_.sources[asked.rank].y + asked.row * shape_.hidden;
  }

  void make_sum(const Sum& sum, std::span<const AskedRow> rows, std::byte* record) {
    host::RecordWriter out(record, stride_, shape_.crc);
    if (sum.whole || shape_.per_expert) {
      sum_.begin();
      for (const AskedRow& asked : rows) sum_.add_row(asked.rank, row(asked), asked.weight);
      out.put_sum(choice_, sum_.sum(args_.weighted), shape_.hidden);
    } else {  // the owner multiplies it
      out.put_row(choice_, row(rows[0]), row_bytes_);
    }
    if (args_.return_weights) {
      if (args_.sum_weights && !shape_.per_expert) {
        sum_weights(rows);
      } else {
        find_weights(rows);
      }
      out.put(weights_.data(), shape_.topk * sizeof(float));
    }
    out.put(abi::FarSum{token_, sum.domain});
  }

  void sum_weights(std::span<const AskedRow> rows) {
    weight_sum_.begin();
    for (const AskedRow& asked : rows) {
      const float* y_weights = args_.sources[asked.rank].y_weights;
      if (y_weights != nullptr) weight_sum_.add(asked.rank, y_weights + asked.row * shape_.topk);
    }
    weight_sum_.store(weights_.data());
  }

  void find_weights(std::span<const AskedRow> rows) {
    weights_.fill(0.0f);
    for (const AskedRow& asked : rows) {
      const float* y_weights = args_.sources[asked.rank].y_weights;
      if (y_weights == nullptr) continue;
      for (std::uint32_t k = 0; k < shape_.topk; ++k) {
        if ((asked.choices >> k & 1) == 0) continue;
        weights_[k] = shape_.per_expert ? y_weights[asked.row] : y_weights[asked.row * shape_.topk + k];
      }
    }
  }

  const host::Choice choice_;
  const FarSumArgs& args_;
  const FarShape& shape_;
  const std::uint32_t num_targets_;
  const std::size_t row_bytes_;
  const std::size_t stride_;
  const host::RankOfExpert rank_of_expert_;
  const WholeDomains domains_;
  // The current ask:
  std::uint32_t token_ = 0;
  std::vector<AskedRow> rows_;
  std::vector<Sum> sums_;
  host::TokenSum sum_;
  host::WeightSum weight_sum_;
  std::array<float, abi::kMaxTopk> weights_{};
};

// ---- the owner

class Merger {
 public:
  // `checks`: the CRCs of all records; else only of one that is bad.
  Merger(host::Choice choice, const FarMergeArgs& args, std::span<FarStream> streams, bool checks)
      : choice_(choice),
        args_(args),
        checks_(checks),
        own_(args.combine),
        streams_(streams),
        per_expert_(own_.plan->per_expert),
        row_bytes_(std::size_t{own_.hidden} * sizeof(std::uint16_t)),
        weights_bytes_(own_.out_weights == nullptr ? 0 : own_.topk * sizeof(float)),
        stride_(abi::far_sum_bytes(row_bytes_, own_.out_weights == nullptr ? 0 : own_.topk)),
        entries_(*own_.plan, own_.topk, own_.experts_per_rank, own_.topk_weights),
        domains_(own_.sum_ranks, args.whole_domains),
        sum_(per_expert_, own_.rank, own_.sum_ranks, own_.sources.size(), own_.topk + std::size(own_.bias)),
        weight_sum_(own_.topk, own_.rank, own_.sum_ranks, own_.sources.size()) {
    taken_.reserve(own_.topk);
  }

  // Whether all that the token needs has come, and is right. Else the streams are where they were.
  bool find(std::uint32_t token) {
    sum_.begin();
    taken_.clear();
    for (const std::uint16_t* bias : own_.bias) {
      if (bias != nullptr) sum_.add_bias(bias + std::size_t{token} * own_.hidden);
    }
    std::size_t i = 0;
    for (const RouteEntry& entry : entries_.of(token)) {
      record_of_[i] = nullptr;
      if (!find_entry(token, entry, record_of_[i])) {
        put_back();
        return false;
      }
      ++i;
    }
    return true;
  }

  // Sums what find() has found.
  void merge(std::uint32_t token) {
    choice_.kernels->sum_rows(sum_.sum(own_.topk_weights != nullptr), own_.hidden,
                              own_.out + std::size_t{token} * own_.hidden, choice_.stores);
    if (own_.out_weights == nullptr) return;
    if (own_.sum_weights && !per_expert_) {
      sum_weights(token);
    } else {
      return_weights(token);
    }
  }

  FarMerged result(std::uint32_t tokens) const { return {fault_, node_, batch_, tokens}; }

 private:
  // A record that the token uses, and where its stream was before.
  struct Taken {
    std::uint32_t node;
    std::uint32_t batch;
    std::uint32_t record;
    std::uint32_t rank;  // the first one in it
    std::uint32_t domain;
    bool whole;
    bool summed;  // it is part of the token's sum: not all of its rows have weight 0
    const std::byte* at;
  };

  bool find_entry(std::uint32_t token, const RouteEntry& entry, const std::byte*& record) {
    const std::uint32_t rank = entries_.rank_of(entry);
    const float weight = entries_.weight(token, entry);
    if (args_.nodes[rank] == kNotFar) {
      const std::uint16_t* y = own_.sources[rank].y;
      if (y != nullptr) sum_.add_row(rank, y + row_of(entry) * own_.hidden, weight);
      return true;
    }
    const std::uint32_t domain = domains_.domain_of(rank);
    const bool whole = domains_.is_whole(domain);
    const bool same = !taken_.empty() && (whole ? taken_.back().whole && taken_.back().domain == domain
                                                : taken_.back().rank == rank);
    if (!same && !take(token, rank, domain, whole)) return false;
    Taken& taken = taken_.back();
    record = taken.at;
    if (weight == 0.0f || taken.summed) return true;
    taken.summed = true;
    if (whole) {
      sum_.add_domain_sum(row(taken.at));
    } else {
      sum_.add_row(rank, row(taken.at), per_expert_ ? 1.0f : weight);
    }
    return true;
  }

  // Takes the next record of the rank's node. False: it has not come, or is not the one that the token needs.
  bool take(std::uint32_t token, std::uint32_t rank, std::uint32_t domain, bool whole) {
    const std::uint32_t node = args_.nodes[rank];
    FarStream& stream = streams_[node];
    skip_used(stream);
    if (stream.batch == stream.batches.size()) return false;
    const std::byte* const record = stream.batches[stream.batch].records + stream.record * stride_;
    const auto sum = host::read_far<abi::FarSum>(record + row_bytes_ + weights_bytes_);
    if (sum.token != token) {
      fault_ = {FarField::kToken, stream.record, 0, sum.token};
    } else if (sum.domain != domain) {
      fault_ = {FarField::kDomain, stream.record, 0, sum.domain};
    }
    if (args_.crc && (checks_ || fault_) && !host::is_whole(record, stride_))
      fault_ = {FarField::kCrc, stream.record, 0, 0};
    if (fault_) {
      node_ = node;
      batch_ = stream.batch;
      return false;
    }
    taken_.push_back({node, stream.batch, stream.record, rank, domain, whole, false, record});
    ++stream.record;
    skip_used(stream);
    return true;
  }

  static void skip_used(FarStream& stream) {
    while (stream.batch < stream.batches.size() &&
           stream.record == stream.batches[stream.batch].num_records) {
      ++stream.batch;
      stream.record = 0;
    }
  }

  void put_back() {
    for (auto taken = taken_.rbegin(); taken != taken_.rend(); ++taken) {
      streams_[taken->node].batch = taken->batch;
      streams_[taken->node].record = taken->record;
    }
  }

  // The row of a record, copied if it is not aligned.
  const std::uint16_t* row(const std::byte* record) {
    if (reinterpret_cast<std::uintptr_t>(record) % alignof(std::uint16_t) == 0)
      return reinterpret_cast<const std::uint16_t*>(record);
    copies_.resize(std::size_t{own_.topk} * own_.hidden);
    std::uint16_t* const copy = copies_.data() + (taken_.size() - 1) * own_.hidden;
    std::memcpy(copy, record, row_bytes_);
    return copy;
  }

  std::size_t row_of(const RouteEntry& entry) const {
    return static_cast<std::uint32_t>(own_.base[entry.target]) + entry.position;
  }

  void sum_weights(std::uint32_t token) {
    weight_sum_.begin();
    const std::byte* last = nullptr;
    std::size_t i = 0;
    for (const RouteEntry& entry : entries_.of(token)) {
      const std::byte* const record = record_of_[i++];
      const float* const near = own_.sources[entry.target].y_weights;
      if (record == nullptr) {
        if (near != nullptr) weight_sum_.add(entry.target, near + row_of(entry) * own_.topk);
      } else if (record != last) {
        std::array<float, abi::kMaxTopk> weights{};
        std::memcpy(weights.data(), record + row_bytes_, own_.topk * sizeof(float));
        if (domains_.is_whole(domains_.domain_of(entry.target))) {
          weight_sum_.add_domain_sum(weights.data());
        } else {
          weight_sum_.add(entry.target, weights.data());
        }
      }
      last = record;
    }
    weight_sum_.store(own_.out_weights + std::size_t{token} * own_.topk);
  }

  void return_weights(std::uint32_t token) const {
    float* out = own_.out_weights + std::size_t{token} * own_.topk;
    std::fill_n(out, own_.topk, 0.0f);
    std::size_t i = 0;
    for (const RouteEntry& entry : entries_.of(token)) {
      const std::byte* const record = record_of_[i++];
      const float* const near = own_.sources[entries_.rank_of(entry)].y_weights;
      if (record == nullptr && near == nullptr) continue;
      const std::size_t row = record == nullptr ? row_of(entry) : 0;
      entries_.visit_choices(token, entry, [&](std::uint32_t k) {
        if (record != nullptr) {
          std::memcpy(out + k, record + row_bytes_ + k * sizeof(float), sizeof(float));
        } else {
          out[k] = per_expert_ ? near[row] : near[row * own_.topk + k];
        }
      });
    }
  }

  const host::Choice choice_;
  const FarMergeArgs& args_;
  const bool checks_;
  const CombineArgs& own_;
  const std::span<FarStream> streams_;
  const bool per_expert_;
  const std::size_t row_bytes_;
  const std::size_t weights_bytes_;
  const std::size_t stride_;
  const host::TokenEntries entries_;
  const WholeDomains domains_;
  // The current token:
  host::TokenSum sum_;
  host::WeightSum weight_sum_;
  std::vector<Taken> taken_;
  std::array<const std::byte*, abi::kMaxTopk> record_of_{};  // of each entry; null: its row is near
  std::vector<std::uint16_t> copies_;
  // The fault of a record:
  FarFault fault_;
  std::uint32_t node_ = 0;
  std::uint32_t batch_ = 0;
};

}  // namespace

void make_asks(const FarAskArgs& args, std::uint32_t begin, std::uint32_t end, std::byte* asks) {
  const std::uint32_t topk = args.shape.topk;
  const std::size_t stride = args.shape.ask_stride();
  const host::TokenEntries entries(*args.plan, topk, args.shape.experts_per_rank, args.topk_weights);
  for (std::uint32_t i = begin; i < end; ++i, asks += stride) {
    const std::uint32_t token = args.tokens[i];
    host::RecordWriter out(asks, stride, args.shape.crc);
    std::byte* const head = out.skip(sizeof(abi::FarAsk));
    std::uint32_t num_entries = 0;
    for (const RouteEntry& entry : entries.of(token)) {
      if (args.nodes[entries.rank_of(entry)] != args.node) continue;
      std::uint32_t choices = 0;
      entries.visit_choices(token, entry, [&](std::uint32_t k) { choices |= std::uint32_t{1} << k; });
      out.put(abi::FarAskEntry{entry.target, entry.position, choices, entries.weight(token, entry)});
      ++num_entries;
    }
    const abi::FarAsk ask = {token, num_entries};
    std::memcpy(head, &ask, sizeof(ask));
  }
}

FarSummed host::sum_rows_for_with(Choice choice, const FarSumArgs& args, const std::byte* asks,
                                  std::uint32_t begin, std::uint32_t end, std::byte* sums,
                                  std::uint32_t room) {
  SumMaker maker(choice, args);
  FarSummed done;
  for (std::uint32_t i = begin; i < end; ++i) {
    done.fault = maker.take(i, asks);
    if (done.fault || maker.num_sums() > room - done.records) break;
    sums = maker.make(sums);
    done.records += maker.num_sums();
    ++done.asks;
  }
  choice.kernels->store_fence();
  return done;
}

// The transport reads the records at once.
FarSummed sum_rows_for(const FarSumArgs& args, const std::byte* asks, std::uint32_t begin, std::uint32_t end,
                       std::byte* sums, std::uint32_t room) {
  return host::sum_rows_for_with({&host::best_row_kernels(), host::Stores::kCached}, args, asks, begin, end,
                                 sums, room);
}

FarMerged host::merge_sums_with(Choice choice, const FarMergeArgs& args, std::span<FarStream> streams,
                                std::uint32_t begin, std::uint32_t end) {
  Merger merger(choice, args, streams, true);
  std::uint32_t token = begin;
  for (; token < end && merger.find(token); ++token) merger.merge(token);
  choice.kernels->store_fence();
  return merger.result(token - begin);
}

FarMerged merge_sums(const FarMergeArgs& args, std::span<FarStream> streams, std::uint32_t begin,
                     std::uint32_t end) {
  const std::size_t volume = args.combine.plan->entries.size() * args.combine.hidden * sizeof(std::uint16_t);
  const host::Stores stores = host::StorePolicy::of_process().preferred(volume);
  return host::merge_sums_with({&host::best_row_kernels(), stores}, args, streams, begin, end);
}

FarMerged judge_sums(const FarMergeArgs& args, std::span<FarStream> streams, std::uint32_t begin,
                     std::uint32_t end) {
  Merger merger({&host::best_row_kernels(), host::Stores::kCached}, args, streams, false);
  std::uint32_t token = begin;
  while (token < end && merger.find(token)) ++token;
  return merger.result(token - begin);
}

}  // namespace epd::kernels
