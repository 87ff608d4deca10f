// The memory that a process may have: the least of the limits of its cgroups.
#include "memory_limit.h"

#include <gtest/gtest.h>
#include <filesystem>
#include <fstream>
#include <limits>

namespace epd::supervisor {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();

class MemoryLimit : public testing::Test {
 protected:
  MemoryLimit() {
    std::string pattern = (fs::temp_directory_path() / "epd-cgroup-XXXXXX").string();
    root_ = ::mkdtemp(pattern.data());
  }
  ~MemoryLimit() override { fs::remove_all(root_); }
  void write(const std::string& file, const std::string& text) const {
    fs::create_directories(fs::path(root_ + "/" + file).parent_path());
    std::ofstream(root_ + "/" + file) << text << "\n";
  }
  std::uint64_t limit(const std::string& memberships) const {
    return cgroup_memory_bytes(memberships, root_);
  }

  std::string root_;
};

TEST_F(MemoryLimit, TheLeastOfAllCgroupsAbove) {
  write("a/b/c/memory.max", "max");
  write("a/b/memory.max", "300");
  write("a/memory.max", "200");
  EXPECT_EQ(limit("0::/a/b/c\n"), 200u);
  write("a/b/c/memory.max", "100");
  EXPECT_EQ(limit("0::/a/b/c\n"), 100u);
}

TEST_F(MemoryLimit, OfVersionOneByItsController) {
  write("memory/a/b/memory.limit_in_bytes", "9223372036854771712");
  write("memory/a/memory.limit_in_bytes", "400");
  write("a/memory.limit_in_bytes", "1");
  EXPECT_EQ(limit("12:cpu,cpuacct:/a\n5:hugetlb,memory:/a/b\n1:name=systemd:/a\n0::/\n"), 400u);
  EXPECT_EQ(limit("12:cpu,memory_like:/a\n"), kNone);
}

// The container's own cgroup is mounted there; the path is the host's.
TEST_F(MemoryLimit, InAContainerThatSeesTheHostsPath) {
  write("memory.max", "500");
  EXPECT_EQ(limit("0::/docker/0123\n"), 500u);
  EXPECT_EQ(limit("0::/\n"), 500u);
}

// The kernel's counts of what its OOM killer has ended.
TEST_F(MemoryLimit, KillsOfTheInnermostCgroupThatThereIs) {
  EXPECT_EQ(cgroup_oom_kills("0::/a/b\n", root_), 0u);
  write("memory.events", "low 0\nhigh 0\nmax 7\noom 5\noom_kill 4\noom_group_kill 0");
  EXPECT_EQ(cgroup_oom_kills("0::/a/b\n", root_), 4u) << "a container that sees the host's path";
  write("a/memory.events", "oom 2\noom_kill 2");
  EXPECT_EQ(cgroup_oom_kills("0::/a/b\n", root_), 2u);
  write("memory/c/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 21");
  EXPECT_EQ(cgroup_oom_kills("4:memory:/c\n0::/\n", root_), 4u);
  EXPECT_EQ(cgroup_oom_kills("3:cpu:/c\n4:memory:/c\n", root_), 21u);
}

TEST_F(MemoryLimit, WithoutAnyThereIsNone) {
  for (const char* memberships : {"", "0", "0::", "0::/a/b\n", "0::/../../a\n", "x:memory:\n"})
    EXPECT_EQ(limit(memberships), kNone) << memberships;
  write("memory.max", "max");
  EXPECT_EQ(limit("0::/\n"), kNone);
  EXPECT_GT(available_memory_bytes(), 0u);
}

}  // namespace
}  // namespace epd::supervisor
