// One submitted dispatch or combine, as a state machine that never waits: the engine's loop steps it.
//
//   planning ─► wait_ready ─► moving ─► wait_arrived ─► done
//       └──────────┴────────────┴───────────┴──► breaking (the group is asked to break)
//
// On a host device the engine does what the stages say (moved_operation.h); a CUDA device does a whole
// operation by itself, and here it is planning, then moving (launched_operation.h).
#pragma once

#include "announcement.h"
#include "device/device.h"
#include "failures.h"
#include "group.h"
#include "page.h"

#include <memory>
#include <optional>
#include <string>

namespace epd {

enum class StepResult { kIdle, kProgress, kDone, kFailed };

// Microseconds between two clock readings, of which the first may be a client's: 0 if it lies ahead.
std::uint32_t saturated_us(std::uint64_t from_ns, std::uint64_t to_ns);

class Operation {
 public:
  virtual ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // One short piece of work. kFailed: failure() says what the group is to be told.
  virtual StepResult step(std::uint64_t now_ns) = 0;
  // Whether step() would get on: the same look, without the work.
  virtual bool runnable() const = 0;
  // Whether the loop's thread could move rows of it now.
  virtual bool can_move() const { return false; }
  // Whether the loop must look again soon, because nobody rings for what it waits for.
  virtual bool needs_polling() const { return false; }
  // Its deadline has passed. kFailed at once, or kIdle and from step() later.
  virtual StepResult expire(std::uint64_t now_ns) = 0;
  // Stops touching any arena: at once, or as soon as settled() says.
  virtual void abandon() = 0;
  virtual bool settled() const { return true; }
  // Whether the client's stream will go on without being told.
  virtual bool releases_stream() const { return false; }
  // Whether it has a number in its group, and all ranks take part.
  virtual bool is_collective() const { return true; }
  // Of one that was abandoned and has settled: every rank has completed it all the same.
  virtual bool completed_anyway() { return false; }

  Member& member() const { return member_; }
  const abi::Submission& submission() const { return submission_; }
  std::uint64_t index() const { return index_; }
  std::uint64_t deadline_ns() const { return deadline_ns_; }
  abi::OpStage stage() const { return stage_; }
  const abi::Break& failure() const { return failure_; }
  abi::Completion completion(StatusCode status, std::int32_t culprit, std::uint64_t now_ns) const;

  // As what it is to end once it has settled.
  void set_verdict(const abi::Break& cause) { verdict_ = cause; }
  const std::optional<abi::Break>& verdict() const { return verdict_; }

  void show(abi::OpView* view);  // takes over the entry

 protected:
  Operation(Member& member, const abi::Submission& submission, std::uint64_t seen_ns,
            std::uint64_t deadline_ns);

  bool is_dispatch() const { return submission_.op == abi::Op::kDispatch; }
  bool has(abi::OpFlags flag) const { return (submission_.flags & flag) != 0; }
  // A dispatch that makes a routing rather than using one.
  bool routes() const { return is_dispatch() && !has(abi::kFlagCached); }
  // A block serves the operations `depth` apart; its former user must be done everywhere.
  bool block_is_free() const { return member_.next_index() + group_.shape.depth > index_; }
  void enter(abi::OpStage stage);
  StepResult fail(const Failure& failure);
  StepResult held_up();  // an earlier operation must end first
  // Of the routing that it uses, if any: the epoch, 0 if not known, and handle of its record.
  abi::OpAnnouncement announcement(std::uint64_t routing_epoch, std::uint64_t routing_handle) const;
  Subject subject() const { return {member_, submission_, index_}; }
  std::string expired_text(std::uint64_t now_ns) const;
  StepResult fail_stale_handle();
  StepResult fail_changed_group(std::uint64_t routing_epoch);

  Member& member_;
  Group& group_;
  const abi::Submission submission_;
  const std::uint64_t index_;
  const std::uint64_t number_;  // Group::in_tags
  const std::uint64_t tag_;
  const std::uint64_t seen_ns_;
  const std::uint64_t deadline_ns_;
  std::uint64_t launched_ns_ = 0;
  std::uint32_t num_recv_rows_ = 0;
  std::uint32_t num_dropped_ = 0;
  abi::OpView* view_ = nullptr;

 private:
  abi::OpStage stage_ = abi::OpStage::kPlanning;
  bool held_up_ = false;
  abi::Break failure_{};
  std::optional<abi::Break> verdict_;
};

}  // namespace epd
