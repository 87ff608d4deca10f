#include "conformance.h"

#include <unistd.h>
#include <cstdlib>

namespace epd::test {
namespace {

bool on_true_gpus() {
  return std::getenv("EPD_TEST_GPUS") != nullptr;
}

std::string letter_of(std::uint32_t node) {
  return std::string(1, static_cast<char>('a' + node));
}

}  // namespace

std::unique_ptr<Daemon> Conformance::daemon_;
std::unique_ptr<kit::NodeNetwork> Conformance::network_;
std::unique_ptr<DaemonCluster> Conformance::cluster_;
std::uint32_t Conformance::nodes_ = 0;
std::string Conformance::prefix_;

std::vector<std::string> kinds_here(const Kinds& kinds) {
#ifdef EPD_TEST_NODES
  return kinds.spanning;
#else
  std::vector<std::string> all = kinds.of_one_node;
  if (on_true_gpus()) all.insert(all.end(), kinds.on_true_gpus.begin(), kinds.on_true_gpus.end());
  return all;
#endif
}

std::uint32_t Conformance::cases_here(std::uint32_t all) const {
  return on_host() || on_true_gpus() ? all : (all + 9) / 10;
}

std::uint64_t base_seed() {
  static const std::uint64_t seed = [] {
    const char* text = std::getenv("EPD_TEST_SEED");
    return text == nullptr ? std::uint64_t{1} : std::strtoull(text, nullptr, 10);
  }();
  return seed;
}

void Conformance::SetUp() {
  const std::string kind = device_kind();
  const bool spans = kind.starts_with("nodes");
  if (!spans && !can_use_devices(kind)) GTEST_SKIP() << "no CUDA driver to be opened here";
  const bool serves = daemon_ != nullptr ? daemon_->running() : cluster_ != nullptr;
  if (serves && prefix_ == kind) return;
  TearDownTestSuite();
  prefix_ = kind;
  let_groups_span_nodes(spans);
  if (spans) {
    if (const std::string why_not = kit::NodeNetwork::why_not(); !why_not.empty())
      GTEST_SKIP() << "nodes can't be made here: " << why_not;
    ASSERT_TRUE(start_nodes(static_cast<std::uint32_t>(std::stoul(kind.substr(5)))));
    return;
  }
  DaemonOptions options;
  use_devices(options, kind);
  daemon_ = std::make_unique<Daemon>(options);
  ASSERT_TRUE(daemon_->start());
}

// Each in network and IPC namespaces of its own. Ranks are here: of a daemon they need its files alone.
bool Conformance::start_nodes(std::uint32_t nodes) {
  constexpr std::uint32_t kDevices = 2;
  nodes_ = nodes;
  network_ = std::make_unique<kit::NodeNetwork>(nodes);
  cluster_ = std::make_unique<DaemonCluster>(kDevices);
  for (std::uint32_t i = 0; i < nodes; ++i) {
    cluster_->place(letter_of(i), network_->address(i), [i] {
      if (*network_->enter(i) != '\0') ::_exit(126);
    });
  }
  if (!cluster_->prepare()) return false;
  for (std::uint32_t i = 0; i < nodes; ++i) cluster_->start(letter_of(i));
  for (std::uint32_t i = 0; i < nodes; ++i) {
    if (cluster_->await("a", letter_of(i), "up") < 0) return false;
  }
  return true;
}

Daemon& Conformance::daemon_of(std::uint32_t rank) {
  return cluster_ == nullptr ? *daemon_ : cluster_->at(letter_of(rank % nodes_));
}

void Conformance::TearDownTestSuite() {
  cluster_.reset();
  network_.reset();
  if (daemon_ == nullptr) return;
  daemon_->stop();
  daemon_.reset();
}

std::string Conformance::group_name() const {
  static int number = 0;
  return "conformance-" + std::to_string(++number);
}

void Conformance::with_ranks(const Case& c, const Body& body, double seconds) {
  SCOPED_TRACE(c.describe());
  const std::string name = group_name();
  expect_all_ok(run_ranks(c.num_ranks, seconds, [&](std::uint32_t rank) -> std::string {
    const Session session = session_of(rank, c.wait_by_on(rank));
    const Group group(session, c.config(name.c_str(), rank), in_streams() || c.in_stream_on(rank));
    body(session, group, rank);
    return "";
  }));
}

void Conformance::run_script(const Case& c, const ScriptOptions& options, double seconds) {
  run_scripts({{c, options}}, seconds);
}

void Conformance::run_scripts(const std::vector<Script>& scripts, double seconds) {
  const std::string name = group_name();
  expect_all_ok(run_ranks(scripts.front().test_case.num_ranks, seconds, [&](std::uint32_t rank) {
    note("attach");
    const Session session = session_of(rank);
    std::string stats;
    for (std::size_t i = 0; i < scripts.size(); ++i) {
      const Case& c = scripts[i].test_case;
      const std::string group = name + "-" + std::to_string(i);
      note("join " + group + ", " + c.describe());
      const Group member(session, c.config(group.c_str(), rank), in_streams() || c.in_stream_on(rank));
      stats = ScriptRunner(member, c, rank, scripts[i].options).run().to_string();
    }
    return stats;
  }));
}

epd_ticket_t submit_dispatch(const Group& group, const Case& c, std::uint32_t rank, std::uint32_t slot,
                             Round round, epd_handle_t* handle, std::uint32_t timeout_ms) {
  const Input input = make_input(c, rank, round);
  fill_dispatch(c, group.buffers(slot), input);
  epd_dispatch_args_t args = dispatch_args(c.at(round), input.num_tokens);
  args.slot = slot;
  args.timeout_ms = timeout_ms;
  epd_ticket_t ticket = 0;
  must(group.dispatch(&args, &ticket, handle), "dispatch on slot " + std::to_string(slot));
  RANK_CHECK(ticket != 0, "0 is never a ticket");
  return ticket;
}

epd_ticket_t submit_combine(const Group& group, const Case& c, std::uint32_t rank, std::uint32_t slot,
                            Round round, epd_handle_t handle, std::uint32_t timeout_ms) {
  const epd_buffers_t buffers = group.buffers(slot);
  const std::int32_t rows = c.layout == EPD_LAYOUT_COMPACT
                                ? buffers.rank_offsets[c.num_ranks]
                                : buffers.expert_offsets[c.num_experts / c.num_ranks];
  fill_combine(c, buffers, rank, round, static_cast<std::uint32_t>(rows));
  epd_combine_args_t args = combine_args(c, round);
  args.slot = slot;
  args.handle = handle;
  args.timeout_ms = timeout_ms;
  epd_ticket_t ticket = 0;
  must(group.combine(&args, &ticket), "combine on slot " + std::to_string(slot));
  return ticket;
}

void finish_dispatch(const Group& group, const Case& c, std::uint32_t rank, std::uint32_t slot, Round round,
                     epd_ticket_t ticket) {
  epd_result_t result;
  epd_result_init(&result);
  must(group.wait(ticket, kWaitMs, &result), "dispatch of round " + std::to_string(round.data));
  const std::string text =
      check_dispatch(c.at(round), group.buffers(slot), make_inputs(c, round), rank, result, nullptr);
  RANK_CHECK(text.empty(), "round " + std::to_string(round.data) + ": " + text);
}

void finish_combine(const Group& group, const Case& c, std::uint32_t rank, std::uint32_t slot, Round round,
                    epd_ticket_t ticket) {
  must(group.wait(ticket, kWaitMs), "combine of round " + std::to_string(round.data));
  const std::string text = check_combine(c, group.buffers(slot), make_inputs(c, round), rank, round);
  RANK_CHECK(text.empty(), "round " + std::to_string(round.data) + ": " + text);
}

void one_round(const Group& group, const Case& c, std::uint32_t rank, std::uint64_t round) {
  const auto slot = static_cast<std::uint32_t>(round % c.depth);
  epd_handle_t handle = 0;
  finish_dispatch(group, c, rank, slot, round, submit_dispatch(group, c, rank, slot, round, &handle));
  finish_combine(group, c, rank, slot, round, submit_combine(group, c, rank, slot, round, handle));
}

}  // namespace epd::test
