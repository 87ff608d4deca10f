// How far a group has come, as one engine sees it, and what may follow.
//
//   kForming ─► kStarting ─► kActive ─► kAsking
//                               │ ▲        │ kBreak
//                               ▼ │        ▼
//                               │ │     kBreaking ─► kBroken ─► kReleased
//                               │ │                  ▲  │          │ kResume
//   kRestoring ─────────────────┼─┼──────────────────┘  ▼          ▼
//                               │ └─────────────────── kResuming ◄─┘
//                               ▼ a fatal kBreak, from any of the above but those that begin
//                            kLosing ─► kUnmapping ─► kUnmapped ─► kLost
//
//   any ─► kRemoving
//
// One that is to begin (kStarting, kResuming) is active before it breaks.
#pragma once

#include <cstdint>

namespace epd::engine {

enum class GroupPhase : std::uint8_t {
  kForming,    // ranks and members are told of, until kGroupCommit
  kRestoring,  // the same, of a group that a former engine has served: it is broken then
  kStarting,   // kernels are to begin it; then kGroupReady
  kActive,
  kAsking,     // active, and the supervisor has been asked for a break
  kBreaking,   // operations stop; then kBroken
  kBroken,     // until kResume. Ranks may come and go
  kReleased,   // likewise, and since kRelease operations fail at once
  kResuming,   // kernels are to begin the epoch; then kResumed
  kLosing,     // what every rank has begun may still end
  kUnmapping,  // its memory is on its way back
  kUnmapped,   // it is gone; then kBroken
  kLost,
  kRemoving,  // kRemoveGroup has come: forgotten when the device has left it
};

class GroupLife {
 public:
  // `broken`: a former engine has served it.
  explicit GroupLife(bool broken) : phase_(broken ? GroupPhase::kRestoring : GroupPhase::kForming) {}

  GroupPhase phase() const { return phase_; }
  bool is(GroupPhase phase) const { return phase_ == phase; }
  bool may(GroupPhase next) const;
  // Only what may follow.
  void enter(GroupPhase next);
  // By a fatal break, of one that is_lost() by another too: kBroken is owed again.
  bool may_lose() const { return may(after_loss()); }
  void lose() { enter(after_loss()); }

  bool is_forming() const { return is(GroupPhase::kForming) || is(GroupPhase::kRestoring); }
  bool begins() const { return is(GroupPhase::kStarting) || is(GroupPhase::kResuming); }
  bool is_active() const { return is(GroupPhase::kActive) || is(GroupPhase::kAsking); }
  bool is_broken() const { return is(GroupPhase::kBroken) || is(GroupPhase::kReleased); }
  bool is_lost() const { return phase_ >= GroupPhase::kLosing && phase_ <= GroupPhase::kLost; }

  // Whether ranks may come and go.
  bool takes_ranks() const { return is_forming() || is_broken(); }
  // Whether operations that are submitted fail at once, or wait with the others for their verdict.
  bool refuses() const { return is(GroupPhase::kReleased) || is_lost() || is(GroupPhase::kRemoving); }
  bool holds_back() const {
    return is(GroupPhase::kBreaking) || is(GroupPhase::kBroken) || is(GroupPhase::kResuming);
  }
  // Whether an operation that ends now still counts. Once the supervisor knows how far this engine has come,
  // what was not completed then is done again.
  bool counts_ends() const { return !is_broken() && !is(GroupPhase::kResuming) && !is(GroupPhase::kLost); }
  // Whether the device is to begin the group, or to leave it.
  bool awaits_device() const { return !is_active() && !is_broken() && !is(GroupPhase::kLost); }

 private:
  GroupPhase after_loss() const;

  GroupPhase phase_;
};

}  // namespace epd::engine
