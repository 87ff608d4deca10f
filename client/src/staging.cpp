#include "staging.h"

#include <algorithm>
#include <cstring>

namespace epd::client {
namespace {

using abi::Region;
using stream_kernels::column_rows;
using stream_kernels::Piece;
using stream_kernels::Rows;

// ---- planning

// An operation whose tokens have no more bytes, in bf16, is a small one.
constexpr std::uint64_t kMostOfSmallBytes = 8 << 20;

Status check_numbers(const char* name, const void* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof(std::int32_t) == 0) return {};
  return bad_value(name, static_cast<long long>(reinterpret_cast<std::uintptr_t>(address)),
                   "an address that is a multiple of 4");
}

std::uint32_t row_bytes_of(const abi::GroupShape& s, Region region) {
  switch (region) {
    case Region::kX: return s.x_bytes();
    case Region::kXScales:
    case Region::kRecvScales: return s.scale_bytes();
    case Region::kTopkIdx: return s.topk * s.index_bytes();
    case Region::kTopkWeights:
    case Region::kOutWeights: return s.topk * 4;
    case Region::kRecvX: return s.row_bytes();
    case Region::kRecvTopkIdx: return s.choices_per_row() * s.index_bytes();
    case Region::kRecvTopkWeights:
    case Region::kYWeights: return s.choices_per_row() * 4;
    case Region::kRecvSrc: return 8;
    case Region::kY:
    case Region::kBias0:
    case Region::kBias1:
    case Region::kOut: return s.hidden * 2;
    default: return 4;  // numbers
  }
}

// Plans the rows of one operation. It never asks for fields that the operation does not use.
class Planner {
 public:
  Planner(Group& group, const SubmitRequest& request, const RouteUse& use, RowPlan& rows, Copies& copies)
      : group_(group),
        shape_(group.shape.with_format(request.row_format)),
        request_(request),
        use_(use),
        rows_(rows),
        copies_(copies) {}

  Status plan() {
    copies_.most_tokens = shape_.max_tokens;
    copies_.blocks = shape_.layout == abi::Layout::kExpert ? shape_.experts_per_rank() : 1;
    Status status = set_room();
    if (!status.ok()) return status;
    request_.op == abi::Op::kDispatch ? plan_dispatch() : plan_combine();
    if (status_.ok() && received_) status_ = set_counts();
    if (status_.ok() && tokens_) status_ = set_tokens();
    if (tokens_at_most() * shape_.hidden * 2 > kMostOfSmallBytes) copies_.large = 1;
    return status_;
  }

 private:
  const epd_memory_t& memory() const { return *request_.memory; }
  bool flagged(std::uint32_t flag) const { return (request_.flags & flag) != 0; }

  Status set_room() {
    const bool blocks = shape_.layout == abi::Layout::kExpert;
    const auto rows = static_cast<std::uint32_t>(blocks ? shape_.expert_capacity() : shape_.recv_rows());
    const std::uint32_t given = memory().recv_rows;
    copies_.region_block = rows;
    copies_.own_block = given != 0 ? given : rows;
    copies_.room = std::min(copies_.own_block, rows);
    if (!blocks) {
      copies_.own_block = copies_.room;
      return {};
    }
    const std::uint32_t most = abi::kMaxRecvRows / copies_.blocks;
    if (copies_.own_block <= most) return {};
    return bad_value("memory.recv_rows", given,
                     "0 .. " + std::to_string(most) + " (rows of an expert's block in the memory)");
  }

  void plan_dispatch() {
    const epd_memory_t& m = memory();
    if (!place_tokens(m.x, shape_.x_bytes(), rows_.memory.in, rows_.places.in))
      input("memory.x", m.x, Region::kX, Rows::kTokens);
    input("memory.x_scales", m.x_scales, Region::kXScales, Rows::kTokens);
    if (request_.handle == 0) input("memory.topk_idx", m.topk_idx, Region::kTopkIdx, Rows::kTokens);
    if (flagged(abi::kFlagWeights))
      input("memory.topk_weights", m.topk_weights, Region::kTopkWeights, Rows::kTokens);
    const bool has_room = copies_.own_block == copies_.region_block ||
                          (copies_.blocks == 1 && m.recv_rows >= copies_.region_block);
    // The device zeroes all rows that no token fills. Who has not said how many there are may have less room.
    const bool zeroes_all =
        m.recv_rows == 0 && flagged(abi::kFlagMarkUnused) && flagged(abi::kFlagZeroPadding);
    const GroupMapped::Rows received{m.recv_x, region_bytes(shape_, Region::kRecvX), zeroes_all};
    if (!place(received, has_room, rows_.memory.out, rows_.places.out))
      output("memory.recv_x", m.recv_x, Region::kRecvX, Rows::kReceived);
    scales(m.recv_scales);
    output("memory.recv_topk_idx", m.recv_topk_idx, Region::kRecvTopkIdx, Rows::kReceived);
    output("memory.recv_topk_weights", m.recv_topk_weights, Region::kRecvTopkWeights, Rows::kReceived);
    output("memory.recv_src", m.recv_src, Region::kRecvSrc, Rows::kReceived);
    if (flagged(abi::kFlagMarkUnused)) {
      mark(m.recv_topk_idx, Region::kRecvTopkIdx, 0xff);
      mark(m.recv_topk_weights, Region::kRecvTopkWeights, 0);
      mark(m.recv_src, Region::kRecvSrc, 0xff);
    }
    const std::uint32_t experts = shape_.experts_per_rank();
    numbers("memory.rank_offsets", m.rank_offsets, Region::kRankOffsets, shape_.num_ranks + 1, 0);
    numbers("memory.expert_counts", m.expert_counts, Region::kExpertCounts, experts, 0);
    numbers("memory.expert_offsets", m.expert_offsets, Region::kExpertOffsets, experts + 1, 1);
    const bool of_block = shape_.range_format == abi::RangeFormat::kRows;  // else they count from there
    numbers("memory.source_ranges", m.source_ranges, Region::kSourceRanges, experts * shape_.num_ranks * 2,
            of_block ? shape_.num_ranks * 2 : 0);
  }

  void plan_combine() {
    const epd_memory_t& m = memory();
    copies_.received_in = 1;
    const bool lies_alike = copies_.blocks == 1 || copies_.own_block == copies_.region_block;
    // The device reads no more rows of layout compact than the routing has.
    const bool compact = shape_.layout == abi::Layout::kCompact;
    const std::uint64_t rows = compact ? copies_.room : shape_.recv_rows();
    const GroupMapped::Rows given{m.y, rows * shape_.hidden * 2, false};
    if (!place(given, lies_alike, rows_.memory.in, rows_.places.in))
      input("memory.y", m.y, Region::kY, Rows::kReceived);
    if (flagged(abi::kFlagWeights))
      input("memory.topk_weights", m.topk_weights, Region::kTopkWeights, Rows::kTokens);
    if (flagged(abi::kFlagReturnWeights)) {
      input("memory.y_weights", m.y_weights, Region::kYWeights, Rows::kReceived);
      output("memory.out_weights", m.out_weights, Region::kOutWeights, Rows::kTokens);
    }
    const std::uint32_t biases = abi::num_biases(request_.flags);
    if (biases > 0) input("memory.bias[0]", m.bias[0], Region::kBias0, Rows::kTokens);
    if (biases > 1) input("memory.bias[1]", m.bias[1], Region::kBias1, Rows::kTokens);
    if (!place_tokens(m.out, std::uint64_t{shape_.hidden} * 2, rows_.memory.out, rows_.places.out))
      output("memory.out", m.out, Region::kOut, Rows::kTokens);
  }

  // Whether rows lie in mapped memory. `known`: the device may read or write them there, as far as it is
  // known now how many and which there are.
  bool place(const GroupMapped::Rows& rows, bool known, const Allocation& in, abi::RowPlace& place) {
    if (rows.at == nullptr) return false;
    if (known) {
      place = group_.mapped.find(rows, in, rows_.memory.graph);
    } else {
      group_.mapped.count(abi::RowsAre::kUnknown);
    }
    return place != 0;
  }
  // A replayed call uses the routing that its record holds at the replay. If no call in a graph has made it,
  // it may be of another dispatch by then, with more tokens than the caller's rows. A copy keeps n.
  bool place_tokens(const void* rows, std::uint64_t row_bytes, const Allocation& in, abi::RowPlace& found) {
    const bool keeps_n = request_.handle == 0 || !rows_.captured ||
                         CallTicket::unpack(group_.routes[use_.route].ticket).captured();
    return place({rows, tokens_at_most() * row_bytes, false}, keeps_n, in, found);
  }
  std::uint64_t tokens_at_most() const {
    const bool given = request_.op == abi::Op::kDispatch && request_.handle == 0;
    if (given) return request_.num_tokens_at == nullptr ? request_.num_tokens : shape_.max_tokens;
    if (before_its_time()) return 0;
    const Route& route = group_.routes[use_.route];
    return route.tokens_known ? route.num_tokens : shape_.max_tokens;
  }

  // Null: there is nothing to copy.
  std::uint8_t* region_for(const char* name, const void* own, Region region, bool in_blocks) {
    if (own == nullptr || !status_.ok()) return nullptr;
    void* const place = region_bytes(shape_, region) != 0 ? group_.region(request_.slot, region) : nullptr;
    if (place == nullptr)
      status_ =
          invalid_argument(std::string(name) + " is given; allowed: NULL, " +
                           (group_.region(request_.slot, region) == nullptr
                                ? "the group has no such region"
                                : "row format " + std::to_string(request_.row_format) + " has no such rows"));
    const bool lies_there = own == place && (!in_blocks || copies_.own_block == copies_.region_block);
    return lies_there ? nullptr : static_cast<std::uint8_t*>(place);
  }

  void note(Rows counted) {
    received_ = received_ || counted == Rows::kReceived;
    tokens_ = tokens_ || counted == Rows::kTokens;
  }

  void input(const char* name, const void* own, Region region, Rows counted) {
    std::uint8_t* const to = region_for(name, own, region, counted == Rows::kReceived && copies_.blocks > 1);
    if (to == nullptr) return;
    copies_.in[copies_.num_in++] = {
        to, static_cast<const std::uint8_t*>(own), row_bytes_of(shape_, region), 0, 0, counted, 0, 0};
    note(counted);
  }

  void output(const char* name, void* own, Region region, Rows counted) {
    const std::uint8_t* const from =
        region_for(name, own, region, counted == Rows::kReceived && copies_.blocks > 1);
    if (from == nullptr) return;
    copies_.out[copies_.num_out++] = {
        static_cast<std::uint8_t*>(own), from, row_bytes_of(shape_, region), 0, 0, counted, 0, 0};
    note(counted);
  }

  void scales(void* own) {
    const std::uint32_t before = copies_.num_out;
    output("memory.recv_scales", own, Region::kRecvScales, Rows::kReceived);
    if (copies_.num_out == before || !shape_.scale_columns()) return;
    if (status_.ok()) status_ = check_numbers("memory.recv_scales", own);
    copies_.out[before].columns = static_cast<std::uint16_t>(shape_.scale_words());
  }

  // Rows that no token fills.
  void mark(void* own, Region region, std::uint8_t value) {
    if (region_for("", own, region, copies_.blocks > 1) == nullptr) return;
    copies_.out[copies_.num_out++] = {static_cast<std::uint8_t*>(own),
                                      nullptr,
                                      row_bytes_of(shape_, region),
                                      0,
                                      0,
                                      Rows::kUnused,
                                      value,
                                      0};
  }

  // `of_block`: as Piece::renumber, where the caller's blocks are not as far apart as the group's.
  void numbers(const char* name, std::int32_t* own, Region region, std::uint32_t count,
               std::uint32_t of_block) {
    const bool renumbers =
        of_block != 0 && copies_.own_block != copies_.region_block && shape_.layout == abi::Layout::kExpert;
    const std::uint8_t* const from = region_for(name, own, region, renumbers);
    if (from == nullptr) return;
    status_ = check_numbers(name, own);
    copies_.out[copies_.num_out++] = {
        reinterpret_cast<std::uint8_t*>(own), from, 4, count, renumbers ? of_block : 0, Rows::kGiven, 0, 0};
  }

  // ---- how many rows there are

  const std::int32_t* last_of(const std::int32_t* rank_offsets, const std::int32_t* expert_offsets,
                              const std::int32_t* expert_counts) const {
    switch (shape_.layout) {
      case abi::Layout::kCompact: return rank_offsets != nullptr ? rank_offsets + shape_.num_ranks : nullptr;
      case abi::Layout::kPacked:
        return expert_offsets != nullptr ? expert_offsets + shape_.experts_per_rank() : nullptr;
      case abi::Layout::kExpert: break;
    }
    return expert_counts;
  }
  const std::int32_t* counts_in(std::uint32_t slot) const {
    const auto at = [&](Region region) {
      return static_cast<const std::int32_t*>(group_.region(slot, region));
    };
    return last_of(at(Region::kRankOffsets), at(Region::kExpertOffsets), at(Region::kExpertCounts));
  }

  Status set_counts() {
    if (request_.op == abi::Op::kDispatch) {
      copies_.counts = counts_in(request_.slot);
      return {};
    }
    const epd_memory_t& m = memory();
    copies_.counts = last_of(m.rank_offsets, m.expert_offsets, m.expert_counts);
    if (copies_.counts != nullptr) return check_numbers("the counts of memory", copies_.counts);
    if (before_its_time()) {
      copies_.blocks = 0;
      return {};
    }
    const std::uint32_t slot = group_.slot_with_counts(use_.route, request_.slot);
    if (slot < shape_.depth) {
      copies_.counts = counts_in(slot);
      return {};
    }
    return invalid_argument(
        "memory.y is given, and no slot has the counts of handle " + std::to_string(request_.handle) +
        " any more: a later dispatch has replaced them, or the group has broken; allowed: memory." +
        (shape_.layout == abi::Layout::kCompact  ? "rank_offsets"
         : shape_.layout == abi::Layout::kPacked ? "expert_offsets"
                                                 : "expert_counts") +
        " as that dispatch delivered them");
  }

  Status set_tokens() {
    copies_.num_tokens = request_.num_tokens;
    copies_.num_tokens_at = request_.num_tokens_at;
    if (request_.handle == 0 || request_.num_tokens_at != nullptr || before_its_time()) return {};
    const Route& route = group_.routes[use_.route];
    const std::string handle = "handle " + std::to_string(request_.handle);
    if (!route.tokens_known) {
      if (request_.num_tokens != 0) return {};
      return invalid_argument(
          "num_tokens is 0, and libepd does not know the n of " + handle +
          ": its dispatch had num_tokens_at, or the group has resumed since; allowed with "
          "memory: n, in num_tokens or num_tokens_at");
    }
    copies_.num_tokens = route.num_tokens;
    if (request_.num_tokens == 0 || request_.num_tokens == route.num_tokens) return {};
    return bad_value("num_tokens", request_.num_tokens,
                     "0, or " + std::to_string(route.num_tokens) + " as in the dispatch of " + handle);
  }

  // A combine of a dispatch that ran before this rank joined: it sent nothing then, and received nothing.
  bool before_its_time() const {
    const Route& route = group_.routes[use_.route];
    return route.handle == 0 || request_.handle == 0;
  }

  Group& group_;
  const abi::GroupShape shape_;  // with the operation's row format alone
  const SubmitRequest& request_;
  const RouteUse& use_;
  RowPlan& rows_;
  Copies& copies_;
  Status status_;
  bool received_ = false;
  bool tokens_ = false;
};

// ---- copying

struct HostRows {
  std::uint32_t row = 0;  // in its block
  std::uint32_t count = 0;
};

// The rows of a piece in one block.
HostRows rows_of(const Copies& c, const Piece& piece, std::uint32_t block) {
  if (piece.counted == Rows::kGiven) return {0, piece.rows};
  if (piece.counted == Rows::kTokens) return {0, std::min(c.num_tokens, c.most_tokens)};
  const auto counted = static_cast<std::uint32_t>(c.counts[block]);
  if (counted > c.room && c.received_in == 0) return {};
  const std::uint32_t received = std::min(counted, c.room);
  return piece.counted == Rows::kReceived ? HostRows{0, received}
                                          : HostRows{received, c.own_block - received};
}

void copy_numbers(const Copies& c, const Piece& piece) {
  for (std::uint32_t i = 0; i < piece.rows; ++i) {
    std::uint32_t number = 0;
    std::memcpy(&number, piece.from + std::size_t{4} * i, 4);
    const bool of_row = piece.renumber == 1 || i % 2 == 0;
    if (of_row) number += i / piece.renumber * (c.own_block - c.region_block);
    std::memcpy(piece.to + std::size_t{4} * i, &number, 4);
  }
}

// Copies column-major scales out.
void copy_columns(const Copies& c, const Piece& piece, std::uint32_t block, const HostRows& rows) {
  for (std::uint32_t column = 0; column < piece.columns; ++column) {
    const std::uint64_t matrix = std::uint64_t{block} * piece.columns + column;
    const std::uint64_t to = matrix * column_rows(c.own_block) + rows.row;
    const std::uint64_t from = matrix * column_rows(c.region_block) + rows.row;
    std::memcpy(piece.to + to * 4, piece.from + from * 4, std::size_t{rows.count} * 4);
  }
}

void copy_piece(const Copies& c, const Piece& piece, bool in) {
  if (piece.renumber != 0) return copy_numbers(c, piece);
  const bool in_blocks = piece.counted == Rows::kReceived || piece.counted == Rows::kUnused;
  for (std::uint32_t block = 0; block < (in_blocks ? c.blocks : 1); ++block) {
    const HostRows rows = rows_of(c, piece, block);
    if (piece.columns != 0) {
      copy_columns(c, piece, block, rows);
      continue;
    }
    const std::uint64_t own = std::uint64_t{block} * c.own_block + rows.row;
    const std::uint64_t region = std::uint64_t{block} * c.region_block + rows.row;
    std::uint8_t* const to = piece.to + (in ? region : own) * piece.row_bytes;
    const std::size_t bytes = std::size_t{rows.count} * piece.row_bytes;
    if (piece.from == nullptr) {
      std::memset(to, piece.fill, bytes);
    } else {
      std::memcpy(to, piece.from + (in ? own : region) * piece.row_bytes, bytes);
    }
  }
}

}  // namespace

Status plan_copies(Group& group, const SubmitRequest& request, const RouteUse& use, RowPlan& rows,
                   Copies& out) {
  if (request.memory == nullptr) return {};
  return Planner(group, request, use, rows, out).plan();
}

NamedRows rows_named(const abi::GroupShape& shape, const SubmitRequest& request) {
  const epd_memory_t& m = *request.memory;
  const abi::GroupShape s = shape.with_format(request.row_format);
  const bool told = request.num_tokens != 0 && request.num_tokens_at == nullptr;
  const std::uint64_t tokens = told ? request.num_tokens : s.max_tokens;
  if (request.op == abi::Op::kDispatch)
    return {{m.x, tokens * s.x_bytes()}, {m.recv_x, region_bytes(s, Region::kRecvX)}};
  const bool fewer = s.layout == abi::Layout::kCompact && m.recv_rows != 0;
  const std::uint64_t received = fewer ? std::min<std::uint64_t>(m.recv_rows, s.recv_rows()) : s.recv_rows();
  return {{m.y, received * s.hidden * 2}, {m.out, tokens * s.hidden * 2}};
}

void copy_in(const Copies& copies) {
  for (std::uint32_t i = 0; i < copies.num_in; ++i) copy_piece(copies, copies.in[i], true);
}

void copy_out(const Copies& copies) {
  for (std::uint32_t i = 0; i < copies.num_out; ++i) copy_piece(copies, copies.out[i], false);
}

std::uint32_t room_for_rows(const Copies& copies) {
  const bool any = std::any_of(copies.out, copies.out + copies.num_out,
                               [](const Piece& piece) { return piece.counted == Rows::kReceived; });
  return any && copies.blocks == 1 ? copies.room : 0;
}

Status too_many_rows(std::uint32_t num_recv_rows, std::uint32_t room) {
  return {StatusCode::kResourceExhausted,
          "the dispatch brought " + std::to_string(num_recv_rows) + " rows, and memory.recv_rows is " +
              std::to_string(room) + ": nothing was copied but counts; the rows are in the slot's regions"};
}

}  // namespace epd::client
