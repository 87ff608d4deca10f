#include "gpu_fault_fixture.h"

#include <cstdio>

namespace epd::test {

void set_first(std::atomic<double>& time) {
  if (time == 0) time = now_s();
}

void print_times(const std::string& what, double killed, const Stage& stage) {
  const auto after = [killed](const std::atomic<double>& time) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.1f ms", (time - killed) * 1000);
    return std::string(time == 0 ? "none" : text);
  };
  for (std::uint32_t rank = 0; rank < kFaultRanks; ++rank) {
    if (rank == kVictim) continue;
    const RankTimes& times = stage.times[rank];
    std::printf("%s, rank %u, since the kill: typed status %s, next operation %s, next of all ranks %s\n",
                what.c_str(), rank, after(times.told).c_str(), after(times.again).c_str(),
                after(times.whole).c_str());
  }
}

void GpuFault::start(const std::vector<std::pair<std::string, std::string>>& settings,
                     std::uint32_t least_gpus) {
  gpus_.reset();  // it takes its environment along
  gpus_ = std::make_unique<FaultyGpus>(least_gpus);
  if (!gpus_->usable()) GTEST_SKIP() << gpus_->why_not();
  ASSERT_TRUE(gpus_->start(settings));
}

std::uint32_t GpuFault::gpu_of(std::uint32_t rank) const {
  const std::uint32_t last = gpus_->num_gpus() - 1;
  if (rank == kVictim || last == 0) return last;
  return (rank < kVictim ? rank : rank - 1) % last;
}

void GpuFault::occupy_its_gpu(int seconds) const {
  note(occupy_gpu(static_cast<int>(victims_gpu()), seconds));
}

RankProcess GpuFault::successor(Stage& stage, const std::function<std::string(const Session&)>& body) const {
  for (const double end = now_s() + 30; now_s() < end;) {
    RankProcess process([&]() -> std::string {
      const std::string socket = daemon().socket();
      const std::string device = device_of(kVictim);
      epd_attach_options_t options;
      epd_attach_options_init(&options);
      options.socket_path = socket.c_str();
      options.device = device.c_str();
      epd_session_t* handle = nullptr;
      const epd_status_t status = epd_session_attach(&options, &handle);
      if (status == EPD_WOULD_BLOCK) return "";
      must(status, "attach");
      const Session session(handle);
      stage.attached.arrive();
      return body(session);
    });
    const bool in = eventually(20, [&] { return stage.attached.count != 0 || !is_running(process.pid()); });
    if (in && stage.attached.count != 0) return process;
    const RankOutcome outcome = process.wait(1);
    EXPECT_TRUE(outcome.ok) << outcome.to_string();
    if (!outcome.ok) break;
  }
  return {};
}

void GpuFault::expect_all_end_well(std::vector<RankProcess>& ranks, RankProcess& newcomer) const {
  for (std::uint32_t rank = 0; rank < kFaultRanks; ++rank) {
    const RankOutcome outcome = rank == kVictim ? newcomer.wait(60) : ranks[rank].wait(60);
    EXPECT_TRUE(outcome.ok) << "rank " << rank << " " << outcome.to_string();
  }
}

Case gpu_case(bool degrade) {
  Case c;
  c.seed = 51;
  c.num_ranks = kFaultRanks;
  c.num_experts = kFaultRanks * 4;
  c.max_tokens = 64;
  c.hidden = 512;
  c.topk = 4;
  c.depth = 2;
  c.sizes = Sizes::kUneven;
  c.degrade = degrade;
  return c;
}

Keepsake::Keepsake(const Session& session, std::uint32_t rank)
    : group_(session, small_config(("keepsake-" + std::to_string(rank)).c_str(), 0, 1)),
      pattern_(group_.slot_bytes()) {
  for (std::size_t i = 0; i < pattern_.size(); ++i)
    pattern_[i] = static_cast<std::byte>((i * 7 + i / 251 + rank) & 0xff);
  copy_to_gpu(group_.gpu(), group_.slot_on_gpu(0), pattern_.data(), pattern_.size());
}

void Keepsake::check() const {
  std::vector<std::byte> now(pattern_.size());
  copy_from_gpu(group_.gpu(), now.data(), group_.slot_on_gpu(0), now.size());
  RANK_CHECK(now == pattern_, "the arena has changed");
}

void only_these(const std::map<std::string, std::uint64_t>& failures, const std::set<std::string>& allowed) {
  for (const auto& [status, count] : failures)
    RANK_CHECK(allowed.contains(status), std::to_string(count) + " operations ended with " + status);
}

}  // namespace epd::test
