// How an engine runs operations on a device. Each rank that the device serves has a lane: what its operations
// need beside the arenas. Lanes run beside each other.
//
// Clients enqueue calls (CallPort), and a lane carries them out, one after the other.
//
// A GPU runs whole operations by itself. Its lanes have kernels enqueued ahead, which carry out the calls.
// Lanes together never ask for more SMs than the device has for them, so none waits behind another that
// waits for a peer.
//
// A host device has no processor of its own. The engine's loop runs operations in short pieces
// (Device::run), and helper threads move rows beside it.
#pragma once

#include "device/device.h"
#include "device/peers.h"
#include "device/signals.h"
#include "kernels/group_view.h"
#include "kernels/routing.h"
#include "proto/link.h"
#include "proto/waits.h"

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace epd::far {
class FarGroup;
}

namespace epd::device {

// An operation that runs on a host device, for those who look at it.
class OperationInFlight {
 public:
  virtual ~OperationInFlight() = default;

  // How far it has come, also after an abort.
  virtual abi::OpStage stage() const = 0;
  // The first rank, from `from` on, that it waits for in kWaitReady and kWaitArrived, else kNobody.
  static constexpr std::uint32_t kNobody = SignalCopy::kNobody;
  virtual std::uint32_t awaited(std::uint32_t from) const = 0;
  // Names the message or rank of another node that it waits for, for people; "" if there is none.
  virtual std::string waits_for() const = 0;
};

// A lane's questions about the group of its rank while it carries out calls. Host devices ask them.
class CallGroup {
 public:
  virtual ~CallGroup() = default;
  // Whether operations may begin: the engines of other nodes may not be ready yet.
  virtual bool may_begin() const = 0;
  // See OperationPeers.
  virtual std::span<const std::uint8_t> masked() const = 0;
  virtual bool holds_rows(std::uint32_t rank, std::uint64_t routing) const = 0;
  virtual void ring_peers() const = 0;
  // The lane has stored something that the client waits for, which may sleep.
  virtual void ring_client() const = 0;
};

// A lane whose operations are calls (proto/call_words.h): the client's streams and its host enqueue them, and
// the device carries them out. The engine learns of them afterwards.
//
// At first the lane is halted. A halted lane discards calls: streams continue, and words.failed counts the
// calls.
class CallPort {
 public:
  struct Layout {
    std::byte* words = nullptr;        // abi::CallWords, in
    std::shared_ptr<Arena> memory;     // the rank's user arena, and
    std::shared_ptr<Arena> results;    // abi::Results: kept mapped while a kernel may read them
    std::uint64_t counts_stride = 0;   // abi::ResultsLayout
    std::byte* generation = nullptr;   // in the rank's exchange arena (abi::ExchangeArenaLayout)
    std::uint32_t ranks_here = 1;      // ranks of the group on this device
    const CallGroup* group = nullptr;  // must outlive the port
    abi::RankWaits waits;              // of the rank; must outlive the port
    std::uint32_t rank = 0;
  };
  // The bell of another active rank of the group.
  struct Bell {
    std::uint32_t rank = 0;
    std::byte* words = nullptr;  // abi::CallWords, in
    std::shared_ptr<Arena> memory;
  };
  struct Start {
    std::uint64_t epoch = 0;
    std::uint64_t index = 0;       // of the next operation, as in tags and in the journal
    std::uint64_t index_base = 0;  // to be added for the number that clients know
    std::uint64_t changed_epoch = 0;
    std::span<const kernels::RouteState> routes;  // [num_routes]
    // The group in this epoch, except what the lane fills in (workspace, memories).
    const kernels::GroupView& view;
    std::span<const kernels::PeerView> peers;  // [R]
    const kernels::MemoryTable& memories;
    std::span<const Bell> bells;
  };

  virtual ~CallPort() = default;
  // Called once, before all else. From here on calls are taken (and discarded).
  virtual void open(const Layout& layout) = 0;
  // These limits hold for calls that are taken from now on.
  struct Limits {
    std::uint32_t sms = 0;         // that an operation may use; 0: all of the lane's
    std::uint32_t timeout_ms = 0;  // of calls that give none
    std::uint32_t linger_us = 0;   // how long a kernel lingers after a call, for the next one
  };
  virtual void set_limits(const Limits& limits) = 0;
  // Aborts the call that runs, and discards others until resume().
  virtual void halt() = 0;
  // Nothing has run since halt(), and front() will return every entry. May begin a look at the device.
  virtual bool halted() = 0;
  // Begins no further call. The one that runs may end if it is known (running()), and is aborted if not.
  virtual void stop() = 0;
  // No further call will begin, and front() will return every entry but that of running().
  virtual bool stopped() = 0;
  virtual void resume(const Start& start) = 0;
  // Changes one of Start::memories, also while calls run. Complete on return. GPUs only.
  virtual void set_memory(std::uint32_t /*rank*/, std::uint32_t /*number*/,
                          const abi::MappedMemory& /*memory*/) {}
  // Calls that are enqueued from now on are run. Those before that are discarded. May begin a look at the
  // device.
  virtual bool resumed() = 0;
  // The next entry of the journal, in the order of calls; null: none yet. Reads host memory. Valid until
  // pop().
  virtual const kernels::JournalEntry* front() const = 0;
  virtual void pop() = 0;

  // A copy of the words with the enqueued calls. look() begins a copy unless one is under way. seen() returns
  // each copy once. It is valid until the next look().
  struct Ring {
    abi::PackedCall calls[abi::kCallSlots];
    abi::PackedCall host_calls[abi::kCallSlots];
    std::uint32_t done;
    std::uint32_t host_ended;
  };
  virtual void look() = 0;
  virtual const Ring* seen() = 0;
  // The operation of the call that runs, on a host device.
  virtual const OperationInFlight* running() const { return nullptr; }
  // The same for the call of the entry at front() when its time was up; "" if there was none.
  virtual std::string waited_for() const { return {}; }
  // When that operation's time is up.
  virtual std::uint64_t deadline_ns() const { return ~std::uint64_t{0}; }
};

struct LaneShape {
  kernels::Shape shape;                                   // has row format 0
  kernels::RowFormat more_formats[abi::kMaxMoreFormats];  // formats 1 to limits.num_formats - 1
  abi::OpLimits limits;                                   // limits of the group's operations
  std::uint32_t placement_words = 0;
  std::int32_t priority = 0;
  kernels::Inbox inbox;
  // The rank's own exchange arena, in which its peers signal, if the device has to be asked for the signals.
  // A lane keeps it mapped while it reads there.
  std::shared_ptr<Arena> exchange;
  std::uint64_t block_bytes = 0;  // abi::ExchangeArenaLayout
  std::uint64_t kept_plans = 0;   // of a host device: plans that stay in memory (proto/route_memory.h)
  std::uint32_t sum_ranks = 0;    // of a host device: ranks of a sum domain, 0: all
  // For a host device and a group whose ranks are on several nodes, else null. Must outlive the lane.
  far::FarGroup* far = nullptr;

  kernels::Shape with_format(std::uint32_t format) const {
    kernels::Shape of = shape;
    if (format != 0) of.format = more_formats[format - 1];
    return of;
  }
};

class Lane {
 public:
  virtual ~Lane() = default;
  // Replaces LaneShape::priority: the lanes' shares of SMs follow. The stream keeps its own priority.
  virtual void set_priority(std::int32_t priority) = 0;
  // A copy of the signals of other ranks to this one, for devices that do not report them otherwise.
  // look_at_signals() begins a copy unless one is under way. signals() returns the last complete one; null:
  // there is none yet.
  virtual void look_at_signals() {}
  virtual const SignalCopy* signals() { return nullptr; }
  // After the lane has been destroyed, every thread that waits for a call is released within a moment. The
  // destructor does not wait until the kernel has ended.
  virtual CallPort& calls() = 0;
  // Whether kernels carry the calls out. They ring nobody, and wait for ranks before they begin
  // (GroupView::together).
  virtual bool by_kernels() const { return false; }
  // Called before the lane is destroyed, when nothing is in flight: returns large memory that the caller
  // frees in pieces.
  virtual std::vector<std::shared_ptr<kernels::RoutingPlan>> take_plans() { return {}; }
};

// The share of a device's SMs for one of its lanes, so that all lanes fit beside each other. Each lane gets
// one SM. The others are divided by weight, which doubles with each step of priority. `lanes` are the
// priorities, at most `sms` of them.
std::uint32_t lane_share(std::uint32_t sms, std::span<const std::int32_t> lanes, std::size_t lane);

class Launcher {
 public:
  virtual ~Launcher() = default;
  // UNSUPPORTED: the device can't hold a row, or takes no calls. RESOURCE_EXHAUSTED: more ranks than SMs, or
  // no memory.
  virtual Result<std::unique_ptr<Lane>> open_lane(const LaneShape& shape) = 0;
  // Copies between the host and memory of an arena. The copy is complete on return. Used rarely: at a restart
  // or a loss.
  virtual void read(void* to, const void* device, std::size_t bytes) = 0;
  // Copies `rows` pieces, which lie `stride` bytes apart on the device, at once. They are packed in `to`.
  virtual void read_rows(void* to, const void* device, std::size_t bytes, std::size_t stride,
                         std::size_t rows) = 0;
  virtual void write(void* device, const void* from, std::size_t bytes) = 0;
  virtual void clear(void* device, std::size_t bytes) = 0;
  // For a rank whose calls nobody will carry out any more: streams that wait at its words (abi::CallWords)
  // continue, and so do those that reach them later. Complete on return.
  virtual void close_calls(std::byte* words) = 0;
};

}  // namespace epd::device
