#include "command_views.h"

#include "session_port.h"

#include <algorithm>
#include <utility>

namespace epd {

using abi::OpStage;
using abi::OpView;

namespace {

// Of one rank: the page is for all of them.
constexpr std::size_t kMostShown = 16;

}  // namespace

void CommandViews::show(std::span<const Rung> rung, Page& page, std::uint64_t now_ns) {
  rung = rung.first(std::min(rung.size(), kMostShown));
  std::vector<Shown> now_there;
  for (const Rung& each : rung) {
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
  if (first != nullptr) first->deadline_ns = now_ns + std::uint64_t{rung.front().timeout_ms} * 1'000'000;
}

void CommandViews::show_first(OpStage stage, std::uint32_t awaited, std::uint64_t now_ns) {
  if (shown_.empty() || shown_.front().view == nullptr) return;
  OpView* const first = shown_.front().view;
  if (first->stage.load(std::memory_order_relaxed) != static_cast<std::uint32_t>(stage))
    Page::enter(first, stage, now_ns);
  if (awaited != Flight::kNobody) Page::wait_for(first, awaited, now_ns);
}

void CommandViews::end_before(kernels::cuda::CallRing ring, std::uint32_t number) {
  std::erase_if(shown_, [ring, number](const Shown& shown) {
    const bool ended =
        shown.ring == ring && static_cast<std::int32_t>(shown.number - number) < 0;  // they are cyclic
    if (ended) Page::release(shown.view);
    return ended;
  });
}

void CommandViews::clear() {
  for (const Shown& shown : shown_) Page::release(shown.view);
  shown_.clear();
}

OpView* CommandViews::claim(const Rung& rung, Page& page, std::uint64_t now_ns) const {
  abi::Submission command = rung.submission;
  // Unlike that of any submission: a membership's number is never that small.
  const auto of_host = static_cast<std::uint64_t>(rung.ring == kernels::cuda::kByHost);
  command.ticket = of_host << 63 | std::uint64_t{member_.number} << 32 | std::uint32_t{rung.number + 1};
  command.submit_ns = now_ns;
  OpView* const view = page.claim(command);
  if (view == nullptr) return nullptr;
  view->session_id = member_.session != nullptr ? member_.session->id() : 0;
  view->group_id = member_.group.id;
  view->rank = member_.rank;
  view->op_index = rung.index;
  view->epoch = member_.group.epoch;
  view->seen_ns = now_ns;
  view->deadline_ns = now_ns + std::uint64_t{rung.timeout_ms} * 1'000'000;
  Page::enter(view, OpStage::kPlanning, now_ns);
  return view;
}

}  // namespace epd
