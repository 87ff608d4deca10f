// The two shared segments of a session and the board of a group member.
//
//   segment A   client read-write, engine read-only    whether the client sleeps
//   segment B   client READ-ONLY,  engine read-write   session state, whether the engine sleeps
//   board       client READ-ONLY,  engine read-write   one per joined group: epoch, how it has broken
//
// All are zero-filled memfds made and sealed by the supervisor. The README of this room tells the
// protocol; field comments say who writes what.
#pragma once

#include "proto/shape.h"
#include "proto/status.h"

#include <atomic>
#include <bit>
#include <cstdint>

namespace epd::abi {

inline constexpr std::uint32_t kSegmentAMagic = 0x41445045;  // "EPDA"
inline constexpr std::uint32_t kSegmentBMagic = 0x42445045;  // "EPDB"
inline constexpr std::uint32_t kBoardMagic = 0x43445045;     // "EPDC"
inline constexpr std::size_t kMessageBytes = 256;
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(std::atomic<std::uint64_t>) == 8);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);
static_assert(std::endian::native == std::endian::little, "the ABI is little-endian");

// Client and engine make a system call only for one that says it sleeps. The sleeper stores not 0, fences
// (seq_cst), looks once more, sleeps, and stores 0. The ringer publishes, fences (seq_cst), loads, and if the
// word is not 0 rings the sleeper's bell, never blocking (a full one is fine: the sleeper has something to
// wake for). Model-checked: proto/model.
enum Sleep : std::uint32_t { kAwake = 0, kAsleep = 1 };

struct alignas(64) SleepLine {
  std::atomic<std::uint32_t> sleeping;
};

struct SegmentA {
  alignas(64) std::uint32_t magic;  // written by the supervisor before sealing
  std::uint32_t version;
  SleepLine client_sleep;  // written by the client
};

enum class SessionState : std::uint32_t {
  kStarting = 0,  // no engine serves it yet, or its engine is being restarted
  kServing = 1,
  kEnded = 2,  // for an illegal call, or by the operator; see message
};

struct SegmentB {
  alignas(64) std::uint32_t magic;
  std::uint32_t version;
  alignas(64) std::atomic<std::uint32_t> state;  // SessionState
  std::atomic<std::uint32_t> end_status;         // StatusCode, when ended
  std::atomic<std::uint32_t> incarnation;        // engine starts, from 1
  SleepLine engine_sleep;
  char message[kMessageBytes];  // valid before state becomes kEnded; zero-terminated
};

enum class GroupState : std::uint32_t {
  kForming = 0,
  kActive = 1,
  kBroken = 2,  // an operation failed for everybody; go on with resume_index in the new epoch
  kLost = 3,    // the group has ended: leave
};

struct Board {
  alignas(64) std::uint32_t magic;
  std::uint32_t version;
  // Even = stable. The engine makes it odd, writes the fields below, makes it even again.
  alignas(64) std::atomic<std::uint32_t> change;
  std::atomic<std::uint32_t> state;  // GroupState
  std::atomic<std::uint64_t> epoch;
  std::atomic<std::uint64_t> resume_index;  // first operation of this epoch
  std::atomic<std::uint64_t> next_index;    // every operation below has completed on this rank
  std::atomic<std::uint64_t> released;      // what failed in epochs up to this has failed, whoever is silent
  std::atomic<std::uint32_t> cause;         // StatusCode of the last break
  std::atomic<std::int32_t> failed_rank;
  char message[kMessageBytes];
  std::atomic<std::uint32_t> memory_cleared;  // an engine has seen to it that the arenas began as zeros
  std::uint32_t reserved;
  std::atomic<std::uint64_t> active[kMaxRanks / 64];  // bit r % 64 of word r / 64: rank r takes part
};

}  // namespace epd::abi
