// A scripted supervisor and engine for tests of the client library: the real attach protocol and the
// real shared memory, no groups of other ranks and no rows. One session at a time.
#pragma once

#include "common/fd.h"
#include "common/memory.h"
#include "common/packet.h"
#include "proto/attach.h"
#include "proto/call_words.h"
#include "proto/waits.h"

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace epd::testing {

// The ways in which the daemon differs from a good one.
struct FakeSettings {
  std::optional<Status> refuse_hello;
  std::optional<Status> refuse_join;
  std::optional<Status> refuse_map;
  bool silent_hello = false;       // takes the request and never answers
  bool silent_join = false;        // likewise
  bool keeps_member = false;       // answers joins that restore as those of a rank that was not late
  std::uint64_t resume_index = 0;  // of joins
  std::string hold_join;           // the name of a group: joins to it are answered by answer_join
  bool deaf = false;               // reads nothing that comes over the connection
  bool close_on_hello = false;
  bool short_welcome = false;  // a packet cut after the header
  bool wrong_nonce = false;
  bool sealed = true;
  bool magic = true;
  std::uint32_t version = abi::kAbiVersion;
  std::uint64_t layout_hash = abi::layout_hash();
  std::uint64_t segment_b_bytes = sizeof(abi::SegmentB);
  std::uint32_t welcome_fds = 4;
  std::int64_t more_user_bytes = 0;   // added to what Joined says
  std::int64_t less_board_bytes = 0;  // missing in the board's file
  abi::DeviceKind device_kind = abi::DeviceKind::kHost;
  std::array<std::uint8_t, 16> device_uuid{};
  std::string arena_name = "fake-user";  // of its memory
  std::size_t arena_unit = 1;            // its memory is a multiple of it
  bool shares_device = false;            // another rank of the group is on the rank's device
  std::uint64_t active = 0;              // ranks that take part, as a board says at the join
  bool automatic = true;                 // completes every call with OK; else the test does, see next_call
};

// A membership as the fake keeps it. Public for tests that write the board themselves.
struct FakeMember {
  std::uint32_t member = 0;
  abi::GroupShape shape{};
  std::vector<abi::MemoryRange> mapped;  // as they were asked for
  std::uint64_t epoch = 1;
  std::uint64_t next_index = 0;
  std::uint32_t next_call = 0;  // of the host
  std::uint32_t writing = 0;    // the last one in the results
  Mapping user;
  Mapping board_mapping;
  Mapping results_mapping;

  abi::CallWords& calls() const { return *user.as<abi::CallWords>(abi::UserArenaLayout(shape).calls); }
  abi::Results& results() const { return *results_mapping.as<abi::Results>(); }
  abi::Board& board() const { return *board_mapping.as<abi::Board>(); }
};

// A call as the engine has taken it.
struct FakeCall : abi::Call {
  FakeMember* member = nullptr;
};

class FakeDaemon {
 public:
  explicit FakeDaemon(FakeSettings settings = {});
  ~FakeDaemon();

  const std::string& socket_path() const { return path_; }
  // From now on, for requests that have not come yet.
  void set(const FakeSettings& settings);

  // ---- engine's part; any thread ----
  // The next call of the host, if one comes within the time. Not in automatic mode.
  std::optional<FakeCall> next_call(int timeout_ms = 10'000);
  // An error breaks the group, which at once has a new epoch.
  void complete(const FakeCall& call, StatusCode status = StatusCode::kOk, std::int32_t failed_rank = -1,
                const std::string& message = "");
  // The call's result alone.
  void end(const FakeCall& call, abi::CallEnding ending);
  void publish_counts(const FakeCall& call);
  void publish_sent(const FakeCall& call);
  // Waits until the client has rung the engine this often in all; false after ten seconds.
  bool await_rings(std::uint64_t count) const;
  void end_session(StatusCode status, const std::string& text);
  void set_serving(bool serving);  // else the engine is being restarted
  bool client_sleeps() const;
  // Waits until the client's leader says that it sleeps; false after ten seconds.
  bool await_client_sleep() const;

  // ---- group's part ----
  FakeMember& member(std::size_t index = 0);
  void write_board(abi::GroupState state, std::uint64_t epoch, std::uint64_t resume_index, StatusCode cause,
                   const std::string& message);

  // ---- supervisor's part ----
  void goodbye(StatusCode status, const std::string& text, bool close = true);
  void hang_up();
  void hang_up_doorbell();
  std::size_t left() const { return left_; }  // kLeave requests seen
  // Waits until so many joins are held; false after ten seconds.
  bool await_held(std::size_t count) const;
  // Answers the held join of this rank.
  void answer_join(std::int32_t rank);

 private:
  void serve();
  void handle(Packet& packet);
  void welcome(const abi::Hello& hello, std::uint32_t request_id);
  struct HeldJoin {
    abi::Join join;
    std::uint32_t request_id;
  };
  void join(const abi::Join& request, std::uint32_t request_id);
  void reply_refused(const Status& status, std::uint32_t request_id);
  void run_engine();
  std::optional<FakeCall> take_locked();
  void end_locked(const FakeCall& call, abi::CallEnding ending);
  void publish_counts_locked(const FakeCall& call);
  void write_board_locked(FakeMember& member, abi::GroupState state, std::uint64_t epoch,
                          std::uint64_t resume_index, StatusCode cause, const std::string& message);
  void ring_locked();
  abi::SegmentA& a() const { return *segment_a_.as<abi::SegmentA>(); }
  abi::SegmentB& b() const { return *segment_b_.as<abi::SegmentB>(); }

  std::string directory_;
  std::string path_;
  UniqueFd listener_;
  UniqueFd stop_;
  UniqueFd news_;  // eventfd: the engine thread has something new to look at

  mutable std::mutex mutex_;  // guards all below
  FakeSettings settings_;
  UniqueFd connection_;
  UniqueFd engine_bell_;
  UniqueFd client_bell_;
  Mapping segment_a_;
  Mapping segment_b_;
  std::vector<std::unique_ptr<FakeMember>> members_;
  std::vector<HeldJoin> held_;

  std::atomic<std::size_t> left_{0};
  std::atomic<std::uint64_t> rings_{0};  // how often the client rang
  std::atomic<bool> stopping_{false};
  std::thread server_;
  std::thread engine_;
};

}  // namespace epd::testing
