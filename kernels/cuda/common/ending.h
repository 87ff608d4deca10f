// How an operation ends: what one thread tells its engine and its client's stream. For device and host, see
// proto/ordered.h.
#pragma once

#include "cuda/common/layout.h"
#include "proto/ordered.h"

namespace epd::kernels::cuda {

using namespace ordered;

// Head of the workspace. Counters return to zero with each operation.
struct Workspace {
  std::uint32_t leaving;     // CTAs that have left the operation
  std::uint32_t counted;     // CTAs whose counts are in
  std::uint32_t finished;    // CTAs that have moved their rows
  std::uint32_t dropped;     // selections of ranks that are not there
  std::uint32_t claimed;     // tokens that warps have taken beyond their first
  std::uint64_t bad_choice;  // all ones less the least (place << 32 | value) that was refused; 0 = none
  std::uint64_t failed;      // tag of the operation that failed last
  std::uint32_t sent;        // CTAs that have sent all: low-latency path
  std::uint32_t rows;        // M of the operation: low-latency path
  std::uint64_t ended;       // tag of the operation that ended last, if it ended well
};
static_assert(sizeof(Workspace) <= kWorkspaceHead);

EPD_DEVICE inline Workspace& workspace(const Operation& op) {
  return *static_cast<Workspace*>(op.workspace);
}
EPD_DEVICE inline void write_word(const ResultOut& out, abi::CallResult::Word word, std::uint32_t value) {
  store_relaxed_system(&out.to->words[word], std::uint64_t{out.number} << 32 | value);
}

// The part of a call's result that whoever ends it writes.
EPD_DEVICE inline void write_ending(const ResultOut& out, abi::CallEnding how, const OpResult& ending) {
  write_word(out, abi::CallResult::kEnding, static_cast<std::uint32_t>(how));
  write_word(out, abi::CallResult::kRows, ending.num_recv_rows);
  write_word(out, abi::CallResult::kDropped, ending.num_dropped);
  write_word(out, abi::CallResult::kRan, static_cast<std::uint32_t>(ending.ran_ns / 1000));
}

// Stores `ending` as the operation's result, with its tag last; a call's for the client too. One thread.
EPD_DEVICE EPD_NO_INLINE inline void publish(const Operation& op, const OpResult& ending) {
  OpResult& result = *op.result;
  result.error = ending.error;
  result.culprit = ending.culprit;
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

// The first failure of the operation is published; every CTA leaves when it sees one.
EPD_DEVICE EPD_NO_INLINE inline void fail(const Operation& op, const OpResult& ending) {
  if (exchange(&workspace(op).failed, op.tag) != op.tag) publish(op, ending);
}

EPD_DEVICE inline OpResult ended(OpError error, std::int32_t culprit) {
  OpResult ending{};
  ending.error = error;
  ending.culprit = culprit;
  ending.expert = -1;
  return ending;
}

// Lets the client's stream go on. One thread, for which everything that the stream may read is visible. A
// stream that has asked by a command waits in a kernel of this device, or for the flag: then a release at the
// device's scope is enough, which takes a microsecond less.
EPD_DEVICE inline void unblock_stream(const Operation& op) {
  const bool by_command = op.signal.failed != nullptr;
  if (op.signal.flag != nullptr) store_release_system(op.signal.flag, 1u);
  if (op.signal.done == nullptr) return;
  if (by_command) {
    store_release(op.signal.done, op.signal.value);
  } else {
    store_release_system(op.signal.done, op.signal.value);
  }
}

// Whether a waiting thread has to leave; says why if it is the first. `waiting`: set of ranks.
EPD_DEVICE EPD_NO_INLINE inline bool must_leave(const Operation& op, std::uint64_t deadline_ns,
                                                std::uint32_t waiting) {
  if (load_relaxed(&workspace(op).failed) == op.tag) return true;
  const std::int32_t culprit = lowest_bit(waiting);
  if (op.abort != nullptr && load_relaxed_system(op.abort) != 0) {
    OpResult ending = ended(OpError::kAborted, culprit);
    ending.num_dropped = load_here(&workspace(op).dropped);  // should all ranks turn out to be done
    fail(op, ending);
    return true;
  }
  if (nanoseconds() >= deadline_ns) {
    fail(op, ended(OpError::kDeadline, culprit));
    return true;
  }
  return false;
}

// Of one that has failed: no CTA runs it any more, and the workspace is in order. One thread.
EPD_DEVICE inline void end_failed(const Operation& op) {
  fence_system();
  if (op.signal.failed != nullptr) add_system(op.signal.failed, 1);
  unblock_stream(op);
  store_release_system(&op.result->left, op.tag);
}

}  // namespace epd::kernels::cuda
