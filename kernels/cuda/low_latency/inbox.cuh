// Inboxes of the low-latency path. A rank has an inbox with one slot for each (source, token). In dispatch, a
// row arrives in its slot and is then scattered to the places of its experts. In combine, a partial sum
// arrives in the slot.
#pragma once

#include "cuda/common/signal.cuh"

namespace epd::kernels::cuda {

// A published word: 16 bytes that carry the operation's tag and a value. One access delivers both, so a word
// needs no flag beside it.
struct PublishedWord {
  std::uint64_t tag;
  std::uint64_t value;
};
static_assert(sizeof(PublishedWord) == 16);

// Publishes or reads a word by one access of 16 bytes: both halves or neither.
__device__ inline void publish_word(PublishedWord* at, std::uint64_t tag, std::uint64_t value) {
  asm volatile(
      "{ .reg .b128 word;\n"
      "  mov.b128 word, {%1, %2};\n"
      "  st.relaxed.sys.global.b128 [%0], word; }" ::"l"(at),
      "l"(tag), "l"(value)
      : "memory");
}
__device__ inline PublishedWord read_word(const PublishedWord* at) {
  PublishedWord word;
  asm volatile(
      "{ .reg .b128 word;\n"
      "  ld.relaxed.sys.global.b128 word, [%2];\n"
      "  mov.b128 {%0, %1}, word; }"
      : "=l"(word.tag), "=l"(word.value)
      : "l"(at)
      : "memory");
  return word;
}

__device__ inline PublishedWord read_word_acquire(const PublishedWord* at) {
  PublishedWord word;
  asm volatile(
      "{ .reg .b128 word;\n"
      "  ld.acquire.sys.global.b128 word, [%2];\n"
      "  mov.b128 {%0, %1}, word; }"
      : "=l"(word.tag), "=l"(word.value)
      : "l"(at)
      : "memory");
  return word;
}

// Each of these functions finds a part of the inbox of rank `at`, for one source and one of its tokens.
__device__ inline std::size_t inbox_index(const Operation& op, std::uint32_t source, std::uint32_t token) {
  EPD_BELOW(source, op.shape.num_ranks);
  EPD_BELOW(token, op.inbox.max_tokens);
  return std::size_t{source} * op.inbox.max_tokens + token;
}
__device__ inline PublishedWord* begin_word(const Operation& op, std::uint32_t at, std::uint32_t source) {
  EPD_BELOW(at, op.shape.num_ranks);
  EPD_BELOW(source, op.shape.num_ranks);
  return reinterpret_cast<PublishedWord*>(op.peers[at].inbox + op.inbox.begin_messages + source * 64);
}
// Dispatch: the plan message of `source` at `rank`, division.plan.end words (abi::PlanWords).
__device__ inline PublishedWord* plan_words(const Operation& op, std::uint32_t rank, std::uint32_t source) {
  EPD_BELOW(rank, op.shape.num_ranks);
  EPD_BELOW(source, op.shape.num_ranks);
  return reinterpret_cast<PublishedWord*>(op.peers[rank].inbox + op.inbox.plans) +
         source * ((op.division.plan.end + 3) / 4 * 4);
}
// Dispatch: the rank whose experts the count word `place` is about, counted from counts_of(0).
__device__ inline std::uint32_t rank_of_count(const Operation& op, std::uint32_t place) {
  return place / op.shape.count_words_divisor;
}
// Combine: the requested words of a token, one for each of its choices.
__device__ inline PublishedWord* requested_words(const Operation& op, std::uint32_t at, std::uint32_t source,
                                                 std::uint32_t token) {
  EPD_BELOW(at, op.shape.num_ranks);
  return reinterpret_cast<PublishedWord*>(op.peers[at].inbox + op.inbox.requested) +
         inbox_index(op, source, token) * op.shape.topk;
}
__device__ inline std::uint64_t* inbox_tag(const Operation& op, std::uint32_t at, std::uint32_t source,
                                           std::uint32_t token, std::uint32_t piece) {
  EPD_BELOW(at, op.shape.num_ranks);
  EPD_BELOW(piece, abi::kInboxPieces);
  return reinterpret_cast<std::uint64_t*>(op.peers[at].inbox + op.inbox.tags) +
         inbox_index(op, source, token) * abi::kInboxPieces + piece;
}
__device__ inline std::uint8_t* inbox_slot(const Operation& op, std::uint32_t at, std::uint32_t source,
                                           std::uint32_t token) {
  EPD_BELOW(at, op.shape.num_ranks);
  EPD_AT_MOST(op.division.inbox_row.bytes, op.inbox.slot_bytes);
  return op.peers[at].inbox + op.inbox.slots + inbox_index(op, source, token) * op.inbox.slot_bytes;
}

// A CTA's warps share this during an operation of the low-latency path. All but the last two words are zero
// at the operation's begin.
struct CtaBoard {
  std::uint32_t tokens[kMaxRanks];  // number of tokens of each source, from the begin messages
  std::uint32_t rows_cast;          // rows of the CTA that are cast
  std::uint32_t cast_claimed;       // steps of the round's cast that warps have claimed
  std::uint32_t sent;               // warps that have sent all their rows or sums, released or not
  std::uint32_t claimed;            // rows in the inbox, or sums to be sent, that warps have claimed
  std::uint32_t local_claimed;      // local rows, or results of own tokens, that warps have claimed
  std::uint32_t placed;             // 0, kKnown: the places are known, or kFailed: the operation has failed
  std::uint32_t begins;             // 0, kKnown: `tokens` are known, or kFailed
  std::uint32_t invalidated;        // dispatch, CTA 0: whether the routing record is invalid
  std::uint32_t rows;               // dispatch: rows of the CTA (OwnRows)
  std::uint32_t first_local;        // dispatch: the first row of the CTA's last round
  static constexpr std::uint32_t kKnown = 1;
  static constexpr std::uint32_t kFailed = 2;
};

// Returns whether this rank must wait for the other ranks' begin messages before it writes to their inboxes.
// It need not wait if there are two inboxes or more in turn and the operation before has ended without an
// error. Then every other rank had begun the operation before, and so had left the operation before that.
// That one was the last to read the inbox.
__device__ inline bool must_wait_for_begins(const Operation& op) {
  return op.inbox.count == 1 || load_relaxed(&workspace(op).ended) + 1 != op.tag;
}

// Clears the board. The first threads of the CTA call; a barrier must follow.
__device__ inline void clear_board(CtaBoard& board) {
  constexpr std::uint32_t kWords = offsetof(CtaBoard, rows) / 4;
  if (threadIdx.x < kWords) reinterpret_cast<std::uint32_t*>(&board)[threadIdx.x] = 0;
}

// Claims the next item for the calling warp. Neighbouring items go to different SMs.
__device__ inline std::uint32_t claim(Cta cta, std::uint32_t& counter) {
  std::uint32_t next = 0;
  if (lane_of() == 0) next = count_shared(&counter);
  return cta.index + cta.count * __shfl_sync(kFull, next, 0);
}

// Sends the begin message to every rank, and announces the operation. One warp of CTA 0 calls. The first
// fence orders this rank's reads in the block, by the operation before, ahead of the message. Nobody needs it
// if nobody has to wait for the message, which is the same on all ranks. A fence takes 1.5 us.
__device__ inline void begin_and_announce(const Operation& op) {
  const std::uint32_t rank = lane_of();
  if (rank >= op.shape.num_ranks || !is_active(op, rank)) return;
  if (must_wait_for_begins(op)) fence_system();
  publish_word(begin_word(op, rank, op.rank), op.tag, op.num_tokens);
  write_announcement(op, rank);
  fence_system();
  signal_ready(op, rank);
}

// Waits for the begin messages of all ranks and stores their tokens on the board. One warp calls. Returns
// false if the operation has failed.
__device__ inline bool wait_begins(const Operation& op, CtaBoard& board, std::uint64_t deadline_ns) {
  PublishedWord word{};
  const bool active = ((active_ranks(op) >> lane_of()) & 1) != 0;
  const bool all = wait_until(op, lane_of(), active, deadline_ns, [&] {
    word = read_word_acquire(begin_word(op, op.rank, lane_of()));
    return word.tag >= op.tag;
  });
  if (!all) return false;
  board.tokens[lane_of()] = min(static_cast<std::uint32_t>(word.value), op.inbox.max_tokens);
  __syncwarp();
  return true;
}
// The same, and also publishes the result to the other warps of the CTA.
__device__ inline bool wait_begins_for_cta(const Operation& op, CtaBoard& board, std::uint64_t deadline_ns) {
  const bool good = wait_begins(op, board, deadline_ns);
  if (lane_of() == 0) {
    __threadfence_block();
    *static_cast<volatile std::uint32_t*>(&board.begins) = good ? CtaBoard::kKnown : CtaBoard::kFailed;
  }
  return good;
}
// Returns whether wait_begins_for_cta() has finished in this CTA.
__device__ inline bool knows_begins(const CtaBoard& board) {
  return static_cast<const volatile std::uint32_t&>(board.begins) != 0;
}
// Waits until wait_begins_for_cta() has finished in this CTA. Returns false if the operation has failed.
__device__ inline bool wait_board_begins(const CtaBoard& board) {
  while (!knows_begins(board)) {
  }
  __threadfence_block();
  __syncwarp();
  return board.begins == CtaBoard::kKnown;
}
// Waits for the begin messages with all warps but the last; warp 0 polls. Returns false if the operation has
// failed.
__device__ inline bool wait_begins_together(const Operation& op, CtaBoard& board, std::uint64_t deadline_ns) {
  return all_but_last().all(warp_of() != 0 || wait_begins(op, board, deadline_ns));
}

// Waits until the word `at` is published, for each lane with `mine`. Returns false if the operation has
// failed. All lanes of a warp call.
__device__ inline bool wait_published(const Operation& op, const PublishedWord* at, bool mine,
                                      std::uint32_t rank, std::uint64_t deadline_ns, std::uint64_t& value) {
  return wait_until(op, rank, mine, deadline_ns, [&] {
    const PublishedWord word = read_word(at);
    value = word.value;
    return word.tag == op.tag;
  });
}

// Counts the calling warp on the board, when it has sent all that it sends to other ranks. The receivers wait
// for the tags of what was sent, so it need not be released.
__device__ inline void count_sent(CtaBoard& board) {
  __syncwarp();
  if (lane_of() != 0) return;
  __threadfence_block();
  count_shared(&board.sent);
}

// Waits until `warps` warps of the CTA have sent all, then counts the CTA. The last CTA signals `arrived` to
// the other ranks. That store is no release: what this rank has sent has tags and releases of its own, and
// each of its reads was waited for. The signal warp of each CTA calls. Returns false if the operation has
// failed.
__device__ inline bool signal_others(const Operation& op, Cta cta, CtaBoard& board, std::uint32_t warps) {
  const volatile std::uint32_t& sent = board.sent;
#pragma unroll 1
  for (std::uint32_t polls = 1; __shfl_sync(kFull, sent, 0) != warps; ++polls) {
    if (polls % 64 != 0) continue;
    if (__any_sync(kFull, load_relaxed(&workspace(op).failed) == op.tag)) return false;
  }
  bool last = false;
  if (lane_of() == 0) {
    __threadfence_block();
    last = count_up(&workspace(op).sent, cta.count - 1) == cta.count - 1;
  }
  const std::uint32_t rank = lane_of();
  if (!__shfl_sync(kFull, last, 0)) return true;
  if (rank >= op.shape.num_ranks || rank == op.rank || !is_active(op, rank)) return true;
  store_relaxed_system(&op.peers[rank].arrived[op.rank].tag, op.tag);
  return true;
}

// The work of CTA 0's signal warp, after begin_and_announce(). It compares all announcements, and signals the
// other ranks when `warps` warps of its CTA have sent all. It ends when all other ranks have sent all to this
// rank. Returns false if the operation has failed.
__device__ inline bool run_signal_warp(const Operation& op, Cta cta, CtaBoard& board, std::uint32_t warps,
                                       std::uint64_t deadline_ns) {
  const Peer& own = op.peers[op.rank];
  const bool active = lane_of() < op.shape.num_ranks && is_active(op, lane_of());
  const std::uint32_t rank = active ? lane_of() : op.rank;
  if (!wait_words(op, &own.ready[rank].tag, active, rank, deadline_ns)) return false;
  if (__any_sync(kFull, active && !agrees(op, rank)) != 0) return false;
  if (!signal_others(op, cta, board, warps)) return false;
  return wait_until(op, rank, active && rank != op.rank, deadline_ns,
                    [&] { return load_acquire_system(&own.arrived[rank].tag) >= op.tag; });
}

}  // namespace epd::kernels::cuda
