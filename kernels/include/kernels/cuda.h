// Dispatch and combine on a CUDA device: one launch does a whole operation, counting and exchange
// included. Plain data and the image of the kernels; who launches them brings the driver.
//
// Pointers are addresses of this device, or of a peer's memory that is mapped here.
#pragma once

#include "kernels/host_device.h"
#include "kernels/operations.h"
#include "proto/commands.h"
#include "proto/exchange.h"

#include <cstddef>
#include <cstdint>
#include <span>

namespace epd::kernels::cuda {

inline constexpr std::uint32_t kMaxRanks = 32;  // reached over NVLink; a set of ranks is one word
inline constexpr std::uint32_t kMaxThreads = 512;

enum class OpError : std::uint32_t {
  kNone = 0,
  kBadChoice,  // token, k, value
  kNoRoom,     // culprit, expert, rows, room
  kMismatch,   // culprit announced something else
  kAborted,    // culprit: the lowest rank that was waited for
  kDeadline,   // likewise
  // Of calls alone, and without having begun:
  kNoRouting,    // its record holds none
  kOldRouting,   // rows: the routing's epoch. Ranks have come or gone since
  kBadCall,      // the client must not ask for that (abi::bad_field says what)
  kLostCommand,  // the call that lies where call `room` should be, which later ones have replaced
};

// Where an operation ended. `tag` is stored last, with release at system scope.
struct OpResult {
  std::uint64_t tag;
  std::uint64_t left;  // the same tag, of one that failed, when no CTA runs it any more: stored after `tag`
  OpError error;
  std::int32_t culprit;
  std::uint32_t token;
  std::uint32_t k;
  std::int32_t value;  // of a bad choice, saturated to 32 bits
  std::int32_t expert;
  std::uint64_t rows;
  std::uint64_t room;
  std::uint32_t num_recv_rows;
  std::uint32_t num_dropped;  // selections of ranks that are not there; kAborted too, once all are counted
  std::uint64_t ran_ns;  // of one that ended well, from when the device began it. 0: not known (noops, hosts)
};

// One rank of the group. `ready` is null for a rank that is not there.
struct Peer {
  // Its exchange block of this operation (abi::ExchangeArenaLayout).
  abi::SignalLine* ready = nullptr;             // [R]
  abi::SignalLine* arrived = nullptr;           // [R]
  abi::OpAnnouncement* announcement = nullptr;  // [R]
  std::uint32_t* rank_counts = nullptr;         // [R,R]
  std::uint32_t* expert_counts = nullptr;       // [R,E]
  std::uint8_t* landing = nullptr;  // its abi::LandingLayout of this operation, if the group has one
  DispatchTarget target;            // dispatch
  CombineSource source;             // combine
};

// abi::LandingLayout: where the parts of every rank's landing begin. Groups with one send a row (or a partial
// sum) once for a (token, rank).
struct Landing {
  std::uint32_t max_tokens = 0;  // T; 0: there is none
  std::uint32_t count = 1;       // of a rank; operations take turns at them
  std::uint32_t slot_bytes = 0;
  std::uint64_t hello = 0;   // [R] words of 16 bytes on 64-byte lines
  std::uint64_t landed = 0;  // [R,T,abi::kLandingPieces] tags
  std::uint64_t plans = 0;   // [R] of 1 + ceil(T/64) + R * ceil(E/R/4) words of 16 bytes, on 64-byte lines
  std::uint64_t asked = 0;   // [R,T,K] words of 16 bytes, on 64-byte lines
  std::uint64_t slots = 0;   // [R,T] of slot_bytes
};
constexpr Landing landing_of(const abi::GroupShape& s) {
  const abi::LandingLayout layout(s);
  if (layout.bytes == 0) return {};
  return {s.max_tokens, s.depth,       static_cast<std::uint32_t>(layout.slot_bytes),
          layout.hello, layout.landed, layout.plans,
          layout.asked, layout.slots};
}

struct Shape {
  std::uint32_t num_ranks = 0;
  std::uint32_t num_experts = 0;
  std::uint32_t topk = 0;
  std::uint32_t hidden = 0;
  bool per_expert = false;
  bool expert_blocks = false;
  bool index64 = false;
  std::uint32_t alignment = 1;
  std::uint64_t expert_capacity = 0;
  std::uint64_t recv_rows = 0;
  RowFormat format;
  // By configure(), for kernels that divide in many places: see multiply_high().
  std::uint32_t experts_per_rank = 0;
  std::uint32_t rank_reciprocal = 0;  // of experts_per_rank
  std::uint32_t topk_reciprocal = 0;
  std::uint32_t ranks_reciprocal = 0;   // of num_ranks
  std::uint32_t others_reciprocal = 0;  // of num_ranks - 1
  std::uint32_t counts_reciprocal = 0;  // of the words of a plan that are about one rank's experts
};

// Byte offsets of the parts of a CTA's shared memory before the stages; from configure().
struct HeaderParts {
  std::uint32_t barriers = 0;  // [warps*stages]
  std::uint32_t targets = 0;   // [R] pointers of DispatchTarget
  std::uint32_t base = 0;  // compact [CTA,R], else [E]: where the first row for each target lies, of each CTA
                           // or of this one
  std::uint32_t ends = 0;  // [E/R,2] own experts: end of the rows received, end of the block
  std::uint32_t headers = 0;  // [warps*stages] StageHeader, combine
  std::uint32_t scratch = 0;  // dispatch: Counters; through landings rows of each source at own experts
  std::uint32_t bits = 0;  // dispatch through landings: sets of tokens, of each expert and twice of each rank
  std::uint32_t counting_warps = 0;
};

// How a CTA divides its shared memory; from configure().
struct alignas(16) Movers {
  std::uint32_t ctas = 0;
  std::uint32_t threads = 0;
  std::uint32_t shared_bytes = 0;
  std::uint32_t header_bytes = 0;  // before the stages
  HeaderParts header;
  std::uint32_t warps = 0;   // that move rows
  std::uint32_t stages = 2;  // of each
  std::uint32_t stage_bytes = 0;
  std::uint32_t chunk_bytes = 0;  // combine: of a row, at a time
  // Through landings, as in Shape: of the CTAs that move rows, of the stages, of the pieces of a sum.
  std::uint32_t carriers_reciprocal = 0;
  std::uint32_t stages_reciprocal = 0;
  std::uint32_t pieces_reciprocal = 0;
  // Of a dispatch through landings.
  abi::LandedRow landed;
  std::uint32_t landed_pitch = 0;  // of rows in a stage
  abi::PlanWords plan;
  std::uint32_t set_words = 0;  // of a set of tokens
  std::uint32_t row_steps = 0;  // of a cast
  std::uint32_t steps_reciprocal = 0;
};

// What a routing leaves for combine and for dispatches that reuse it: this device's own memory.
struct Routing {
  std::int32_t* topk = nullptr;  // [n,K] validated copy; -1 for ranks that are not there
  std::int32_t* rows = nullptr;  // [n,K] row at the choice's rank if the choice sends it, else -1 (while the
                                 // dispatch runs also -2 - i: the i-th row of a CTA)
  std::int32_t* placement = nullptr;  // abi::placement_words, kernels::Placement
  // A dispatch that makes the routing stores this when every rank is done, the handle last. Null: not wanted.
  abi::RoutingRecord* head = nullptr;
  // Of a call that uses the routing: what its dispatch has stored, which it counts on from.
  const abi::RoutingRecord* record = nullptr;
  std::uint64_t handle = 0;
  std::uint64_t epoch = 0;
};

// Where a dispatch tells what was received. Null: not wanted.
struct CountOutputs {
  std::int32_t* rank_offsets = nullptr;
  std::int32_t* expert_counts = nullptr;
  std::int32_t* expert_offsets = nullptr;
  std::int32_t* source_ranges = nullptr;
  // For a CPU that polls, in host memory: the placement's words, each with `mark` in its upper half, so that
  // a word tells by itself whether it is there.
  std::uint64_t* host_words = nullptr;
  // Gets `mark` when this rank's rows have left, before those of others have come: x is read no more.
  std::uint32_t* host_sent = nullptr;
  std::uint32_t mark = 0;
};

// Words by which operations and streams of the client wait for each other; in the rank's user arena. Compared
// cyclically.
struct Signal {
  std::uint32_t* ready = nullptr;  // the operation begins when this has got to `value`. Null: at once
  std::uint32_t* done = nullptr;   // gets `value` when the operation has ended, well or not. May be null
  std::uint32_t value = 0;
  // Of commands, stored before `done`; may be null.
  std::uint32_t* flag = nullptr;    // gets 1
  std::uint32_t* failed = nullptr;  // one is added if it ended badly
};

// Where the result of a call goes, beside Operation::result. Host memory.
struct ResultOut {
  abi::CallResult* to = nullptr;  // null: nowhere
  std::uint32_t number = 0;       // of the writing
};

// Everything about one operation of one rank. It lies in device memory until the operation
// has ended; each CTA copies it first. (As a kernel's parameter it would cost a microsecond for each line
// of constant memory that is touched, one after the other.)
struct alignas(64) Operation {
  Shape shape;
  Movers movers;
  std::uint32_t rank = 0;
  std::uint32_t num_tokens = 0;
  std::uint64_t tag = 0;
  abi::OpAnnouncement announcement = {};  // with the same tag and num_tokens
  bool cached = false;                    // dispatch: `routing` is already made
  bool mark_unused = false;               // rows above what was received are marked too
  bool zero_padding = false;              // and rows so marked are zeroed
  Routing routing;
  CountOutputs counts;
  Landing landing;
  // dispatch
  const void* topk_idx = nullptr;       // [n,K], the client's: read once
  const float* topk_weights = nullptr;  // [n,K] or null; combine: null = unweighted
  const void* x = nullptr;
  const void* x_scales = nullptr;
  // combine
  const std::uint16_t* bias[2] = {};
  std::uint16_t* out = nullptr;
  float* out_weights = nullptr;

  Signal signal;
  void* workspace = nullptr;  // zeroed once
  std::uint64_t workspace_bytes = 0;
  const std::uint32_t* abort = nullptr;  // nonzero: leave. May be null
  std::uint64_t timeout_ns = 0;          // of the operation on the device
  OpResult* result = nullptr;
  ResultOut out_result;
  Peer peers[kMaxRanks];
};

enum class Kind { kDispatch, kCombine, kNoop };

// What all CTAs of a resident kernel do next.
enum class Task : std::uint32_t { kStop, kDispatch, kCombine, kCombinePerExpert };

// ---- calls: operations that clients hand to a resident kernel (abi::CommandWords)

inline constexpr std::uint32_t kJournalEntries = 1024;

// Who enqueues calls; each has a ring, and numbers of its own.
enum CallRing : std::uint32_t { kByStreams = 0, kByHost = 1, kCallRings = 2 };

// A routing record as commands know it.
struct RouteState {
  std::uint64_t tag = 0;  // of its dispatch, abi::op_tag; 0: it holds none
  std::uint32_t num_tokens = 0;
  std::uint32_t half = 0;  // in which it lies. The next dispatch writes the other one
};

// Where commands go on. By the host in pinned memory, read once for each odd turn (`sets` and `sequence` also
// when a kernel starts).
struct CommandStart {
  std::uint64_t epoch = 0;
  std::uint64_t index = 0;          // of the next dispatch or combine in the group
  std::uint64_t changed_epoch = 0;  // a cached dispatch needs a routing of this epoch or a later one
  std::uint32_t num_routes = 0;
  std::uint32_t sets = 0;  // 1: `sequence` counts too (a new engine): at the first kernel's start, or in the
                           // first odd turn that says so. Later the kernel knows better
  std::uint32_t sequence[kCallRings] = {};  // of the next call
  std::uint64_t index_base = 0;             // added to `index`: the number that clients know
  const RouteState* routes = nullptr;       // [num_routes], pinned
};

// An end that the host is to know, in order. Discarded calls have none.
struct alignas(64) JournalEntry {
  abi::PackedCall call;
  OpResult result;  // tag and left: the operation's, 0 if it has not begun. A noop's tag only counts noops
  std::uint64_t index;   // its number in the group; of a noop, and of what has not begun: the next one's
  CallRing ring;         // in which the call lay
  std::uint32_t number;  // of the entry + 1, cyclic. Stored last, with release at system scope
};
static_assert(sizeof(JournalEntry) == 128);

// Pinned memory of the host, which the kernel writes, and reads only as said at CommandStart.
struct CommandHost {
  alignas(64) CommandStart start;
  alignas(64) std::uint32_t turn;  // the turn that the kernel has taken: stored when no command of an earlier
                                   // one runs any more
  alignas(64) JournalEntry journal[kJournalEntries];
};

// What the kernel keeps, and the host's words for it (by stream memory operations). Device memory, zeroed
// once; RouteState[num_routes] lie behind.
struct alignas(64) CommandState {
  // By the host. Each pair is read at once.
  alignas(8) std::uint32_t turn;  // odd: calls are carried out from CommandStart on; even: they are discarded
  std::uint32_t sms;              // of the device, that the group's operations may use; 0: all
  alignas(8) std::uint32_t journal_read;  // entries that the host has read
  std::uint32_t timeout_ms;               // of a call that says none
  std::uint32_t stop;                     // number of the kernel that is to leave, see ResidentArguments
  std::uint32_t abort;                    // not 0: the call that runs is to end
  // The kernel's own.
  alignas(64) std::uint64_t epoch;
  std::uint64_t index;
  std::uint64_t changed_epoch;
  std::uint64_t index_base;
  std::uint32_t sequence[kCallRings];  // of the next call
  std::uint32_t journal;               // entries written
  std::uint32_t turn_taken;
  std::uint32_t failed;        // one has failed: others are discarded until the next turn
  std::uint32_t sequence_set;  // CommandStart::sets has been heeded: it counts once in a lane's life
  std::uint64_t noops;
  std::uint32_t results;  // written
  std::uint32_t reserved;
};

// How many calls of a replayed graph have ended with one result. Device memory.
struct alignas(8) ResultRuns {
  std::uint32_t result;  // + 1; 0: none has
  std::uint32_t runs;
};

struct DeviceView;  // group_view.h

// The client writes `words`: each is read once, and judged.
struct CommandArguments {
  abi::CommandWords* words = nullptr;
  CommandState* state = nullptr;
  RouteState* routes = nullptr;
  // What is constant in an epoch. By the host, while no call can run.
  const DeviceView* view = nullptr;
  const Movers* movers = nullptr;  // [kMoverKinds][most_ctas]: of each number of CTAs, see movers_index()
  std::uint32_t most_ctas = 0;
  CommandHost* host = nullptr;
  abi::Results* results = nullptr;  // of the host: written alone
  std::uint32_t counts_stride = 0;  // abi::ResultsLayout
  ResultRuns* runs = nullptr;       // [kReplayedResults]
  abi::OpLimits limits;
  bool per_expert = false;
};

// ---- what a resident kernel is given

// A call that has become an operation. All of it is told from CTA to CTA, in words of 32 bits.
struct alignas(8) TakenCall {
  std::uint64_t tag;          // abi::op_tag: its epoch and number
  std::uint64_t routing_tag;  // of the routing that it uses; 0: it makes one
  std::uint32_t number;       // of the call
  std::uint32_t turn;         // since which the group's view is what it is
  std::uint32_t journal;      // entry where it is to tell how it ends
  std::uint32_t result;       // abi::result_of(), and with which number that is written
  std::uint32_t writing;
  std::uint32_t num_tokens;
  std::uint32_t timeout_ms;
  std::uint16_t flags;  // abi::OpFlags
  std::uint16_t sms;    // at most; 0: all
  std::uint16_t route;  // routing record
  std::uint8_t op_code;
  std::uint8_t slot;
  std::uint8_t block;  // of the exchange arenas
  std::uint8_t half;   // of the routing record
  std::uint8_t flagged;
  std::uint8_t ring;  // CallRing

  EPD_HOST_DEVICE constexpr abi::Op op() const { return static_cast<abi::Op>(op_code); }

  static constexpr std::uint32_t kWords = 14;
};
static_assert(sizeof(TakenCall) == TakenCall::kWords * 4);

// What CTA 0 tells the others to do. Each word has (heralds before + 1) in its upper half, so a word tells by
// itself whether it is there.
struct alignas(128) Herald {
  std::uint64_t task;
  std::uint64_t call[TakenCall::kWords];  // not of kStop
  static constexpr std::uint32_t kWords = 1 + TakenCall::kWords;
};
static_assert(sizeof(Herald) == 128);

// Device memory, zeroed once.
struct alignas(128) ResidentState {
  Herald herald;                   // as CTA 0 has found it
  alignas(64) std::uint64_t left;  // heralds that all CTAs have left (low half); bit 32: the last one failed
  std::uint32_t leaving;           // CTAs that have left a kStop
};

// A resident kernel never looks again and again at the host's memory: while it did, steps of the clients'
// streams on that GPU took some 30 us longer (measured; see daemon/device/README).
//
// It leaves between two calls when it is told to (CommandState::stop), and also when `round` is not what it
// was: a device may come to begin nothing new as long as a kernel stays on it (README, "Stepping aside").
struct ResidentArguments {
  ResidentState* state = nullptr;
  const std::uint32_t* round = nullptr;  // of the host
  std::uint32_t own_round = 0;           // as it was launched
  std::uint32_t number = 0;              // of the lane's kernels. Not 0
  CommandArguments commands = {};
};

// Bytes of device memory that an operation in flight needs for itself.
std::size_t workspace_bytes(const Shape& shape, std::uint32_t max_sms);

// Divides the work among `sms` CTAs. `max_shared_bytes`: what one may have on the device. False: a row does
// not fit. movers.stages of a combine is taken as it is given.
bool configure(Kind kind, std::size_t max_shared_bytes, std::uint32_t sms, Operation& op);

// The kernels, for cuLibraryLoadData: a fat binary, and what is in it. Each may have as much dynamic shared
// memory as max_shared_bytes less kStaticBytes. The first three run one operation, to which their only
// parameter points in device memory. The resident one stays; its parameter is ResidentArguments. It runs on
// as many SMs as it has CTAs, of kMaxThreads and all shared memory, so that nothing else fits beside it, and
// operations may ask for fewer. The pulse does nothing: that it has run says that kernels begin.
std::span<const std::byte> image();
bool image_checks_ranges();  // cuda/common/range.h: of the debug image
// The operation's copy, the group's view, a few words, the driver's; and room for a kernel of a client's that
// waits for this one, which must not keep a launched CTA from its SM.
inline constexpr std::uint32_t kStaticBytes = 12 * 1024;
inline constexpr const char* kKernelNames[] = {"epd_dispatch", "epd_combine", "epd_combine_per_expert",
                                               "epd_resident", "epd_pulse"};
inline constexpr const char* kResidentKernel = kKernelNames[3];
inline constexpr const char* kPulseKernel = kKernelNames[4];

// Of `op`, which is configured: movers.ctas CTAs of movers.threads threads and movers.shared_bytes, one CTA
// on an SM; all must be able to run at once.
const char* kernel_name(Kind kind, const Operation& op);

}  // namespace epd::kernels::cuda
