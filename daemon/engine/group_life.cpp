#include "group_life.h"

#include "common/status.h"

#include <initializer_list>

namespace epd::engine {
namespace {

constexpr std::uint32_t bits(std::initializer_list<GroupPhase> phases) {
  std::uint32_t all = 0;
  for (const GroupPhase phase : phases) all |= 1u << static_cast<std::uint32_t>(phase);
  return all;
}

// But for kRemoving, which may follow all others.
constexpr std::uint32_t following(GroupPhase phase) {
  using enum GroupPhase;
  switch (phase) {
    case kForming: return bits({kStarting});
    case kRestoring: return bits({kBroken});
    case kStarting: return bits({kActive});
    case kActive: return bits({kAsking, kBreaking, kLosing});
    case kAsking: return bits({kBreaking, kLosing});
    case kBreaking: return bits({kBreaking, kBroken, kLosing});
    case kBroken:
    case kReleased: return bits({kBreaking, kReleased, kResuming, kLosing});
    case kResuming: return bits({kActive});
    case kLosing: return bits({kLosing, kUnmapping});
    case kUnmapping: return bits({kUnmapping, kUnmapped});
    case kUnmapped: return bits({kUnmapped, kLost});
    case kLost: return bits({kUnmapped});
    case kRemoving: break;
  }
  return 0;
}

}  // namespace

bool GroupLife::may(GroupPhase next) const {
  if (next == GroupPhase::kRemoving) return phase_ != GroupPhase::kRemoving;
  return (following(phase_) & bits({next})) != 0;
}

void GroupLife::enter(GroupPhase next) {
  EPD_CHECK(may(next));
  phase_ = next;
}

GroupPhase GroupLife::after_loss() const {
  if (is(GroupPhase::kUnmapping)) return GroupPhase::kUnmapping;
  return is_lost() && !is(GroupPhase::kLosing) ? GroupPhase::kUnmapped : GroupPhase::kLosing;
}

}  // namespace epd::engine
