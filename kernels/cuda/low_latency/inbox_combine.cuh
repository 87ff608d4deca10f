// Low-latency combine. The holder of a token's rows adds them up. One partial sum for each (token, rank)
// crosses NVLink to the token's owner, and the owner adds the partial sums up.
#pragma once

#include "cuda/common/routing.cuh"
#include "cuda/common/weights.cuh"
#include "cuda/low_latency/inbox.cuh"
#include "cuda/low_latency/summands.cuh"

namespace epd::kernels::cuda {

// The division of a sum into pieces, which warps add up one at a time. Pieces keep the work of warps even
// when some tokens have many rows.
struct SumPieces {
  std::uint32_t vectors;  // vectors of 16 bytes in a row
  std::uint32_t count;
  Divisor per_token_divisor;

  __device__ explicit SumPieces(const Operation& op)
      : vectors(op.shape.hidden / 8),
        count(num_pieces(op.shape.hidden)),
        per_token_divisor(op.division.pieces_divisor) {}
  __device__ std::uint32_t token_of(std::uint32_t i) const { return i / per_token_divisor; }
  __device__ Range range(std::uint32_t piece) const {
    return {piece * kSummedAtOnce, min((piece + 1) * kSummedAtOnce, vectors)};
  }
};

// The tokens of a warp are first_of_warp() and every step_of_warps()-th token after it. Neighbouring tokens
// go to different SMs.
__device__ inline std::uint32_t first_of_warp(const Operation& op) {
  return blockIdx.x + op.division.ctas * warp_of();
}
__device__ inline std::uint32_t step_of_warps(const Operation& op) {
  return op.division.ctas * op.division.warps;
}

// The row of choice `lane`: the holder's rank, and whether the token takes a row there. It takes none of
// weight 0. All lanes of a warp call.
struct TakenRow {
  std::uint32_t rank = kFull;
  bool takes = false;

  __device__ TakenRow(const Operation& op, const RawChoice& raw) {
    if (raw.expert >= 0) rank = rank_of_expert(op.shape, static_cast<std::uint32_t>(raw.expert));
    if (raw.row >= 0) EPD_BELOW(rank, op.shape.num_ranks);
    takes = raw.row >= 0 && op.peers[rank].source.y != nullptr;
    // Weights above 0 do not add up to 0. So their sums are needed here only beside others.
    if (op.topk_weights == nullptr || !__any_sync(kFull, raw.expert >= 0 && !(raw.weight > 0.0f))) return;
    const auto expert = static_cast<std::uint32_t>(raw.expert);
    takes = sum_weights(op.shape.topk, expert, raw.weight) != 0.0f && takes;
  }
};

// Publishes to every rank which of its rows the token takes, and their weights. An entry for a choice of
// another rank is kFull.
__device__ inline void request_sums(const Operation& op, std::uint32_t token, const RawChoice& raw) {
  const TakenRow taken(op, raw);
  float weight = 1.0f;
  if (op.topk_weights != nullptr)
    weight = sum_weights(op.shape.topk, static_cast<std::uint32_t>(raw.expert), raw.weight);
  if (lane_of() >= op.shape.topk) return;
  const std::uint64_t row =
      std::uint64_t{__float_as_uint(weight)} << 32 | static_cast<std::uint32_t>(raw.row);
  for (std::uint32_t d = 0; d < op.shape.num_ranks; ++d) {
    if (!is_active(op, d)) continue;
    publish_word(requested_words(op, d, op.rank, token) + lane_of(), op.tag,
                 taken.takes && taken.rank == d ? row : kFull);
  }
}

// One piece of this rank's partial sum for a token of `owner`.
struct SumTask {
  std::uint32_t owner = 0;
  std::uint32_t token = kFull;  // kFull: no task
  std::uint32_t piece = 0;
  PublishedWord word{};  // requested word of choice `lane`, as it was when the task was read

  // The requested word of choice `lane`.
  __device__ const PublishedWord* at(const Operation& op) const {
    return requested_words(op, op.rank, owner, token == kFull ? 0 : token) +
           min(lane_of(), op.shape.topk - 1);
  }
  // Returns whether the word was not published yet.
  __device__ bool is_late(const Operation& op) const {
    return token != kFull && lane_of() < op.shape.topk && word.tag != op.tag;
  }
  // Returns the requested value of choice `lane`: one of this rank's rows and its weight, or kFull for none.
  __device__ std::uint64_t row(const Operation& op) const {
    return token != kFull && lane_of() < op.shape.topk ? word.value : kFull;
  }
};

// All tasks of the rank, in the order in which warps claim them. First come some partial sums for own tokens,
// which need no other rank: one for every second warp. Then come the partial sums for other ranks, so that
// they cross NVLink while the rest of the own ones is added up. With an own sum for every warp, or for none,
// a combine of 128 tokens took 1 us more (2 x H200, 2026-11-28). Neighbouring tasks belong to
// different owners, which keeps the links to all ranks busy.
class SumTasks {
 public:
  __device__ SumTasks(const Operation& op, const CtaBoard& board)
      : op_(op),
        board_(board),
        pieces_(op),
        others_(op.shape.num_ranks - 1),
        other_ranks_divisor_(op.shape.other_ranks_divisor),
        own_(op.num_tokens * pieces_.count),
        first_(min(own_, op.division.ctas * op.division.warps / 2)) {}

  __device__ bool has(std::uint32_t i) const { return i < own_ + of_other_ranks_; }
  // Returns whether task i is known only after the begin messages have arrived.
  __device__ bool needs_begins(std::uint32_t i) const { return i >= first_ && !all_; }
  // Takes the other ranks' tokens from the board.
  __device__ void take_begins() {
    all_ = true;
    std::uint32_t most = 0;
#pragma unroll 1
    for (std::uint32_t s = 0; s < op_.shape.num_ranks; ++s)
      most = max(most, s == op_.rank ? 0 : board_.tokens[s]);
    of_other_ranks_ = most * pieces_.count * others_;
  }
  // Returns task i with its requested words as they are now.
  __device__ SumTask read_task(std::uint32_t i) const {
    SumTask task;
    if (!has(i)) return task;
    task.owner = op_.rank;
    const bool is_own = i < first_ || i >= first_ + of_other_ranks_;
    if (i >= first_) i -= is_own ? of_other_ranks_ : first_;
    std::uint32_t token = pieces_.token_of(i);
    task.piece = i - token * pieces_.count;
    if (!is_own) {
      const std::uint32_t other = token;
      token = other / other_ranks_divisor_;
      task.owner += 1 + other - token * others_;
      if (task.owner >= op_.shape.num_ranks) task.owner -= op_.shape.num_ranks;
      if (token >= board_.tokens[task.owner]) return task;
    }
    EPD_BELOW(task.owner, op_.shape.num_ranks);
    EPD_BELOW(task.piece, pieces_.count);
    task.token = token;
    if (lane_of() < op_.shape.topk) task.word = read_word(task.at(op_));
    return task;
  }
  __device__ Range range(const SumTask& task) const {
    return pieces_.range(task.piece);
  }

 private:
  const Operation& op_;
  const CtaBoard& board_;
  const SumPieces pieces_;
  const std::uint32_t others_;
  const Divisor other_ranks_divisor_;
  const std::uint32_t own_;
  const std::uint32_t first_;  // tasks of own tokens that come first
  std::uint32_t of_other_ranks_ = 0;
  bool all_ = false;
};

// Turns requested values into this rank's rows. A lane without a valid row has none.
__device__ inline Summands requested_rows(const Operation& op, std::uint64_t requested) {
  const std::uint16_t* const y = op.peers[op.rank].source.y;
  const auto row = static_cast<std::uint32_t>(requested);
  const bool holds = row < op.shape.recv_rows && row != kFull && y != nullptr;
  return {__ballot_sync(kFull, holds), reinterpret_cast<const std::uint8_t*>(y),
          std::size_t{op.shape.hidden} * 2, row,
          __uint_as_float(static_cast<std::uint32_t>(requested >> 32))};
}

// The shared address of the lane's vectors in the warp's stage. No other lane uses them.
__device__ inline std::uint32_t lane_stage(const Operation& op, const std::uint8_t* stages) {
  return shared_address(stages) + warp_of() * op.division.stage_bytes + lane_of() * 16;
}

// The sums that one warp forms. Each lane loads its own vectors of a row into the warp's stage, up to
// kSummedAhead rows ahead of the addition, also across the end of a sum. Rows and sums are numbered; lane n %
// 32 keeps the values of number n.
class SumStream {
 public:
  __device__ SumStream(const Operation& op, std::uint8_t* stages, CtaBoard& board)
      : op_(op), board_(board), stage_(lane_stage(op, stages)), tasks_(op, board) {}

  // Forms sums until no task is left. Returns false if the operation has failed.
  __device__ bool run(std::uint64_t deadline_ns) {
    EPD_AT_MOST(op_.division.shared_bytes, dynamic_shared_bytes());
    EPD_AT_MOST((warp_of() + 1) * op_.division.stage_bytes, op_.division.shared_bytes);
    deadline_ns_ = deadline_ns;
    next_i_ = claim(cta_of(op_), board_.claimed);
    prefetch_task();
#pragma unroll 1
    while (true) {
#pragma unroll 1
      while (has_room() && (left_ != 0 || begin_sum())) load_row();
      if (loaded_ == added_) break;
      add_sum();
    }
    release();
    return state_ != State::kFailed;
  }

 private:
  enum class State { kRunning, kDone, kFailed };
  // The number of sums that are released together: a release waits for all stores in flight.
  static constexpr std::uint32_t kReleased = 8;
  static_assert(kReleased + kSummedAhead <= 32);

  // Reads the next task early, while other work continues. A task of another rank needs that rank's begin
  // message first.
  __device__ void prefetch_task() {
    prefetched_ = !tasks_.needs_begins(next_i_);
    if (prefetched_) next_ = tasks_.read_task(next_i_);
  }
  // Begins the next sum that has rows. It waits for other ranks only if no rows are in flight. Returns false
  // if no sum can begin now.
  __device__ bool begin_sum() {
#pragma unroll 1
    while (state_ == State::kRunning) {
      if (!prefetched_) {
        if (loaded_ != added_ && !knows_begins(board_)) return false;
        if (!wait_board_begins(board_)) return end(State::kFailed);
        tasks_.take_begins();
        prefetch_task();
      }
      if (!tasks_.has(next_i_)) return end(State::kDone);
      const bool late = next_.is_late(op_);
      if (__any_sync(kFull, late)) {
        if (loaded_ != added_) {
          if (late) next_.word = read_word(next_.at(op_));
          return false;
        }
        release();
        if (!wait_published(op_, next_.at(op_), late, next_.owner, deadline_ns_, next_.word.value))
          return end(State::kFailed);
      }
      rows_ = requested_rows(op_, next_.row(op_));
      left_ = rows_.lanes;
      if (left_ != 0) describe_sum();
      next_i_ = claim(cta_of(op_), board_.claimed);
      prefetch_task();
      if (left_ != 0) return true;
    }
    return false;
  }
  __device__ bool end(State state) {
    state_ = state;
    return false;
  }
  // Notes the begun sum's destination, tag and size in the lane of its number.
  __device__ void describe_sum() {
    const Range range = tasks_.range(next_);
    const std::uint32_t vectors = range.end - range.begin;
    rows_.base += (range.begin + lane_of()) * 16;
    lacks_ = kSummedAtOnce - vectors;
    mine_ = vectors <= lane_of() ? 0 : (vectors - lane_of() + 31) / 32;
    EPD_AT_MOST(range.end * 16, min(op_.shape.hidden * 2, op_.inbox.slot_bytes));
    if (lane_of() == begun_ % 32) {
      to_ = inbox_slot(op_, next_.owner, op_.rank, next_.token) + range.begin * 16;
      tag_ = inbox_tag(op_, next_.owner, op_.rank, next_.token, next_.piece);
      size_ = vectors << 8 | static_cast<std::uint32_t>(__popc(left_));
    }
    ++begun_;
  }

  __device__ bool has_room() const {
    return loaded_ - added_ < kSummedAhead;
  }
  // Starts the loads of the next row of the begun sum.
  __device__ void load_row() {
    const int lane = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    const float weight = __shfl_sync(kFull, rows_.weight, lane);
    if (lane_of() == loaded_ % 32) weight_ = weight;
    EPD_BELOW(__shfl_sync(kFull, rows_.row, lane), op_.shape.recv_rows);
    EPD_BELOW(load_at_, kSummedAhead);
    const std::uint8_t* const from = rows_.base + __shfl_sync(kFull, rows_.row, lane) * rows_.pitch;
    const std::uint32_t to = stage_ + load_at_ * (kSummedAtOnce * 16);
    if (lacks_ == 0) {
      load_vectors(to, from, kSummedVectors);
    } else {
      load_vectors(to, from, mine_);
    }
    thread_loads_commit();
    advance(load_at_);
    ++loaded_;
  }
  // Adds up and stores the oldest sum. Rows of the sum that was begun last are loaded as there is space. No
  // other sum begins here: its registers would drive the sums out of registers.
  __device__ void add_sum() {
    const auto lane = static_cast<int>(summed_ % 32);
    const std::uint32_t size = __shfl_sync(kFull, size_, lane);
    auto* const to =
        reinterpret_cast<uint4*>(__shfl_sync(kFull, reinterpret_cast<std::uintptr_t>(to_), lane)) + lane_of();
    Eight sums[kSummedVectors];
#pragma unroll
    for (Eight& sum : sums) sum.clear();
#pragma unroll 1
    for (std::uint32_t rows = size & 0xff; rows != 0; --rows) {
      if (has_room() && left_ != 0) load_row();
      thread_loads_wait<kSummedAhead - 1>(loaded_ - added_ - 1);
      const float weight = __shfl_sync(kFull, weight_, static_cast<int>(added_ % 32));
      EPD_BELOW(add_at_, kSummedAhead);
      const std::uint32_t from = stage_ + add_at_ * (kSummedAtOnce * 16);
#pragma unroll
      for (std::uint32_t i = 0; i < kSummedVectors; ++i) sums[i].add(load_shared(from + i * 512), weight);
      advance(add_at_);
      ++added_;
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kSummedVectors; ++i) {
      if (lane_of() + i * 32 < size >> 8) to[i * 32] = sums[i].rounded();
    }
    ++summed_;
    if (summed_ - released_ == kReleased) release();
  }
  // Releases the tags of all stored sums.
  __device__ void release() {
    __syncwarp();
    if (((lane_of() - released_) & 31) < summed_ - released_) store_release_system(tag_, op_.tag);
    released_ = summed_;
  }
  __device__ static void advance(std::uint32_t& slot) {
    if (++slot == kSummedAhead) slot = 0;
  }

  const Operation& op_;
  CtaBoard& board_;
  const std::uint32_t stage_;  // shared address of the lane's vectors
  SumTasks tasks_;
  std::uint64_t deadline_ns_ = 0;
  State state_ = State::kRunning;
  // The next task.
  std::uint32_t next_i_ = 0;
  bool prefetched_ = false;
  SumTask next_;
  // The sum whose rows are being loaded.
  Summands rows_{};          // from the lane's first vector on
  std::uint32_t left_ = 0;   // set of lanes whose rows are not loaded yet
  std::uint32_t lacks_ = 0;  // vectors that a row lacks to a whole piece
  std::uint32_t mine_ = 0;   // vectors of a row that the lane has
  // Counters of rows.
  std::uint32_t load_at_ = 0;
  std::uint32_t add_at_ = 0;
  std::uint32_t loaded_ = 0;
  std::uint32_t added_ = 0;
  float weight_ = 0.0f;  // weight of the row that the lane keeps
  // Counters of sums.
  std::uint32_t begun_ = 0;
  std::uint32_t summed_ = 0;
  std::uint32_t released_ = 0;
  std::uint32_t size_ = 0;  // of the sum that the lane keeps: vectors << 8 | rows
  std::uint8_t* to_ = nullptr;
  std::uint64_t* tag_ = nullptr;
};

// Adds up one piece of the result of an own token: the biases, then the partial sums in the inbox in order of
// rank. Returns false if the operation has failed.
__device__ inline bool add_own_piece(const Operation& op, std::uint32_t stage, std::uint32_t token,
                                     std::uint32_t piece, Range vectors, const RawChoice& raw,
                                     std::uint64_t deadline_ns) {
  EPD_BELOW(token, op.num_tokens);
  EPD_AT_MOST(vectors.end * 16, min(op.shape.hidden * 2, op.inbox.slot_bytes));
  const TakenRow taken(op, raw);
  const std::uint32_t ranks = __reduce_or_sync(kFull, taken.takes ? 1u << taken.rank : 0u);
  const bool mine = ((ranks >> lane_of()) & 1) != 0;
  const std::uint32_t from = mine ? lane_of() : op.rank;
  if (!wait_words<kManyPauseNs>(op, inbox_tag(op, op.rank, from, token, piece), mine, from, deadline_ns))
    return false;
  const std::uint32_t first = vectors.begin + lane_of();
  const std::uint32_t count = first < vectors.end ? (vectors.end - first + 31) / 32 : 0;
  const std::size_t row = std::size_t{token} * op.shape.hidden;
  const std::uint32_t biases = (op.bias[0] != nullptr ? 1 : 0) + (op.bias[1] != nullptr ? 1 : 0);
  const std::uint8_t* const slots = inbox_slot(op, op.rank, 0, token) + first * 16;
  std::uint32_t left = 0;
  const auto address = [&](std::uint32_t r) {
    if (r < biases) {
      const std::uint16_t* const bias = op.bias[op.bias[0] != nullptr ? r : 1];
      return reinterpret_cast<const std::uint8_t*>(bias + row) + first * 16;
    }
    if (r == biases) left = ranks;
    const auto source = static_cast<std::uint32_t>(__ffs(static_cast<int>(left)) - 1);
    left &= left - 1;
    return slots + std::size_t{source} * op.inbox.max_tokens * op.inbox.slot_bytes;
  };
  auto* const out = reinterpret_cast<uint4*>(op.out + row) + first;
  add_staged(stage, biases + __popc(ranks), min(count, kSummedVectors), address,
             [out](std::uint32_t i, uint4 v) { out[i * 32] = with_canonical_nans(v); });
  return true;
}

// Writes out_weights of all own tokens.
__device__ inline void return_all_weights(const Operation& op) {
  for (std::uint32_t token = first_of_warp(op); token < op.num_tokens; token += step_of_warps(op)) {
    const RawChoice raw = load_raw(op, token);
    PulledRow pulled;
    pulled.rank = TakenRow(op, raw).rank;
    return_weights<true>(op, token, raw, pulled);
  }
}

// Adds up the results of own tokens, as warps become free. Returns false if the operation has failed.
__device__ inline bool add_own(const Operation& op, const std::uint8_t* stages, CtaBoard& board,
                               std::uint64_t deadline_ns) {
  const std::uint32_t stage = lane_stage(op, stages);
  const SumPieces pieces(op);
  const std::uint32_t end = op.num_tokens * pieces.count;
  std::uint32_t i = claim(cta_of(op), board.local_claimed);
  RawChoice raw = load_raw(op, pieces.token_of(i));
#pragma unroll 1
  while (i < end) {
    const std::uint32_t next = claim(cta_of(op), board.local_claimed);
    const RawChoice next_raw = load_raw(op, pieces.token_of(next));
    const std::uint32_t token = pieces.token_of(i);
    const std::uint32_t piece = i - token * pieces.count;
    if (!add_own_piece(op, stage, token, piece, pieces.range(piece), raw, deadline_ns)) return false;
    i = next;
    raw = next_raw;
  }
  return true;
}

// The work of the copy warps. Returns false if the operation has failed.
__device__ inline bool combine_by_inbox(const Operation& op, std::uint8_t* stages, CtaBoard& board,
                                        std::uint64_t deadline_ns) {
  // The words of the operation before in the same inbox have been read: each reader kept that operation from
  // ending until it had read them.
  for (std::uint32_t token = first_of_warp(op); token < op.num_tokens; token += step_of_warps(op))
    request_sums(op, token, load_raw(op, token));
  if (!SumStream(op, stages, board).run(deadline_ns)) return false;
  if (op.out_weights != nullptr) return_all_weights(op);
  count_sent(board);
  return add_own(op, stages, board, deadline_ns);
}

// Runs one CTA's part of a low-latency combine.
__device__ __noinline__ inline void run_low_latency_combine(const Operation& op, std::uint8_t* memory) {
  __shared__ CtaBoard board;
  const std::uint64_t deadline_ns = nanoseconds() + op.timeout_ns;
  clear_board(board);
  __syncthreads();
  bool good = true;
  if (warp_of() < op.division.warps) {
    good = combine_by_inbox(op, memory, board, deadline_ns);
  } else if (warp_of() == signal_warp()) {
    if (blockIdx.x == 0) begin_and_announce(op);
    good = wait_begins_for_cta(op, board, deadline_ns);
    if (good && blockIdx.x == 0) {
      good = run_signal_warp(op, cta_of(op), board, op.division.warps, deadline_ns);
    } else if (good) {
      good = signal_others(op, cta_of(op), board, op.division.warps);
    }
  }
  if (__syncthreads_or(!good) != 0) return;
  finish<true>(
      op, cta_of(op), deadline_ns, [] { return 0u; }, true);
}

}  // namespace epd::kernels::cuda
