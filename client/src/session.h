// A session: the attach connection, the shared segments, and every operation in flight.
//
// Threads. Any thread may call. `mutex_` guards all state, and the reading end of the attach socket; the
// order is a group's submit_mutex, mutex_. None is held while sleeping, except submit_mutex in calls of a
// device's driver, which are made without mutex_, and while the engine takes a program. At most one waiting
// thread is the leader: it alone spins and sleeps on the descriptors; the others sleep on their own condition
// variable. See README, "Who sleeps where".
#pragma once

#include "attach.h"
#include "group.h"
#include "handle.h"
#include "home_process.h"
#include "spin.h"
#include "ticket_status.h"

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace epd::client {

// How long leaving waits for the daemon's answer.
inline constexpr std::int64_t kLeaveMs = 5'000;
inline constexpr std::int64_t kDetachMs = 200;  // a daemon that is slower lets go later
struct Operation {
  Group* group = nullptr;
  abi::Op op = abi::Op::kNone;
  std::uint32_t slot = 0;
  bool deferred = false;  // submitted with defer_receive
  bool in_stream = false;
  SteadyClock::time_point answer_by;  // an engine that runs has ended it by then
  bool done = false;
  epd_result_t result{};             // once done
  std::string text;                  // why it failed; may be empty
  std::list<HookCall> waiting_hook;  // at most one; made beforehand so that completing can't fail
};

// What a call has come to.
struct CallOutcome {
  Status status;
  epd_result_t result{};
  std::uint32_t runs = 0;
};

class ReplyWaiter;

// A thread that takes none of the host program's signals.
Status start_thread(const char* name, std::function<void()> body, std::thread& thread);

// What one thread waits for. Linked into the session while it does.
class Waiter {
 public:
  Waiter() = default;
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;
  virtual ~Waiter() = default;
  // With the session's mutex. Must be true once the session has ended.
  virtual bool ready() = 0;
  // Without it, by the leader: a cheap look at shared memory; false if there is none.
  virtual bool glance() const { return false; }

  std::condition_variable wake;
  // Looks again at least this often, whoever died before it rang.
  nanoseconds slice = std::chrono::milliseconds(100);
};

struct SubmitRequest {
  abi::Op op = abi::Op::kNone;
  std::uint32_t slot = 0;
  std::uint32_t num_tokens = 0;
  std::uint32_t flags = 0;  // abi::OpFlags, but kFlagCached, which follows from the handle
  std::uint32_t timeout_ms = 0;
  std::uint32_t sms = 0;
  epd_handle_t handle = 0;                       // combine, dispatch with an old routing
  bool keep = false;                             // dispatch: its handle
  StreamUse stream = {};                         // CUDA devices; a CUstream
  const std::uint32_t* num_tokens_at = nullptr;  // calls in a stream: on the device, in place of num_tokens
};

// Flags as the engine takes them: it ends sessions for flags that can't have a meaning.
std::uint32_t engine_flags(const abi::GroupShape& shape, const SubmitRequest& request);
// CLOCK_MONOTONIC
std::uint64_t monotonic_ns();

class Session {
 public:
  explicit Session(Attachment attachment);
  // Leaves all groups and ends what is in flight; returns when the hooks have run. Not from a hook.
  ~Session();
  Status prepare();  // once, before anything else: what can fail

  // OK, or INVALID_ARGUMENT in a process that was forked off the one that attached. Needs no lock, which
  // might be held for ever there.
  Status in_home_process() const;
  epd_session_info_t info() const;
  Status check();
  bool in_hook_thread() const;

  // What the caller holds; set once, by whoever made the session.
  Handle<Session>* given = nullptr;

  // requests.cpp
  Status join(const epd_group_config_t& config, Group*& group);
  // Frees the group once its hooks have run. Not from a hook.
  void leave(Group* group, Deadline deadline);

  // submit.cpp; *handle of a dispatch may be null
  Status submit(Group& group, const SubmitRequest& request, epd_ticket_t& ticket, epd_handle_t* handle);
  Status release_handle(Group& group, epd_handle_t handle);

  // streams.cpp
  Status wait_on_stream(Group& group, epd_ticket_t ticket, void* stream);

  // tickets.cpp: the text of a failed operation comes back in the status
  Status wait_ticket(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, epd_result_t* result);
  bool pending(Group& group, epd_ticket_t ticket);
  Status counts(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, epd_counts_t& counts);
  Status wait_sent(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms);
  Status resume(Group& group, std::int32_t timeout_ms, epd_resume_info_t& info);

  // session_calls.cpp
  Status check_group(Group& group, epd_progress_t& progress);

  // hooks.cpp
  Status on_complete(Group& group, epd_ticket_t ticket, epd_hook_t hook, void* user);
  Status drop(Group& group, epd_ticket_t ticket);

 private:
  friend class TicketWaiter;
  friend class BoardWaiter;
  friend class ResumeWaiter;
  friend class HookWaiter;
  friend class BreakWaiter;
  friend class ReplyWaiter;
  friend struct SessionTestAccess;
  using Lock = std::unique_lock<std::mutex>;
  using Operations = std::unordered_map<std::uint64_t, Operation>;

  abi::SegmentA& a() const { return *attachment_.segment_a.as<abi::SegmentA>(); }
  abi::SegmentB& b() const { return *attachment_.segment_b.as<abi::SegmentB>(); }
  // False: its engine is away.
  bool serving() const {
    return b().state.load(std::memory_order_acquire) ==
           static_cast<std::uint32_t>(abi::SessionState::kServing);
  }

  // completion.cpp
  // True once waiter.ready(); false when the deadline passed first. Called and returns with mutex_.
  bool wait(Lock& lock, Waiter& waiter, Deadline deadline);
  class Listed;
  class Leading;
  void lead(Lock& lock, Waiter& waiter, nanoseconds slice);
  void sleep(nanoseconds slice);
  void drain_doorbell();
  void await_end() const;
  // After publishing: wakes the engine if it sleeps, and for no less than this.
  void ring_engine(abi::Sleep at_least) const;
  bool has_completion() const;
  bool drain_locked();  // true if anything was taken
  void finish_locked(Operations::iterator op, const abi::Completion& completion, const char* text) noexcept;
  void abort_locked(StatusCode code, const char* text, const Group* only) noexcept;
  void notify_ready_locked(const Waiter* except);

  // submit.cpp
  struct RouteUse {
    std::uint32_t route = kNoRoute;
    bool writes = false;
  };
  Status ready_to_submit(Lock& lock, Group& group, const SubmitRequest& request);
  Status choose_route(Lock& lock, Group& group, const SubmitRequest& request, RouteUse& use);
  // All that can refuse a submission.
  Status admit(Lock& lock, Group& group, const SubmitRequest& request, RouteUse& use);
  Status push(Lock& lock, Group& group, const SubmitRequest& request, const RouteUse& use,
              epd_ticket_t ticket);
  Status no_room(Lock& lock);
  static Status no_handle_left(const Group& group);
  Status blocked(Lock& lock, std::string why);  // WOULD_BLOCK, unless the session is over

  // streams.cpp
  Status check_stream(const SubmitRequest& request) const;
  // One kernel lets it begin and waits for it.
  bool begins_and_waits(const SubmitRequest& request) const;
  // On the caller's stream: the inputs are there; or, if it begins and waits, that it can be told so. Called
  // and returns with mutex_, which it lets go meanwhile.
  Status mark_ready(Lock& lock, Group& group, const SubmitRequest& request, epd_ticket_t ticket);
  // What a stream waits for that waits for the operation. Needs mutex_, the others not.
  static StreamWait end_of(const Group& group, const Operation& op, epd_ticket_t ticket);
  Status enqueue_wait(void* stream, const StreamWait& wait, epd_ticket_t ticket);
  Status begin_and_wait(const Group& group, const SubmitRequest& request, const StreamWait& wait,
                        epd_ticket_t ticket);
  Status start_watch_locked();
  void watch();
  bool release_a_group(Lock& lock);  // false: none wants it
  bool any_released_locked() const;
  void want_releases_again_locked();
  void want_release_locked(Group& group);
  // After an operation has ended: if one on the slot has failed and none is in flight there any more.
  void want_slot_release_locked(Group& group, std::uint32_t slot) noexcept;
  // True if it had to wait, in which it lets mutex_ go.
  bool await_slot_release(Lock& lock, const Group& group, std::uint32_t slot);
  // The streams wait for no group that is to be released.
  void await_releases(Lock& lock);
  // Returns when no stream can wait in the group's memory any more.
  void await_release(Group& group);
  void kick_watch() const;
  void stop_watch();

  // tickets.cpp
  Status take_epoch(Group& group, std::int32_t timeout_ms, Deadline deadline, epd_resume_info_t& info);

  // session_calls.cpp: all that is different where operations are calls
  struct MadeCall {
    RouteUse use;
    epd_ticket_t ticket = 0;
    abi::Call call;
    std::uint64_t limit_ns = 0;  // that a kernel waits for its end
  };
  Status call(Group& group, const SubmitRequest& request, epd_ticket_t& ticket, epd_handle_t* handle);
  Status can_call_by_stream() const;
  Status prepare_call(Lock& lock, Group& group, const SubmitRequest& request, bool captured, MadeCall& made);
  Status admit_host_call(Lock& lock, Group& group, const SubmitRequest& request);
  Status usable_for_calls(const Group& group);
  // A record to keep is taken from the free ones.
  static Status choose_call_route(Group& group, const SubmitRequest& request, RouteUse& use);
  Status enqueue_call(Group& group, const SubmitRequest& request, MadeCall& made);
  static StreamWait flag_of(const Group& group, const CallTicket& about);
  Status wait_for_call_on_stream(Group& group, epd_ticket_t ticket, void* stream);
  Status wait_call(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, epd_result_t* result);
  bool call_pending(Group& group, epd_ticket_t ticket);
  Status call_counts(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, epd_counts_t& counts);
  Status call_sent(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms);
  Status hook_call(Group& group, epd_ticket_t ticket, epd_hook_t hook, void* user);
  void take_hooked_calls_locked();
  bool call_ended_locked(const Group& group, KnownCall& call, CallOutcome& out) const;
  bool call_missed_locked(const Group& group, KnownCall& call, CallOutcome& out) const;
  static KnownCall* await_call_locked(Group& group, epd_ticket_t ticket);
  static KnownCall* find_call_locked(Group& group, epd_ticket_t ticket);
  static void take_call_locked(Group& group, KnownCall& call, const CallOutcome& out);
  static Deadline call_deadline(const KnownCall& call, std::int32_t timeout_ms);
  // Whether the device still runs what streams have, now and then; no lock held.
  void look_at_device();
  bool device_look_due_locked() const;
  template <typename Done>
  bool look_until(Lock& lock, Deadline deadline, Done done);
  template <typename Look>
  Status look_at_call(Group& group, epd_ticket_t ticket, std::int32_t timeout_ms, const char* not_there,
                      Look look);
  Status renew_calls(Group& group);  // needs no mutex
  Status open_calls(Group& group);   // once, in join
  Status write_epoch(Group& group, std::uint64_t epoch);
  void close_calls(const Group& group);  // of the watch; needs no mutex

  // session.cpp
  void end_locked(Status status);
  void note_ended_locked();  // ends the session if segment B says that it has ended
  void kick() const;         // wakes the leader
  void probe();              // looks after the connection, at most once a millisecond; no lock held

  // requests.cpp
  struct Request {
    abi::AttachType type;
    abi::AttachType reply_type;
    const void* body;
    std::size_t body_bytes;
    Deadline send_by;           // DEADLINE_EXCEEDED if it could not be sent by then
    Deadline reply_by;          // likewise for the reply
    std::vector<int> fds = {};  // of the caller, to go with it
  };
  class Expected;
  Status request(const Request& request, Packet& reply);
  Status send_request(Lock& lock, const Request& request, std::uint32_t id);
  std::uint32_t new_request_id_locked();
  void look_at_socket() noexcept;  // takes what has come; needs no lock
  void take_packets_locked();
  void route_locked(Packet& packet);
  void give_up_join_locked(std::uint32_t id);
  bool awaits_late_join_locked() const;
  void send_owed_leaves_locked();
  Status adopt_joined(Packet& packet, Group& group);
  Status map_user_arena(const UniqueFd& fd, Group& group);
  void send_leave(std::uint32_t member, Deadline deadline);
  // Ends its operations and unblocks its streams; nothing is submitted in it any more.
  void begin_leave_locked(Group& group);

  // hooks.cpp
  Status start_hooks_locked();
  bool hooks_have_news_to_await() const;
  void run_hooks();
  void stop_hooks();
  void await_hooks_locked(Lock& lock, const Group& group);

  Attachment attachment_;
  HomeProcess home_;
  UniqueFd wake_;  // eventfd: makes the leader look up

  mutable std::mutex mutex_;  // guards all below, but what says otherwise
  Status ended_;              // not OK once the session is over
  std::uint64_t last_ticket_ = 0;
  std::uint64_t submission_tail_ = 0;
  std::atomic<std::uint64_t> completion_head_{0};  // written under mutex_, read by the leader without
  Operations operations_;
  std::size_t num_in_flight_ = 0;  // of operations_: not done
  std::vector<Waiter*> waiters_;
  bool has_leader_ = false;
  SteadyClock::time_point last_probe_{};
  Status device_status_;  // not OK: nothing runs in its context any more
  SteadyClock::time_point last_device_look_{};
  std::list<std::unique_ptr<Group>> groups_;

  std::uint32_t last_request_id_ = 1;  // 1 was Hello
  // By id, who waits for the reply. Null: nobody any more, and it is that of a join.
  std::unordered_map<std::uint32_t, ReplyWaiter*> requests_;
  std::vector<std::uint32_t> owed_leaves_;  // memberships that came when nobody waited for them any more

  std::thread hook_thread_;
  std::condition_variable hook_wake_;  // hooks wanted, or stopping
  std::condition_variable hook_done_;  // a hook has returned
  std::list<HookCall> ready_hooks_;
  const Group* hook_running_ = nullptr;
  std::size_t hooks_outstanding_ = 0;                          // asked for, operation not ended
  std::vector<std::pair<Group*, epd_ticket_t>> hooked_calls_;  // of them, those of calls
  bool stopping_ = false;

  std::thread watch_thread_;  // from the first operation on a stream to detach
  UniqueFd watch_wake_;       // eventfd: makes it look up
  std::condition_variable released_;
  bool watch_stopping_ = false;

  // The leader's alone; leadership passes under mutex_.
  SpinBudget spin_;
  bool doorbell_open_ = true;
};

}  // namespace epd::client
