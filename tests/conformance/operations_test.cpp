// Every device must do the same: results, order, depth, completion. failures_test.cpp tests ranks that
// disagree or do not come.
#include "conformance.h"

#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

namespace epd::test {
namespace {

class Operations : public Conformance {};
INSTANTIATE_TEST_SUITE_P(Devices, Operations,
                         testing::ValuesIn(kinds_here({{"host", "cuda", "cuda_in_streams"}, {}})),
                         [](const auto& tested) { return tested.param; });

Case small_case(std::uint32_t num_ranks, std::uint32_t depth = 2) {
  Case c;
  c.seed = base_seed();
  c.num_ranks = num_ranks;
  c.num_experts = num_ranks * 2;
  c.max_tokens = 8;
  c.topk = 3;
  c.depth = depth;
  c.sizes = Sizes::kFull;
  return c;
}

// ---- results -----------------------------------------------------------------------------------

TEST_P(Operations, ExtremeShapesAndRoutings) {
  struct Extreme {
    const char* what;
    Case test_case;
    std::function<void(Case&)> change;
    std::uint32_t rounds = ScriptOptions().rounds;
  };
  const auto long_rows = [](epd_payload_t payload) {
    return [payload](Case& c) {
      c.hidden = 7168, c.num_experts = 256, c.topk = 8, c.max_tokens = 9;
      c.payload = payload;
    };
  };
  const Extreme extremes[] = {
      {"nothing is selected anywhere", small_case(3), [](Case& c) { c.routing = Routing::kNothing; }},
      {"no tokens on any rank", small_case(4), [](Case& c) { c.sizes = Sizes::kAllEmpty; }},
      {"no tokens on some ranks", small_case(5), [](Case& c) { c.sizes = Sizes::kSomeEmpty; }, 8},
      {"all tokens to one expert fill the buffer", small_case(4),
       [](Case& c) { c.max_tokens = 33, c.routing = Routing::kOneExpert; }},
      {"most choices and one expert per rank", small_case(4),
       [](Case& c) { c.num_experts = 4, c.topk = 32, c.max_tokens = 7, c.index64 = true; }},
      {"many experts per rank", small_case(2), [](Case& c) { c.num_experts = 4096, c.topk = 8; }},
      {"long rows", small_case(4), long_rows(EPD_PAYLOAD_BF16)},
      {"long rows of FP8", small_case(4), long_rows(EPD_PAYLOAD_FP8_CAST)},
      {"one token, one rank, one expert", small_case(1, 1),
       [](Case& c) { c.num_experts = 1, c.max_tokens = 1, c.topk = 1; }},
      {"blocks larger than one chunk of work", small_case(2),
       [](Case& c) { c.hidden = 4096, c.max_tokens = 301, c.sizes = Sizes::kUneven; }, 3},
  };
  for (const Extreme& extreme : extremes) {
    SCOPED_TRACE(extreme.what);
    Case c = extreme.test_case;
    extreme.change(c);
    ScriptOptions options;
    options.rounds = extreme.rounds;
    run_script(c, options);
  }
}

TEST_P(Operations, SameInputsGiveSameBytes) {
  Case c = small_case(3, 4);
  c.payload = EPD_PAYLOAD_FP8_CAST;
  c.sizes = Sizes::kUneven;
  std::vector<std::string> first;
  for (const std::uint32_t sms : {1u, 2u, 3u}) {
    const std::string name = group_name();
    const auto outcomes = run_ranks(c.num_ranks, 60, [&](std::uint32_t rank) -> std::string {
      const Session session = session_of(rank);
      epd_group_config_t config = c.config(name.c_str(), rank);
      config.sms = sms;
      const Group group(session, config);
      ScriptOptions options;
      options.rounds = 8;
      options.order = Order::kInTurn;  // so that digests come in one order
      std::string text;
      for (const std::uint64_t digest : ScriptRunner(group, c, rank, options).run().digests)
        text += std::to_string(digest) + " ";
      return text;
    });
    expect_all_ok(outcomes);
    for (std::uint32_t rank = 0; rank < c.num_ranks; ++rank) {
      if (sms == 1) {
        first.push_back(outcomes[rank].text);
      } else {
        EXPECT_EQ(outcomes[rank].text, first[rank]) << "rank " << rank << " with " << sms << " SMs";
      }
    }
  }
}

// ---- many operations ---------------------------------------------------------------------------

TEST_P(Operations, ManyInARowOnAllSlots) {
  for (const Order order : {Order::kInTurn, Order::kWindows, Order::kStaggered}) {
    Case c = small_case(4, 4);
    c.sizes = Sizes::kUneven;
    ScriptOptions options;
    options.rounds = 100;
    options.order = order;
    run_script(c, options);
  }
}

TEST_P(Operations, DeepestGroup) {
  Case c = small_case(2, 16);
  ScriptOptions options;
  options.rounds = 48;
  run_script(c, options);
}

TEST_P(Operations, TwoGroupsOnTheSameSessionsAtOnce) {
  Case first = small_case(4, 2);
  Case second = small_case(4, 3);
  second.seed += 100;
  second.payload = EPD_PAYLOAD_FP8_CAST;
  second.hidden = 512;
  const std::string names[2] = {group_name(), group_name()};
  expect_all_ok(run_ranks(4, 120, [&](std::uint32_t rank) -> std::string {
    const Session session = session_of(rank);
    const Group a(session, first.config(names[0].c_str(), rank));
    const Group b(session, second.config(names[1].c_str(), rank));
    std::string failure;
    // The library is used from two threads of one session.
    std::thread other([&] {
      try {
        ScriptOptions options;
        options.rounds = 30;
        ScriptRunner(b, second, rank, options).run();
      } catch (const RankFailure& error) {
        failure = error.text;
      }
    });
    ScriptOptions options;
    options.rounds = 40;
    std::string own_failure;
    try {
      ScriptRunner(a, first, rank, options).run();
    } catch (const RankFailure& error) {
      own_failure = error.text;
    }
    other.join();
    RANK_CHECK(own_failure.empty() && failure.empty(), own_failure + " | " + failure);
    return "";
  }));
}

TEST_P(Operations, AGroupNameCanBeUsedAgain) {
  const Case c = small_case(3);
  expect_all_ok(run_ranks(3, 60, [&](std::uint32_t rank) -> std::string {
    const Session session = session_of(rank);
    for (std::uint64_t i = 0; i < 5; ++i) {
      note("turn " + std::to_string(i));
      const std::string name = "again-" + std::to_string(i % 2);
      const Group group(session, c.config(name.c_str(), rank));
      one_round(group, c, rank, i);
      // Leaving is not collective: nobody leaves before all are done.
      epd_ticket_t ticket = submit_dispatch(group, c, rank, 0, i + 100);
      finish_dispatch(group, c, rank, 0, i + 100, ticket);
    }
    return "";
  }));
}

// ---- depth -------------------------------------------------------------------------------------

TEST_P(Operations, OneMoreThanTheDepthWouldBlock) {
  if (in_streams()) GTEST_SKIP() << "a stream takes more";
  const Case c = small_case(2, 3);
  Shared<Gate> held;
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    if (rank == 1) held->wait_for(1);
    std::vector<epd_ticket_t> tickets;
    for (std::uint32_t slot = 0; slot < c.depth; ++slot)
      tickets.push_back(submit_dispatch(group, c, rank, slot, slot));
    if (rank == 0) {
      for (std::uint32_t slot = 0; slot < c.depth; ++slot) {
        epd_dispatch_args_t args;
        epd_dispatch_args_init(&args);
        args.slot = slot;
        epd_ticket_t ticket = 0;
        must(group.dispatch(&args, &ticket, nullptr), "one more", EPD_WOULD_BLOCK);
        must(epd_noop(group.get(), slot, EPD_NO_STREAM, &ticket), "a noop on a busy slot", EPD_WOULD_BLOCK);
        RANK_CHECK(epd_ticket_pending(group.get(), tickets[slot]) == 1, "the peer has not come");
      }
      held->arrive();
    }
    for (std::uint32_t slot = 0; slot < c.depth; ++slot)
      finish_dispatch(group, c, rank, slot, slot, tickets[slot]);
    one_round(group, c, rank, 10);  // nothing was submitted by the refused calls
  });
}

// ---- counts, waiting, hooks --------------------------------------------------------------------

TEST_P(Operations, CountsComeNoLaterThanTheRows) {
  Case c = small_case(2);
  c.hidden = 7168;
  c.max_tokens = 512;  // several chunks of work, so that there is a time between counts and rows
  Shared<std::atomic<int>> early;
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    for (std::uint64_t round = 0; round < 4; ++round) {
      const epd_ticket_t ticket = submit_dispatch(group, c, rank, 0, round);
      epd_counts_t counts;
      epd_counts_init(&counts);
      must(epd_ticket_counts(group.get(), ticket, kWaitMs, &counts), "counts");
      if (epd_ticket_pending(group.get(), ticket) == 1) early->fetch_add(1);
      epd_result_t result;
      epd_result_init(&result);
      must(group.wait(ticket, kWaitMs, &result), "dispatch");
      const std::string text =
          check_dispatch(c, group.buffers(0), make_inputs(c, round), rank, result, &counts);
      RANK_CHECK(text.empty(), text);
    }
  });
  std::printf("counts were there before the rows in %d of 8 dispatches\n", early->load());
}

TEST_P(Operations, CountsOfAnEndedDispatchNeedNoWait) {
  const Case c = small_case(2);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    const epd_ticket_t ticket = submit_dispatch(group, c, rank, 1, 0);
    RANK_CHECK(eventually(30, [&] { return epd_ticket_pending(group.get(), ticket) == 0; }),
               "it ends by itself");
    epd_counts_t counts;
    epd_counts_init(&counts);
    must(epd_ticket_counts(group.get(), ticket, EPD_NO_WAIT, &counts), "counts");
    epd_result_t result;
    epd_result_init(&result);
    must(group.wait(ticket, EPD_NO_WAIT, &result), "counts do not retire the ticket");
    RANK_CHECK(result.num_recv_rows == counts.num_recv_rows, "counts and result agree");
    must(group.wait(ticket, EPD_NO_WAIT, &result), "poll of a retired ticket", EPD_NOT_FOUND);
  });
}

TEST_P(Operations, WaitingTakesItsTimeAndKeepsTheTicket) {
  const Case c = small_case(2);
  Shared<Gate> held;
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    if (rank == 1) held->wait_for(1);
    const epd_ticket_t ticket = submit_dispatch(group, c, rank, 0, 0);
    if (rank == 0) {
      must(group.wait(ticket, EPD_NO_WAIT, nullptr), "poll", EPD_WOULD_BLOCK);
      epd_counts_t counts;
      epd_counts_init(&counts);
      must(epd_ticket_counts(group.get(), ticket, EPD_NO_WAIT, &counts), "counts", EPD_WOULD_BLOCK);
      must(epd_ticket_counts(group.get(), ticket, 20, &counts), "counts", EPD_DEADLINE_EXCEEDED);
      const double start = now_s();
      must(group.wait(ticket, 100), "wait for 100 ms", EPD_DEADLINE_EXCEEDED);
      RANK_CHECK(now_s() - start > 0.09, "it waited " + std::to_string(now_s() - start) + " s");
      RANK_CHECK(epd_ticket_pending(group.get(), ticket) == 1, "the ticket stays valid");
      held->arrive();
    }
    finish_dispatch(group, c, rank, 0, 0, ticket);
    must(group.wait(ticket, EPD_NO_WAIT), "wait for a retired ticket", EPD_NOT_FOUND);
    must(group.wait(ticket + 1000, EPD_NO_WAIT), "wait for a ticket never given", EPD_NOT_FOUND);
    must(group.wait(0, EPD_NO_WAIT), "wait for 0", EPD_NOT_FOUND);
  });
}

TEST_P(Operations, ForeverEndsWithTheOperation) {
  const Case c = small_case(2);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    const epd_ticket_t ticket = submit_dispatch(group, c, rank, 0, 0);
    must(group.wait(ticket, EPD_FOREVER), "wait");
  });
}

struct HookRecord {
  std::atomic<int> calls{0};
  std::atomic<bool> other_thread{false};
  std::thread::id caller;
  epd_result_t result{};
};

void record_hook(const epd_result_t* result, void* user) {
  auto* record = static_cast<HookRecord*>(user);
  record->result = *result;
  record->other_thread = std::this_thread::get_id() != record->caller;
  record->calls.fetch_add(1);
}

TEST_P(Operations, HooksRunOnceOnTheLibrarysThread) {
  const Case c = small_case(2, 4);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    HookRecord records[8];
    for (std::uint32_t i = 0; i < 8; ++i) {
      records[i].caller = std::this_thread::get_id();
      const epd_ticket_t ticket = submit_dispatch(group, c, rank, i % c.depth, i);
      if (i % 2 == 1) {  // a hook for what has already ended
        RANK_CHECK(eventually(30, [&] { return epd_ticket_pending(group.get(), ticket) == 0; }), "it ends");
      }
      must(epd_ticket_on_complete(group.get(), ticket, record_hook, &records[i]), "hook");
      RANK_CHECK(eventually(30, [&] { return records[i].calls.load() == 1; }), "hook " + std::to_string(i));
      must(group.wait(ticket, EPD_NO_WAIT), "the hook retires the ticket", EPD_NOT_FOUND);
      const std::string text =
          check_dispatch(c, group.buffers(i % c.depth), make_inputs(c, i), rank, records[i].result, nullptr);
      RANK_CHECK(text.empty(), text);
    }
    sleep_ms(50);
    for (const HookRecord& record : records) {
      RANK_CHECK(record.calls.load() == 1, "called " + std::to_string(record.calls.load()) + " times");
      RANK_CHECK(record.other_thread.load(), "a hook never runs inside a call of the caller's");
      RANK_CHECK(record.result.status == EPD_OK && record.result.failed_rank == -1, "result");
    }
  });
}

struct Chain {
  const Group* group;
  const Case* test_case;
  std::uint32_t rank;
  epd_handle_t handle = 0;
  epd_ticket_t dispatched = 0;
  epd_ticket_t combined = 0;
  std::atomic<int> stage{0};
  std::string failure = {};
};

void combine_done(const epd_result_t* result, void* user) {
  auto* chain = static_cast<Chain*>(user);
  if (result->status != EPD_OK) chain->failure = "combine failed";
  chain->stage = 2;
}

void dispatch_done(const epd_result_t*, void* user) {
  auto* chain = static_cast<Chain*>(user);
  try {
    chain->group->ended(chain->dispatched);
    chain->combined = submit_combine(*chain->group, *chain->test_case, chain->rank, 0, 0, chain->handle);
    must(epd_ticket_on_complete(chain->group->get(), chain->combined, combine_done, chain), "hook in a hook");
  } catch (const RankFailure& error) {
    chain->failure = error.text;
    chain->stage = 2;
  }
}

TEST_P(Operations, AHookMaySubmitTheNextOperation) {
  const Case c = small_case(3);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    Chain chain{&group, &c, rank};
    chain.dispatched = submit_dispatch(group, c, rank, 0, 0, &chain.handle);
    must(epd_ticket_on_complete(group.get(), chain.dispatched, dispatch_done, &chain), "hook");
    RANK_CHECK(eventually(30, [&] { return chain.stage.load() == 2; }), "the chain ends");
    RANK_CHECK(chain.failure.empty(), chain.failure);
    group.ended(chain.combined);
    const std::string text = check_combine(c, group.buffers(0), make_inputs(c, 0), rank, 0);
    RANK_CHECK(text.empty(), text);
  });
}

TEST_P(Operations, NoopsAreNeitherCollectiveNorNumbered) {
  const Case c = small_case(2, 4);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    if (rank == 0) {
      for (int i = 0; i < 300; ++i) {
        epd_ticket_t ticket = 0;
        must(epd_noop(group.get(), static_cast<std::uint32_t>(i) % c.depth, EPD_NO_STREAM, &ticket), "noop");
        must(group.wait(ticket, kWaitMs), "noop");
      }
    }
    const epd_ticket_t ticket = submit_dispatch(group, c, rank, 0, 0);
    epd_result_t result;
    epd_result_init(&result);
    must(group.wait(ticket, kWaitMs, &result), "dispatch");
    RANK_CHECK(result.op_index == 0, "first operation has number " + std::to_string(result.op_index));
    RANK_CHECK(result.done_us >= result.launched_us && result.launched_us >= result.seen_us,
               "times in order");
  });
}

TEST_P(Operations, RegionsAreDisjointWritableAndStable) {
  const Case c = small_case(2, 3);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    RANK_CHECK(epd_group_rank(group.get()) == rank, "rank");
    for (std::uint32_t slot = 0; slot < c.depth; ++slot) {
      const epd_buffers_t b = group.buffers(slot);
      RANK_CHECK(b.recv_scales == nullptr, "no scales without FP8");
      void* const regions[] = {b.x,
                               b.topk_idx,
                               b.topk_weights,
                               b.recv_x,
                               b.recv_topk_idx,
                               b.recv_topk_weights,
                               b.recv_src,
                               b.rank_offsets,
                               b.expert_counts,
                               b.y,
                               b.out};
      for (void* region : regions) {
        RANK_CHECK(region != nullptr && reinterpret_cast<std::uintptr_t>(region) % 64 == 0, "aligned");
        *static_cast<volatile std::uint32_t*>(region) = slot;
      }
      RANK_CHECK(group.buffers(slot).y == b.y, "the same on every call");
    }
    for (std::uint32_t slot = 0; slot < c.depth; ++slot)
      RANK_CHECK(*static_cast<std::uint32_t*>(group.buffers(slot).x) == slot, "slots do not overlap");
    epd_buffers_t b;
    epd_buffers_init(&b);
    must(epd_group_buffers(group.get(), c.depth, &b), "a slot too many", EPD_INVALID_ARGUMENT);
    must_say(std::to_string(c.depth));
  });
}

TEST_P(Operations, ArgumentsAreRefusedByNameAndValue) {
  const Case c = small_case(1);
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t) {
    epd_ticket_t ticket = 0;
    epd_dispatch_args_t args;
    epd_dispatch_args_init(&args);
    args.num_tokens = c.max_tokens + 1;
    must(group.dispatch(&args, &ticket, nullptr), "too many tokens", EPD_INVALID_ARGUMENT);
    must_say("num_tokens");
    must_say(std::to_string(c.max_tokens + 1));
    epd_dispatch_args_init(&args);
    args.slot = c.depth;
    must(group.dispatch(&args, &ticket, nullptr), "slot", EPD_INVALID_ARGUMENT);
    must_say("slot");
    epd_dispatch_args_init(&args);
    args.size = 1;
    must(group.dispatch(&args, &ticket, nullptr), "size", EPD_INVALID_ARGUMENT);
    must(epd_dispatch(nullptr, &args, EPD_NO_STREAM, &ticket, nullptr), "no group", EPD_INVALID_ARGUMENT);
    must(group.dispatch(nullptr, &ticket, nullptr), "no arguments", EPD_INVALID_ARGUMENT);
    epd_combine_args_t combine;
    epd_combine_args_init(&combine);
    combine.slot = 99;
    must(group.combine(&combine, &ticket), "slot", EPD_INVALID_ARGUMENT);
    must(epd_noop(group.get(), 99, EPD_NO_STREAM, &ticket), "slot", EPD_INVALID_ARGUMENT);
    must_say("99");
    one_round(group, c, 0, 0);
  });
}

}  // namespace
}  // namespace epd::test
