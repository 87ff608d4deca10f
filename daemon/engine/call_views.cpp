#include "call_views.h"

#include "session_port.h"

#include <algorithm>
#include <utility>

namespace epd::engine {

using abi::OpStage;
using abi::OpView;

namespace {

// Per rank, because all ranks share the page.
constexpr std::size_t kMostShown = 16;

}  // namespace

void CallViews::show(std::span<const Enqueued> enqueued, Page& page, std::uint64_t now_ns) {
  enqueued = enqueued.first(std::min(enqueued.size(), kMostShown));
  std::vector<Shown> now_there;
  for (const Enqueued& each : enqueued) {
    const auto known = std::find_if(shown_.begin(), shown_.end(), [&](const Shown& shown) {
      return shown.ring == each.ring && shown.number == each.number;
    });
    if (known == shown_.end()) {
      now_there.push_back({each.ring, each.number, claim(each, page, now_ns), false});
    } else {
      now_there.push_back(*known);
      shown_.erase(known);
    }
  }
  clear();
  shown_ = std::move(now_there);
  if (shown_.empty() || std::exchange(shown_.front().is_first, true)) return;
  OpView* const first = shown_.front().view;
  if (first != nullptr) first->deadline_ns = now_ns + std::uint64_t{enqueued.front().timeout_ms} * 1'000'000;
}

void CallViews::show_first(OpStage stage, std::uint32_t awaited, std::uint64_t now_ns) {
  if (shown_.empty() || shown_.front().view == nullptr) return;
  OpView* const first = shown_.front().view;
  if (first->stage.load(std::memory_order_relaxed) != static_cast<std::uint32_t>(stage))
    Page::enter(first, stage, now_ns);
  if (awaited != device::OperationInFlight::kNobody) Page::wait_for(first, awaited, now_ns);
}

void CallViews::show_far_wait(const std::string& text) {
  if (shown_.empty() || shown_.front().view == nullptr) return;
  if (text.empty()) {
    shown_.front().view->far_wait.clear();
  } else {
    shown_.front().view->far_wait.store(text);
  }
}

void CallViews::show_breaking(kernels::CallRing ring, std::uint32_t number, std::uint64_t now_ns) {
  std::erase_if(shown_, [ring, number](const Shown& shown) {
    const bool other = shown.ring != ring || shown.number != number;
    if (other) Page::release(shown.view);
    return other;
  });
  if (!shown_.empty()) Page::enter(shown_.front().view, OpStage::kBreaking, now_ns);
}

void CallViews::end_before(kernels::CallRing ring, std::uint32_t number) {
  std::erase_if(shown_, [ring, number](const Shown& shown) {
    const bool ended =
        shown.ring == ring && static_cast<std::int32_t>(shown.number - number) < 0;  // the numbers are cyclic
    if (ended) Page::release(shown.view);
    return ended;
  });
}

void CallViews::clear() {
  for (const Shown& shown : shown_) Page::release(shown.view);
  shown_.clear();
}

OpView* CallViews::claim(const Enqueued& enqueued, Page& page, std::uint64_t now_ns) const {
  const auto of_host = static_cast<std::uint64_t>(enqueued.ring == kernels::kByHost);
  OpView* const view = page.claim(
      enqueued.call, of_host << 63 | std::uint64_t{member_.number} << 32 | std::uint32_t{enqueued.number + 1},
      now_ns);
  if (view == nullptr) return nullptr;
  view->session_id = member_.session != nullptr ? member_.session->id() : 0;
  view->group_id = member_.group.id;
  view->rank = member_.rank;
  view->op_index = enqueued.index;
  view->epoch = member_.group.epoch;
  view->seen_ns = now_ns;
  view->deadline_ns = now_ns + std::uint64_t{enqueued.timeout_ms} * 1'000'000;
  Page::enter(view, OpStage::kPlanning, now_ns);
  return view;
}

}  // namespace epd::engine
