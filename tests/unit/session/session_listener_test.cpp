// The attach socket in the file system.
#include "session_fixture.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <fstream>
#include <thread>
#include <vector>

namespace epd::session {
namespace {

TEST_F(Attach, TheSocketHasItsModeAndGoesWithTheTable) {
  struct stat info {};
  ASSERT_EQ(::stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0660u);
  table_->stop_listening();
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(Attach, ALivingDaemonIsNotDisplacedAndADeadOneIs) {
  const Result<Listener> second = Listener::open({path_, 0660, {}});
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find("pid " + std::to_string(::getpid())), std::string::npos)
      << second.status().message();
  const UniqueFd still = attach();

  const std::string other = directory_ + "/stale.sock";
  const pid_t child = ::fork();
  if (child == 0) {
    const Result<Listener> listener = Listener::open({other, 0660, {}});
    ::_exit(listener.ok() ? 0 : 1);  // without removing its socket, as if killed
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  ASSERT_TRUE(std::filesystem::exists(other));
  EXPECT_TRUE(Listener::open({other, 0660, {}}).ok());
}

TEST_F(Attach, OtherFilesAndBadPathsAreLeftAlone) {
  const std::string file = directory_ + "/file";
  std::ofstream(file) << "precious";
  EXPECT_EQ(Listener::open({file, 0660, {}}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(std::filesystem::exists(file));
  EXPECT_FALSE(std::filesystem::exists(file + ".lock")) << "nothing is left beside it";
  const Result<Listener> longer = Listener::open({directory_ + "/" + std::string(200, 'x'), 0660, {}});
  EXPECT_NE(longer.status().message().find("107"), std::string::npos) << longer.status().message();
}

// Another program's socket, which never took epd's lock: of every type that a Unix socket has.
TEST_F(Attach, ASocketAtWhichAnotherProgramListensIsLeftAlone) {
  for (const int type : {SOCK_STREAM, SOCK_SEQPACKET, SOCK_DGRAM}) {
    const std::string path = directory_ + "/other" + std::to_string(type);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    UniqueFd other(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::bind(other.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_TRUE(type == SOCK_DGRAM || ::listen(other.get(), 4) == 0);
    const Result<Listener> listener = Listener::open({path, 0660, {}});
    EXPECT_EQ(listener.status().code(), StatusCode::kResourceExhausted) << type;
    EXPECT_NE(listener.status().message().find("another process listens at " + path), std::string::npos)
        << listener.status().message();
    EXPECT_FALSE(std::filesystem::exists(path + ".lock")) << "nothing is left beside it";
    ASSERT_TRUE(std::filesystem::exists(path));
    other.reset();  // as if killed
    EXPECT_TRUE(Listener::open({path, 0660, {}}).ok()) << type;
  }
}

TEST_F(Attach, AFileThatHasReplacedTheSocketIsNotRemovedWithIt) {
  const std::string path = directory_ + "/replaced";
  {
    const Result<Listener> listener = Listener::open({path, 0660, {}});
    ASSERT_TRUE(listener.ok());
    for (const std::string& file : {path, path + ".lock"}) {
      ASSERT_EQ(::unlink(file.c_str()), 0);
      std::ofstream(file) << "another daemon's";
    }
  }
  EXPECT_TRUE(std::filesystem::exists(path));
  EXPECT_TRUE(std::filesystem::exists(path + ".lock"));
}

TEST_F(Attach, AStartThatFailedLeftItsLockBehind) {
  const std::string path = directory_ + "/failed";
  if (::geteuid() == 0) {
    const pid_t child = ::fork();  // one who may bind the socket, and not give it to that group
    if (child == 0) {
      if (::chmod(directory_.c_str(), 0777) != 0 || ::setuid(65534) != 0) ::_exit(2);
      ::_exit(Listener::open({path, 0660, 1}).ok() ? 1 : 0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
  } else {
    ASSERT_FALSE(Listener::open({path, 0660, 0}).ok());
  }
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_FALSE(std::filesystem::exists(path + ".lock"));
}

// The file of the lock goes with its owner, and the next one must not lock a file that has gone.
TEST_F(Attach, OneAtATimeOwnsAPathThoughLocksAreRemoved) {
  const std::string path = directory_ + "/shared";
  std::atomic<int> owners{0};
  std::atomic<int> opened{0};
  const auto own = [&] {
    for (int i = 0; i < 300; ++i) {
      const Result<Listener> listener = Listener::open({path, 0660, {}});
      if (!listener.ok()) continue;
      ++opened;
      EXPECT_EQ(++owners, 1);
      std::this_thread::yield();
      --owners;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back(own);
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(opened, 0);
  EXPECT_FALSE(std::filesystem::exists(path + ".lock"));
}

// A plain user who starts a daemon on the default paths.
TEST_F(Attach, WhoMayNotWriteThereIsToldWhatToName) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  ASSERT_EQ(::chmod(directory_.c_str(), 0755), 0);
  for (const char* path : {"/closed/epd.sock", "/epd2.sock"}) {
    const pid_t child = ::fork();
    if (child == 0) {
      if (::setuid(65534) != 0) ::_exit(2);
      const Result<Listener> listener = Listener::open({directory_ + path, 0660, {}});
      const bool says = listener.status().message().find("daemon.socket") != std::string::npos;
      ::_exit(listener.status().code() == StatusCode::kPermissionDenied && says ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << path;
  }
}

}  // namespace
}  // namespace epd::session
