// Files of sockets that are removed while the daemon runs.
#include "socket_watch.h"

#include "base/event.h"

#include <gtest/gtest.h>
#include <filesystem>
#include <fstream>

namespace epd::supervisor {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kSecondNs = 1'000'000'000;

TEST(SocketWatchTest, AFileThatIsGoneIsToldUntilItIsBack) {
  EventLog events;
  events.install();
  std::string pattern = (fs::temp_directory_path() / "epd-sockets-XXXXXX").string();
  const std::string directory = ::mkdtemp(pattern.data());
  const std::string attach = directory + "/epd.sock";
  const std::string control = directory + "/control.sock";
  for (const std::string& path : {attach, control}) std::ofstream(path) << "";
  SocketWatch watch;
  watch.begin(attach, control);
  std::uint64_t now = kSecondNs;
  const auto problem = [&] {
    watch.tick(now += kSecondNs);
    return watch.problem();
  };
  EXPECT_EQ(problem(), "");
  fs::rename(attach, directory + "/away");
  EXPECT_EQ(problem(), attach + " has been removed: clients can't attach");
  EXPECT_EQ(problem(), attach + " has been removed: clients can't attach");
  std::ofstream(attach) << "";
  fs::remove(control);
  EXPECT_EQ(problem(), attach + " has been replaced: clients can't attach; " + control +
                           " has been removed: epctl can't connect");
  fs::rename(directory + "/away", attach);
  EXPECT_EQ(problem(), control + " has been removed: epctl can't connect");
  EXPECT_EQ(events.read(0, 100, 0).events.size(), 3u) << "each change is told once";
  fs::remove_all(directory);
}

}  // namespace
}  // namespace epd::supervisor
