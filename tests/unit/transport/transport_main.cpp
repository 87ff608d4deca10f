// The environment that UCX wants, before any thread; and the peer process of transport_processes_test.cpp.
#include "transport/ucx.h"
#include "transport_child.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

// Passes on the output of the run. Returns whether UCX has aborted it.
bool pass_on(int from) {
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = ::read(from, buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<std::size_t>(n));
    std::fwrite(buffer, 1, static_cast<std::size_t>(n), stdout);
  }
  return text.find("libucs.so") != std::string::npos && text.find("Assertion `") != std::string::npos;
}

// UCX 1.13 may abort a process whose peer dies during a handshake (daemon/transport/README.md). The
// supervisor starts an engine again then. So do these tests, twice at most.
int run_again_after_an_abort() {
  for (int run = 0;; ++run) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return 1;
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::dup2(ends[1], STDOUT_FILENO);
      ::dup2(ends[1], STDERR_FILENO);
      ::close_range(3, ~0u, 0);
      return RUN_ALL_TESTS();
    }
    ::close(ends[1]);
    const bool by_ucx = pass_on(ends[0]);
    ::close(ends[0]);
    int status = 0;
    if (pid < 0 || ::waitpid(pid, &status, 0) != pid) return 1;
    if (WIFEXITED(status)) return WEXITSTATUS(status);
    if (!by_ucx || run == 2) return 1;
    std::printf("UCX has aborted this run: again\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (const auto& [name, value] : epd::transport::ucx_environment())
    ::setenv(name.c_str(), value.c_str(), 0);
  // Error handling by peer, over shared memory too: tests only.
  for (const char* name : {"UCX_POSIX_ERROR_HANDLING", "UCX_CMA_ERROR_HANDLING"}) ::setenv(name, "y", 0);
  if (argc == 5 && std::strcmp(argv[1], "--peer") == 0) {
    return epd::transport::run_child(argv[2], std::strtoull(argv[3], nullptr, 10),
                                     static_cast<epd::transport::Carrier>(std::atoi(argv[4])));
  }
  ::testing::InitGoogleTest(&argc, argv);
  const bool peers_are_killed = GTEST_FLAG_GET(filter).find("UcxKilled") != std::string::npos;
  return peers_are_killed ? run_again_after_an_abort() : RUN_ALL_TESTS();
}
