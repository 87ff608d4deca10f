#include "page.h"

#include <unistd.h>

namespace epd::engine {

void Page::start(std::uint32_t sms) {
  page_->magic = abi::kEnginePageMagic;
  page_->version = abi::kAbiVersion;
  page_->sms.store(sms, std::memory_order_relaxed);
  page_->sleep.sleeping.store(0, std::memory_order_relaxed);
  for (abi::OpView& view : page_->ops) {
    view.ticket.store(0, std::memory_order_relaxed);
    view.far_wait.reset();
  }
  for (auto* counter :
       {&page_->ops_submitted, &page_->ops_completed, &page_->ops_failed, &page_->bytes_dispatched,
        &page_->bytes_combined, &page_->submissions_refused, &page_->busy_ns, &page_->sleeps}) {
    counter->store(0, std::memory_order_relaxed);
  }
  const auto forget = [](auto& table) {
    table.unlisted.store(0, std::memory_order_relaxed);
    for (abi::StatisticsRow& row : table.rows) {
      // Clears only rows in use: so pages of memory that were never touched stay untouched.
      if (row.key.load(std::memory_order_relaxed) != 0) row.key.store(0, std::memory_order_release);
    }
  };
  forget(page_->sessions);
  forget(page_->members);
  page_->times_stuck.store(0, std::memory_order_relaxed);
}

abi::OpView* Page::claim(const abi::Call& call, std::uint64_t id, std::uint64_t now_ns) {
  for (abi::OpView& view : page_->ops) {
    if (view.ticket.load(std::memory_order_relaxed) != 0) continue;
    view.submit_ns = now_ns;
    view.op = call.op;
    view.slot = call.slot;
    view.num_tokens = call.num_tokens;
    view.op_index = 0;
    view.stage.store(0, std::memory_order_relaxed);
    view.waiting_for.store(-1, std::memory_order_relaxed);
    view.waiting_since_ns.store(0, std::memory_order_relaxed);
    view.far_wait.clear();
    for (auto& entered : view.stage_ns) entered.store(0, std::memory_order_relaxed);
    view.ticket.store(id, std::memory_order_release);
    return &view;
  }
  return nullptr;
}

void Page::release(abi::OpView* view) {
  if (view != nullptr) view->ticket.store(0, std::memory_order_release);
}

void Page::enter(abi::OpView* view, abi::OpStage stage, std::uint64_t now_ns) {
  if (view == nullptr) return;
  view->stage_ns[static_cast<std::size_t>(stage)].store(now_ns, std::memory_order_relaxed);
  view->stage.store(static_cast<std::uint32_t>(stage), std::memory_order_relaxed);
  view->waiting_for.store(-1, std::memory_order_relaxed);
  view->waiting_since_ns.store(0, std::memory_order_relaxed);
  view->far_wait.clear();
}

void Page::wait_for(abi::OpView* view, std::uint32_t rank, std::uint64_t now_ns) {
  const auto who = static_cast<std::int32_t>(rank);
  if (view == nullptr || view->waiting_for.load(std::memory_order_relaxed) == who) return;
  view->waiting_since_ns.store(now_ns, std::memory_order_relaxed);
  view->waiting_for.store(who, std::memory_order_relaxed);
}

void Bell::ring() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (page_->sleep.sleeping.load(std::memory_order_relaxed) != 0) ring_eventfd(fd_.get());
}

void Bell::take() {
  std::uint64_t rings;
  [[maybe_unused]] const ssize_t n = ::read(fd_.get(), &rings, sizeof(rings));
}

}  // namespace epd::engine
