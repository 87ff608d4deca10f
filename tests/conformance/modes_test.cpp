// Every mode of dispatch and combine through real processes: layouts, payloads, routings, cached and kept
// routings, rows that nobody counts, many groups at once.
#include "common/signal.h"
#include "conformance.h"

#include <signal.h>
#include <algorithm>
#include <cstring>
#include <thread>

namespace epd::test {
namespace {

constexpr epd_layout_t kLayouts[] = {EPD_LAYOUT_COMPACT, EPD_LAYOUT_PACKED, EPD_LAYOUT_EXPERT};

class Modes : public Conformance {
 protected:
  void outlive_engines(const Case& c, Order order);
};
INSTANTIATE_TEST_SUITE_P(Devices, Modes,
                         testing::ValuesIn(kinds_here({{"host", "cuda_in_streams"}, {"cuda"}})),
                         [](const auto& tested) { return tested.param; });

Case mode_case(std::uint32_t num_ranks, epd_layout_t layout, std::uint32_t depth = 2) {
  Case c;
  c.seed = base_seed() + 9000;
  c.num_ranks = num_ranks;
  c.num_experts = num_ranks * 3;
  c.max_tokens = 9;
  c.topk = 3;
  c.depth = depth;
  c.layout = layout;
  return c;
}

struct PayloadCase {
  epd_payload_t payload;
  epd_scale_format_t scales;
  std::uint32_t opaque_bytes;
};
constexpr PayloadCase kPayloads[] = {{EPD_PAYLOAD_BF16, EPD_SCALE_FORMAT_FLOAT32, 0},
                                     {EPD_PAYLOAD_FP8_CAST, EPD_SCALE_FORMAT_FLOAT32, 0},
                                     {EPD_PAYLOAD_FP8_CAST, EPD_SCALE_FORMAT_FLOAT32_POW2, 0},
                                     {EPD_PAYLOAD_FP8_CAST, EPD_SCALE_FORMAT_UE8M0, 0},
                                     {EPD_PAYLOAD_FP8, EPD_SCALE_FORMAT_FLOAT32, 0},
                                     {EPD_PAYLOAD_FP8, EPD_SCALE_FORMAT_UE8M0, 0},
                                     {EPD_PAYLOAD_OPAQUE, EPD_SCALE_FORMAT_FLOAT32, 16},
                                     {EPD_PAYLOAD_OPAQUE, EPD_SCALE_FORMAT_FLOAT32, 1040}};

TEST_P(Modes, EveryPayloadInEveryLayout) {
  std::vector<Script> scripts;
  for (const epd_layout_t layout : kLayouts) {
    for (const PayloadCase& p : kPayloads) {
      Case c = mode_case(3, layout);
      c.hidden = 584;  // five scales, the last of 72 values; FP8 rows are no multiple of 16
      c.payload = p.payload;
      c.scales = p.scales;
      c.opaque_bytes = p.opaque_bytes;
      c.index64 = scripts.size() % 2 == 1;
      c.alignment = scripts.size() % 3 == 0 ? 1 : 16;
      c.zero_padding = scripts.size() % 2 == 0;
      scripts.push_back({c, {.rounds = 3}});
    }
  }
  run_scripts(scripts);
}

TEST_P(Modes, EveryRoutingInEveryLayout) {
  constexpr Routing kRoutings[] = {Routing::kUniform, Routing::kZipf,   Routing::kOneExpert,
                                   Routing::kOneRank, Routing::kSparse, Routing::kNothing,
                                   Routing::kRepeated};
  constexpr Sizes kSizes[] = {Sizes::kFull, Sizes::kUneven, Sizes::kSomeEmpty, Sizes::kAllEmpty};
  std::vector<Script> scripts;
  for (const epd_layout_t layout : kLayouts) {
    for (const Routing routing : kRoutings) {
      for (const bool index64 : {false, true}) {
        Case c = mode_case(4, layout);
        c.routing = routing;
        c.sizes = kSizes[scripts.size() % 4];
        c.index64 = index64;
        c.alignment = 8;
        c.mark_unused = scripts.size() % 3 == 0;
        scripts.push_back({c, {.rounds = 2}});
      }
    }
  }
  run_scripts(scripts);
}

// ---- sum domains

TEST_P(Modes, EverySumDomainInEveryLayout) {
  if (!on_host()) GTEST_SKIP() << "GPUs have one sum domain: SmallerSumDomainsAreRefused";
  constexpr Sizes kSizes[] = {Sizes::kFull, Sizes::kUneven, Sizes::kSomeEmpty};
  std::vector<Script> scripts;
  for (const epd_layout_t layout : kLayouts) {
    for (std::uint32_t sum_ranks = 1; sum_ranks <= 5; ++sum_ranks) {
      for (const bool weighted : {false, true}) {
        Case c = mode_case(5, layout);  // two ranks on one device
        c.seed += scripts.size();
        c.sum_ranks = sum_ranks;
        c.topk = 7;
        c.hidden = sum_ranks == 2 ? 640 : 128;
        c.weighted = weighted;
        c.return_weights = static_cast<abi::ReturnWeights>(scripts.size() % 3);
        c.num_biases = static_cast<std::uint32_t>(scripts.size() % 3);
        c.sizes = kSizes[scripts.size() % 3];
        scripts.push_back({c, {.rounds = 4, .order = Order::kCached}});
      }
    }
  }
  run_scripts(scripts);
}

TEST_P(Modes, TheGroupSaysItsSumRanks) {
  for (const std::uint32_t sum_ranks : {0u, 3u}) {
    Case c = mode_case(3, EPD_LAYOUT_COMPACT);
    c.sum_ranks = sum_ranks;
    with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
      const std::uint32_t told = epd_group_sum_ranks(group.get());
      RANK_CHECK(told == 3, std::to_string(told));
      one_round(group, c, rank, 0);
    });
  }
}

TEST_P(Modes, SmallerSumDomainsAreRefused) {
  const bool host = on_host();
  Case c = mode_case(4, EPD_LAYOUT_COMPACT);
  c.sum_ranks = host ? 5 : 2;
  const std::string name = group_name();
  expect_all_ok(run_ranks(1, 30, [&](std::uint32_t) -> std::string {
    const Session session = session_of(0);
    const epd_group_config_t config = c.config(name.c_str(), 0);
    epd_group_t* group = nullptr;
    must(epd_group_join(session.get(), &config, &group), "join",
         host ? EPD_INVALID_ARGUMENT : EPD_UNSUPPORTED);
    must_say(host ? "sum_ranks is 5; allowed: 1 .. num_ranks, which is 4, or 0" : "sum_ranks is 2; allowed");
    return "";
  }));
}

// ---- routings used again ---------------------------------------------------------------------------

TEST_P(Modes, TrainingGoesForwardAndBackUnderKeptHandles) {
  std::vector<Script> scripts;
  for (const epd_layout_t layout : kLayouts) {
    for (const std::uint32_t depth : {1u, 2u, 4u}) {
      Case c = mode_case(3, layout, depth);
      c.num_handles = handles_needed(c);
      c.return_weights = depth == 1 ? abi::kReturnSum : abi::kReturnOwn;
      c.num_biases = depth % 3;
      c.weighted = depth != 2;
      scripts.push_back({c, {.rounds = 10, .order = Order::kTraining}});
    }
  }
  run_scripts(scripts);
}

TEST_P(Modes, CachedDispatchesDeliverOtherRowsToTheSamePlaces) {
  std::vector<Script> scripts;
  for (const epd_layout_t layout : kLayouts) {
    for (const std::uint32_t depth : {1u, 3u}) {
      Case c = mode_case(4, layout, depth);
      c.payload = EPD_PAYLOAD_FP8_CAST;
      c.mark_unused = depth == 3;
      scripts.push_back({c, {.rounds = 8, .order = Order::kCached}});
    }
  }
  run_scripts(scripts);
}

TEST_P(Modes, AKeptHandleStandsWhateverItsSlotDoes) {
  Case c = mode_case(3, EPD_LAYOUT_PACKED);
  c.num_handles = 1;
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    const Input input = make_input(c, rank, 0);
    fill_dispatch(c, group.buffers(0), input);
    epd_dispatch_args_t args = dispatch_args(c, input.num_tokens);
    args.keep_handle = 1;
    epd_ticket_t ticket = 0;
    epd_handle_t kept = 0;
    must(group.dispatch(&args, &ticket, &kept), "dispatch");
    finish_dispatch(group, c, rank, 0, 0, ticket);
    for (std::uint64_t round = 1; round < 20; ++round) one_round(group, c, rank, round);
    for (std::uint32_t slot = 0; slot < c.depth; ++slot) {
      const Round again(50 + slot, 0);
      fill_dispatch(c, group.buffers(slot), make_input(c, rank, again), true);
      args = dispatch_args(c, 0);
      args.slot = slot;
      args.handle = kept;
      must(group.dispatch(&args, &ticket, nullptr), "cached dispatch");
      finish_dispatch(group, c, rank, slot, again, ticket);
      finish_combine(group, c, rank, slot, again, submit_combine(group, c, rank, slot, again, kept));
    }
    must(epd_handle_release(group.get(), kept), "release");
  });
}

// Ranks keep the same routings in different records, by the order in which they give handles back.
TEST_P(Modes, EachRankGivesHandlesBackInItsOwnOrder) {
  Case c = mode_case(4, EPD_LAYOUT_COMPACT);
  c.num_handles = 2;
  with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
    const auto dispatch_and_keep = [&](std::uint64_t round) {
      const Input input = make_input(c, rank, round);
      fill_dispatch(c, group.buffers(0), input);
      epd_dispatch_args_t args = dispatch_args(c, input.num_tokens);
      args.keep_handle = 1;
      epd_ticket_t ticket = 0;
      epd_handle_t kept = 0;
      must(group.dispatch(&args, &ticket, &kept), "dispatch");
      finish_dispatch(group, c, rank, 0, round, ticket);
      return kept;
    };
    const epd_handle_t first = dispatch_and_keep(0);
    const epd_handle_t second = dispatch_and_keep(1);
    must(epd_handle_release(group.get(), rank % 3 == 0 ? second : first), "release");
    const epd_handle_t third = dispatch_and_keep(2);
    one_round(group, c, rank, 3);
    finish_combine(group, c, rank, 0, 2, submit_combine(group, c, rank, 0, 2, third));
    must(epd_handle_release(group.get(), rank % 3 == 0 ? first : second), "release");
    must(epd_handle_release(group.get(), third), "release");
  });
}

// Two engines die while many operations are in flight; ranks resume and do again what was lost.
void Modes::outlive_engines(const Case& c, Order order) {
  struct Stage {
    Gate finished;
    std::atomic<std::uint64_t> completed;
  };
  Shared<Stage> stage;
  ScriptOptions options;
  options.rounds = 24;
  options.order = order;
  options.recover = true;
  options.finished = &stage->finished;
  options.on_complete = [&stage](std::uint64_t) { stage->completed.fetch_add(1); };
  const std::string name = group_name();
  std::vector<RankProcess> ranks = start_ranks(c.num_ranks, [&](std::uint32_t rank) {
    return run_case(daemon_of(rank).socket(), daemon_of(rank).device(rank), name, c, rank, options);
  });
  const std::uint64_t all = make_script(c, options.rounds, order).size() * c.num_ranks;
  for (std::uint64_t kill = 0; kill < 2; ++kill) {
    const std::uint64_t wanted = all / 8 + all / 4 * kill;
    EXPECT_TRUE(eventually(60, [&] { return stage->completed >= wanted; }));
    const pid_t engine = engine_of(static_cast<std::uint32_t>(kill));
    if (engine > 0) send_signal(engine, SIGKILL);
  }
  const auto outcomes = wait_all(ranks, 90);
  expect_all_ok(outcomes);
  std::printf("rank 0: %s\n", outcomes[0].text.c_str());
}

// The engine's death takes nothing that had been completed: kept routings are used on, lost ones are made
// again.
TEST_P(Modes, KeptRoutingsOutliveTheEngine) {
  Case c = mode_case(3, EPD_LAYOUT_PACKED, 3);
  c.max_tokens = 64;
  c.num_handles = handles_needed(c);
  c.return_weights = abi::kReturnOwn;
  outlive_engines(c, Order::kTraining);
}

// More dispatches have been made since than a routing record has halves.
TEST_P(Modes, DeepGroupsOutliveTheEngine) {
  Case c = mode_case(3, EPD_LAYOUT_COMPACT, 8);
  c.max_tokens = 64;
  outlive_engines(c, Order::kInTurn);
}

// ---- rows that nobody counts -------------------------------------------------------------------------

// The answers of the ranks' experts if each gives its rows back.
std::vector<Answer> echoes(const Case& c, const std::vector<Input>& inputs) {
  std::vector<Answer> answers;
  for (const auto& received : kernels::reference::dispatch(c.params(), inputs)) {
    Answer answer;
    answer.y.resize(received.recv_x.size() / 2);
    if (!answer.y.empty()) std::memcpy(answer.y.data(), received.recv_x.data(), received.recv_x.size());
    answers.push_back(std::move(answer));
  }
  return answers;
}

// The experts work on all rows in the region, whether tokens fill them or not, and never ask how many do. If
// `marked`, they pass over the rows that say that they are not used.
void echo_all_rows(const Case& c, const epd_buffers_t& b, bool marked) {
  const abi::GroupShape shape = c.shape();
  const auto* idx = static_cast<const std::int32_t*>(b.recv_topk_idx);
  const std::size_t choices = shape.choices_per_row();
  auto* y = static_cast<std::uint16_t*>(b.y);
  for (std::size_t row = 0; row < shape.recv_rows(); ++row) {
    const auto* own = idx + row * choices;
    if (marked && std::all_of(own, own + choices, [](std::int32_t expert) { return expert < 0; })) {
      std::fill_n(y + row * c.hidden, c.hidden, std::uint16_t{0x7fc0});  // nobody may sum this up
    } else {
      std::copy_n(static_cast<const std::uint16_t*>(b.recv_x) + row * c.hidden, c.hidden, y + row * c.hidden);
    }
  }
}

TEST_P(Modes, ExpertsNeedNotKnowHowManyRowsThereAre) {
  for (const epd_layout_t layout : kLayouts) {
    for (const bool marked : {false, true}) {
      Case c = mode_case(3, layout);
      c.alignment = 16;
      c.mark_unused = marked;
      with_ranks(c, [&](const Session&, const Group& group, std::uint32_t rank) {
        for (std::uint64_t round = 0; round < 4; ++round) {
          const auto slot = static_cast<std::uint32_t>(round % c.depth);
          const epd_buffers_t b = group.buffers(slot);
          epd_handle_t handle = 0;
          const epd_ticket_t dispatched = submit_dispatch(group, c, rank, slot, round, &handle);
          must(group.wait(dispatched, kWaitMs), "dispatch");
          echo_all_rows(c, b, marked);
          epd_combine_args_t args;
          epd_combine_args_init(&args);
          args.slot = slot;
          args.handle = handle;
          epd_ticket_t combined = 0;
          must(group.combine(&args, &combined), "combine");
          must(group.wait(combined, kWaitMs), "combine");
          const std::vector<Input> inputs = make_inputs(c, round);
          const auto want = kernels::reference::combine_to(c.params(), inputs, echoes(c, inputs), {}, rank);
          RANK_CHECK(want.out.empty() || std::memcmp(b.out, want.out.data(), want.out.size() * 2) == 0,
                     c.describe() + ", round " + std::to_string(round));
        }
      });
    }
  }
}

TEST_P(Modes, RoomForExactlyTheRowsThatCome) {
  std::vector<Script> scripts;
  for (const epd_layout_t layout : kLayouts) {
    Case c = mode_case(4, layout);
    c.alignment = 16;
    c.mark_unused = true;
    c.max_recv_rows = rows_needed(c, 6);
    scripts.push_back({c, {.rounds = 6}});
  }
  run_scripts(scripts);
}

// ---- how operations are run ----------------------------------------------------------------------------

TEST_P(Modes, SmsOfACallChangeNoByte) {
  Case c = mode_case(3, EPD_LAYOUT_PACKED);
  c.hidden = 2048;
  c.max_tokens = 64;
  std::vector<std::string> first(c.num_ranks);
  for (const std::uint32_t sms : {1u, 2u, 64u}) {
    c.sms = sms;
    const std::string name = group_name();
    const auto outcomes = run_ranks(c.num_ranks, 60, [&](std::uint32_t rank) -> std::string {
      const Session session = session_of(rank);
      const Group group(session, c.config(name.c_str(), rank));
      std::string text;
      for (const std::uint64_t digest :
           ScriptRunner(group, c, rank, {.rounds = 4, .order = Order::kInTurn}).run().digests) {
        text += std::to_string(digest) + " ";
      }
      return text;
    });
    expect_all_ok(outcomes);
    for (std::uint32_t rank = 0; rank < c.num_ranks; ++rank) {
      if (sms == 1) first[rank] = outcomes[rank].text;
      EXPECT_EQ(outcomes[rank].text, first[rank]) << "rank " << rank << " with " << sms << " SMs";
    }
  }
}

// Flags that do not concern the routing apply to the rank's own rows alone.
TEST_P(Modes, EachRankHasItsOwnFlags) {
  const Case c = mode_case(4, EPD_LAYOUT_PACKED);
  const std::string name = group_name();
  expect_all_ok(run_ranks(c.num_ranks, 60, [&](std::uint32_t rank) -> std::string {
    Case own = c;
    own.alignment = 8;
    own.num_biases = 2;
    own.weighted = rank % 2 == 0;
    own.mark_unused = rank == 1;
    own.zero_padding = rank == 2;
    own.defer = rank == 3;
    own.sms = rank;
    const Session session = session_of(rank);
    const Group group(session, own.config(name.c_str(), rank));
    return ScriptRunner(group, own, rank, {.rounds = 5}).run().to_string();
  }));
}

// After the send the inputs are overwritten while rows may still arrive (ScriptRunner does it).
TEST_P(Modes, DeferredReceivesFreeTheirInputs) {
  std::vector<Script> scripts;
  for (const epd_layout_t layout : kLayouts) {
    Case c = mode_case(4, layout, 3);
    c.defer = true;
    c.max_tokens = 40;
    c.hidden = 1024;
    c.payload = layout == EPD_LAYOUT_EXPERT ? EPD_PAYLOAD_FP8 : EPD_PAYLOAD_BF16;
    scripts.push_back({c, {.rounds = 9, .order = Order::kStaggered}});
  }
  run_scripts(scripts);
}

// Groups of all kinds on the same sessions at once, two sessions of each group on each device, the small
// operations of one before the large ones of the others.
TEST_P(Modes, ManyGroupsOfManyKindsAtOnce) {
  constexpr std::uint32_t kGroups = 4;
  constexpr std::uint32_t kMostOnOne = 24;  // ranks on one GPU, all groups together
  const std::uint32_t num_ranks = std::min(8u, daemon().devices() * kMostOnOne / kGroups / 2 * 2);
  std::vector<Script> scripts;
  for (std::uint32_t i = 0; i < kGroups; ++i) {
    Case c = mode_case(num_ranks, kLayouts[i % 3], 2 + i % 2);
    c.seed += i;
    c.priority = i == 0 ? 7 : -static_cast<std::int32_t>(i);
    c.hidden = i == 0 ? 128 : 2048;
    c.max_tokens = i == 0 ? 4 : 24;
    c.num_handles = handles_needed(c);
    c.payload = i % 2 == 0 ? EPD_PAYLOAD_BF16 : EPD_PAYLOAD_FP8_CAST;
    scripts.push_back(
        {c, {.rounds = i == 0 ? 12u : 4u, .order = i % 2 == 0 ? Order::kWindows : Order::kTraining}});
  }
  const std::string name = group_name();
  expect_all_ok(run_ranks(num_ranks, 120, [&](std::uint32_t rank) -> std::string {
    const Session session = session_of(rank);
    std::vector<Group> groups;
    for (std::size_t i = 0; i < scripts.size(); ++i) {
      const std::string group = name + "-" + std::to_string(i);
      groups.emplace_back(session, scripts[i].test_case.config(group.c_str(), rank));
    }
    std::vector<std::string> failures(scripts.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < scripts.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          ScriptRunner(groups[i], scripts[i].test_case, rank, scripts[i].options).run();
        } catch (const RankFailure& error) {
          failures[i] = error.text;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& failure : failures) RANK_CHECK(failure.empty(), failure);
    return "";
  }));
}

}  // namespace
}  // namespace epd::test
