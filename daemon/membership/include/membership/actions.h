// What the registry wants done: plain data, and whole, so that whoever carries it out need not ask back. The
// registry never does anything itself. Each node carries out its actions in their order; tests read them.
//
// What is for an engine is dropped if that is down, or has started since the registry decided it.
#pragma once

#include "common/status.h"
#include "membership/ids.h"
#include "proto/attach.h"
#include "proto/link.h"

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace epd::membership {

// Whose events are about it.
struct GroupLabel {
  std::uint64_t id = 0;
  std::uint32_t uid = 0;
  std::string name;
};
struct RankDescription {
  std::uint32_t rank = 0;
  EngineId engine;
  std::uint64_t active_since = 0;  // the epoch in which it came; 0: masked, or has never come
};
// A rank as the engine that serves it must know it.
struct MemberDescription {
  std::uint32_t rank = 0;
  SessionId session;
  std::uint32_t member = 0;
  std::uint64_t first_index = 0;  // the operation with which it came
};
// An engine of another node than the one that is told.
struct FarEngine {
  EngineId engine;
  std::string node;     // its name
  std::string address;  // "": it is down, and SendFarEngine follows
};
struct GroupDescription {
  GroupLabel label;
  abi::GroupShape shape{};
  std::uint64_t epoch = 0;
  std::uint64_t resume_index = 0;
  std::uint64_t view = 0;  // grows when other ranks take part
  EpochKey epoch_key;
  std::vector<RankDescription> ranks;      // all
  std::vector<MemberDescription> members;  // those of the engine that is told
  abi::GroupSettings settings{};           // what these have asked for
  std::vector<FarEngine> far_engines;      // those that serve a living rank
};

// ---- for engines

// kGroupBegin, kGroupRank..., kGroupMember..., kGroupCommit.
struct StartGroup {
  EngineId engine;
  GroupDescription group;
  bool broken = false;
};
// kGroupRank to an engine that knows the group: a rank that has come, or is masked.
struct SendRank {
  EngineId engine;
  std::uint64_t group_id = 0;
  RankDescription rank;
};
// kGroupMember of a rank that has come, to the engine that serves it.
struct SendMember {
  EngineId engine;
  std::uint64_t group_id = 0;
  MemberDescription member;
};
// An engine of another node that shares groups with this one has come, or has another address.
struct SendFarEngine {
  EngineId engine;
  FarEngine far;
};
struct SendStopMember {
  EngineId engine;
  abi::MemberRef message;
};
struct SendBreak {
  EngineId engine;
  abi::Break message;
  GroupLabel group;
  bool orderly = false;  // the failed rank left or detached: nothing went wrong
};
struct SendRelease {
  EngineId engine;
  abi::GroupRef message;
};
struct SendResume {
  EngineId engine;
  abi::Resume message;
  GroupLabel group;
  std::uint64_t view = 0;
  EpochKey epoch_key;
};
struct SendRemoveGroup {
  EngineId engine;
  abi::GroupRef message;
};
// kCloseStreams to an engine that does not serve the rank, of which no engine ever will.
struct CloseStreams {
  EngineId engine;
  std::uint64_t group_id = 0;
  std::uint32_t rank = 0;
  bool later =
      false;  // the engine is down: to the next one, whatever becomes of the rank's memory until then
};
// The engine has not answered in time: end it, unless it is stopped; its death then takes its usual course.
// Said again while it is silent.
struct KillEngine {
  EngineId engine;
  std::string text;
};

// ---- for the memory of ranks, on the node of their engine

// Makes the arenas and the board of a rank, and keeps what its regions are bound to. Answered with
// MemoryAcquired: RESOURCE_EXHAUSTED if a quota says no, INVALID_ARGUMENT for memory of the client's that
// can't be used.
struct AcquireMemory {
  EngineId engine;
  RequestId request;
  std::uint64_t group_id = 0;
  std::uint32_t rank = 0;
  std::uint32_t uid = 0;
  abi::GroupShape shape{};
};
// Gives them up. Mappings of others live on until they drop them. Nothing happens if there is no such memory.
struct ReleaseMemory {
  EngineId engine;
  std::uint64_t group_id = 0;
  std::uint32_t rank = 0;
};
// Says on the board that the group is lost: no engine serves the rank.
struct MarkLost {
  EngineId engine;
  std::uint64_t group_id = 0;
  std::uint32_t rank = 0;
  StatusCode cause = StatusCode::kOk;
  std::int32_t failed_rank = -1;
  std::string text;
};

// ---- for sessions

// The user arena and the board of this rank go with it.
struct ReplyJoined {
  RequestId request;
  abi::Joined message;
  GroupLabel group;
};
struct ReplyLeft {
  RequestId request;
  abi::Left message;
};
struct ReplyRefused {
  RequestId request;
  Status status;
};
// Something that the client reads in shared memory has been written for it while no engine could.
struct WakeSession {
  SessionId session;
};

using Action = std::variant<StartGroup, SendRank, SendMember, SendFarEngine, SendStopMember, SendBreak,
                            SendRelease, SendResume, SendRemoveGroup, CloseStreams, KillEngine, AcquireMemory,
                            ReleaseMemory, MarkLost, ReplyJoined, ReplyLeft, ReplyRefused, WakeSession>;
using Actions = std::vector<Action>;

// "break device=1 group=3 epoch=2 fatal=1 cause=RANK_LOST failed_rank=2 fail_from=7": for logs and tests.
// What is for another node than the local one says " node=2" behind.
std::string to_string(const Action& action);

// Which node is to carry it out.
std::uint32_t node_of(const Action& action);

}  // namespace epd::membership
