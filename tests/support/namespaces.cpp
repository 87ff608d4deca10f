#include "support/namespaces.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <unistd.h>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

namespace epd::test {
namespace {

constexpr int kNamespaces = CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNS;

// "" or what failed.
std::string enter() {
  if (::unshare(kNamespaces) != 0) return std::string("unshare: ") + std::strerror(errno);
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
    return std::string("mount: ") + std::strerror(errno);
  if (::mount("shm", "/dev/shm", "tmpfs", 0, nullptr) != 0)
    return std::string("mount of /dev/shm: ") + std::strerror(errno);
  return "";
}

}  // namespace

std::string why_no_namespaces() {
  RankProcess trial([]() -> std::string { return enter(); });
  const RankOutcome outcome = trial.wait(10);
  return outcome.ok ? outcome.text : outcome.to_string();
}

void enter_namespaces() {
  if (const std::string why = enter(); !why.empty()) RANK_FAIL(why);
}

void mount_own_proc() {
  if (::getpid() == 1 && ::mount("proc", "/proc", "proc", 0, nullptr) == 0) return;
  std::perror("mount of /proc");
  ::_exit(126);
}

RankProcess contained(const RankProcess::Body& body, double seconds) {
  return RankProcess([body, seconds]() -> std::string {
    enter_namespaces();
    RankProcess first([&body]() -> std::string {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      mount_own_proc();
      return body();
    });
    const RankOutcome outcome = first.wait(seconds);
    RANK_CHECK(outcome.ok, outcome.to_string());
    return outcome.text;
  });
}

}  // namespace epd::test
