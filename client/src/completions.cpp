#include "completions.h"

#include "ticket_status.h"

#include <algorithm>
#include <utility>

namespace epd::client {

bool Completions::has() const {
  const std::uint64_t head = head_.load(std::memory_order_relaxed);
  abi::Completion& slot = b_.completions.slots[head % abi::kCompletionSlots];
  return std::atomic_ref(slot.sequence).load(std::memory_order_acquire) == head + 1;
}

bool Completions::take() {
  bool any = false;
  abi::Completion completion;
  std::uint64_t head = head_.load(std::memory_order_relaxed);
  // The loop is bounded, so a ring full of invalid entries can't hold the lock for ever.
  for (std::size_t i = 0; i < abi::kCompletionSlots && abi::ring_peek(b_.completions, head, completion);
       ++i) {
    // A ticket may be unknown: its engine died while completing it and its successor did it again, or the
    // group was left.
    const auto found = operations_.find(completion.ticket);
    if (found != operations_.end() && !found->second.done) finish(found, completion, nullptr);
    head_.store(++head, std::memory_order_relaxed);
    a_.completion_head.value.store(head, std::memory_order_release);
    any = true;
  }
  return any;
}

Operation* Completions::find(epd_ticket_t ticket) {
  const auto found = operations_.find(ticket);
  return found != operations_.end() ? &found->second : nullptr;
}

void Completions::add_hook(epd_ticket_t ticket, std::list<HookCall>& call) {
  const auto found = operations_.find(ticket);
  Operation& op = found->second;
  if (op.done) {
    call.front().result = op.result;
    operations_.erase(found);
    hooks_.call_locked(call);
  } else {
    op.waiting_hook.splice(op.waiting_hook.end(), call);
    hooks_.expect_locked();
  }
}

void Completions::finish(Operations::iterator found, const abi::Completion& completion,
                         const char* text) noexcept {
  Operation& op = found->second;
  op.done = true;
  op.result.size = sizeof(op.result);
  op.result.status = static_cast<epd_status_t>(checked_code(static_cast<std::uint32_t>(completion.status)));
  op.result.failed_rank = completion.failed_rank;
  op.result.op_index = completion.op_index;
  op.result.num_recv_rows = completion.num_recv_rows;
  op.result.seen_us = completion.seen_us;
  op.result.launched_us = completion.launched_us;
  op.result.done_us = completion.done_us;
  op.result.num_dropped_selections = completion.num_dropped_selections;
  op.result.runs = 1;
  op.group->end_in_flight(found->first, op.result.status == EPD_OK);
  if (op.has_outputs && op.result.status == EPD_OK) op.group->ended_well[op.slot] = found->first;
  op.crowded = op.result.status == EPD_OK && op.room != 0 && op.result.num_recv_rows > op.room;
  if (op.crowded) op.result.status = EPD_RESOURCE_EXHAUSTED;
  if (op.result.status != EPD_OK) {
    try {
      op.text = text != nullptr ? std::string(text) : op.group->board.message_for(op.slot, found->first);
    } catch (...) {
      op.text.clear();  // out of memory: the caller gets the status alone
    }
  }
  if (!op.waiting_hook.empty()) {
    op.waiting_hook.front().result = op.result;
    hooks_.ready_locked(op.waiting_hook);
    operations_.erase(found);
  }
}

void Completions::abort(StatusCode code, const char* text, const Group* only) noexcept {
  abi::Completion completion{};
  completion.status = code;
  completion.failed_rank = -1;
  for (auto it = operations_.begin(); it != operations_.end();) {
    const auto current = it++;
    if (current->second.done || (only != nullptr && current->second.group != only)) continue;
    finish(current, completion, text);
  }
}

void Completions::forget(const Group& group) {
  std::erase_if(operations_, [&](const auto& entry) { return entry.second.group == &group; });
}

bool Completions::overdue(const Group& group) const {
  const SteadyClock::time_point now = SteadyClock::now();
  return std::any_of(operations_.begin(), operations_.end(), [&](const auto& entry) {
    const Operation& op = entry.second;
    return op.group == &group && !op.done && now > op.answer_by - kAnswerGrace;
  });
}

}  // namespace epd::client
