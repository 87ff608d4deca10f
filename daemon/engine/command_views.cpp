#include "command_views.h"

#include "session_port.h"

#include <algorithm>

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
    const auto known = std::find_if(shown_.begin(), shown_.end(),
                                    [&](const Shown& shown) { return shown.number == each.number; });
    if (known == shown_.end()) {
      now_there.push_back({each.number, claim(each, page, now_ns)});
    } else {
      now_there.push_back(*known);
      shown_.erase(known);
    }
  }
  clear();
  shown_ = std::move(now_there);
  if (shown_.empty() || shown_.front().view == nullptr) return;
  OpView& first = *shown_.front().view;
  if (first.stage.load(std::memory_order_relaxed) == static_cast<std::uint32_t>(OpStage::kMoving)) return;
  first.deadline_ns = now_ns + std::uint64_t{rung.front().timeout_ms} * 1'000'000;  // it counts from here
  enter(&first, OpStage::kMoving, now_ns);
}

void CommandViews::end_before(std::uint32_t number) {
  std::erase_if(shown_, [number](const Shown& shown) {
    const bool ended = static_cast<std::int32_t>(shown.number - number) < 0;  // they are cyclic
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
  command.ticket = std::uint64_t{member_.number} << 32 | std::uint32_t{rung.number + 1};
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
  enter(view, OpStage::kPlanning, now_ns);
  return view;
}

void CommandViews::enter(OpView* view, OpStage stage, std::uint64_t now_ns) const {
  view->stage_ns[static_cast<std::size_t>(stage)].store(now_ns, std::memory_order_relaxed);
  view->stage.store(static_cast<std::uint32_t>(stage), std::memory_order_relaxed);
}

}  // namespace epd
