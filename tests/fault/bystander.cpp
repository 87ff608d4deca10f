#include "bystander.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <cstdio>

namespace epd::test {
namespace {

constexpr std::uint64_t kCalmRounds = 100;
constexpr std::uint32_t kDeadlineMs = 20'000;
constexpr std::uint64_t kInputs = 8;  // rounds repeat after so many
constexpr double kPatienceS = 60;

}  // namespace

class Bystander::Rank {
 public:
  Rank(const Daemon& daemon, Log& log, std::uint32_t rank)
      : log_(log),
        rank_(rank),
        case_(fault_case(kRanks, 1)),
        session_(daemon.socket(), daemon.device(rank)),
        group_(session_, case_.config("bystander", rank)) {
    for (std::uint64_t round = 0; round < kInputs; ++round) inputs_.push_back(make_inputs(case_, round));
  }

  void run() {
    for (std::uint64_t round = 0; log_.last.comes(rank_, round); ++round) {
      note("round " + std::to_string(round));
      one_round(round % kInputs);
      log_.rounds[rank_].store(round + 1);
    }
  }

 private:
  template <typename Submit>
  epd_result_t timed(std::size_t kind, const char* what, const Submit& submit) {
    const std::uint32_t phase = log_.phase.load();
    const double start = now_s();
    epd_ticket_t ticket = 0;
    must(submit(&ticket), what);
    epd_result_t result;
    epd_result_init(&result);
    must(group_.wait(ticket, kDeadlineMs, &result), what);
    Samples& samples = log_.samples[phase][kind];
    samples.us[samples.count.fetch_add(1) % kSamples] = static_cast<float>((now_s() - start) * 1e6);
    return result;
  }

  void one_round(std::uint64_t round) {
    const std::vector<Input>& inputs = inputs_[round];
    const epd_buffers_t buffers = group_.buffers(0);
    timed(0, "noop", [&](epd_ticket_t* ticket) { return epd_noop(group_.get(), 0, EPD_NO_STREAM, ticket); });

    fill_dispatch(case_, buffers, inputs[rank_]);
    epd_dispatch_args_t dispatch;
    epd_dispatch_args_init(&dispatch);
    dispatch.num_tokens = inputs[rank_].num_tokens;
    dispatch.timeout_ms = kDeadlineMs;
    epd_handle_t handle = 0;
    const epd_result_t received = timed(
        1, "dispatch", [&](epd_ticket_t* ticket) { return group_.dispatch(&dispatch, ticket, &handle); });
    std::string wrong = check_dispatch(case_, buffers, inputs, rank_, received, nullptr);
    RANK_CHECK(wrong.empty(), wrong);

    fill_combine(case_, buffers, rank_, round, received.num_recv_rows);
    epd_combine_args_t combine;
    epd_combine_args_init(&combine);
    combine.handle = handle;
    combine.weighted = 1;
    combine.timeout_ms = kDeadlineMs;
    timed(2, "combine", [&](epd_ticket_t* ticket) { return group_.combine(&combine, ticket); });
    wrong = check_combine(case_, buffers, inputs, rank_, round);
    RANK_CHECK(wrong.empty(), wrong);
  }

  Log& log_;
  const std::uint32_t rank_;
  const Case case_;
  const Session session_;
  const Group group_;
  std::vector<std::vector<Input>> inputs_;
};

Bystander::Bystander(const Daemon& daemon) {
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks_.emplace_back([this, &daemon, rank]() -> std::string {
      Rank(daemon, *log_, rank).run();
      return "";
    });
  }
  EXPECT_TRUE(eventually(kPatienceS, [&] { return rounds_of_all() >= kCalmRounds; }))
      << "the bystander got to round " << rounds_of_all();
}

std::uint64_t Bystander::rounds_of_all() const {
  return std::min(log_->rounds[0].load(), log_->rounds[1].load());
}

void Bystander::finish(std::uint64_t rounds) {
  const std::uint64_t goal = rounds_of_all() + rounds;
  EXPECT_TRUE(eventually(kPatienceS, [&] { return rounds_of_all() >= goal; }))
      << "the bystander got to round " << rounds_of_all() << ", not to " << goal;
  log_->last.ask();
  expect_all_ok(wait_all(ranks_, kPatienceS));
  print();
}

void Bystander::print() const {
  static constexpr const char* kNames[kOps] = {"noop", "dispatch", "combine"};
  std::printf("bystander, us         before: count   p50   p99   max   during: count   p50   p99   max\n");
  for (std::size_t kind = 0; kind < kOps; ++kind) {
    std::printf("  %-10s", kNames[kind]);
    for (const auto& phase : log_->samples) {
      const Samples& samples = phase[kind];
      const std::uint64_t count = samples.count.load();
      std::vector<float> sorted(samples.us, samples.us + std::min<std::uint64_t>(count, kSamples));
      std::sort(sorted.begin(), sorted.end());
      const auto at = [&](double part) {
        return sorted.empty() ? 0.0f : sorted[static_cast<std::size_t>(part * double(sorted.size() - 1))];
      };
      std::printf("        %8llu %7.0f %7.0f %7.0f", static_cast<unsigned long long>(count), at(0.5),
                  at(0.99), at(1));
    }
    std::printf("\n");
  }
}

}  // namespace epd::test
