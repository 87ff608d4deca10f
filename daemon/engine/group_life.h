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
  kForming,    // ranks and members are told, until kGroupCommit
  kRestoring,  // the same for a group that a former engine has served: it is then broken
  kStarting,   // kernels are to begin the group; then kGroupReady
  kActive,
  kAsking,     // active, and the supervisor has been asked for a break
  kBreaking,   // operations stop; then kBroken
  kBroken,     // until kResume. Ranks may join and leave
  kReleased,   // likewise, and the board says so: clients are told of failures now
  kResuming,   // kernels are to begin the epoch; then kResumed
  kLosing,     // operations that every rank has begun may still end
  kUnmapping,  // its memory is being freed
  kUnmapped,   // its memory is freed; then kBroken
  kLost,
  kRemoving,  // kRemoveGroup has come: the group is forgotten when the device has left it
};

class GroupLife {
 public:
  // `broken`: a former engine has served the group.
  explicit GroupLife(bool broken) : phase_(broken ? GroupPhase::kRestoring : GroupPhase::kForming) {}

  GroupPhase phase() const { return phase_; }
  bool is(GroupPhase phase) const { return phase_ == phase; }
  bool may(GroupPhase next) const;
  // `next` must be a phase that may follow.
  void enter(GroupPhase next);
  // Whether a fatal break may come. It may come again to a group that is_lost(): then kBroken is pending
  // again.
  bool may_lose() const { return may(after_loss()); }
  void lose() { enter(after_loss()); }

  bool is_forming() const { return is(GroupPhase::kForming) || is(GroupPhase::kRestoring); }
  bool begins() const { return is(GroupPhase::kStarting) || is(GroupPhase::kResuming); }
  bool is_active() const { return is(GroupPhase::kActive) || is(GroupPhase::kAsking); }
  bool is_broken() const { return is(GroupPhase::kBroken) || is(GroupPhase::kReleased); }
  bool is_lost() const { return phase_ >= GroupPhase::kLosing && phase_ <= GroupPhase::kLost; }

  // Whether ranks may join and leave.
  bool takes_ranks() const { return is_forming() || is_broken(); }
  // Whether the device is to begin the group, or to leave it.
  bool awaits_device() const { return !is_active() && !is_broken() && !is(GroupPhase::kLost); }

 private:
  GroupPhase after_loss() const;

  GroupPhase phase_;
};

}  // namespace epd::engine
