// Low-latency dispatch: a copy warp.
#pragma once

#include "cuda/common/cast.cuh"
#include "cuda/common/received.cuh"
#include "cuda/common/weights.cuh"
#include "cuda/low_latency/inbox_row.cuh"
#include "cuda/low_latency/own_rows.cuh"
#include "cuda/low_latency/plans.cuh"
#include "cuda/low_latency/selections.cuh"

namespace epd::kernels::cuda {

// One copy warp. It sends rows of this rank's tokens, then scatters received rows.
//
// Warps cast a round together, in steps that they claim. The round's rows are sent when all of them are cast.
class LowLatencySender {
 public:
  __device__ LowLatencySender(const Operation& op, const Shared& shared, const OwnChoices& own,
                              const OwnRows& rows, CtaBoard& board, std::uint64_t* x_arrived)
      : op_(op),
        format_(op.shape.format),
        own_(own),
        rows_(rows),
        board_(board),
        shared_(shared),
        x_arrived_(x_arrived),
        row_(warp_of()) {}

  // Starts the round that begins with row `first`. This part needs no sets of choices.
  __device__ void load(std::uint32_t first) {
    const bool mine = warp_of() < round_rows(first);
    if (mine) row_ = first + warp_of();
    if (first != 0 && format_.cast) begin_next_round(first);
    if (mine) read_choices(token_of(row_));
    if (mine && !format_.cast) load_copied(first);
  }
  // Sends the round's row, when the sets are complete, and advances `first` to the next round. The row is in
  // flight, not released. Returns whether this was the last round.
  __device__ bool send(std::uint32_t& first) {
    const bool mine = warp_of() < round_rows(first);
    if (mine) {
      add_weights();
      sent_.prepare(op_, write_choices(), token_of(row_), row_ >= rows_.first_local());
    }
    if (format_.cast && rows_.count() != 0) cast_round(first);
    if (mine) {
      thread_loads_wait<0>(0);
      if (!format_.cast) barrier_wait(x_arrived_, 0);
      fence_async_shared();
      __syncwarp();
      if (format_.cast && lane_of() == 0) count_shared(&board_.rows_cast);
      sent_.send(op_, stage(warp_of()));
    }
    first += rows_.most();
    return first >= rows_.count();
  }

  // Scatters rows as warps become free: local rows first, then rows from the inbox. Returns false if the
  // operation has failed. The code that scatters a row stands once, and is not cold when rows from the inbox
  // arrive.
  __device__ bool scatter(const ReceivedPlans& plans, std::uint64_t deadline_ns) {
    count_sent(board_);
    // Without a cast and with many rows in flight, the release waits until a local row is scattered.
    if (format_.cast || op_.num_tokens <= rows_.cta().count) sent_.release(op_);
    if (!wait_places()) return leave(false);
    const std::uint32_t ranks = op_.shape.num_ranks;
    // In reverse order, because the first CTAs have more rows to send.
    const Cta cta{rows_.cta().count - 1 - rows_.cta().index, rows_.cta().count};
    std::uint32_t most = 0;
#pragma unroll 1
    for (std::uint32_t s = 0; s < ranks; ++s) most = max(most, board_.tokens[s]);
    bool is_local = true;
    std::uint32_t item = next_local();  // a local row, then a row of the inbox
#pragma unroll 1
    while (true) {
      if (is_local && item == kFull) {
        is_local = false;
        sent_.release<1>(op_);
        item = claim(cta, board_.claimed);
      }
      if (!is_local && item >= most * ranks) return leave(true);
      std::uint32_t source = op_.rank;
      std::uint32_t token = 0;
      std::uint8_t* row = own_stage();
      if (is_local) {
        token = token_of(item);
        if (format_.cast) row = stage(item - rows_.first_local());
      } else {
        token = item / op_.shape.num_ranks_divisor;
        source += item - token * ranks;
        if (source >= ranks) source -= ranks;
        if (!plans.will_come(source, token) || (source == op_.rank && rows_.is_local(token))) {
          item = claim(cta, board_.claimed);
          continue;
        }
        const std::uint64_t* const tag = inbox_tag(op_, op_.rank, source, token, 0);
        if (!wait_words<kManyPauseNs>(op_, tag, lane_of() == 0, source, deadline_ns)) return leave(false);
        load_from_inbox(source, token);
      }
      scatter_staged(plans, row, source, token);
      item = is_local ? next_local() : claim(cta, board_.claimed);
    }
  }

  // Ends after load() without send(), when the operation has failed. No copy may be in flight to this CTA's
  // memory when it leaves.
  __device__ void abandon() const {
    thread_loads_wait<0>(0);
    if (rows_.count() != 0) barrier_wait(x_arrived_, 0);
  }

 private:
  // ---- sending rows of this rank's tokens
  __device__ std::uint32_t token_of(std::uint32_t row) const {
    return rows_.token_of(row);
  }
  __device__ std::uint8_t* stage(std::uint32_t number) const {
    return rows_.stage(number);
  }
  __device__ std::uint32_t round_rows(std::uint32_t first) const {
    return rows_.round_rows(first);
  }
  // The part of a stage that belongs to this warp: for rows from the inbox, and for rows without a cast.
  __device__ std::uint8_t* own_stage() const {
    if (!format_.cast) return stage(warp_of());
    EPD_AT_MOST(op_.division.inbox_pitch * (2 + warp_of() % 2), op_.division.stage_bytes);
    return stage(warp_of() / 2) + op_.division.inbox_pitch * (1 + warp_of() % 2);
  }

  __device__ void read_choices(std::uint32_t token) {
    EPD_BELOW(token, op_.num_tokens);
    choice_ = max(own_.read_lane(token), std::int64_t{-1});  // add_weights() compares 32 bits of it
    weight_ = 0.0f;
    if (op_.topk_weights != nullptr && lane_of() < op_.shape.topk)
      weight_ = __ldcg(op_.topk_weights + token * op_.shape.topk + lane_of());
  }
  // A row's weight at an expert is the sum of all choices of that expert.
  __device__ void add_weights() {
    const auto key = static_cast<std::uint32_t>(choice_);
    weight_ = sum_weights(op_.shape.topk, key, weight_);
    is_first_ = (__match_any_sync(kFull, key) & lanes_below()) == 0;
  }
  // Writes choices and weights after the row. Returns the expert of choice `lane`, or kFull.
  __device__ std::uint32_t write_choices() const {
    if (lane_of() >= op_.shape.topk) return kFull;
    std::uint8_t* const row = stage(warp_of());
    const std::uint32_t token = token_of(row_);
    const std::uint32_t expert = own_.accepted(choice_, token);
    std::uint32_t number = InboxChoice::kNone;
    if (expert != kFull && is_first_) number = own_.number(expert, token);
    EPD_AT_MOST(number, InboxChoice::kNone);
    const InboxChoice choice = InboxChoice::make(expert, number);
    reinterpret_cast<InboxChoice*>(row + op_.division.inbox_row.choices)[lane_of()] = choice;
    reinterpret_cast<float*>(row + op_.division.inbox_row.weights)[lane_of()] = weight_;
    return expert;
  }

  __device__ Team copy_team() const {
    return {0, op_.division.warps, NamedBarrier::kCopy};
  }
  // Loads x of a later round with a cast, when all rows of the round before have left.
  __device__ void begin_next_round(std::uint32_t first) {
    sent_.release(op_);  // all rows of the round before have left
    fence_async();
    copy_team().sync();
    if (warp_of() == 0) rows_.load_round(first, x_arrived_);
    if (threadIdx.x == 0) board_.cast_claimed = 0;
    copy_team().sync();
  }
  // Casts the round, in steps that the warps claim.
  __device__ void cast_round(std::uint32_t first) {
    const std::uint32_t all = round_rows(first) * op_.division.row_steps;
    const Cta here{0, 1};
    std::uint32_t next = claim(here, board_.cast_claimed);
    barrier_wait(x_arrived_, parity_);
    parity_ ^= 1;
#pragma unroll 1
    while (next < all) {
      const std::uint32_t place = next / op_.division.row_steps_divisor;
      const std::uint32_t step = next - place * op_.division.row_steps;
      EPD_BELOW(place, round_rows(first));
      EPD_BELOW(step, op_.division.row_steps);
      next = claim(here, board_.cast_claimed);
      std::uint8_t* const to = stage(place);
      cast_step(format_, to + op_.division.inbox_pitch, to, to + format_.row_bytes, step);
      if (format_.hidden % 128 != 0 && step + 1 == op_.division.row_steps)
        cast_last_block(format_, to + op_.division.inbox_pitch, to, to + format_.row_bytes);
    }
    fence_async_shared();
    copy_team().sync();
  }

  // Loads what lanes copy: scales that the client gives, and x of all rounds but the first.
  __device__ void load_copied(std::uint32_t first) {
    if (first != 0) {
      stores_wait_read();
      __syncwarp();
      if (format_.x_bytes % 16 == 0) {
        lanes_load(own_stage(), rows_.x_of(row_), format_.x_bytes);
      } else {
        lanes_load_eights(own_stage(), rows_.x_of(row_), format_.x_bytes);
      }
    }
    if (op_.x_scales != nullptr) load_given_scales();
    thread_loads_commit();
    // One row in flight for each warp. More rows slow each other down: 512 rows of 14 KB then took 330 us in
    // place of 157 us.
    if (first != 0) sent_.release(op_);
  }
  __device__ void load_given_scales() const {
    EPD_BELOW(token_of(row_), op_.num_tokens);
    std::uint8_t* const to = own_stage() + format_.row_bytes;
    const std::uint8_t* from =
        static_cast<const std::uint8_t*>(op_.x_scales) + std::size_t{token_of(row_)} * format_.scale_bytes;
    if ((format_.row_bytes | format_.scale_bytes) % 16 == 0) return lanes_load(to, from, format_.scale_bytes);
#pragma unroll 1
    for (std::uint32_t i = lane_of(); i < format_.scale_bytes / 4; i += 32)
      reinterpret_cast<std::uint32_t*>(to)[i] = reinterpret_cast<const std::uint32_t*>(from)[i];
  }

  // ---- scattering received rows
  // Waits until the places are known and no x lies in the part of a stage that receives rows.
  __device__ bool wait_places() const {
    const volatile CtaBoard& board = board_;
    while (board.placed == 0 || (format_.cast && board.rows_cast != rows_.count())) {
    }
    __threadfence_block();
    __syncwarp();
    return board.placed == CtaBoard::kKnown;
  }
  // Returns the next local row that the warp scatters, or kFull. With a cast, any warp scatters any local
  // row. Without a cast, a warp scatters the row that it has copied.
  __device__ std::uint32_t next_local() {
    std::uint32_t row = row_;
    row_ = kFull;
    if (format_.cast) row = rows_.first_local() + claim({0, 1}, board_.local_claimed);
    return row < rows_.count() ? row : kFull;
  }
  // Loads a row from its inbox slot, when the row before has left the warp's stage.
  __device__ void load_from_inbox(std::uint32_t source, std::uint32_t token) const {
    stores_wait_read();
    __syncwarp();
    lanes_load(own_stage(), inbox_slot(op_, op_.rank, source, token), op_.division.inbox_row.bytes);
    thread_loads_commit();
    thread_loads_wait<0>(0);
    fence_async_shared();
    __syncwarp();
  }
  // Scatters a staged row, with all that comes with it, to its places at this rank. The stores are one group.
  __device__ void scatter_staged(const ReceivedPlans& plans, std::uint8_t* row, std::uint32_t source,
                                 std::uint32_t token) const {
    InboxChoice choice{kFull};
    float weight = 0.0f;
    if (lane_of() < op_.shape.topk) {
      choice = reinterpret_cast<const InboxChoice*>(row + op_.division.inbox_row.choices)[lane_of()];
      weight = reinterpret_cast<const float*>(row + op_.division.inbox_row.weights)[lane_of()];
    }
    const std::uint32_t local = plans.local(choice.expert());
    std::int32_t place = -1;
    if (local < experts_per_rank(op_.shape)) place = plans.row(local, source, choice.number());
    EPD_BELOW_OR_NONE(place, op_.shape.recv_rows);
    const DispatchTarget& own = shared_.targets[op_.rank];
    const bool has = place >= 0;
    const std::size_t number = has ? static_cast<std::uint32_t>(place) : 0;
    auto* const x = static_cast<std::uint8_t*>(own.recv_x);
    if (format_.row_bytes % 16 == 0) {
      warp_store(x + number * format_.row_bytes, row, format_.row_bytes, has);
    } else {
      warp_store_eights(x + number * format_.row_bytes, row, format_.row_bytes, has);
    }
    stores_commit();
    if (format_.scale_pitch != 0) {
      scatter_scales<std::uint32_t>(own, row + format_.row_bytes, place, first_scale(format_, number),
                                    format_.scale_pitch);
    } else if ((format_.row_bytes | format_.scale_bytes) % 16 == 0) {
      scatter_scales<uint4>(own, row + format_.row_bytes, place, number * (format_.scale_bytes / 16), 1);
    } else {
      scatter_scales<std::uint32_t>(own, row + format_.row_bytes, place, number * (format_.scale_bytes / 4),
                                    1);
    }
    if (!has) return;
    store_index(op_, own.recv_topk_idx, place, static_cast<std::int32_t>(local));
    own.recv_topk_weights[place] = weight;
    reinterpret_cast<int2*>(own.recv_src)[place] = {static_cast<int>(source), static_cast<int>(token)};
  }
  // Copies a row's scales to the place of each lane that has one. There, the first unit goes to `first`, and
  // the next ones follow at `pitch`.
  template <typename Unit>
  __device__ void scatter_scales(const DispatchTarget& own, const std::uint8_t* scales, std::int32_t place,
                                 std::size_t first, std::uint32_t pitch) const {
    const std::uint32_t units = format_.scale_bytes / sizeof(Unit);
    const std::uint32_t places = __ballot_sync(kFull, place >= 0);
#pragma unroll 1
    for (std::uint32_t begin = 0; begin < units; begin += 32) {
      const std::uint32_t i = begin + lane_of();
      Unit unit{};
      if (i < units) unit = reinterpret_cast<const Unit*>(scales)[i];
      Unit* const to = static_cast<Unit*>(own.recv_scales) + std::size_t{i} * pitch;
#pragma unroll 1
      for (std::uint32_t left = places; left != 0; left &= left - 1) {
        const int lane = __ffs(static_cast<int>(left)) - 1;
        EPD_BELOW(__shfl_sync(kFull, place, lane), static_cast<std::int32_t>(op_.shape.recv_rows));
        const std::size_t row = __shfl_sync(kFull, first, lane);
        if (i < units) to[row] = unit;
      }
    }
  }
  __device__ bool leave(bool good) const {
    stores_wait_done();
    return good;
  }

  const Operation& op_;
  const RowFormat& format_;
  const OwnChoices& own_;
  const OwnRows& rows_;
  CtaBoard& board_;
  const Shared& shared_;
  std::uint64_t* const x_arrived_;
  std::uint32_t parity_ = 0;  // parity of the barrier for the round whose x comes next
  std::uint32_t row_;         // the CTA's row whose choices the warp has read last
  std::int64_t choice_ = -1;  // choice `lane` of the row, as the client gave it
  float weight_ = 0.0f;       // its weight; after add_weights() the sum for its expert
  bool is_first_ = false;     // whether it is the first choice of its expert
  SentRow sent_;
};

}  // namespace epd::kernels::cuda
