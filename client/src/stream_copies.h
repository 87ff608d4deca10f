// Steps that copy. Of a FewStep, one block copies the inputs, and its thread 0 begins and waits.
//
// The other kind: what the blocks of one kernel do. They need not all run at the same time. Each takes
// parts of the inputs until none is left, and counts them as finished. Whoever counts the last one begins the
// operation. Then each waits for its end, and copies its share of the outputs.
//
// Memory ordering. The threads of a block have stored a part -> barrier -> the acquire and release of
// `finished` by thread 0 of each block -> the fence or release that begins the operation. Its end is acquired
// by thread 0 -> barrier -> the others load, past L1.
//
// The code is kept short: it is cold at each launch, and a kilobyte of it takes 0.2 to 0.5 us (H200). So
// loops are not unrolled, but one that needs several loads under way, and what is called twice is not
// inlined.
//
// A Block has index(), count(), thread(), threads(), sync() and shared(). A test plays blocks of one thread
// each, one after the other. See proto/ordered.h.
#pragma once

#include "stream_words.h"

namespace epd::stream_kernels {

// How a piece is shared out among the blocks of the kernel.
struct Share {
  std::uint32_t rows;   // of the piece
  std::uint32_t each;   // of a part
  std::uint32_t parts;  // of the piece
};

// Behind it: the sums of the threads, then the ends of the blocks of rows.
struct SharedWords {
  Share shares[kMostPiecesOut];
  std::uint32_t part;
  std::uint32_t* sums;  // [threads]
  std::uint32_t* ends;  // [Copies::blocks]: the rows received in this block and those before it
};

static_assert(sizeof(SharedWords) == kSharedWords && kMostPiecesIn <= kMostPiecesOut);

// How many rows there are of each kind.
struct Tally {
  std::uint32_t tokens = 0;
  std::uint32_t received = 0;
  std::uint32_t unused = 0;
};

EPD_DEVICE inline std::uint32_t least(std::uint32_t a, std::uint32_t b) {
  return a < b ? a : b;
}

// ---- counting

// The rows of a block, as far as there is space.
EPD_DEVICE inline std::uint32_t rows_in(const Copies& c, std::uint32_t block) {
  const std::uint32_t rows = load_here(reinterpret_cast<const std::uint32_t*>(c.counts) + block);
  return rows <= c.room ? rows : c.received_in != 0 ? c.room : 0;
}
EPD_DEVICE inline bool has_room(const Copies& c) {
  return c.blocks != 1 || load_here(reinterpret_cast<const std::uint32_t*>(c.counts)) <= c.room;
}

// Adds up the rows of all blocks. All threads call.
template <typename Block>
EPD_DEVICE inline void add_up(const Copies& c, const Block& block) {
  const SharedWords& shared = block.shared();
  const std::uint32_t each = (c.blocks + block.threads() - 1) / block.threads();
  const std::uint32_t first = least(block.thread() * each, c.blocks);
  const std::uint32_t last = least(first + each, c.blocks);
  std::uint32_t sum = 0;
  EPD_NO_UNROLL
  for (std::uint32_t i = first; i < last; ++i) {
    sum += rows_in(c, i);
    shared.ends[i] = sum;
  }
  shared.sums[block.thread()] = sum;
  block.sync();
  std::uint32_t before = 0;
  const std::uint32_t others = first < last ? block.thread() : 0;
  EPD_NO_UNROLL
  for (std::uint32_t i = 0; i < others; ++i) before += shared.sums[i];
  EPD_NO_UNROLL
  for (std::uint32_t i = first; i < last; ++i) shared.ends[i] += before;
  block.sync();
}

// All threads call. `received`: also of received rows, whose counts are known by now.
template <typename Block>
EPD_DEVICE inline Tally tally(const Copies& c, const Block& block, bool received) {
  Tally tally;
  const std::uint32_t n = c.num_tokens_at != nullptr ? load_relaxed_system(c.num_tokens_at) : c.num_tokens;
  tally.tokens = least(n, c.most_tokens);
  if (!received || c.counts == nullptr) return tally;
  add_up(c, block);
  tally.received = block.shared().ends[c.blocks - 1];
  tally.unused = c.received_in != 0 || has_room(c) ? c.blocks * c.own_block - tally.received : 0;
  return tally;
}

EPD_DEVICE inline std::uint32_t rows_of(const Piece& piece, const Tally& tally) {
  switch (piece.counted) {
    case Rows::kTokens: return tally.tokens;
    case Rows::kReceived: return tally.received;
    case Rows::kUnused: return tally.unused;
    case Rows::kGiven: break;
  }
  return piece.rows;
}

// ---- copying, by threads `who` of `all`

template <typename Word>
EPD_DEVICE inline void copy_by(std::uint8_t* to, const std::uint8_t* from, std::uint32_t bytes,
                               std::uint32_t who, std::uint32_t all) {
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  const std::uint32_t head = least(static_cast<std::uint32_t>(-address % sizeof(Word)), bytes);
  const std::uint32_t words = (bytes - head) / sizeof(Word);
  auto* const target = reinterpret_cast<Word*>(to + head);
  const auto* const source = reinterpret_cast<const Word*>(from + head);
  constexpr std::uint32_t kAtOnce = kLoadsAtOnce;
  EPD_NO_UNROLL
  for (std::uint32_t i = who; i < words; i += kAtOnce * all) {
    Word some[kAtOnce];
    // In place of words behind the last one, the first is copied again. Conditions take more registers.
    const auto place = [&](std::uint32_t k) { return i + k * all < words ? i + k * all : i; };
    for (std::uint32_t k = 0; k < kAtOnce; ++k) some[k] = load_alone(source + place(k));
    for (std::uint32_t k = 0; k < kAtOnce; ++k) store_alone(target + place(k), some[k]);
  }
  EPD_NO_UNROLL
  for (std::uint32_t i = who; i < head; i += all) store_alone(to + i, load_alone(from + i));
  EPD_NO_UNROLL
  for (std::uint32_t i = head + words * static_cast<std::uint32_t>(sizeof(Word)) + who; i < bytes; i += all)
    store_alone(to + i, load_alone(from + i));
}

// Copies by the largest words for which both addresses are aligned alike.
EPD_DEVICE inline void copy_bytes(std::uint8_t* to, const std::uint8_t* from, std::uint32_t bytes,
                                  std::uint32_t who, std::uint32_t all) {
  const auto apart = reinterpret_cast<std::uintptr_t>(to) ^ reinterpret_cast<std::uintptr_t>(from);
  if (apart % sizeof(Words) == 0) {
    copy_by<Words>(to, from, bytes, who, all);
  } else if (apart % 8 == 0) {
    copy_by<std::uint64_t>(to, from, bytes, who, all);
  } else if (apart % 4 == 0) {
    copy_by<std::uint32_t>(to, from, bytes, who, all);
  } else if (apart % 2 == 0) {
    copy_by<std::uint16_t>(to, from, bytes, who, all);
  } else {
    copy_by<std::uint8_t>(to, from, bytes, who, all);
  }
}

EPD_DEVICE EPD_NO_INLINE inline void fill_bytes(std::uint8_t* to, std::uint8_t value, std::uint32_t bytes,
                                                std::uint32_t who, std::uint32_t all) {
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  const std::uint32_t head = least(static_cast<std::uint32_t>(-address % 4), bytes);
  const std::uint32_t words = (bytes - head) / 4;
  EPD_NO_UNROLL
  for (std::uint32_t i = who; i < words; i += all)
    store_alone(reinterpret_cast<std::uint32_t*>(to + head) + i, value * 0x01010101u);
  EPD_NO_UNROLL
  for (std::uint32_t i = who; i < head; i += all) store_alone(to + i, value);
  EPD_NO_UNROLL
  for (std::uint32_t i = head + 4 * words + who; i < bytes; i += all) store_alone(to + i, value);
}

// Numbers of rows, as the caller's memory counts them.
EPD_DEVICE inline void copy_numbers(const Copies& c, const Piece& piece, std::uint32_t first,
                                    std::uint32_t last, std::uint32_t who, std::uint32_t all) {
  EPD_NO_UNROLL
  for (std::uint32_t i = first + who; i < last; i += all) {
    std::uint32_t number = load_alone(reinterpret_cast<const std::uint32_t*>(piece.from) + i);
    const bool of_row = piece.renumber == 1 || i % 2 == 0;
    if (of_row) number += i / piece.renumber * (c.own_block - c.region_block);
    store_alone(reinterpret_cast<std::uint32_t*>(piece.to) + i, number);
  }
}

// ---- parts

EPD_DEVICE inline bool in_blocks(const Copies& c, const Piece& piece) {
  return c.blocks > 1 && (piece.counted == Rows::kReceived || piece.counted == Rows::kUnused);
}

// Shares pieces out among the blocks, by what there is to copy. Returns how many parts there are. All threads
// call.
template <typename Block>
EPD_DEVICE EPD_NO_INLINE inline std::uint32_t share_out(const Copies& c, const Piece* pieces,
                                                        std::uint32_t count, const Tally& tally,
                                                        const Block& block) {
  constexpr std::uint32_t kMostRows = 256;  // of short blocks of rows, which other threads copy each
  constexpr std::uint32_t kUnit = 1024;     // bytes are counted in these: so no division is of 64 bits
  Share* const shares = block.shared().shares;
  std::uint64_t bytes = 0;
  EPD_NO_UNROLL
  for (std::uint32_t i = 0; i < count; ++i)
    bytes += std::uint64_t{rows_of(pieces[i], tally)} * pieces[i].row_bytes;
  const std::uint32_t units = static_cast<std::uint32_t>(bytes / kUnit) / (kPartsOfABlock * block.count());
  const std::uint32_t part = units < kLeastPart / kUnit ? kLeastPart : (units + 1) * kUnit;
  EPD_NO_UNROLL
  for (std::uint32_t i = block.thread(); i < count; i += block.threads()) {
    const Piece& piece = pieces[i];
    const std::uint32_t rows = rows_of(piece, tally);
    std::uint32_t each = piece.row_bytes < part ? part / piece.row_bytes : 1;
    if (in_blocks(c, piece)) each = least(each, kMostRows);
    shares[i] = {rows, each, rows / each + (rows % each != 0 ? 1u : 0u)};
  }
  block.sync();
  std::uint32_t parts = 0;
  EPD_NO_UNROLL
  for (std::uint32_t i = 0; i < count; ++i) parts += shares[i].parts;
  return parts;
}

// The rows of a piece that are in blocks before this one.
EPD_DEVICE inline std::uint32_t rows_before(const Copies& c, const Piece& piece, const std::uint32_t* ends,
                                            std::uint32_t block) {
  const std::uint32_t received = block == 0 ? 0 : ends[block - 1];
  return piece.counted == Rows::kReceived ? received : block * c.own_block - received;
}

// Copies `count` rows of column-major scales: outputs.
EPD_DEVICE EPD_NO_INLINE inline void copy_columns(const Copies& c, const Piece& piece, std::uint32_t block,
                                                  std::uint32_t row, std::uint32_t count, std::uint32_t who,
                                                  std::uint32_t all) {
  auto* const to = reinterpret_cast<std::uint32_t*>(piece.to);
  const auto* const from = reinterpret_cast<const std::uint32_t*>(piece.from);
  const std::uint64_t first = std::uint64_t{block} * piece.columns;
  EPD_NO_UNROLL
  for (std::uint32_t i = who; i < count * piece.columns; i += all) {
    const std::uint32_t column = i / count;
    const std::uint32_t at = row + (i - column * count);
    store_alone(to + (first + column) * column_rows(c.own_block) + at,
                load_alone(from + (first + column) * column_rows(c.region_block) + at));
  }
}

// Copies `count` rows that lie close together, from `row` of the block on.
EPD_DEVICE EPD_NO_INLINE inline void copy_rows(const Copies& c, const Piece& piece, bool in,
                                               std::uint32_t block, std::uint32_t row, std::uint32_t count,
                                               std::uint32_t who, std::uint32_t all) {
  if (piece.columns != 0) return copy_columns(c, piece, block, row, count, who, all);
  const std::uint64_t to_row = std::uint64_t{block} * (in ? c.region_block : c.own_block) + row;
  const std::uint64_t from_row = std::uint64_t{block} * (in ? c.own_block : c.region_block) + row;
  std::uint8_t* const to = piece.to + to_row * piece.row_bytes;
  const std::uint32_t bytes = count * piece.row_bytes;
  if (piece.from == nullptr) return fill_bytes(to, piece.fill, bytes, who, all);
  copy_bytes(to, piece.from + from_row * piece.row_bytes, bytes, who, all);
}

// Copies rows first .. last - 1 of a piece whose rows lie in blocks.
template <typename Block>
EPD_DEVICE inline void copy_blocks(const Copies& c, const Piece& piece, bool in, std::uint32_t first,
                                   std::uint32_t last, const Block& its) {
  const std::uint32_t* const ends = its.shared().ends;
  std::uint32_t block = 0;  // the last one before which there are no more rows than `first`
  EPD_NO_UNROLL
  for (std::uint32_t end = c.blocks; end - block > 1;) {
    const std::uint32_t middle = (block + end) / 2;
    (rows_before(c, piece, ends, middle) <= first ? block : end) = middle;
  }
  std::uint32_t who = its.thread();
  EPD_NO_UNROLL
  for (; first < last; ++block) {
    const std::uint32_t before = rows_before(c, piece, ends, block);
    const std::uint32_t end = rows_before(c, piece, ends, block + 1);
    if (first >= end) continue;
    const std::uint32_t received = ends[block] - (block == 0 ? 0 : ends[block - 1]);
    const std::uint32_t row = first - before + (piece.counted == Rows::kUnused ? received : 0);
    const std::uint32_t count = least(end, last) - first;
    copy_rows(c, piece, in, block, row, count, who, its.threads());
    first += count;
    who = (who + 32) % its.threads();  // the next one by other warps, at the same time
  }
}

// Copies one of the parts of share_out(). All threads call.
template <typename Block>
EPD_DEVICE EPD_NO_INLINE inline void copy_part(const Copies& c, bool in, const Tally& tally,
                                               std::uint32_t part, const Block& block) {
  const Piece* piece = in ? c.in : c.out;
  const Share* share = block.shared().shares;
  EPD_NO_UNROLL
  for (; part >= share->parts; ++piece, ++share) part -= share->parts;
  const std::uint32_t first = part * share->each;
  const std::uint32_t last = least(first + share->each, share->rows);
  if (in_blocks(c, *piece)) {
    copy_blocks(c, *piece, in, first, last, block);
  } else if (piece->renumber != 0) {
    copy_numbers(c, *piece, first, last, block.thread(), block.threads());
  } else {
    const std::uint32_t skipped = piece->counted == Rows::kUnused ? tally.received : 0;
    copy_rows(c, *piece, in, 0, skipped + first, last - first, block.thread(), block.threads());
  }
}

// ---- a few words

// All warps but the first copy; that one reads the step meanwhile. A test's block of one thread does both.
// All threads call.
template <typename Block>
EPD_DEVICE inline void run(const FewStep& step, const Block& block) {
  constexpr std::uint32_t kAtOnce = 4;
  const std::uint32_t first = block.threads() > kCallThreads ? kCallThreads : 0;
  const std::uint32_t all = block.threads() - first;
  if (block.thread() < first) {
    read_early(step.limit_ns);
  } else {
    EPD_NO_UNROLL
    for (std::uint32_t p = 0; p < kMostFewPieces; ++p) {
      const FewWords& piece = step.in[p];
      EPD_NO_UNROLL
      for (std::uint32_t i = block.thread() - first; i < piece.count; i += kAtOnce * all) {
        std::uint64_t some[kAtOnce];
        for (std::uint32_t k = 0; k < kAtOnce; ++k) {
          if (i + k * all < piece.count) some[k] = load_alone(piece.from + i + k * all);
        }
        for (std::uint32_t k = 0; k < kAtOnce; ++k) {
          if (i + k * all < piece.count) store_alone(piece.to + i + k * all, some[k]);
        }
      }
    }
  }
  block.sync();
  if (block.thread() == 0) run(static_cast<const Step&>(step));
}

// ---- the whole step

template <typename Block>
EPD_DEVICE inline void copy_in_and_begin(const StagedStep& step, const Block& block) {
  abi::StagingWords& words = *step.staging;
  const Copies& c = step.copies;
  // While a part is copied, the next one is being taken.
  std::uint32_t taken = 0;
  if (block.thread() == 0) taken = add(&words.taken, 1);
  const Tally rows = tally(c, block, c.received_in != 0);
  const std::uint32_t parts = share_out(c, c.in, c.num_in, rows, block);
  const std::uint32_t all = parts != 0 ? parts : 1;  // without any, whoever comes first begins
  std::uint32_t copied = 0;
  EPD_NO_UNROLL
  for (;; ++copied) {
    if (block.thread() == 0) block.shared().part = taken;
    block.sync();
    const std::uint32_t part = block.shared().part;
    if (part >= all) break;
    if (block.thread() == 0) taken = add(&words.taken, 1);
    if (part < parts) copy_part(c, true, rows, part, block);
    block.sync();
  }
  if (block.thread() != 0 || copied == 0 || count_in(&words.finished, copied) + copied != all) return;
  store_relaxed_system(&words.end, begin(step));
  store_release(&words.begun, 1);
}

// One thread calls.
EPD_DEVICE inline void await_end(const StagedStep& step) {
  const abi::StagingWords& words = *step.staging;
  std::uint32_t end = 0;
  if (step.calls) {
    // Another block is about to do so.
    const std::uint64_t since = nanoseconds();
    std::uint32_t looks = 0;
    EPD_NO_UNROLL
    while (load_acquire(&words.begun) == 0 && nanoseconds() - since < step.limit_ns) look_again(++looks);
    end = load_relaxed_system(&words.end);
  }
  await(step, end);
}

template <typename Block>
EPD_DEVICE inline void copy_out(const Copies& c, const Block& block) {
  const Tally rows = tally(c, block, c.received_in == 0);
  const std::uint32_t parts = share_out(c, c.out, c.num_out, rows, block);
  EPD_NO_UNROLL
  for (std::uint32_t part = block.index(); part < parts; part += block.count())
    copy_part(c, false, rows, part, block);
}

// All threads of all blocks call.
template <typename Block>
EPD_DEVICE inline void run(const StagedStep& step, const Block& block) {
  if (step.calls) copy_in_and_begin(step, block);
  if (step.wait != Wait::kNothing) {
    if (block.thread() == 0) await_end(step);
    block.sync();
  }
  if (step.copies.num_out != 0) copy_out(step.copies, block);
  block.sync();
  abi::StagingWords& words = *step.staging;
  if (block.thread() != 0 || count_up(&words.left, block.count() - 1) != block.count() - 1) return;
  store_relaxed_system(&words.taken, 0);
  store_relaxed_system(&words.finished, 0);
  store_relaxed_system(&words.begun, 0);
}

}  // namespace epd::stream_kernels
