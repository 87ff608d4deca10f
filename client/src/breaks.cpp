// A rank after a break: it takes the next epoch, and learns which operation comes next.
#include "session.h"

#include "ticket_status.h"

#include <algorithm>
#include <thread>

namespace epd::client {
namespace {

constexpr std::chrono::milliseconds kAskAgain{1};  // while an engine comes back

class ResumeWaiter final : public Waiter {
 public:
  ResumeWaiter(const Connection& connection, Operations& operations, Group& group, std::uint64_t epoch)
      : connection_(connection), operations_(operations), group_(group), epoch_(epoch) {
    slice = std::chrono::milliseconds(10);
  }
  bool ready() override {
    if (!connection_.ended().ok() || group_.left) return true;
    if (!group_.board.snapshot(board)) return false;
    overdue = board.state == abi::GroupState::kActive && board.epoch == group_.epoch &&
              operations_.overdue_locked(group_);
    const bool failed = board.epoch == group_.epoch && operations_.failed_locked(group_);
    const bool goes_on =
        board.state == abi::GroupState::kActive && board.epoch >= epoch_ && !overdue && !failed;
    return board.state == abi::GroupState::kLost || goes_on;
  }

  BoardSnapshot board;   // as read last
  bool overdue = false;  // the group seems well, but this device's engine is stopped

 private:
  const Connection& connection_;
  Operations& operations_;
  Group& group_;
  const std::uint64_t epoch_;
};

}  // namespace

Status Session::resume(Group& group, std::int32_t timeout_ms, Deadline deadline, std::uint64_t epoch,
                       epd_resume_info_t& info) {
  for (;;) {
    Status status = take_epoch(group, timeout_ms, deadline, epoch, info);
    if (!status.ok()) return status;
    status = operations_.renew(group, deadline);
    if (status.ok()) {
      if (attachment_.device != nullptr) mapper_.map_again(group);
      return group.active_mask.write(group, attachment_.device.get());
    }
    if (status.code() == StatusCode::kDeadlineExceeded && timeout_ms == EPD_NO_WAIT)
      return would_block(status.message() + " yet");
    // The group may have broken again meanwhile, which is the same as if it broke a little later. An engine
    // that was restarted says so before the board does.
    const bool restarted = status.code() == StatusCode::kEngineRestarted;
    {
      const Lock lock = waits_.lock();
      const bool broken = restarted || !group.board.usable_in(group.epoch).ok();
      if (!connection_.ended().ok() || !broken || deadline.passed()) return status;
    }
    if (restarted) std::this_thread::sleep_for(kAskAgain);
  }
}

Status Session::take_epoch(Group& group, std::int32_t timeout_ms, Deadline deadline, std::uint64_t epoch,
                           epd_resume_info_t& info) {
  ResumeWaiter waiter(connection_, operations_, group, epoch);
  Lock lock = waits_.lock();
  const bool ready = waits_.wait(lock, waiter, deadline);
  if (!connection_.ended().ok()) return connection_.ended();
  if (group.left) return {StatusCode::kAborted, "this rank has left the group"};
  if (!ready) {
    const std::string text =
        waiter.overdue
            ? "this device's engine, which may be stopped, has not ended an operation past its deadline"
            : "the group has not agreed on a new epoch";
    if (timeout_ms == EPD_NO_WAIT) return would_block(text + " yet");
    return {StatusCode::kDeadlineExceeded, text + " within " + std::to_string(timeout_ms) + " ms"};
  }
  const BoardSnapshot& board = waiter.board;
  if (board.state == abi::GroupState::kLost) return break_status(board);
  if (board.epoch > group.epoch) {
    group.epoch = board.epoch;
    group.next_index = board.resume_index;
    operations_.begin_epoch_locked(group);
  }
  info.epoch = group.epoch;
  info.resume_op = group.next_index;
  info.num_active_ranks = board.num_active_ranks;
  return {};
}

Status Session::advance(Group& group, epd_ticket_t& ticket, std::int32_t timeout_ms, epd_result_t& result,
                        epd_resume_info_t& info) {
  Status status = check_wait(timeout_ms);
  if (!status.ok()) return status;
  const Deadline deadline = Deadline::of_wait(timeout_ms);
  if (ticket == 0) return resume(group, timeout_ms, deadline, 0, info);
  std::uint64_t before = 0;
  {
    const Lock lock = waits_.lock();
    before = group.epoch;
  }
  const bool numbered = CallTicket::unpack(ticket).op != abi::Op::kNoop;
  do {  // a stopped engine may hold it beyond its deadline
    status = operations_.wait(group, ticket, timeout_ms, &result);
  } while (for_ever(timeout_ms) && result.size == 0 && status.code() == StatusCode::kDeadlineExceeded);
  if (result.size == 0) return status;
  ticket = 0;
  if (epd_is_break(result.status) != 0) return resume(group, timeout_ms, deadline, 0, info);
  if (!status.ok()) return status;
  const Lock lock = waits_.lock();
  if (numbered && group.epoch == before)  // else another thread has resumed meanwhile
    group.next_index = std::max(group.next_index, result.op_index + 1);
  info.epoch = group.epoch;
  info.resume_op = group.next_index;
  info.num_active_ranks = group.board.num_active();
  return {};
}

}  // namespace epd::client
