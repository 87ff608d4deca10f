// Operations that name memory of the caller's own (epd_memory_t): results bit for bit, whatever regions are
// named, wherever they lie; and nothing else is written to.
#include "memory_ranks.h"

#include <algorithm>
#include <random>

namespace epd::test::callers_memory {
namespace {

INSTANTIATE_TEST_SUITE_P(Devices, CallersMemory, testing::Values("host", "cuda", "cuda_by_kernel"),
                         [](const auto& tested) { return tested.param; });

// ---- any case

// Regions that are named, rows of tokens, and room for received rows, all as the seed says.
CallerMemory random_memory(const Case& c, std::uint32_t rank, Round round, std::uint32_t rows,
                           std::mt19937_64& random, bool aligned = false) {
  const std::uint32_t tokens = make_input(c, rank, round).num_tokens;
  std::uint32_t named = random() % 3 == 0 ? kAllRegions : static_cast<std::uint32_t>(random());
  if (random() % 4 == 0) named &= kDispatchInputs | kCombineInputs;  // few bytes then, if rows are registered
  std::uint32_t room = 0;
  if (c.layout == EPD_LAYOUT_EXPERT) {
    const auto most = static_cast<std::uint32_t>(c.shape().expert_capacity());
    if (random() % 2 == 0) room = std::clamp(rows, 1u, most) + static_cast<std::uint32_t>(random() % 9);
  } else if (random() % 2 == 0) {
    room = std::max(1u, rows + static_cast<std::uint32_t>(random() % 3));
    room = std::min(room, static_cast<std::uint32_t>(c.shape().recv_rows()));
  }
  return {c.at(round), named, tokens, room, random(), aligned};
}

void run_rounds(const Group& group, const Case& c, std::uint32_t rank, bool on_host, std::uint64_t rounds = 3,
                Slab* slab = nullptr) {
  Rank self(group, c, rank, on_host, slab);
  const auto aligned = [&](std::uint64_t number) { return slab != nullptr && number % 3 != 2; };
  std::mt19937_64 random(c.seed * 100 + rank);
  for (std::uint64_t number = 0; number < rounds; ++number) {
    const Round first(number);
    const std::uint32_t rows = self.rows_of(first);
    // All ranks use the same slots.
    const auto slot = static_cast<std::uint32_t>(number % c.depth);
    const std::uint32_t other = (slot + 1) % c.depth;
    note(c.describe() + ", round " + std::to_string(number));
    const CallerMemory dispatched = random_memory(c, rank, first, rows, random, aligned(number));
    const Memory m = self.take(dispatched.bytes());
    epd_handle_t handle = 0;
    epd_result_t result = self.dispatch(dispatched, m, first, slot, handle, number == 1);
    must(result.status, "dispatch");
    self.check_dispatch(dispatched, m, first, result);
    const epd_memory_t counts = dispatched.memory(m.real);
    const epd_memory_t* const own_counts = random() % 2 == 0 ? &counts : nullptr;

    note("combine");
    const CallerMemory combined = random_memory(c, rank, first, rows, random, aligned(number));
    const Memory back = self.take(combined.bytes());
    self.combine(combined, back, first, number % 2 == 0 ? slot : other, handle, own_counts);
    self.check_combine(combined, back, first);

    note("dispatch under the handle");
    const Round again(number + 40, number);
    const CallerMemory under = random_memory(c, rank, again, rows, random, aligned(number));
    const Memory third = self.take(under.bytes());
    epd_handle_t same = handle;
    result = self.dispatch(under, third, again, other, same);
    must(result.status, "dispatch under a handle");
    self.check_dispatch(under, third, again, result);
    self.combine(combined, back, again, other, handle, nullptr);
    self.check_combine(combined, back, again);
    if (number == 1) must(epd_handle_release(group.get(), handle), "release");
  }
}

TEST_P(CallersMemory, AnyCaseIsBitExact) {
  for (std::uint64_t i = 0; i < cases_here(24); ++i) {
    const Case c = memory_case(21000 + i, 1 + i % 3);
    with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
      run_rounds(group, c, rank, on_host());
    });
    if (HasFailure()) return;
  }
}

// Streams copy these operations in larger parts, by more blocks, and wait by one thread.
TEST_P(CallersMemory, LargeOperationsToo) {
  for (const epd_layout_t layout : {EPD_LAYOUT_COMPACT, EPD_LAYOUT_EXPERT}) {
    const Case c = large_case(layout);
    with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
      run_rounds(group, c, rank, on_host(), 1);
    });
    if (HasFailure()) return;
  }
}

// ---- registered memory

TEST_P(CallersMemory, AnyCaseInRegisteredMemoryIsBitExact) {
  for (std::uint64_t i = 0; i < cases_here(24); ++i) {
    const Case c = memory_case(21200 + i, 1 + i % 3);
    const auto body = [&](const Session&, const Group& group, std::uint32_t rank, Slab* slab) {
      run_rounds(group, c, rank, on_host(), 3, slab);
    };
    with_registered(c, 24, body, kind_of(i / 3));
    if (HasFailure()) return;
  }
}

TEST_P(CallersMemory, LargeOperationsInRegisteredMemory) {
  for (const epd_layout_t layout : {EPD_LAYOUT_COMPACT, EPD_LAYOUT_EXPERT}) {
    const Case c = large_case(layout);
    with_registered(c, 10, [&](const Session&, const Group& group, std::uint32_t rank, Slab* slab) {
      run_rounds(group, c, rank, on_host(), 1, slab);
    });
    if (HasFailure()) return;
  }
}

// The slot's bytes in place of the rows stay there. Once the memory is not registered, the rows are copied.
TEST_P(CallersMemory, RowsInRegisteredMemoryAreNotCopied) {
  if (!by_calls()) GTEST_SKIP() << "only calls have places";
  for (std::uint64_t i = 0; i < 6; ++i) {
    Case c = memory_case(21300 + i, 2);
    c.max_recv_rows = 0;
    with_registered(c, 16, [&](const Session& session, const Group& group, std::uint32_t rank, Slab* slab) {
      Rank self(group, c, rank, on_host(), slab);
      const auto junk_in = [&](Region region) {
        const auto* const at = self.image().region(self.slot_memory().got, region);
        return std::all_of(at, at + abi::region_bytes(c.shape(), region),
                           [](std::byte b) { return b == std::byte{0x5a}; });
      };
      for (const bool registered : {true, false}) {
        const Round round(registered ? 1 : 2);
        const auto why = [&](const char* name) {
          return std::string(name) + (registered ? " is copied" : " is not copied") + ": " + c.describe();
        };
        const std::uint32_t tokens = make_input(c, rank, round).num_tokens;
        if (!registered) must(epd_memory_unregister(session.get(), slab->begin()), "unregister");
        const CallerMemory mine(c.at(round), kAllRegions, tokens, 0, 7, true);
        const Memory there = self.take(mine.bytes());
        const Memory back = self.take(mine.bytes());
        epd_handle_t handle = 0;
        epd_result_t result = self.dispatch(mine, there, round, 0, handle);
        must(result.status, "dispatch");
        RANK_CHECK(junk_in(Region::kX) == (registered || tokens == 0), why("x"));
        RANK_CHECK(!registered || junk_in(Region::kRecvX), why("recv_x"));
        self.check_dispatch(mine, there, round, result);
        self.combine(mine, back, round, 0, handle, nullptr);
        RANK_CHECK(!registered || junk_in(Region::kY), why("y"));
        RANK_CHECK(junk_in(Region::kOut) == (registered || tokens == 0), why("out"));
        self.check_combine(mine, back, round);
      }
      must(epd_memory_unregister(session.get(), slab->begin()), "unregister again", EPD_NOT_FOUND);
    });
    if (HasFailure()) return;
  }
}

// ---- graphs

// Dispatch and combine as one graph, whose number of tokens is read at each replay; y comes from another
// allocation than the rows.
void replay_rounds(const Group& group, const Case& of_group, std::uint32_t rank) {
  const Case c = of_group.at(Round(0));  // the row format of all its rounds
  Rank self(group, c, rank, false);
  const CallerMemory dispatched(c, kAllRegions, c.max_tokens, 0, c.seed);
  const CallerMemory combined(c, kAllRegions, c.max_tokens, 0, c.seed + 1);
  const Memory m = self.take(dispatched.bytes());
  const Memory back = self.take(combined.bytes());
  const Memory n = self.take(4);
  const epd_memory_t to_dispatch = dispatched.memory(m.real);
  const epd_memory_t to_combine = Rank::with_counts(combined.memory(back.real), &to_dispatch);
  GpuStream& stream = self.stream();
  const Round shape(0);  // of which the number of biases is that of all rounds

  stream.begin_capture();
  stream.copy_in(n.real, n.given, 4);
  stream.copy_in(m.real, m.given, dispatched.bytes());
  stream.copy_in(back.real, back.given, combined.bytes());
  epd_dispatch_args_t args = dispatch_args(c, 0);
  args.num_tokens_at = reinterpret_cast<const std::uint32_t*>(n.real);
  args.memory = &to_dispatch;
  epd_ticket_t tickets[2] = {};
  epd_handle_t handle = 0;
  must(epd_dispatch(group.get(), &args, stream.get(), &tickets[0], &handle), "captured dispatch");
  if (c.defer) must(epd_ticket_wait_on_stream(group.get(), tickets[0], stream.get()), "captured wait");
  epd_combine_args_t then = combine_args(c, shape);
  then.slot = 1;
  then.handle = handle;
  then.memory = &to_combine;
  then.num_tokens_at = args.num_tokens_at;
  must(epd_combine(group.get(), &then, stream.get(), &tickets[1]), "captured combine");
  if (c.defer) must(epd_ticket_wait_on_stream(group.get(), tickets[1], stream.get()), "captured wait");
  stream.copy_out(m.got, m.real, dispatched.bytes());
  stream.copy_out(back.got, back.real, combined.bytes());
  const GpuGraph graph = stream.end_capture();

  std::vector<std::byte> image(self.image().bytes());
  Memory slot{nullptr, image.data(), self.slot_memory().got};
  for (std::uint64_t number = 0; number < 6; ++number) {
    const Round round(number * 6, number);
    note("replay " + std::to_string(number));
    const Input input = make_input(c, rank, round);
    std::memcpy(n.given, &input.num_tokens, 4);
    test::fill_dispatch(c, self.image().buffers(image.data()), input);
    self.spread(dispatched, m, slot, kDispatchInputs, kDispatchOutputs);
    test::fill_combine(c, self.image().buffers(image.data()), rank, round, self.rows_of(round));
    self.spread(combined, back, slot, kCombineInputs, kCombineOutputs);
    stream.launch(graph);
    RANK_CHECK(stream.finish(60), "the stream waits");
    epd_result_t result;
    epd_result_init(&result);
    must(epd_ticket_wait(group.get(), tickets[0], kWaitMs, &result), "dispatch");
    self.check_dispatch(dispatched, m, round, result);
    must(epd_ticket_wait(group.get(), tickets[1], kWaitMs, &result), "combine");
    self.check_combine(combined, back, round);
  }
}

TEST_P(CallersMemory, AGraphIsReplayedWithWhatTheMemoryHoldsThen) {
  if (!by_calls()) GTEST_SKIP() << "graphs are for calls";
  for (std::uint64_t i = 0; i < 9; ++i) {
    Case c = memory_case(22000 + i, 2);
    c.layout = static_cast<epd_layout_t>(i % 3);
    c.max_recv_rows = 0;
    with_ranks(
        c, [&](const Session&, const Group& group, std::uint32_t rank) { replay_rounds(group, c, rank); });
    if (HasFailure()) return;
  }
}

// `out` has space for n rows. The dispatch that the combine is replayed for had more.
TEST_P(CallersMemory, AReplayedCombineWritesNoMoreRowsThanWhenItWasCaptured) {
  if (!by_calls()) GTEST_SKIP() << "graphs are for calls";
  constexpr std::uint32_t kFew = 2;
  for (const bool registered : {false, true}) {
    SCOPED_TRACE(registered ? "registered" : "not registered");
    Case c;
    c.seed = base_seed() + 22100;
    c.num_ranks = 1;
    c.num_experts = 2;
    c.kernel_waits = kernel_waits();
    with_registered(c, 4, [&](const Session&, const Group& group, std::uint32_t, Slab* slab) {
      const std::size_t row = std::size_t{c.hidden} * 2;
      const std::size_t bytes = c.max_tokens * row;
      const GpuStream stream(group.gpu());
      std::byte* const out = registered ? slab->take(bytes) : allocate_on_gpu(group.gpu(), bytes).address;
      std::byte* const seen = pinned_memory(group.gpu(), bytes);
      const auto dispatch = [&](std::uint32_t tokens) {
        const epd_dispatch_args_t args = dispatch_args(c, tokens);
        epd_ticket_t ticket = 0;
        epd_handle_t handle = 0;
        must(epd_dispatch(group.get(), &args, stream.get(), &ticket, &handle), "dispatch");
        RANK_CHECK(stream.finish(60), "the stream waits");
        must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "dispatch");
        return handle;
      };
      epd_memory_t memory;
      epd_memory_init(&memory);
      memory.out = out;
      epd_combine_args_t args = combine_args(c, Round(0));
      args.handle = dispatch(kFew);
      args.memory = &memory;
      epd_ticket_t ticket = 0;
      stream.begin_capture();
      must(epd_combine(group.get(), &args, stream.get(), &ticket), "captured combine");
      const GpuGraph graph = stream.end_capture();
      dispatch(c.max_tokens);
      std::memset(seen, kPoison, bytes);
      stream.copy_in(out, seen, bytes);
      stream.launch(graph);
      stream.copy_out(seen, out, bytes);
      RANK_CHECK(stream.finish(60), "the stream waits");
      const auto poisoned = [](std::byte b) { return b == std::byte{kPoison}; };
      RANK_CHECK(std::none_of(seen, seen + kFew * row, poisoned), "no rows");
      RANK_CHECK(std::all_of(seen + kFew * row, seen + bytes, poisoned), "more rows than there is room for");
    });
    if (HasFailure()) return;
  }
}

// ---- what goes wrong

TEST_P(CallersMemory, MoreRowsThanThereIsRoomForFailOnThisRankOnly) {
  for (const epd_layout_t layout : {EPD_LAYOUT_COMPACT, EPD_LAYOUT_PACKED}) {
    for (const bool marked : {false, true}) {
      Case c;
      c.seed = base_seed() + 23000;
      c.num_ranks = 2;
      c.num_experts = 4;
      c.max_tokens = 8;
      c.layout = layout;
      c.sizes = Sizes::kFull;
      c.mark_unused = marked;
      c.kernel_waits = kernel_waits();
      with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
        Rank self(group, c, rank, on_host());
        self.use_junk(kPoison);
        const Round round(3);
        const std::uint32_t rows = self.rows_of(round);
        RANK_CHECK(rows > 1, "too few rows for this test");
        const CallerMemory mine(c, kDispatchOutputs, 8, rank == 0 ? rows - 1 : rows, 5);
        const Memory m = self.take(mine.bytes());
        epd_handle_t handle = 0;
        epd_result_t result = self.dispatch(mine, m, round, 0, handle);
        RANK_CHECK(result.num_recv_rows == rows, "M is " + std::to_string(result.num_recv_rows));
        if (rank == 0) {
          must(result.status, "dispatch", EPD_RESOURCE_EXHAUSTED);
          // The rows are where they would be without memory; here are only counts.
          self.gather(mine, m, self.slot_memory(), kCountOutputs, false);
          const std::string text = check_dispatch(c, self.image().buffers(self.slot_memory().got),
                                                  make_inputs(c, round), rank, result, nullptr);
          RANK_CHECK(text.empty(), text);
        } else {
          must(result.status, "dispatch");
          self.check_dispatch(mine, m, round, result);
        }
        const CallerMemory none(c, 0, 8, 0, 6);
        const Memory nothing = self.take(none.bytes());
        self.combine(none, nothing, round, 0, handle, nullptr);
        self.check_combine(none, nothing, round);
      });
      if (HasFailure()) return;
    }
  }
}

// Layout expert: of an expert with more rows nothing is written, and the ticket ends well.
TEST_P(CallersMemory, ABlockWithTooLittleRoomStaysAsItIs) {
  Case c;
  c.seed = base_seed() + 23500;
  c.num_ranks = 2;
  c.num_experts = 4;
  c.layout = EPD_LAYOUT_EXPERT;
  c.sizes = Sizes::kFull;
  c.kernel_waits = kernel_waits();
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    Rank self(group, c, rank, on_host());
    for (std::uint32_t room = 1; room < c.shape().expert_capacity(); ++room) {
      const CallerMemory mine(c, kDispatchOutputs, c.max_tokens, room, room);
      const Memory m = self.take(mine.bytes());
      epd_handle_t handle = 0;
      must(self.dispatch(mine, m, Round(room), 0, handle).status, "dispatch");
      const std::string text = mine.changes(m.given, m.got, kDispatchOutputs);
      RANK_CHECK(text.empty(), text);
      const epd_memory_t got = mine.memory(m.got);
      const std::size_t row = std::size_t{c.hidden} * 2;
      for (std::uint32_t expert = 0; expert < c.shape().experts_per_rank(); ++expert) {
        const auto rows = static_cast<std::uint32_t>(got.expert_counts[expert]);
        const auto* const block = static_cast<const std::byte*>(got.recv_x) + expert * room * row;
        const auto written = static_cast<std::size_t>(
            std::count_if(block, block + room * row, [](std::byte b) { return b != std::byte{kPoison}; }));
        RANK_CHECK((written != 0) == (rows > 0 && rows <= room), std::to_string(rows) + " rows came");
      }
    }
  });
}

TEST_P(CallersMemory, ALostRankLeavesAllElseAlone) {
  Case c;
  c.seed = base_seed() + 24000;
  c.num_ranks = 2;
  c.sizes = Sizes::kFull;
  c.kernel_waits = kernel_waits();
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    if (rank == 1) {  // it leaves, most probably during the operation
      sleep_ms(200);
      return;
    }
    Rank self(group, c, rank, on_host());
    const CallerMemory mine(c, kAllRegions, 8, 0, 5);
    const Memory m = self.take(mine.bytes());
    epd_handle_t handle = 0;
    const epd_result_t result = self.dispatch(mine, m, Round(0), 0, handle);
    must(result.status, "dispatch", EPD_RANK_LOST);
    const std::string text = mine.changes(m.given, m.got, on_host() ? 0 : kDispatchOutputs);
    RANK_CHECK(text.empty(), text);
  });
}

}  // namespace
}  // namespace epd::test::callers_memory
