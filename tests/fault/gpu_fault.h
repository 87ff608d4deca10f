// A daemon on GPUs under MPS, and what ends a process in the middle of its kernel there. On a machine
// with GPUs (EPD_TEST_GPUS) all of it is true; elsewhere files stand for what MPS does (support/fake_cuda,
// fake_mps_control).
#pragma once

#include "fault.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace epd::test {

// Keeps the last step of a process's end back: it does nothing any more, but it is there.
class HeldExit {
 public:
  explicit HeldExit(pid_t pid);
  ~HeldExit();  // lets it go
  HeldExit(const HeldExit&) = delete;
  HeldExit& operator=(const HeldExit&) = delete;
  bool works() const { return traced_; }
  // Whether it has come to its end, and is held there.
  bool reached();

 private:
  const pid_t pid_;
  bool traced_ = false;
  bool reached_ = false;
};

class FaultyGpus {
 public:
  // On as many GPUs as there are, at most kMost, at least that many.
  explicit FaultyGpus(std::uint32_t least);
  ~FaultyGpus();  // stops the daemon
  FaultyGpus(const FaultyGpus&) = delete;
  FaultyGpus& operator=(const FaultyGpus&) = delete;

  static constexpr std::uint32_t kMost = 4;

  bool usable() const { return why_not_.empty(); }
  const std::string& why_not() const { return why_not_; }
  bool start(const std::vector<std::pair<std::string, std::string>>& settings);
  Daemon& daemon() const { return *daemon_; }
  std::uint32_t num_gpus() const { return num_gpus_; }

  // Kills the process, which occupies the GPU, and returns when, in seconds. The GPU's engine is dead then,
  // and the GPU recovers.
  double kill_in_a_kernel(RankProcess& process, std::uint32_t device);
  // Kills the GPU's engine, which takes along its clients there: this one, which must be using the GPU.
  double kill_engine(RankProcess& client, std::uint32_t device);
  // The same without waiting for anything, and what must follow.
  double strike(pid_t process, std::uint32_t device);
  void recover(std::uint32_t device);
  // Because the GPU had failed, or else as `how` says, and once; the others' have not died. Prints what the
  // daemon told of engines.
  void expect_only_this_engine_died(std::uint32_t device, const std::string& how = "exit 3") const;
  void expect_no_engine_died() const;

  bool can_terminate() const;
  // Whether a HeldMps holds it: the fake one.
  bool can_hold_mps() const { return !true_gpus_; }
  // Sets the clients that the fake MPS lists; the true one knows them itself.
  void list_clients(const std::vector<pid_t>& clients) const;
  bool was_terminated(pid_t pid) const;
  // "" if it has none.
  std::string session_of(pid_t client) const;

 private:
  friend class HeldMps;
  const bool true_gpus_;
  const std::uint32_t num_gpus_;
  std::string why_not_;
  std::string folder_;  // of the fakes' files
  std::unique_ptr<Daemon> daemon_;
};

// The fake MPS does not answer who its clients are, until it is let go.
class HeldMps {
 public:
  explicit HeldMps(const FaultyGpus& gpus);
  ~HeldMps() { unblock(); }
  HeldMps(const HeldMps&) = delete;
  HeldMps& operator=(const HeldMps&) = delete;
  void unblock() const;
  // Since it is held, a line for each question.
  std::string asked() const;

 private:
  const std::string folder_;
};

}  // namespace epd::test
