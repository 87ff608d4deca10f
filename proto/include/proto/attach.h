// The attach protocol: a client's requests to the supervisor over its SOCK_SEQPACKET connection.
// Each request gets exactly one reply (its own type or kRefused) with its request_id. After Welcome several
// may wait for theirs, which come in any order; no two of them may have one id. The connection is the
// session's life: its end is the client's death, whatever the reason.
#pragma once

#include "proto/arena.h"
#include "proto/mapped_memory.h"
#include "proto/wire.h"

#include <array>

namespace epd::abi {

enum class AttachType : std::uint16_t {
  kHello = 1,    // client -> supervisor; must come first, within the daemon's attach deadline
  kWelcome = 2,  // fds: segment A (rw), segment B (read-only), the engine's bell, the client's bell
  kRefused = 3,  // any request
  kJoin = 4,
  kJoined = 5,  // fds: user arena (rw), board (read-only); of a GPU, Results
  kLeave = 6,
  kLeft = 7,
  kGoodbye = 8,     // supervisor -> client, unasked: the session is over, and why
  kDetach = 9,      // client -> supervisor, no body and no reply: the end that follows is an orderly one
  kMapMemory = 10,  // fd: the memory, if it goes by descriptor
  kMapped = 11,     // all engines of the group have done that
  kRowsTold = 12,   // client -> supervisor, no reply
};

// A Join is refused (RESOURCE_EXHAUSTED) while so many requests of its session wait for their replies. Those
// of all sessions of a user have a bound, too, which leaves space for as many Leaves.
inline constexpr std::size_t kMaxPendingRequests = 64;

// A client names no more of the GPUs that it sees.
inline constexpr std::size_t kMaxVisibleGpus = 32;
using GpuUuid = std::array<std::uint8_t, 16>;

struct Hello {
  std::uint32_t version_min;
  std::uint32_t version_max;
  std::uint64_t layout_hash;
  std::uint64_t features;         // 0 in version 1
  std::uint64_t nonce;            // echoed
  char library[64];               // client library and version, for logs and refusals
  char device[kDeviceNameBytes];  // "host:0"; empty = the device with the fewest sessions
  // For people to find it by, where the daemon is in another PID namespace; never believed.
  std::int32_t pid;  // the client's own number of itself; 0 = it says none
  char host[60];     // the client's host name
  // If `device` is empty and these are not: the client sees these GPUs only, and gets one of them.
  std::uint32_t num_gpus;
  std::uint32_t reserved;
  std::array<GpuUuid, kMaxVisibleGpus> gpus;
};

struct Welcome {
  std::uint32_t version;
  std::uint32_t device_index;
  std::uint64_t layout_hash;
  std::uint64_t features;
  std::uint64_t nonce;
  std::uint64_t session_id;
  std::uint8_t boot_id[16];  // of this daemon run
  char daemon[64];           // daemon name and version
  char device[kDeviceNameBytes];
  DeviceKind device_kind;
  GpuUuid device_uuid;  // of a CUDA device: its number here and in the client may differ
};

struct Refused {
  StatusCode status;
  char text[kTextBytes];  // what was wrong, with which value, what is allowed
};

struct Join {
  char group[kMaxGroupName + 1];
  std::int32_t rank;         // -1 = the lowest free one
  std::uint32_t timeout_ms;  // how long to wait for the other ranks; 0 = the daemon's default
  std::uint32_t sms;         // SMs (host: threads) per device for this group's operations; 0 = default
  std::int32_t priority;     // of this rank's operations on its device: kMinPriority .. kMaxPriority
  GroupShape shape;
  // Not 0: the rank is, or was until it was late, a member of this group. It asks that the late ranks come
  // back: all that live ask, with all operations ended. kDegradeLate; answered with Joined.
  std::uint64_t restores;
};

struct Joined {
  std::uint32_t member;  // names the membership, as in Leave
  std::uint32_t rank;
  std::uint64_t group_id;
  std::uint64_t epoch;
  std::uint64_t resume_index;
  std::uint64_t user_bytes;          // UserArenaLayout::total_bytes, repeated for the check
  std::uint64_t board_bytes;         // sizeof(Board), likewise
  std::uint32_t default_timeout_ms;  // of operations that give none
  std::uint32_t sum_ranks;           // of the group's shape; never 0
  // Not 0: another rank of the group is on the rank's device. Then a stream that waits by a kernel might hold
  // the GPU that the other rank needs.
  std::uint32_t shares_device;
  std::uint32_t kept;  // 1: an answer to Join::restores of a rank that was not late. No descriptors come
};

struct Leave {
  std::uint32_t member;
  std::uint32_t reserved;
};

struct Left {
  std::uint32_t member;
  std::uint32_t reserved;
};

// Asks that the engines map memory on a GPU: rows of the membership's calls may lie there from kMapped on.
struct MapMemory {
  std::uint32_t member;
  std::uint32_t reserved;
  MemoryRange range;
};

struct Mapped {
  std::uint32_t member;
  std::uint32_t number;
};

// Counts how rows of the membership's calls have moved: in place, or copied and why.
struct RowsTold {
  std::uint32_t member;
  std::uint32_t reserved;
  RowCounts counts;
};

struct Goodbye {
  StatusCode status;
  char text[kTextBytes];
};

static_assert(sizeof(Join) + sizeof(WireHeader) <= kMaxMessageBytes);
static_assert(std::is_trivially_copyable_v<Welcome> && std::is_trivially_copyable_v<Join>);

// Changes whenever a size or offset that client and daemon share changes.
constexpr std::uint64_t layout_hash() {
  using detail::mix;
  std::uint64_t h = 0xcbf29ce484222325ull;
  for (std::uint64_t v : {sizeof(SegmentA), sizeof(SegmentB), sizeof(Board), sizeof(GroupShape),
                          sizeof(Hello), sizeof(Welcome), sizeof(Refused), sizeof(Join), sizeof(Joined),
                          sizeof(Leave), sizeof(MapMemory), sizeof(RowsTold), sizeof(Goodbye)}) {
    h = mix(h, v);
  }
  for (std::uint64_t v : {offsetof(SegmentA, client_sleep), offsetof(SegmentB, state),
                          offsetof(SegmentB, engine_sleep), offsetof(SegmentB, message),
                          offsetof(Board, change), offsetof(Board, message), offsetof(Board, active)}) {
    h = mix(h, v);
  }
  GroupShape probe{4, 16, 64, 256, 3, 2, Payload::kFp8Cast, IndexType::kInt64, LossPolicy::kFailFast};
  probe.num_more_formats = 1;  // the larger rows
  const UserArenaLayout arena(probe);
  for (std::uint64_t v : arena.offset) h = mix(h, v);
  h = mix(h, arena.staging);
  h = mix(h, arena.calls);
  h = mix(h, arena.total_bytes);
  h = mix(h, offsetof(CallWords, flags));
  h = mix(h, sizeof(CallWords));
  return mix(h, ResultsLayout(probe).total_bytes);
}

}  // namespace epd::abi
