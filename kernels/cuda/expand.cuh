// Dispatch through landings: a row crosses the wire once for each rank, before its places are known; the
// receiver works them out from everybody's plans and spreads the row over its experts' rows as it lands.
#pragma once

#include "cuda/dispatch.cuh"
#include "cuda/landed_plans.cuh"
#include "cuda/landed_row.cuh"
#include "cuda/own_choices.cuh"

namespace epd::kernels::cuda {

// One warp that moves rows: it sends those of this rank's tokens, then spreads what has landed. CTA 0 keeps
// the books and moves none, if there are others.
//
// Rows that are cast are so in pieces, each by another warp, since the time until the first row leaves
// counts; whoever ends a row sends it. All of x is loaded before anything is sent: a load would wait behind
// the SM's own stores. Stages of such rows belong to rows: a row that leaves, then its x, where later two
// rows land. Of others they belong to warps.
//
// Rows that no other follows in their stage are held: this rank takes them from there, without a landing.
class Carrier {
 public:
  __device__ Carrier(const Operation& op, Cta cta, const Shared& shared, const OwnChoices& own,
                     LandingBoard& board)
      : op_(op),
        format_(op.shape.format),
        own_(own),
        board_(board),
        shared_(shared),
        landed_(format_, op.shape.topk),
        warps_(op.movers.warps),
        cta_(cta.count == 1 ? cta : Cta{cta.index - 1, cta.count - 1}),
        moves_(warp_of() < warps_ && (cta.count == 1 || cta.index != 0)),
        row_(warp_of()) {
    if (moves_ && op.num_tokens > cta_.index) rows_ = rows_of(cta_.index);
  }
  __device__ bool moves() const { return moves_; }

  // What is sent first is on its way while choices are read.
  __device__ void begin() {
    if (!moves_) return;
    if (format_.cast) {
      load_round(0);
    } else {
      load_own();
    }
  }

  // Two rows at most are not released then.
  __device__ void send() {
    if (format_.cast) {
      cast_rows();
    } else {
      copy_rows();
    }
  }

  // Spreads rows, held ones and then landed ones, as warps get free. False: the operation has failed.
  __device__ bool spread(const LandedPlans& plans, std::uint64_t deadline_ns) {
    if (!wait_places()) return leave(false);
    spread_held(plans);
    count_sent(board_);
    const std::uint32_t ranks = op_.shape.num_ranks;
    const Cta cta{cta_.count - 1 - cta_.index, cta_.count};  // the first ones have more rows to send
    std::uint32_t most = 0;
#pragma unroll 1
    for (std::uint32_t s = 0; s < ranks; ++s) most = max(most, board_.tokens[s]);
#pragma unroll 1
    for (std::uint32_t i = claim(cta, board_.claimed); i < most * ranks; i = claim(cta, board_.claimed)) {
      const std::uint32_t token = multiply_high(i, op_.shape.ranks_reciprocal);
      std::uint32_t source = i - token * ranks + op_.rank;
      if (source >= ranks) source -= ranks;
      if (!plans.comes(source, token) || (source == op_.rank && is_held(token))) continue;
      const std::uint64_t* const tag = landed_tag(op_, op_.rank, source, token, 0);
      if (!wait_words<kManyPauseNs>(op_, tag, lane_of() == 0, source, deadline_ns)) return leave(false);
      spread_landed(plans, source, token);
    }
    return leave(true);
  }

  // After begin(), in place of send(). Nothing may be on its way into this CTA's memory when it leaves.
  __device__ void abandon() const {
    thread_loads_wait<0>(0);
  }

 private:
  using Section = ShortCastSection<5>;

  // ---- tokens of this rank
  __device__ std::uint32_t round_of(std::uint32_t token) const {
    return cta_.count == 1 ? token : multiply_high(token, op_.movers.carriers_reciprocal);
  }
  // That a CTA sends; one at least.
  __device__ std::uint32_t rows_of(std::uint32_t cta) const {
    return round_of(op_.num_tokens - cta - 1) + 1;
  }
  __device__ std::uint32_t token_of(std::uint32_t row) const {
    return cta_.index + cta_.count * row;
  }
  __device__ std::uint8_t* stage(std::uint32_t number) const {
    return shared_.stages + std::size_t{number} * op_.movers.stage_bytes;
  }
  // The first row that is held of a CTA that has so many.
  __device__ std::uint32_t first_held(std::uint32_t rows) const {
    if (!format_.cast) return rows - min(rows, warps_);
    if (rows <= op_.movers.stages) return 0;
    return multiply_high(rows - 1, op_.movers.stages_reciprocal) * op_.movers.stages;
  }
  __device__ bool is_held(std::uint32_t token) const {
    const std::uint32_t row = round_of(token);
    return row >= first_held(rows_of(token - row * cta_.count));
  }
  // What lands goes to the warp's own; and so does a row that is copied.
  __device__ std::uint8_t* own_stage() const {
    if (!format_.cast) return stage(warp_of());
    return stage(warp_of() / 2) + landed_.pitch * (1 + warp_of() % 2);
  }

  __device__ const std::uint8_t* x_of(std::uint32_t row) const {
    return static_cast<const std::uint8_t*>(op_.x) + std::size_t{token_of(row)} * format_.x_bytes;
  }
  __device__ void read_choices(std::uint32_t token) {
    choice_ = own_.read_lane(token);
    weight_ = 0.0f;
    if (op_.topk_weights != nullptr && lane_of() < op_.shape.topk)
      weight_ = __ldcg(op_.topk_weights + token * op_.shape.topk + lane_of());
  }
  // What comes with a row, behind it. Its weight at an expert is that of all choices of it.
  __device__ void write_choices(std::uint8_t* stage, std::uint32_t token) const {
    const std::uint32_t expert = own_.accepted(choice_, token);
    const float weight = sum_weights(op_.shape.topk, expert, weight_);
    const std::uint32_t same = __match_any_sync(kFull, expert);
    if (lane_of() >= op_.shape.topk) return;
    std::uint32_t number = LandedChoice::kNone;
    if (expert != kFull && (same & lanes_below()) == 0) number = own_.number(expert, token);
    reinterpret_cast<LandedChoice*>(stage + landed_.choices)[lane_of()] = LandedChoice::make(expert, number);
    reinterpret_cast<float*>(stage + landed_.weights)[lane_of()] = weight;
  }

  // In rounds of as many rows as there are stages. Each piece, and the choices, are a part of a row; the
  // choices are written by the warp whose number is the row's place.
  __device__ std::uint32_t pieces() const {
    return (format_.hidden / 128 + Section::kBlocks - 1) / Section::kBlocks;
  }
  // The warp's pieces of a round: who has choices to write begins last.
  template <typename Each>
  __device__ void each_piece(std::uint32_t count, Each each) const {
#pragma unroll 1
    for (std::uint32_t place = 0, piece = warps_ - 1 - warp_of();; piece += warps_) {
#pragma unroll 1
      for (; piece >= pieces(); piece -= pieces()) ++place;
      if (place >= count) return;
      each(place, piece * Section::kBlocks);
    }
  }
  __device__ std::uint32_t round_rows(std::uint32_t first) const {
    return first < rows_ ? min(op_.movers.stages, rows_ - first) : 0;
  }
  // x by who casts it.
  __device__ void load_round(std::uint32_t first) {
    const std::uint32_t blocks = format_.hidden / 128;
    each_piece(round_rows(first), [&](std::uint32_t place, std::uint32_t block) {
      lanes_load(stage(place) + landed_.pitch + block * 256, x_of(first + place) + block * 256,
                 min(Section::kBlocks, blocks - block) * 256);
    });
    thread_loads_commit();
    row_ = first + warp_of();
    if (warp_of() < round_rows(first)) read_choices(token_of(row_));
  }
  __device__ void cast_rows() {
    const std::uint32_t stages = op_.movers.stages;
#pragma unroll 1
    for (std::uint32_t first = 0; first < rows_; first += stages) {
      if (first != 0) {  // all rows of the round before have left
        sent_.release();
        Team{0, warps_, 2}.sync();
        load_round(first);
      }
      if (warp_of() < round_rows(first)) {
        write_choices(stage(warp_of()), token_of(row_));
        end_part(first, warp_of());
      }
      thread_loads_wait<0>(0);
      __syncwarp();
      each_piece(round_rows(first), [&](std::uint32_t place, std::uint32_t block) {
        cast_piece(place, block);
        end_part(first, place);
      });
    }
  }
  __device__ void cast_piece(std::uint32_t place, std::uint32_t first) const {
    const std::uint32_t blocks = format_.hidden / 128;
    std::uint8_t* const to = stage(place);
    Section::cast(format_, to + landed_.pitch, to, to + format_.row_bytes, first, blocks);
  }
  // Of row first + place. Who ends the last one sends it.
  __device__ void end_part(std::uint32_t first, std::uint32_t place) {
    fence_async_shared();
    __syncwarp();
    bool last = false;
    if (lane_of() == 0) {
      __threadfence_block();
      last = count_shared(&board_.ended[place]) == pieces();
      __threadfence_block();
      if (last) board_.ended[place] = 0;
      if (last) count_shared(&board_.rows_cast);
    }
    if (!__shfl_sync(kFull, last, 0)) return;
    sent_.send(op_, landed_, stage(place), token_of(first + place), first >= first_held(rows_));
  }

  // A row and its choices.
  __device__ void load_own() {
    if (row_ >= rows_) return;
    std::uint8_t* const to = own_stage();
    lanes_load(to, x_of(row_), format_.x_bytes);
    if (op_.x_scales != nullptr) load_scales(to + format_.row_bytes, token_of(row_));
    thread_loads_commit();
    read_choices(token_of(row_));
  }
  __device__ void load_scales(std::uint8_t* to, std::uint32_t token) const {
    const std::uint8_t* from =
        static_cast<const std::uint8_t*>(op_.x_scales) + std::size_t{token} * format_.scale_bytes;
    if (format_.scale_bytes % 16 == 0) return lanes_load(to, from, format_.scale_bytes);
#pragma unroll 1
    for (std::uint32_t i = lane_of(); i < format_.scale_bytes / 4; i += 32)
      reinterpret_cast<std::uint32_t*>(to)[i] = reinterpret_cast<const std::uint32_t*>(from)[i];
  }
  __device__ void copy_rows() {
    std::uint8_t* const row = own_stage();
#pragma unroll 1
    while (row_ < rows_) {
      write_choices(row, token_of(row_));
      thread_loads_wait<0>(0);
      fence_async_shared();
      __syncwarp();
      sent_.send(op_, landed_, row, token_of(row_), row_ >= first_held(rows_));
      if (row_ + warps_ >= rows_) return;
      row_ += warps_;
      stores_wait_read();
      __syncwarp();
      load_own();
      // More on their way would hold up each other: 512 rows of 14 KB took 330 us in place of 157.
      sent_.release();
    }
  }

  // ---- what has landed
  // And until no x lies any more where rows land.
  __device__ bool wait_places() const {
    const volatile LandingBoard& board = board_;
    while (board.placed == 0 || (format_.cast && board.rows_cast != rows_)) {
    }
    __threadfence_block();
    __syncwarp();
    return board.placed == LandingBoard::kKnown;
  }
  // And releases what is sent. A row that was cast is spread by any warp, first by those that have sent none. Who
  // has copied a row spreads it, and before it is acknowledged, unless few are on the wire.
  __device__ void spread_held(const LandedPlans& plans) {
    if (!format_.cast) {
      if (op_.num_tokens <= cta_.count) sent_.release();
      if (row_ < rows_) spread_staged(plans, own_stage(), op_.rank, token_of(row_));
      sent_.release<1>();
      return;
    }
    sent_.release();
    const std::uint32_t first = first_held(rows_);
    const Cta here{0, 1};
#pragma unroll 1
    for (std::uint32_t i = claim(here, board_.own_claimed); first + i < rows_; i = claim(here, board_.own_claimed))
      spread_staged(plans, stage(i), op_.rank, token_of(first + i));
  }
  // From its slot; the row before has left the warp's stage.
  __device__ void spread_landed(const LandedPlans& plans, std::uint32_t source, std::uint32_t token) const {
    stores_wait_read();
    __syncwarp();
    lanes_load(own_stage(), landing_slot(op_, op_.rank, source, token), landed_.bytes);
    thread_loads_commit();
    thread_loads_wait<0>(0);
    fence_async_shared();
    __syncwarp();
    spread_staged(plans, own_stage(), source, token);
  }
  // A row and what comes with it, to those of its places that are of this rank. A group of stores.
  __device__ void spread_staged(const LandedPlans& plans, std::uint8_t* row, std::uint32_t source,
                                std::uint32_t token) const {
    LandedChoice choice{kFull};
    float weight = 0.0f;
    if (lane_of() < op_.shape.topk) {
      choice = reinterpret_cast<const LandedChoice*>(row + landed_.choices)[lane_of()];
      weight = reinterpret_cast<const float*>(row + landed_.weights)[lane_of()];
    }
    const std::uint32_t local = plans.local(choice.expert());
    TokenChoice place;
    place.rank = op_.rank;
    if (local < experts_per_rank(op_.shape)) place.row = plans.row(local, source, choice.number());
    send_row(op_, shared_, StageLayout(format_, row), place);
    if (place.row < 0) return;
    const DispatchTarget& own = shared_.targets[op_.rank];
    store_index(op_, own.recv_topk_idx, place.row, static_cast<std::int32_t>(local));
    own.recv_topk_weights[place.row] = weight;
    reinterpret_cast<int2*>(own.recv_src)[place.row] = {static_cast<int>(source), static_cast<int>(token)};
  }
  __device__ bool leave(bool good) const {
    stores_wait_done();
    return good;
  }

  const Operation& op_;
  const RowFormat& format_;
  const OwnChoices& own_;
  LandingBoard& board_;
  const Shared& shared_;
  const LandedRow landed_;
  const std::uint32_t warps_;
  const Cta cta_;  // among those that move rows
  const bool moves_;
  std::uint32_t row_;         // that the warp has loaded, among the CTA's
  std::uint32_t rows_ = 0;    // that the CTA sends
  std::int64_t choice_ = -1;  // choice `lane` of the row, as given
  float weight_ = 0.0f;       // likewise
  SentRows sent_;
};

// The clerks' part of every CTA: places, from everybody's plans. False: failed.
__device__ inline bool find_places(const Shared& shared, const Team& clerks, const LandedPlans& plans,
                                   LandingBoard& board, std::uint64_t deadline_ns) {
  const bool good = plans.collect(clerks, deadline_ns) && plans.place(clerks, shared.ends);
  if (clerks.thread() == 0) {
    __threadfence_block();
    *static_cast<volatile std::uint32_t*>(&board.placed) =
        good ? LandingBoard::kKnown : LandingBoard::kNowhere;
  }
  return good;
}

// CTA 0: what a routing leaves for later operations, and the counts. False: failed.
__device__ inline bool keep_landing_books(const Operation& op, Cta cta, const Shared& shared,
                                          const Team& clerks, const OwnChoices& own,
                                          const LandedPlans& plans) {
  if (op.cached) {
    deliver_counts(op, clerks);
  } else {
    std::int32_t* const words = plans.placement_words(cta);
    if (!plans.place_own(clerks, shared.base)) return false;
    plans.write_placement(clerks, shared, words);
    deliver_words(op, clerks, words, op.routing.placement);
    own.write_rows(clerks, shared.base);
  }
  if (clerks.warp() == clerks.warps - 1) {
    const std::uint32_t rows = plans.num_rows(shared.ends);
    if (lane_of() == 0) workspace(op).rows = rows;
  }
  return true;
}

// All warps of a CTA but the last.
__device__ inline bool dispatch_landing(const Operation& op, Cta cta, const Shared& shared,
                                        LandingBoard& board, std::uint64_t deadline_ns) {
  const Team all = all_but_last();
  const Team fillers{op.movers.warps, herald_warp() - op.movers.warps};
  const Team clerks = cta.index == 0 && cta.count > 1 ? all : fillers;
  const OwnChoices own(op, shared);
  const LandedPlans plans(op, cta, shared, board);
  Carrier carrier(op, cta, shared, own, board);
  const OwnChoices::Batch first = own.load(all.thread(), all);
  carrier.begin();
  const bool asks = asks_before_landing(op);
  bool good = all.all(own.read(first, all, cta.index == 0));
  if (good && asks) good = greet_together(op, board, deadline_ns);
  if (!good) {
    carrier.abandon();
    return false;
  }
  if (carrier.moves()) {
    carrier.send();
    return carrier.spread(plans, deadline_ns);
  }
  if (cta.index == 0) own.tell_plan(clerks);
  if (!find_places(shared, clerks, plans, board, deadline_ns)) return false;
  if (cta.index == 0 && !keep_landing_books(op, cta, shared, clerks, own, plans)) return false;
  if (warp_of() >= op.movers.warps) fill_rows(op, cta, shared, fillers);
  return true;
}

// One CTA's part of a dispatch through landings.
__device__ __noinline__ inline void run_landing_dispatch(const Operation& op, Cta cta, std::uint8_t* memory) {
  __shared__ LandingBoard board;
  const std::uint64_t deadline_ns = nanoseconds() + op.timeout_ns;
  const Shared shared(op, memory);
  if (threadIdx.x < op.shape.num_ranks) shared.targets[threadIdx.x] = op.peers[threadIdx.x].target;
  clear_board(board);
  OwnChoices(op, shared).clear();
  __syncthreads();
  bool good = true;
  if (warp_of() != herald_warp()) {
    good = dispatch_landing(op, cta, shared, board, deadline_ns);
  } else if (cta.index == 0) {
    say_hello(op);
    good = herald(op, cta, board, cta.count > 1 ? 0 : op.movers.warps, deadline_ns);
  } else {
    good = tell_others(op, cta, board, op.movers.warps);
  }
  good = __syncthreads_or(!good) == 0;
  if (!good) return;
  const auto count_rows = [&op] { return __ldcg(&workspace(op).rows); };
  finish(op, cta, deadline_ns, count_rows, true);
}

// What the record held is overwritten from now on, by each CTA that does behind its own barrier; if the
// engine dies meanwhile, nobody may take it for a routing. All threads call.
__device__ inline void open_routing(const Operation& op) {
  if (op.routing.head == nullptr) return;
  if (threadIdx.x == 0) {
    *static_cast<volatile std::uint64_t*>(&op.routing.head->handle) = 0;
    fence_device();
  }
  __syncthreads();
}

// One CTA's part of a dispatch. `op` is the CTA's own copy.
__device__ inline void run_dispatch(const Operation& op, Cta cta, std::uint8_t* memory) {
  if (!lands(op) || cta.index == 0) open_routing(op);  // through landings nobody else writes it
  if (lands(op)) {
    run_landing_dispatch(op, cta, memory);
  } else {
    run_pushing_dispatch(op, cta, memory);
  }
}

}  // namespace epd::kernels::cuda
