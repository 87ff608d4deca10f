// A device that runs whole operations. Each rank that it serves has a lane: a stream, and what its operations
// need beside the arenas; it launches each, or hands them to a kernel that stays (LaunchMode). Operations of
// a lane run in order; lanes run beside each other, and together never ask for more SMs than the device has
// for them, so that none waits behind another that waits for a peer.
#pragma once

#include "device/device.h"
#include "kernels/cuda.h"

#include <cstdint>
#include <memory>
#include <span>

namespace epd {

struct LaunchRequest {
  kernels::cuda::Kind kind = kernels::cuda::Kind::kNoop;
  std::uint32_t place = 0;  // of the lane, below its depth; nothing else is in flight there. Noops need none
  // `signal`, and of all but noops everything but movers, workspace, abort, result and the host's counts,
  // which are the lane's to fill in.
  kernels::cuda::Operation* op = nullptr;
  std::uint32_t sms = 0;  // at most; 0: the lane's share
};

// An operation in flight. It must have left() before it is destroyed: nothing waits for that there.
class Flight {
 public:
  virtual ~Flight() = default;
  // Once true, counts() and result() may be read. These are looks at host memory.
  virtual bool counted() = 0;
  virtual bool sent() = 0;  // of a dispatch: its inputs are read no more
  virtual bool ended() = 0;
  // Ended, and nothing of it runs any more: one that has failed says so before all of it has left.
  virtual bool left() = 0;
  virtual std::span<const std::int32_t> counts() const = 0;  // kernels::Placement's words
  virtual const kernels::cuda::OpResult& result() const = 0;
  // Makes it end soon, and frees it from waiting for the client's stream.
  virtual void abort() = 0;
};

// Of a lane whose operations are commands (proto/commands.h): a stream of the client's asks for them, the
// kernel that stays carries them out, and the engine hears of it afterwards.
//
// Halted, as it is at first, it discards commands: streams go on, words.failed counts.
class CommandPort {
 public:
  using Program = kernels::cuda::Program;

  // Where an operation's memory lies for the next numbers, as kernels::cuda::CommandArguments.
  struct Layout {
    std::byte* words = nullptr;     // abi::CommandWords, in
    std::shared_ptr<Arena> memory;  // the rank's user arena: mapped as long as a kernel may look at them
    std::uint32_t rank = 0;
    std::uint32_t depth = 0;
    std::uint32_t num_routes = 0;
    std::uint64_t block_bytes = 0;
    std::uint64_t landing_bytes = 0;
    std::uint64_t half_bytes = 0;
  };
  struct Start {
    std::uint64_t epoch = 0;
    std::uint64_t index = 0;  // as in tags, and in the journal
    std::uint64_t changed_epoch = 0;
    std::span<const kernels::cuda::RouteState> routes;  // [num_routes]
  };

  virtual ~CommandPort() = default;
  // Once, before all else: commands are taken (and discarded) from here on.
  virtual void open(const Layout& layout) = 0;
  // Program `number` < kMaxPrograms, movers excepted, of at most `sms` SMs (0: the lane's share). Only one
  // that has not been recorded, or while halted().
  virtual void record(std::uint32_t number, kernels::cuda::Kind kind, const Program& program,
                      std::uint32_t sms) = 0;
  // Ends the command that runs, and discards others until resume().
  virtual void halt() = 0;
  // Nothing runs since halt(), and front() comes to everything.
  virtual bool halted() const = 0;
  virtual void resume(const Start& start) = 0;
  // The kernel knows of resume(). What is rung before that is discarded.
  virtual bool resumed() const = 0;
  // Others hold the SMs of the first kernel, which is still to begin. That may take as long as what runs
  // there.
  virtual bool waits_for_room() const = 0;
  // Ends in the order of their commands. A look at host memory; null: none yet. Valid until pop().
  virtual const kernels::cuda::JournalEntry* front() const = 0;
  virtual void pop() = 0;

  // What is rung: a copy of the words, begun by look() unless one is under way. It is there when seen() gives
  // it, once; valid until the next look().
  struct Ring {
    alignas(64) std::uint64_t commands[abi::kCommandSlots];
    std::uint32_t done;
  };
  virtual void look() = 0;
  virtual const Ring* seen() = 0;
};

struct LaneShape {
  kernels::cuda::Shape shape;
  std::uint32_t depth = 0;
  std::uint32_t placement_words = 0;
  std::uint32_t num_biases = 0;
  std::int32_t priority = 0;
  bool commands = false;         // UNSUPPORTED where no kernel stays
  std::uint32_t num_routes = 0;  // routing records that commands use
};

class Lane {
 public:
  static constexpr std::uint32_t kMaxNoops = 64;

  virtual ~Lane() = default;
  // At most kMaxNoops noops at a time.
  virtual std::unique_ptr<Flight> launch(const LaunchRequest& request) = 0;
  // For an operation that will never be launched: `done`, when no flight that has the same word may still
  // write a lower value there. Never takes the word back. `ticket`: all of it, signal.value is the low half.
  virtual void release(const kernels::cuda::Signal& signal, std::uint64_t ticket) = 0;
  // In place of LaneShape::priority: lanes' shares of SMs follow. The stream's own stays as it is.
  virtual void set_priority(std::int32_t priority) = 0;
  // Null unless LaneShape::commands. Once the lane has been destroyed whoever waits for a command goes on,
  // though a moment may pass: nobody waits here until the kernel has ended.
  virtual CommandPort* commands() { return nullptr; }
};

// What one of a device's lanes may have of its SMs, so that all fit beside each other: one SM, and of those
// that are left then its part by weight, which doubles with each step of priority. `lanes`: their priorities,
// not more than `sms`.
std::uint32_t lane_share(std::uint32_t sms, std::span<const std::int32_t> lanes, std::size_t lane);

class Launcher {
 public:
  virtual ~Launcher() = default;
  // UNSUPPORTED: the device can't hold a row. RESOURCE_EXHAUSTED: more ranks than SMs, or no memory.
  virtual Result<std::unique_ptr<Lane>> open_lane(const LaneShape& shape) = 0;
  // Between the host and memory of an arena; done when these return. Rare: a restart, a loss.
  virtual void read(void* to, const void* device, std::size_t bytes) = 0;
  // The same of `rows` pieces, `stride` bytes from one to the next there, in one copy: `to` gets them packed.
  virtual void read_rows(void* to, const void* device, std::size_t bytes, std::size_t stride,
                         std::size_t rows) = 0;
  virtual void write(void* device, const void* from, std::size_t bytes) = 0;
  virtual void clear(void* device, std::size_t bytes) = 0;
  // Of a rank whose operations nobody will run any more: streams that wait there go on, those too that are
  // still to come to it. Done when these return. Of abi::StreamWords[depth], which no flight will write:
  virtual void close_streams(std::byte* words, std::uint32_t depth) = 0;
  // Of abi::CommandWords, which no kernel serves:
  virtual void close_commands(std::byte* words) = 0;
};

}  // namespace epd
