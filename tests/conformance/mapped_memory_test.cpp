// Rows lie where the caller's memory lies: the engines map what calls name again, whatever it is, and nothing
// that was freed is ever used.
#include "common/signal.h"
#include "memory_ranks.h"
#include "support/census.h"

#include <signal.h>
#include <unistd.h>
#include <algorithm>
#include <set>
#include <thread>

namespace epd::test::callers_memory {
namespace {

class MappedMemory : public CallersMemory {
 protected:
  Case mapped_case(std::uint64_t seed, std::uint32_t num_ranks) const {
    Case c = memory_case(seed, num_ranks);
    c.max_recv_rows = 0;
    c.sizes = Sizes::kFull;
    c.defer = false;
    return c;
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, MappedMemory, testing::Values("cuda", "cuda_by_kernel"),
                         [](const auto& tested) { return tested.param; });

// Whether the slot has what lay there before the operation in place of the region's rows.
bool is_untouched(const Rank& rank, const Case& c, Region region) {
  const auto* const at = rank.image().region(rank.slot_memory().got, region);
  return std::all_of(at, at + abi::region_bytes(c.shape(), region),
                     [](std::byte b) { return b == std::byte{0x5a}; });
}

struct Copied {
  bool dispatch = false;
  bool combine = false;
};

// A dispatch and a combine, checked, in memory of their own. Tells which of them copied rows.
Copied checked_round(Rank& self, const Case& c, std::uint32_t rank, std::uint64_t number, const Memory& there,
                     const Memory& back) {
  const Round round(number);
  const CallerMemory mine(c.at(round), kAllRegions, make_input(c, rank, round).num_tokens, 0, 7, true);
  epd_handle_t handle = 0;
  const epd_result_t result = self.dispatch(mine, there, round, 0, handle);
  must(result.status, "dispatch");
  Copied copied;
  copied.dispatch = !is_untouched(self, c, Region::kX);
  self.check_dispatch(mine, there, round, result);
  self.combine(mine, back, round, 0, handle, nullptr);
  copied.combine = !is_untouched(self, c, Region::kOut);
  self.check_combine(mine, back, round);
  return copied;
}

TEST_P(MappedMemory, WhatIsNamedAThirdTimeIsNotCopied) {
  for (std::uint64_t i = 0; i < 4; ++i) {
    Case c = mapped_case(24100 + i, 1 + i % 3);
    c.mark_unused = false;  // with zero_padding all rows would be written
    const auto body = [&](const Session&, const Group& group, std::uint32_t rank, Slab* slab) {
      Rank self(group, c, rank, false, slab);
      const std::size_t bytes = SlotImage(c).bytes() * 2;
      const Memory there = self.take(bytes);
      const Memory back = self.take(bytes);
      for (std::uint64_t number = 0; number < 4; ++number) {
        const Copied copied = checked_round(self, c, rank, number, there, back);
        const bool expected = number == 0;
        RANK_CHECK(copied.dispatch == expected && copied.combine == expected,
                   "round " + std::to_string(number) + (expected ? " copies" : " copies no") +
                       " rows: " + c.describe());
      }
    };
    with_registered(c, 10, body, Slab::kNotRegistered);
    if (HasFailure()) return;
  }
}

// Whether the second allocation lies where the first one did, which the fake driver sees to. On a GPU there
// is nothing to test then.
bool is_used_again(const std::byte* first, const std::byte* second) {
  const bool fake = memory_objects(::getpid()).contains("epd_fake_cuda_malloc");
  RANK_CHECK(first == second || !fake, "the address was not used again");
  return first == second;
}

// The address is the same, and the engines still have the memory that lay there before.
TEST_P(MappedMemory, WhatIsAllocatedAgainAtTheSameAddressIsOtherMemory) {
  for (const bool by_another_thread : {false, true}) {
    const Case c = mapped_case(24200, 2);
    const auto body = [&](const Session& session, const Group& group, std::uint32_t rank, Slab*) {
      std::byte* first = nullptr;
      for (std::uint64_t number = 0; number < 3; ++number) {
        std::unique_ptr<Slab> slab;
        const std::size_t bytes = SlotImage(c).bytes() * 8;
        const auto renew = [&] { slab = std::make_unique<Slab>(session, bytes, Slab::kNotRegistered); };
        by_another_thread ? std::thread(renew).join() : renew();
        if (first == nullptr) first = slab->begin();
        is_used_again(first, slab->begin());
        Rank self(group, c, rank, false, slab.get());
        const Memory there = self.take(SlotImage(c).bytes() * 2);
        const Memory back = self.take(SlotImage(c).bytes() * 2);
        for (std::uint64_t again = 0; again < 3; ++again)
          checked_round(self, c, rank, number * 3 + again, there, back);
        RANK_CHECK(self.stream().finish(60), "the stream waits");
      }
    };
    with_registered(c, 1, body, Slab::kNotRegistered);
    if (HasFailure()) return;
  }
}

// As in torch's expandable segments: rows lie in several allocations, which are freed and replaced where they
// are.
TEST_P(MappedMemory, RowsThatLieInSeveralPieces) {
  for (const epd_layout_t layout : {EPD_LAYOUT_COMPACT, EPD_LAYOUT_EXPERT}) {
    Case c = large_case(layout);
    c.defer = false;
    const auto body = [&](const Session&, const Group& group, std::uint32_t rank, Slab* slab) {
      Rank self(group, c, rank, false, slab);
      const Memory there = self.take(SlotImage(c).bytes() + 65536);
      const Memory back = self.take(SlotImage(c).bytes() + 65536);
      for (std::uint64_t number = 0; number < 6; ++number) {
        if (number == 3) {
          RANK_CHECK(self.stream().finish(60), "the stream waits");
          slab->renew();
        }
        const Copied copied = checked_round(self, c, rank, number, there, back);
        const bool expected = number % 3 != 2;
        RANK_CHECK(copied.dispatch == expected && copied.combine == expected,
                   "round " + std::to_string(number) + (expected ? " copies" : " copies no") +
                       " rows: " + c.describe());
      }
      RANK_CHECK(self.stream().finish(60), "the stream waits");
    };
    with_registered(c, 3, body, Slab::kOfPieces);
    if (HasFailure()) return;
  }
}

// A dispatch in a graph, whose rows lie in the memory.
class Captured {
 public:
  Captured(Rank& self, const Group& group, const Case& c, std::uint32_t rank, std::byte* memory)
      : self_(self),
        group_(group),
        case_(c),
        rank_(rank),
        mine_(c, kAllRegions, make_input(c, rank, Round(0)).num_tokens, 0, 7, true),
        memory_(self.take(mine_.bytes(), false)),
        graph_(capture(memory)) {}

  // Returns the ticket's status after a replay. The graph has the call alone: the driver does not expect that
  // the memory of a graph's copies is freed.
  epd_status_t replay() {
    self_.fill_dispatch(mine_, memory_, Round(0), false);
    self_.stream().copy_in(memory_.real, memory_.given, mine_.bytes());
    self_.stream().launch(graph_);
    self_.stream().copy_out(memory_.got, memory_.real, mine_.bytes());
    RANK_CHECK(self_.stream().finish(60), "the stream waits");
    epd_result_t result;
    epd_result_init(&result);
    const epd_status_t status = epd_ticket_wait(group_.get(), ticket_, kWaitMs, &result);
    if (status == EPD_OK) self_.check_dispatch(mine_, memory_, Round(0), result);
    return status;
  }
  std::size_t bytes() const { return mine_.bytes(); }

 private:
  GpuGraph capture(std::byte* memory) {
    memory_.real = memory;
    const epd_memory_t named = mine_.memory(memory);
    GpuStream& stream = self_.stream();
    stream.begin_capture();
    epd_dispatch_args_t args = dispatch_args(case_, make_input(case_, rank_, Round(0)).num_tokens);
    args.memory = &named;
    epd_handle_t handle = 0;
    must(epd_dispatch(group_.get(), &args, stream.get(), &ticket_, &handle), "captured dispatch");
    return stream.end_capture();
  }

  Rank& self_;
  const Group& group_;
  const Case case_;
  const std::uint32_t rank_;
  const CallerMemory mine_;
  Memory memory_;
  epd_ticket_t ticket_ = 0;
  const GpuGraph graph_;
};

// The next call that no graph captures reports it, and so does epd_group_check. From then on the graph fails,
// and what lies at the address stays as it is.
TEST_P(MappedMemory, AGraphWhoseMemoryWasFreedIsReportedAndFails) {
  for (const bool by_check : {false, true}) {
    const Case c = mapped_case(24300, 1).at(Round(0));
    const auto body = [&](const Session&, const Group& group, std::uint32_t rank, Slab*) {
      Rank self(group, c, rank, false);
      const std::size_t bytes = SlotImage(c).bytes() * 4;
      std::byte* const memory = malloc_on_gpu(group.gpu(), bytes);
      Captured captured(self, group, c, rank, memory);
      must(captured.replay(), "a replay");
      must(captured.replay(), "another");
      must(epd_group_check(group.get(), nullptr), "nothing is wrong");
      free_on_gpu(group.gpu(), memory);
      std::byte* const again = malloc_on_gpu(group.gpu(), bytes);
      if (!is_used_again(memory, again)) return;  // copies around the replay would fault
      epd_ticket_t ticket = 0;
      epd_handle_t handle = 0;
      const epd_dispatch_args_t args = dispatch_args(c, 0);
      const epd_status_t said = by_check
                                    ? epd_group_check(group.get(), nullptr)
                                    : epd_dispatch(group.get(), &args, self.stream().get(), &ticket, &handle);
      RANK_CHECK(said == EPD_INVALID_ARGUMENT &&
                     std::string(epd_last_error()).find("has been freed") != std::string::npos,
                 "said: " + std::string(epd_last_error()));
      must(captured.replay(), "a replay without its memory", EPD_NOT_FOUND);
      must(epd_group_resume(group.get(), kWaitMs, nullptr), "resume");
      must(epd_dispatch(group.get(), &args, self.stream().get(), &ticket, &handle), "the next call");
      RANK_CHECK(self.stream().finish(60), "the stream waits");
      must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "the next call");
      must(epd_group_check(group.get(), nullptr), "it was said once");
      free_on_gpu(group.gpu(), memory);
    };
    with_registered(c, 1, body, Slab::kNotRegistered);
    if (HasFailure()) return;
  }
}

// As torch's pools of graphs do it: the memory is freed right after its last graph.
TEST_P(MappedMemory, AGraphThatEndsBeforeItsMemoryIsNotReported) {
  const Case c = mapped_case(24310, 1).at(Round(0));
  const auto body = [&](const Session&, const Group& group, std::uint32_t rank, Slab*) {
    Rank self(group, c, rank, false);
    for (int i = 0; i < 4; ++i) {
      std::byte* const memory = malloc_on_gpu(group.gpu(), SlotImage(c).bytes() * 4);
      {
        Captured captured(self, group, c, rank, memory);
        must(captured.replay(), "a replay");
      }
      free_on_gpu(group.gpu(), memory);
      epd_ticket_t ticket = 0;
      epd_handle_t handle = 0;
      const epd_dispatch_args_t args = dispatch_args(c, 0);
      if (i % 2 == 0) must(epd_group_check(group.get(), nullptr), "nothing is wrong");
      must(epd_dispatch(group.get(), &args, self.stream().get(), &ticket, &handle), "the next call");
      RANK_CHECK(self.stream().finish(60), "the stream waits");
      must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "the next call");
    }
  };
  with_registered(c, 1, body, Slab::kNotRegistered);
}

// Its successor maps all again before the group continues.
TEST_P(MappedMemory, AGraphGoesOnWithAnotherEngine) {
  const Case c = mapped_case(24400, 1).at(Round(0));
  const auto body = [&](const Session&, const Group& group, std::uint32_t rank, Slab*) {
    Rank self(group, c, rank, false);
    std::byte* const memory = malloc_on_gpu(group.gpu(), SlotImage(c).bytes() * 4);
    Captured captured(self, group, c, rank, memory);
    must(captured.replay(), "a replay");
    send_signal(engine_of(rank), SIGKILL);
    RANK_CHECK(eventually(30, [&] { return epd_group_check(group.get(), nullptr) != EPD_OK; }), "no break");
    must(epd_group_resume(group.get(), kWaitMs, nullptr), "resume");
    must(captured.replay(), "a replay with the other engine");
    free_on_gpu(group.gpu(), memory);
  };
  with_registered(c, 1, body, Slab::kNotRegistered);
}

// Nobody says so, no call follows, and the group stays with kernels that wait for its calls: closing waits
// for those. Memory of groups before it may be closed meanwhile, so its own is looked for.
TEST_P(MappedMemory, WhatIsFreedIsClosedWhenTheDeviceIsIdle) {
  const Case c = mapped_case(24500, 1);
  const auto body = [&](const Session& session, const Group& group, std::uint32_t rank, Slab*) {
    const pid_t engine = engine_of(rank);
    Rank self(group, c, rank, false);
    const Memory there = self.take(SlotImage(c).bytes() * 2);
    const Memory back = self.take(SlotImage(c).bytes() * 2);
    for (std::uint64_t number = 0; number < 3; ++number) {
      const std::set<ino_t> others = memfds_of(::getpid());
      std::byte* const memory = malloc_on_gpu(group.gpu(), 4096);
      std::set<ino_t> its = memfds_of(::getpid());
      for (const ino_t other : others) its.erase(other);
      if (its.empty()) return free_on_gpu(group.gpu(), memory);  // a true driver
      const auto is_open = [&] { return memfds_of(engine).contains(*its.begin()); };
      must(epd_memory_register(session.get(), memory, 4096), "register");
      RANK_CHECK(is_open(), "it is not mapped");
      free_on_gpu(group.gpu(), memory);
      RANK_CHECK(eventually(30, [&] { return !is_open(); }), "it is still open");
      checked_round(self, c, rank, number, there, back);
    }
  };
  with_registered(c, 1, body, Slab::kNotRegistered);
}

TEST_P(MappedMemory, RangesThatCannotBeRegisteredAreRefused) {
  const Case c = mapped_case(24600, 1);
  const auto body = [&](const Session& session, const Group&, std::uint32_t, Slab* slab) {
    std::uint64_t on_host[4] = {};
    must(epd_memory_register(session.get(), on_host, 16), "memory of the host", EPD_INVALID_ARGUMENT);
    must(epd_memory_register(session.get(), slab->begin(), std::size_t{1} << 40), "too much",
         EPD_INVALID_ARGUMENT);
    must(epd_memory_register(session.get(), slab->begin() + 8, 16), "a place", EPD_INVALID_ARGUMENT);
  };
  with_registered(c, 1, body, Slab::kNotRegistered);
}

}  // namespace
}  // namespace epd::test::callers_memory
