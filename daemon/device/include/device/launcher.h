// How an engine runs operations on a device. Each rank that the device serves has a lane: what its operations
// need beside the arenas. Lanes run beside each other.
//
// A GPU runs whole operations by itself: a lane has a stream and launches each, or hands them to a kernel
// that stays (LaunchMode). They run in order. Lanes together never ask for more SMs than the device has for
// them, so that none waits behind another that waits for a peer.
//
// A host device has no processor of its own: the engine's loop runs operations, in short pieces
// (OperationInFlight::advance), and helper threads move rows beside it. Operations of a lane run beside each
// other.
#pragma once

#include "device/device.h"
#include "device/peers.h"
#include "device/signals.h"
#include "kernels/group_view.h"
#include "kernels/routing.h"
#include "proto/link.h"

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace epd::far {
class FarGroup;
}

namespace epd::device {

struct LaunchRequest {
  kernels::cuda::Kind kind = kernels::cuda::Kind::kNoop;
  std::uint32_t place = 0;  // of the lane, below its depth; nothing else is in flight there. Noops need none
  // `signal`, and of all but noops everything but peers, work division, workspace, abort, result and the
  // host's counts, which are the lane's to fill in.
  kernels::cuda::Operation* op = nullptr;
  const OperationPeers* peers = nullptr;  // not of noops. Outlives the operation in flight
  std::uint32_t record = 0;               // routing record that it makes or uses
  std::uint32_t sms = 0;                  // at most; 0: the lane's share
};

// An operation in flight. It must have left() before it is destroyed: nothing waits for that there.
class OperationInFlight {
 public:
  virtual ~OperationInFlight() = default;

  // One short piece of it on the calling thread, if the device has no processor of its own. False: it waits,
  // or has ended. What it waits for rings the engine.
  virtual bool advance() { return false; }
  // Whether advance() would do something.
  virtual bool can_advance() const { return false; }
  // Whether that would move rows: these go by priority.
  virtual bool can_move() const { return false; }
  // Whether nobody rings when it has got on.
  virtual bool needs_polling() const { return true; }
  // Whether the lane begins operations in the order of their launches. Else the next one is not launched
  // before this one has left kPlanning.
  virtual bool in_order() const { return true; }
  // How far it has come; still of one that was aborted. On a GPU: as it was at the last look at its signals,
  // kPlanning before the first.
  virtual abi::OpStage stage() const = 0;
  // The first rank, from `from` on, that it waits for in kWaitReady and kWaitArrived; else kNobody.
  static constexpr std::uint32_t kNobody = SignalCopy::kNobody;
  virtual std::uint32_t awaited(std::uint32_t from) const = 0;
  // What it waits for of other nodes, for people; "" if for nothing.
  virtual std::string waits_for() const { return {}; }

  // Once true, counts() and result() may be read. These are looks at host memory.
  virtual bool counted() = 0;
  virtual bool sent() = 0;  // of a dispatch: its inputs are read no more
  virtual bool ended() = 0;
  // Ended, and nothing of it runs any more: one that has failed says so before all of it has left.
  virtual bool left() = 0;
  virtual const kernels::Placement& counts() = 0;
  virtual const kernels::cuda::OpResult& result() const = 0;
  // Of the routing that it used: selections of the ranks, [R] not 0, which lost it since.
  virtual std::uint32_t count_selections(std::span<const std::uint8_t> ranks) const = 0;
  // Makes it end soon, and frees it from waiting for the client's stream.
  virtual void abort() = 0;
};

// Of a lane whose operations are calls (proto/call_words.h): the client's streams and its host enqueue them,
// the resident kernel carries them out, and the engine hears of it afterwards.
//
// Halted, as it is at first, it discards calls: streams go on, words.failed counts.
class CallPort {
 public:
  struct Layout {
    std::byte* words = nullptr;       // abi::CallWords, in
    std::shared_ptr<Arena> memory;    // the rank's user arena, and
    std::shared_ptr<Arena> results;   // abi::Results: mapped as long as a kernel may look at them
    std::uint64_t counts_stride = 0;  // abi::ResultsLayout
  };
  struct Start {
    std::uint64_t epoch = 0;
    std::uint64_t index = 0;       // as in tags, and in the journal
    std::uint64_t index_base = 0;  // with it: as clients count
    std::uint64_t changed_epoch = 0;
    std::span<const kernels::cuda::RouteState> routes;  // [num_routes]
    // What the group is in this epoch, but for what is the lane's own (workspace).
    const kernels::cuda::DeviceView& view;
  };

  virtual ~CallPort() = default;
  // Once, before all else: calls are taken (and discarded) from here on.
  virtual void open(const Layout& layout) = 0;
  // SMs that an operation may have (0: all of the lane's), and the timeout of one that says none: of calls
  // that are taken from now on.
  virtual void set_limits(std::uint32_t sms, std::uint32_t timeout_ms) = 0;
  // Ends the call that runs, and discards others until resume().
  virtual void halt() = 0;
  // Nothing runs since halt(), and front() comes to everything.
  virtual bool halted() const = 0;
  virtual void resume(const Start& start) = 0;
  // The kernel knows of resume(). What is enqueued before that is discarded.
  virtual bool resumed() const = 0;
  // Others hold the SMs of the first kernel, which is still to begin. That may take as long as what runs
  // there.
  virtual bool waits_for_room() const = 0;
  // Ends in the order of their calls. A look at host memory; null: none yet. Valid until pop().
  virtual const kernels::cuda::JournalEntry* front() const = 0;
  virtual void pop() = 0;

  // What is enqueued: a copy of the words, begun by look() unless one is under way. It is there when seen()
  // gives it, once; valid until the next look().
  struct Ring {
    abi::PackedCall calls[abi::kCallSlots];
    abi::PackedCall host_calls[abi::kCallSlots];
    std::uint32_t done;
    std::uint32_t host_ended;
  };
  virtual void look() = 0;
  virtual const Ring* seen() = 0;
};

struct LaneShape {
  kernels::cuda::Shape shape;
  abi::OpLimits limits;  // of the group's operations
  std::uint32_t placement_words = 0;
  std::int32_t priority = 0;
  kernels::cuda::Inbox inbox;
  // The rank's own, where its peers signal: of a device that has to be asked for that. A lane keeps it mapped
  // as long as it looks there.
  std::shared_ptr<Arena> exchange;
  std::uint64_t block_bytes = 0;  // abi::ExchangeArenaLayout
  std::uint64_t kept_plans = 0;   // of a host device: plans that stay in memory (proto/route_memory.h)
  std::uint32_t sum_ranks = 0;    // of a host device: ranks of a sum domain, 0: all
  // Of a host device and a group whose ranks are on several nodes; outlives the lane. Else null.
  far::FarGroup* far = nullptr;
};

class Lane {
 public:
  static constexpr std::uint32_t kMaxNoops = 64;

  virtual ~Lane() = default;
  // At most kMaxNoops noops at a time. Not of a lane with calls().
  virtual std::unique_ptr<OperationInFlight> launch(const LaunchRequest& request) = 0;
  // For an operation that will never be launched: `done`, when no operation in flight that has the same word
  // may still write a lower value there. Never takes the word back. `ticket`: all of it, signal.value is the
  // low half.
  virtual void release(const kernels::cuda::Signal& signal, std::uint64_t ticket) = 0;
  // In place of LaneShape::priority: lanes' shares of SMs follow. The stream's own stays as it is.
  virtual void set_priority(std::int32_t priority) = 0;
  // What ranks have signalled to this one, of a device that does not say it otherwise: a copy, begun by
  // look_at_signals() unless one is under way. The last one that has come; null: none has.
  virtual void look_at_signals() {}
  virtual const SignalCopy* signals() { return nullptr; }
  // Of a lane whose operations are calls; else null. Once the lane has been destroyed whoever waits for a
  // call goes on, though a moment may pass: nobody waits here until the kernel has ended.
  virtual CallPort* calls() { return nullptr; }
  // Before it is destroyed, when nothing is in flight: large memory, for somebody else to free in pieces.
  virtual std::vector<std::shared_ptr<kernels::RoutingPlan>> take_plans() { return {}; }
};

// What one of a device's lanes may have of its SMs, so that all fit beside each other: one SM, and of those
// that are left then its part by weight, which doubles with each step of priority. `lanes`: their priorities,
// not more than `sms`.
std::uint32_t lane_share(std::uint32_t sms, std::span<const std::int32_t> lanes, std::size_t lane);

class Launcher {
 public:
  virtual ~Launcher() = default;
  // UNSUPPORTED: the device can't hold a row, or takes no calls. RESOURCE_EXHAUSTED: more ranks than SMs,
  // or no memory.
  virtual Result<std::unique_ptr<Lane>> open_lane(const LaneShape& shape) = 0;
  // Between the host and memory of an arena; done when these return. Rare: a restart, a loss.
  virtual void read(void* to, const void* device, std::size_t bytes) = 0;
  // The same of `rows` pieces, `stride` bytes from one to the next there, in one copy: `to` gets them packed.
  virtual void read_rows(void* to, const void* device, std::size_t bytes, std::size_t stride,
                         std::size_t rows) = 0;
  virtual void write(void* device, const void* from, std::size_t bytes) = 0;
  virtual void clear(void* device, std::size_t bytes) = 0;
  // Of a rank whose operations nobody will run any more: streams that wait there go on, those too that are
  // still to come to it. Done when these return. Of abi::StreamWords[depth], which no operation in flight
  // will write:
  virtual void close_streams(std::byte* words, std::uint32_t depth) = 0;
  // Of abi::CallWords, which no kernel serves:
  virtual void close_calls(std::byte* words) = 0;
};

}  // namespace epd::device
