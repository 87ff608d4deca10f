#include "hostile_fixture.h"

#include <grp.h>
#include <sys/stat.h>
#include <unistd.h>

namespace epd::test {

namespace {

// Threads are left out: gRPC's come and go with the calls of epctl.
std::size_t held(const Daemon& daemon) {
  std::size_t count = 0;
  for (const Census& census : take_system_census(daemon).processes)
    count += census.fds + census.memfd_mappings;
  return count;
}

}  // namespace

void Hostile::SetUp() {
  DaemonOptions options;
  options.devices = 2;
  options.sms = 1;
  options.settings = {{"daemon.socket_mode", "\"0666\""},
                      {"timeouts.attach_ms", "1500"},
                      {"limits.max_routing_bytes", "\"64GiB\""},
                      {"access.rule",
                       "[{users = [0]}, {users = [61001], max_sessions = 40, max_groups = 8, "
                       "max_routing_bytes = \"128MiB\"}, "
                       "{attach = false}]"}};
  daemon_ = std::make_unique<Daemon>(std::move(options));
  ASSERT_TRUE(daemon_->start());
  ASSERT_EQ(::chmod(daemon_->directory().c_str(), 0755), 0);
  (void)settled_census(*daemon_);
  bystander_ = std::make_unique<Bystander>(*daemon_);
  engines_ = daemon_->engines();
  (void)settled_census(*daemon_, true);
  held_ = held(*daemon_);
}

void Hostile::TearDown() {
  if (!bystander_) return;
  if (daemon_->running()) {
    EXPECT_TRUE(eventually(10, [&] { return held(*daemon_) == held_; }))
        << "before: " << held_ << "; now:\n"
        << take_system_census(*daemon_).to_string();
  }
  bystander_->finish();
  bystander_.reset();
  EXPECT_EQ(daemon_->engines(), engines_) << "an engine was restarted";
  if (daemon_->running()) daemon_->stop();
}

void Hostile::attack(const std::vector<std::function<void()>>& attackers, double seconds) {
  bystander_->attack_begins();
  expect_all_ok(run_ranks(static_cast<std::uint32_t>(attackers.size()), seconds,
                          [&](std::uint32_t number) -> std::string {
                            attackers[number]();
                            return "";
                          }));
}

void Hostile::become(std::uint32_t user) {
  RANK_CHECK(::setgroups(0, nullptr) == 0 && ::setresgid(user, user, user) == 0 &&
                 ::setresuid(user, user, user) == 0,
             "become user " + std::to_string(user));
}

bool Hostile::root() {
  return ::geteuid() == 0;
}

void Hostile::expect_logged(const std::string& text) const {
  EXPECT_TRUE(eventually(5, [&] { return daemon_->log().find(text) != std::string::npos; }))
      << "the log lacks: " << text;
}

std::uint64_t Hostile::shown(const std::string& call, const std::string& key) const {
  const std::string out = daemon_->epctl({"--json", call}).out;
  const std::size_t at = out.find('"' + key + '"');
  EXPECT_NE(at, std::string::npos) << key << " is not in " << out;
  const std::size_t digits = out.find_first_of("0123456789", at + key.size() + 2);
  return at == std::string::npos || digits == std::string::npos ? 0 : std::stoull(out.substr(digits));
}

void must_hold(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    RANK_CHECK(text.find(word) != std::string::npos,
               std::string("\"").append(text).append("\" lacks \"").append(word).append("\""));
}

}  // namespace epd::test
