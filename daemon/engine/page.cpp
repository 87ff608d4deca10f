#include "page.h"

namespace epd {

void Page::start(std::uint32_t sms) {
  page_->magic = abi::kEnginePageMagic;
  page_->version = abi::kAbiVersion;
  page_->sms.store(sms, std::memory_order_relaxed);
  page_->sleep.sleeping.store(0, std::memory_order_relaxed);
  for (abi::OpView& view : page_->ops) view.ticket.store(0, std::memory_order_relaxed);
}

abi::OpView* Page::claim(const abi::Submission& submission) {
  for (abi::OpView& view : page_->ops) {
    if (view.ticket.load(std::memory_order_relaxed) != 0) continue;
    view.submit_ns = submission.submit_ns;
    view.op = submission.op;
    view.slot = submission.slot;
    view.num_tokens = submission.num_tokens;
    view.op_index = 0;
    view.stage.store(0, std::memory_order_relaxed);
    view.waiting_for.store(-1, std::memory_order_relaxed);
    view.ticket.store(submission.ticket, std::memory_order_release);
    return &view;
  }
  return nullptr;
}

void Page::release(abi::OpView* view) {
  if (view != nullptr) view->ticket.store(0, std::memory_order_release);
}

}  // namespace epd
