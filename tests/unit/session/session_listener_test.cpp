// The attach socket in the file system.
#include "session_fixture.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <fstream>

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
  const Result<Listener> longer = Listener::open({directory_ + "/" + std::string(200, 'x'), 0660, {}});
  EXPECT_NE(longer.status().message().find("107"), std::string::npos) << longer.status().message();
}

}  // namespace
}  // namespace epd::session
