// The copies that host devices make of memory of the caller's own: when inputs may go, when outputs are
// there.
#include "memory_ranks.h"

#include <sys/mman.h>

namespace epd::test::callers_memory {
namespace {

class HostCopies : public CallersMemory {
 protected:
  void SetUp() override {
    if (GetParam() != "host") GTEST_SKIP() << "of host devices";
    CallersMemory::SetUp();
  }
  Case one_rank() const {
    Case c;
    c.seed = base_seed() + 25000;
    c.num_ranks = 1;
    c.num_experts = 2;
    c.sizes = Sizes::kFull;
    return c;
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, HostCopies, testing::Values("host"),
                         [](const auto& tested) { return tested.param; });

// Memory that is gone faults when it is touched.
class Pages {
 public:
  explicit Pages(std::size_t bytes)
      : bytes_(bytes),
        at_(static_cast<std::byte*>(
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~Pages() { ::munmap(at_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* at() const { return at_; }

 private:
  const std::size_t bytes_;
  std::byte* const at_;
};

epd_ticket_t submit(const Group& group, const Case& c, const CallerMemory& mine, std::byte* at, Round round,
                    std::uint32_t slot) {
  const SlotImage image(c);
  std::vector<std::byte> slot_image(image.bytes());
  const Input input = make_input(c, 0, round);
  fill_dispatch(c, image.buffers(slot_image.data()), input);
  std::memset(at, kPoison, mine.bytes());
  for (const Region region : regions_in(kDispatchInputs, c)) mine.put(region, at, slot_image.data());
  const epd_memory_t memory = mine.memory(at);
  epd_dispatch_args_t args = dispatch_args(c, input.num_tokens);
  args.slot = slot;
  args.memory = &memory;
  epd_ticket_t ticket = 0;
  must(epd_dispatch(group.get(), &args, EPD_NO_STREAM, &ticket, nullptr), "dispatch");
  return ticket;
}

std::string received(const Case& c, const CallerMemory& mine, const std::byte* at, Round round,
                     const epd_result_t& result) {
  const SlotImage image(c);
  std::vector<std::byte> slot(image.bytes(), std::byte{kPoison});
  for (const Region region : regions_in(kDispatchOutputs, c)) mine.take(region, at, slot.data(), false);
  return check_dispatch(c, image.buffers(slot.data()), make_inputs(c, round), 0, result, nullptr);
}

TEST_P(HostCopies, InputsMayGoAtOnceAndOutputsWhenTheEndIsTaken) {
  const Case c = one_rank();
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t) {
    const CallerMemory inputs(c, kDispatchInputs, 8, 0, 5);
    const CallerMemory all(c, kAllRegions, 8, 0, 6);
    for (std::uint32_t i = 0; i < 20; ++i) {
      epd_ticket_t ticket = 0;
      {
        const Pages pages(inputs.bytes());
        ticket = submit(group, c, inputs, pages.at(), Round(i), 0);
      }
      must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "dispatch from memory that is gone");
      {
        const Pages pages(all.bytes());
        ticket = submit(group, c, all, pages.at(), Round(i), 0);
        if (i % 2 == 0) {
          epd_result_t result;
          epd_result_init(&result);
          must(epd_ticket_wait(group.get(), ticket, kWaitMs, &result), "dispatch");
          const std::string text = received(c, all, pages.at(), Round(i), result);
          RANK_CHECK(text.empty(), text);
        } else {
          must(epd_ticket_drop(group.get(), ticket), "drop");
        }
      }
      // A noop comes after everything else on the slot.
      const double until = now_s() + 30;
      while (epd_noop(group.get(), 0, EPD_NO_STREAM, &ticket) == EPD_WOULD_BLOCK && now_s() < until)
        sleep_ms(1);
      must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "noop");
    }
  });
}

TEST_P(HostCopies, OutputsAreSavedBeforeTheSlotIsUsedAgain) {
  const Case c = one_rank();
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t) {
    const CallerMemory mine(c, kAllRegions, 8, 0, 5);
    constexpr std::uint32_t kOps = 5;
    const Pages pages(mine.bytes() * kOps);
    epd_ticket_t tickets[kOps] = {};
    for (std::uint32_t i = 0; i < kOps; ++i) {
      tickets[i] = submit(group, c, mine, pages.at() + i * mine.bytes(), Round(i), 0);
      RANK_CHECK(eventually(30, [&] { return epd_ticket_pending(group.get(), tickets[i]) == 0; }), "no end");
    }
    for (std::uint32_t i = 0; i < kOps; ++i) {
      epd_result_t result;
      epd_result_init(&result);
      must(epd_ticket_wait(group.get(), tickets[i], kWaitMs, &result), "dispatch");
      const std::string text = received(c, mine, pages.at() + i * mine.bytes(), Round(i), result);
      RANK_CHECK(text.empty(), text);
    }
  });
}

TEST_P(HostCopies, AForkedChildCopiesNothing) {
  const Case c = one_rank();
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t) {
    const CallerMemory mine(c, kAllRegions, 8, 0, 5);
    const Pages pages(mine.bytes());
    const epd_ticket_t ticket = submit(group, c, mine, pages.at(), Round(0), 0);
    const std::vector<std::byte> before(pages.at(), pages.at() + mine.bytes());
    RankProcess child([&]() -> std::string {
      must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "wait in a child", EPD_INVALID_ARGUMENT);
      return std::equal(before.begin(), before.end(), pages.at()) ? "" : "the child copied";
    });
    const RankOutcome outcome = child.wait(30);
    RANK_CHECK(outcome.ok, outcome.to_string());
    must(epd_ticket_wait(group.get(), ticket, kWaitMs, nullptr), "dispatch");
  });
}

}  // namespace
}  // namespace epd::test::callers_memory
