// The end of an operation: how one thread publishes the result to the engine and unblocks the client's
// stream. The code compiles for device and host (proto/ordered.h).
#pragma once

#include "cuda/common/layout.h"
#include "proto/ordered.h"

namespace epd::kernels::cuda {

using namespace ordered;

// The head of a rank's workspace in device memory. Every counter is zero again at the end of an operation.
struct Workspace {
  std::uint32_t leaving;   // CTAs that have left the operation
  std::uint32_t counted;   // CTAs whose counts are in totals() and cta_counts()
  std::uint32_t finished;  // CTAs whose rows are copied
  std::uint32_t dropped;   // selections of inactive ranks
  std::uint32_t claimed;   // tokens that warps have claimed beyond their first one
  // The complement of the smallest (index << 32 | value) of all invalid choices; 0: none.
  std::uint64_t bad_choice;
  std::uint64_t failed;  // tag of the last operation that failed
  std::uint32_t sent;    // low-latency path: CTAs that have sent all their rows
  std::uint32_t rows;    // low-latency path: M of the operation
  std::uint64_t ended;   // tag of the last operation that ended without an error
};
static_assert(sizeof(Workspace) <= kWorkspaceHead);

// Returns the head of the operation's workspace.
EPD_DEVICE inline Workspace& workspace(const Operation& op) {
  return *static_cast<Workspace*>(op.workspace);
}
// Writes one word of a call's result, with the number of the writing in the upper half.
EPD_DEVICE inline void write_word(const ResultOut& out, abi::CallResult::Word word, std::uint32_t value) {
  store_relaxed_system(&out.to->words[word], std::uint64_t{out.number} << 32 | value);
}

// Writes the part of a call's result that is the same for all endings.
EPD_DEVICE inline void write_ending(const ResultOut& out, abi::CallEnding how, const OpResult& ending) {
  write_word(out, abi::CallResult::kEnding, static_cast<std::uint32_t>(how));
  write_word(out, abi::CallResult::kRows, ending.num_recv_rows);
  write_word(out, abi::CallResult::kDropped, ending.num_dropped);
  write_word(out, abi::CallResult::kRan, static_cast<std::uint32_t>(ending.ran_ns / 1000));
}

// Stores `ending` as the operation's result and the tag last, with a fence before it. The operation of a call
// also gets the client's result. One thread calls.
EPD_DEVICE EPD_NO_INLINE inline void publish(const Operation& op, const OpResult& ending) {
  OpResult& result = *op.result;
  result.error = ending.error;
  result.failed_rank = ending.failed_rank;
  result.token = ending.token;
  result.k = ending.k;
  result.value = ending.value;
  result.expert = ending.expert;
  result.rows = ending.rows;
  result.room = ending.room;
  result.num_recv_rows = ending.num_recv_rows;
  result.num_dropped = ending.num_dropped;
  result.ran_ns = ending.ran_ns;
  fence_system();
  store_relaxed_system(&result.tag, op.tag);
  if (op.out_result.to == nullptr) return;
  write_ending(op.out_result,
               ending.error == OpError::kNone ? abi::CallEnding::kCarriedOut : abi::CallEnding::kFailed,
               ending);
}

// Publishes the operation's first failure. Every CTA leaves when it sees the failure.
EPD_DEVICE EPD_NO_INLINE inline void fail(const Operation& op, const OpResult& ending) {
  if (exchange(&workspace(op).failed, op.tag) != op.tag) publish(op, ending);
}

// Makes a result with this error and failed rank; -1: no rank.
EPD_DEVICE inline OpResult ended(OpError error, std::int32_t failed_rank) {
  OpResult ending{};
  ending.error = error;
  ending.failed_rank = failed_rank;
  ending.expert = -1;
  return ending;
}

// Unblocks the client's stream. One thread calls; everything that the stream may read is visible to this
// thread. The stream waits in a kernel of this device, or for the flag. So for `done` a release at device
// scope is enough, and it is a microsecond faster.
EPD_DEVICE inline void unblock_stream(const Operation& op) {
  if (op.signal.flag != nullptr) store_release_system(op.signal.flag, 1u);
  if (op.signal.done != nullptr) store_release(op.signal.done, op.signal.value);
}

// Returns whether a waiting thread must leave: the operation has failed, was aborted or is past its deadline.
// The first thread to find out publishes the reason. `waiting` is the set of ranks that the thread waits for.
EPD_DEVICE EPD_NO_INLINE inline bool must_leave(const Operation& op, std::uint64_t deadline_ns,
                                                std::uint32_t waiting) {
  if (load_relaxed(&workspace(op).failed) == op.tag) return true;
  const std::int32_t failed_rank = lowest_bit(waiting);
  if (op.abort != nullptr && load_relaxed_system(op.abort) != 0) {
    OpResult ending = ended(OpError::kAborted, failed_rank);
    ending.num_dropped = load_here(&workspace(op).dropped);  // for an abort after all ranks have finished
    fail(op, ending);
    return true;
  }
  if (nanoseconds() >= deadline_ns) {
    fail(op, ended(OpError::kDeadline, failed_rank));
    return true;
  }
  return false;
}

// Ends a failed operation, when no CTA runs it any more and the workspace is clean. One thread calls.
EPD_DEVICE inline void end_failed(const Operation& op) {
  fence_system();
  if (op.signal.failed != nullptr) add_system(op.signal.failed, 1);
  unblock_stream(op);
  store_release_system(&op.result->left, op.tag);
}

}  // namespace epd::kernels::cuda
