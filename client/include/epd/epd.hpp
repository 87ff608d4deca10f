// epd for C++17 and later: owning types over epd.h, which states shapes, units and errors of each call.
// Header only; link libepd.
//
//   epd::Session session;                       // $EPD_SOCKET, any device
//   epd::Config config;
//   config.name = "layer"; config.num_ranks = 2; ...
//   epd::Group group = session.join(config);
//   epd::Buffers b = group.buffers(0);          // write b.x, b.topk_idx, b.topk_weights
//   epd::Dispatch d = group.dispatch(0, num_tokens, EPD_NO_STREAM);
//   std::uint32_t rows = d.ticket.wait().num_recv_rows;
//   ...                                         // read b.recv_x, write b.y
//   group.combine(0, d.handle, EPD_NO_STREAM).wait();  // read b.out
//
// Errors. A status that is not EPD_OK is thrown as epd::Error. try_ functions return the status instead,
// where trying again is normal.
// Lifetime. A Group keeps its session, a Ticket and a KeptHandle keep their group. Destroying the last owner
// leaves and detaches. Destroying a Ticket does not wait: the operation goes on, and its result is dropped.
// Threads. As in epd.h. One object of these types belongs to one thread at a time.
#pragma once

#if __cplusplus < 201703L
#error "epd.hpp needs C++17 or later (-std=c++17); epd.h needs C89 or C++98"
#endif

#include "epd/epd.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace epd {

class Error : public std::runtime_error {
 public:
  Error(epd_status_t status, const std::string& text)
      : std::runtime_error(std::string(epd_status_name(status)) + ": " + text), status_(status) {}
  epd_status_t status() const noexcept { return status_; }
  // epd_is_break: to be repeated after advance() or resume().
  bool is_break() const noexcept { return epd_is_break(status_) != 0; }

 private:
  epd_status_t status_;
};

namespace detail {
inline void check(epd_status_t status) {
  if (status != EPD_OK) throw Error(status, epd_last_error());
}
}  // namespace detail

// A view of `size` elements. The memory belongs to the group.
template <typename T>
class Span {
 public:
  constexpr Span() noexcept = default;
  constexpr Span(T* data, std::size_t size) noexcept : data_(data), size_(size) {}
  constexpr T* data() const noexcept { return data_; }
  constexpr std::size_t size() const noexcept { return size_; }
  constexpr bool empty() const noexcept { return size_ == 0; }
  constexpr T& operator[](std::size_t i) const { return data_[i]; }
  constexpr T* begin() const noexcept { return data_; }
  constexpr T* end() const noexcept { return data_ + size_; }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

struct AttachOptions {
  std::string socket_path;                    // as in C; "": $EPD_SOCKET, else /run/epd/epd.sock
  std::string device;                         // "host:0", "GPU-..."; "": the least used
  std::int32_t timeout_ms = 0;                // 0: 5000
  epd_wait_by_t wait_by = EPD_WAIT_BY_MEMOP;  // MEMOP: $EPD_WAIT_BY if it is set
};

// The fields of epd_group_config_t, which states their limits and what zero means.
struct Config {
  // [fields.py: Config]
  std::string name;
  std::int32_t rank = 0;
  std::uint32_t num_ranks = 0;
  std::uint32_t num_experts = 0;
  std::uint32_t max_tokens = 0;
  std::uint32_t hidden = 0;
  std::uint32_t topk = 0;
  std::uint32_t depth = 0;
  epd_payload_t payload = EPD_PAYLOAD_BF16;
  epd_index_type_t index_type = EPD_INDEX_TYPE_INT32;
  epd_policy_t policy = EPD_POLICY_FAIL_FAST;
  std::uint32_t sms = 0;
  std::int32_t timeout_ms = 0;
  epd_layout_t layout = EPD_LAYOUT_COMPACT;
  epd_scale_format_t scale_format = EPD_SCALE_FORMAT_FLOAT32;
  std::uint32_t expert_alignment = 0;
  std::uint32_t opaque_bytes = 0;
  std::uint32_t num_biases = 0;
  std::uint32_t num_handles = 0;
  std::uint32_t max_recv_rows = 0;
  std::int32_t priority = 0;
  std::uint32_t sum_ranks = 0;
  epd_span_t span = EPD_SPAN_NODE;
  epd_scale_layout_t scale_layout = EPD_SCALE_LAYOUT_ROW_MAJOR;
  epd_range_format_t range_format = EPD_RANGE_FORMAT_ROWS;
  std::vector<epd_row_format_t> more_formats;
  std::uint32_t shared_regions = 0;
  // [end]
};

// A region whose elements' type follows from the configuration.
class Region {
 public:
  constexpr Region() noexcept = default;
  constexpr Region(void* data, std::size_t bytes) noexcept : data_(data), bytes_(bytes) {}
  constexpr void* data() const noexcept { return data_; }
  constexpr std::size_t bytes() const noexcept { return bytes_; }
  constexpr bool empty() const noexcept { return bytes_ == 0; }
  // The region as elements of T. The caller chooses the type that the configuration says.
  template <typename T>
  Span<T> as() const noexcept {
    return {static_cast<T*>(data_), bytes_ / sizeof(T)};
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// The regions of a slot, whole; epd_buffers_t says how much of each an operation uses. A region that the
// group does not have is empty. bf16 elements are std::uint16_t, e4m3 elements std::uint8_t.
struct Buffers {
  Region x;         // by payload of the row format: bf16 (also FP8_CAST), e4m3, or bytes
  Region x_scales;  // by scale_format: float, or std::int32_t of UE8M0
  Region topk_idx;  // by index_type: std::int32_t or std::int64_t
  Span<float> topk_weights;
  Region recv_x;         // by payload: bf16, e4m3 (also FP8_CAST), or bytes
  Region recv_scales;    // as x_scales, by scale_layout
  Region recv_topk_idx;  // as topk_idx
  Span<float> recv_topk_weights;
  Span<std::int32_t> recv_src;
  Span<std::int32_t> rank_offsets;
  Span<std::int32_t> expert_counts;
  Span<std::int32_t> expert_offsets;
  Span<std::int32_t> source_ranges;  // pairs; EPD_RANGE_FORMAT_PACKED64: the halves of each int64
  Span<std::uint16_t> y;
  Span<float> y_weights;
  Span<std::uint16_t> bias[2];
  Span<std::uint16_t> out;
  Span<float> out_weights;
};

// epd_group_waits: by rank.
struct Waits {
  std::vector<std::int64_t> ready_ns;
  std::vector<std::int64_t> arrived_ns;
};

// epd_counts_t.
struct Counts {
  std::uint32_t num_recv_rows = 0;
  Span<const std::int32_t> rank_offsets;
  Span<const std::int32_t> expert_counts;
  Span<const std::int32_t> expert_offsets;  // empty if compact
};

// epd_memory_t, initialised. It owns nothing, and must last until the submission has returned.
struct Memory : epd_memory_t {
  Memory() { epd_memory_init(this); }
};

// The optional fields of epd_dispatch_args_t.
struct DispatchOptions {
  epd_handle_t handle = 0;
  const std::uint32_t* num_tokens_at = nullptr;
  bool omit_weights = false;
  bool keep_handle = false;
  bool defer_receive = false;
  bool zero_padding = false;
  bool mark_unused = false;
  std::uint32_t sms = 0;
  std::int32_t timeout_ms = 0;
  std::uint32_t row_format = 0;
  const Memory* memory = nullptr;  // in place of regions
};
// The optional fields of epd_combine_args_t.
struct CombineOptions {
  bool weighted = false;
  std::uint32_t num_biases = 0;
  epd_return_weights_t return_weights = EPD_RETURN_WEIGHTS_NONE;
  bool defer_receive = false;
  std::uint32_t sms = 0;
  std::int32_t timeout_ms = 0;
  const Memory* memory = nullptr;                // in place of regions
  std::uint32_t num_tokens = 0;                  // with memory
  const std::uint32_t* num_tokens_at = nullptr;  // with memory
};

namespace detail {

struct SessionOwner {
  epd_session_t* handle = nullptr;
  SessionOwner() = default;
  SessionOwner(const SessionOwner&) = delete;
  SessionOwner& operator=(const SessionOwner&) = delete;
  ~SessionOwner() { epd_session_detach(handle); }
};

// Points into `config`.
inline epd_group_config_t make_config(const Config& config) {
  epd_group_config_t raw;
  epd_group_config_init(&raw);
  // [fields.py: make_config]
  raw.name = config.name.c_str();
  raw.rank = config.rank;
  raw.num_ranks = config.num_ranks;
  raw.num_experts = config.num_experts;
  raw.max_tokens = config.max_tokens;
  raw.hidden = config.hidden;
  raw.topk = config.topk;
  raw.depth = config.depth;
  raw.payload = config.payload;
  raw.index_type = config.index_type;
  raw.policy = config.policy;
  raw.sms = config.sms;
  raw.timeout_ms = config.timeout_ms;
  raw.layout = config.layout;
  raw.scale_format = config.scale_format;
  raw.expert_alignment = config.expert_alignment;
  raw.opaque_bytes = config.opaque_bytes;
  raw.num_biases = config.num_biases;
  raw.num_handles = config.num_handles;
  raw.max_recv_rows = config.max_recv_rows;
  raw.priority = config.priority;
  raw.sum_ranks = config.sum_ranks;
  raw.span = config.span;
  raw.scale_layout = config.scale_layout;
  raw.range_format = config.range_format;
  raw.more_formats = config.more_formats.data();
  raw.num_more_formats = static_cast<std::uint32_t>(config.more_formats.size());
  raw.shared_regions = config.shared_regions;
  // [end]
  return raw;
}

// Bytes of the regions in one slot, from epd_region_bytes.
struct RegionSizes {
  explicit RegionSizes(const Config& config) {
    const epd_group_config_t raw = make_config(config);
    for (std::size_t i = 0; i < bytes.size(); ++i)
      check(epd_region_bytes(&raw, static_cast<epd_region_t>(i), &bytes[i]));
  }
  std::size_t of(epd_region_t region) const { return static_cast<std::size_t>(bytes[region]); }

  std::array<std::uint64_t, EPD_REGION_OUT_WEIGHTS + 1> bytes{};
};

struct GroupOwner {
  std::shared_ptr<SessionOwner> session;  // outlives the handle
  epd_group_t* handle = nullptr;
  Config config;
  RegionSizes sizes;
  GroupOwner(std::shared_ptr<SessionOwner> owner, Config joined)
      : session(std::move(owner)), config(std::move(joined)), sizes(config) {}
  GroupOwner(const GroupOwner&) = delete;
  GroupOwner& operator=(const GroupOwner&) = delete;
  ~GroupOwner() { epd_group_leave(handle); }
};

// The function of a hook. It does not own the group: a hook must not destroy the last owner.
using Hook = std::function<void(const epd_result_t&)>;
extern "C" inline void epd_hpp_call_hook(const epd_result_t* result, void* user) {
  const std::unique_ptr<Hook> hook(static_cast<Hook*>(user));
  (*hook)(*result);
}

inline Buffers make_buffers(const RegionSizes& sizes, const epd_buffers_t& raw) {
  const auto region = [&](void* data, epd_region_t which) {
    return data != nullptr ? Region(data, sizes.of(which)) : Region();
  };
  const auto floats = [&](void* data, epd_region_t which) { return region(data, which).as<float>(); };
  const auto ints = [&](void* data, epd_region_t which) { return region(data, which).as<std::int32_t>(); };
  const auto bf16 = [&](void* data, epd_region_t which) { return region(data, which).as<std::uint16_t>(); };
  Buffers b;
  b.x = region(raw.x, EPD_REGION_X);
  b.x_scales = region(raw.x_scales, EPD_REGION_X_SCALES);
  b.topk_idx = region(raw.topk_idx, EPD_REGION_TOPK_IDX);
  b.topk_weights = floats(raw.topk_weights, EPD_REGION_TOPK_WEIGHTS);
  b.recv_x = region(raw.recv_x, EPD_REGION_RECV_X);
  b.recv_scales = region(raw.recv_scales, EPD_REGION_RECV_SCALES);
  b.recv_topk_idx = region(raw.recv_topk_idx, EPD_REGION_RECV_TOPK_IDX);
  b.recv_topk_weights = floats(raw.recv_topk_weights, EPD_REGION_RECV_TOPK_WEIGHTS);
  b.recv_src = ints(raw.recv_src, EPD_REGION_RECV_SRC);
  b.rank_offsets = ints(raw.rank_offsets, EPD_REGION_RANK_OFFSETS);
  b.expert_counts = ints(raw.expert_counts, EPD_REGION_EXPERT_COUNTS);
  b.expert_offsets = ints(raw.expert_offsets, EPD_REGION_EXPERT_OFFSETS);
  b.source_ranges = ints(raw.source_ranges, EPD_REGION_SOURCE_RANGES);
  b.y = bf16(raw.y, EPD_REGION_Y);
  b.y_weights = floats(raw.y_weights, EPD_REGION_Y_WEIGHTS);
  b.bias[0] = bf16(raw.bias[0], EPD_REGION_BIAS_0);
  b.bias[1] = bf16(raw.bias[1], EPD_REGION_BIAS_1);
  b.out = bf16(raw.out, EPD_REGION_OUT);
  b.out_weights = floats(raw.out_weights, EPD_REGION_OUT_WEIGHTS);
  return b;
}

}  // namespace detail

// One operation in flight, or nothing (after wait, drop, on_complete, or a move). wait() empties it also for
// an operation that was captured in a graph. To wait for each replay, keep get() and call epd_ticket_wait.
class Ticket {
 public:
  Ticket() = default;
  Ticket(Ticket&& other) noexcept
      : group_(std::move(other.group_)), ticket_(std::exchange(other.ticket_, 0)) {}
  Ticket& operator=(Ticket&& other) noexcept {
    if (this != &other) {
      drop();
      group_ = std::move(other.group_);
      ticket_ = std::exchange(other.ticket_, 0);
    }
    return *this;
  }
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;
  ~Ticket() { drop(); }

  bool valid() const noexcept { return ticket_ != 0; }
  epd_ticket_t get() const noexcept { return ticket_; }
  // True while the operation is in flight.
  bool pending() const { return valid() && epd_ticket_pending(group_->handle, ticket_) != 0; }

  // epd_ticket_wait: returns the result of an operation that ended well, throws its status otherwise. After
  // DEADLINE_EXCEEDED, valid() is true if the operation is still in flight.
  epd_result_t wait(std::int32_t timeout_ms = EPD_FOREVER) {
    epd_result_t result;
    detail::check(try_wait(timeout_ms, result));
    return result;
  }
  // Returns what epd_ticket_wait returns. valid() is true afterwards if the operation is still in flight.
  epd_status_t try_wait(std::int32_t timeout_ms, epd_result_t& result) {
    epd_result_init(&result);
    result.op_index = kUntouched;
    const epd_status_t status = epd_ticket_wait(handle(), ticket_, timeout_ms, &result);
    if (result.op_index != kUntouched || status == EPD_NOT_FOUND) release();
    return status;
  }
  // False while the operation is in flight, then true with its result. Throws the status of a failed one.
  bool poll(epd_result_t& result) {
    const epd_status_t status = try_wait(EPD_NO_WAIT, result);
    if (status == EPD_WOULD_BLOCK) return false;
    detail::check(status);
    return true;
  }

  // epd_ticket_counts, for a dispatch.
  Counts counts(std::int32_t timeout_ms = EPD_FOREVER) const {
    epd_counts_t counts;
    epd_counts_init(&counts);
    detail::check(epd_ticket_counts(handle(), ticket_, timeout_ms, &counts));
    const auto view = [this](const std::int32_t* data, epd_region_t region) {
      return Span<const std::int32_t>(data, group_->sizes.of(region) / sizeof(std::int32_t));
    };
    return {counts.num_recv_rows, view(counts.rank_offsets, EPD_REGION_RANK_OFFSETS),
            view(counts.expert_counts, EPD_REGION_EXPERT_COUNTS),
            view(counts.expert_offsets, EPD_REGION_EXPERT_OFFSETS)};
  }

  // epd_ticket_wait_sent, for an operation with defer_receive. The ticket stays.
  void wait_sent(std::int32_t timeout_ms = EPD_FOREVER) const {
    detail::check(epd_ticket_wait_sent(handle(), ticket_, timeout_ms));
  }
  // epd_ticket_wait_on_stream, for an operation in a stream. The ticket stays.
  void wait_on_stream(void* stream) const {
    detail::check(epd_ticket_wait_on_stream(handle(), ticket_, stream));
  }
  // epd_ticket_event: a CUevent that completes with the operation. The ticket stays.
  void* event() const {
    void* event = nullptr;
    detail::check(epd_ticket_event(handle(), ticket_, &event));
    return event;
  }
  // epd_ticket_drop: the result is not wanted. An empty ticket stays empty.
  void drop() noexcept {
    if (valid()) epd_ticket_drop(group_->handle, ticket_);
    release();
  }

  // epd_ticket_on_complete: hook(result) runs once, on a thread of the library. It must not throw, and must
  // not destroy the last owner of the group. The ticket is empty afterwards.
  void on_complete(std::function<void(const epd_result_t&)> hook) {
    auto owned = std::make_unique<detail::Hook>(std::move(hook));
    detail::check(epd_ticket_on_complete(handle(), ticket_, &detail::epd_hpp_call_hook, owned.get()));
    [[maybe_unused]] const detail::Hook* given_away = owned.release();
    release();
  }

 private:
  friend class Group;
  static constexpr std::uint64_t kUntouched = ~std::uint64_t{0};

  Ticket(std::shared_ptr<detail::GroupOwner> group, epd_ticket_t ticket)
      : group_(std::move(group)), ticket_(ticket) {}
  epd_group_t* handle() const {
    if (!valid()) throw Error(EPD_NOT_FOUND, "the ticket is empty: waited for, given to a hook, or moved");
    return group_->handle;
  }
  void release() noexcept {
    ticket_ = 0;
    group_.reset();
  }
  std::shared_ptr<detail::GroupOwner> group_;
  epd_ticket_t ticket_ = 0;
};

// A kept handle, given back by its owner's end.
class KeptHandle {
 public:
  KeptHandle() = default;
  KeptHandle(KeptHandle&& other) noexcept
      : group_(std::move(other.group_)), handle_(std::exchange(other.handle_, 0)) {}
  KeptHandle& operator=(KeptHandle&& other) noexcept {
    if (this != &other) {
      release();
      group_ = std::move(other.group_);
      handle_ = std::exchange(other.handle_, 0);
    }
    return *this;
  }
  KeptHandle(const KeptHandle&) = delete;
  KeptHandle& operator=(const KeptHandle&) = delete;
  ~KeptHandle() { release(); }

  bool valid() const noexcept { return handle_ != 0; }
  epd_handle_t get() const noexcept { return handle_; }
  // epd_handle_release, after the end of operations in flight that use the handle. It is no error if the
  // handle has ended by a failure. False: they have not ended within `most`, for example because this
  // device's engine is stopped. A destructor, and an assignment, give up then: the handle lasts as long as
  // the membership.
  bool release(std::chrono::milliseconds most = std::chrono::minutes(1)) noexcept {
    if (handle_ == 0) return true;
    const auto end = std::chrono::steady_clock::now() + most;
    while (epd_handle_release(group_->handle, handle_) == EPD_WOULD_BLOCK) {
      if (std::chrono::steady_clock::now() >= end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    handle_ = 0;
    group_.reset();
    return true;
  }

 private:
  friend class Group;
  KeptHandle(std::shared_ptr<detail::GroupOwner> group, epd_handle_t handle)
      : group_(std::move(group)), handle_(handle) {}

  std::shared_ptr<detail::GroupOwner> group_;
  epd_handle_t handle_ = 0;
};

struct Dispatch {
  Ticket ticket;
  epd_handle_t handle = 0;
  KeptHandle kept;  // with keep_handle the owner of `handle`; move it to where the routing is used
};

// One rank's membership in a group. Copies are of the same membership.
class Group {
 public:
  Group() = default;
  bool valid() const noexcept { return owner_ != nullptr; }
  epd_group_t* get() const { return owner().handle; }
  const Config& config() const { return owner().config; }
  std::uint32_t rank() const { return epd_group_rank(get()); }
  std::uint32_t sum_ranks() const { return epd_group_sum_ranks(get()); }
  bool active(std::uint32_t rank) const { return epd_group_active(get(), rank) != 0; }
  Span<const std::int32_t> active_mask() const {
    const std::int32_t* mask = nullptr;
    detail::check(epd_group_active_mask(get(), &mask));
    return {mask, config().num_ranks};
  }
  Waits waits() const {
    Waits waits;
    waits.ready_ns.resize(config().num_ranks);
    waits.arrived_ns.resize(config().num_ranks);
    detail::check(epd_group_waits(get(), waits.ready_ns.data(), waits.arrived_ns.data()));
    return waits;
  }

  Buffers buffers(std::uint32_t slot) const {
    epd_buffers_t raw;
    epd_buffers_init(&raw);
    detail::check(epd_group_buffers(get(), slot, &raw));
    return detail::make_buffers(owner().sizes, raw);
  }

  // Submissions. stream: a cudaStream_t or CUstream, or EPD_NO_STREAM. WOULD_BLOCK is thrown like any other
  // status. try_dispatch and try_combine return the status; they set result if the operation was submitted.
  Dispatch dispatch(std::uint32_t slot, std::uint32_t num_tokens, void* stream,
                    const DispatchOptions& options = {}) {
    epd_dispatch_args_t args;
    epd_dispatch_args_init(&args);
    args.slot = slot;
    args.num_tokens = num_tokens;
    args.handle = options.handle;
    args.num_tokens_at = options.num_tokens_at;
    args.omit_weights = options.omit_weights ? 1 : 0;
    args.keep_handle = options.keep_handle ? 1 : 0;
    args.defer_receive = options.defer_receive ? 1 : 0;
    args.zero_padding = options.zero_padding ? 1 : 0;
    args.mark_unused = options.mark_unused ? 1 : 0;
    args.sms = options.sms;
    args.timeout_ms = options.timeout_ms;
    args.row_format = options.row_format;
    args.memory = options.memory;
    Dispatch result;
    detail::check(try_dispatch(args, stream, result));
    return result;
  }
  epd_status_t try_dispatch(const epd_dispatch_args_t& args, void* stream, Dispatch& result) {
    epd_ticket_t ticket = 0;
    epd_handle_t handle = 0;
    const epd_status_t status = epd_dispatch(get(), &args, stream, &ticket, &handle);
    if (ticket == 0) return status;  // else the operation was submitted, even if the status is an error
    result.ticket = Ticket(owner_, ticket);
    result.handle = handle;
    result.kept = args.keep_handle != 0 ? KeptHandle(owner_, handle) : KeptHandle();
    return status;
  }

  Ticket combine(std::uint32_t slot, epd_handle_t handle, void* stream, const CombineOptions& options = {}) {
    epd_combine_args_t args;
    epd_combine_args_init(&args);
    args.slot = slot;
    args.weighted = options.weighted ? 1 : 0;
    args.handle = handle;
    args.timeout_ms = options.timeout_ms;
    args.num_biases = options.num_biases;
    args.return_weights = options.return_weights;
    args.defer_receive = options.defer_receive ? 1 : 0;
    args.sms = options.sms;
    args.memory = options.memory;
    args.num_tokens = options.num_tokens;
    args.num_tokens_at = options.num_tokens_at;
    Ticket result;
    detail::check(try_combine(args, stream, result));
    return result;
  }
  epd_status_t try_combine(const epd_combine_args_t& args, void* stream, Ticket& result) {
    epd_ticket_t ticket = 0;
    const epd_status_t status = epd_combine(get(), &args, stream, &ticket);
    if (ticket != 0) result = Ticket(owner_, ticket);
    return status;
  }

  Ticket noop(std::uint32_t slot, void* stream) {
    epd_ticket_t ticket = 0;
    const epd_status_t status = epd_noop(get(), slot, stream, &ticket);
    Ticket result;
    if (ticket != 0) result = Ticket(owner_, ticket);
    detail::check(status);
    return result;
  }

  // epd_group_check.
  epd_progress_t check() const {
    epd_progress_t progress;
    epd_progress_init(&progress);
    detail::check(epd_group_check(get(), &progress));
    return progress;
  }
  // epd_group_advance: resume_op is the operation to submit next. The ticket may be empty before, and is
  // empty afterwards, or in flight if this throws DEADLINE_EXCEEDED or WOULD_BLOCK.
  epd_resume_info_t advance(Ticket& ticket, std::int32_t timeout_ms = EPD_FOREVER,
                            epd_result_t* result = nullptr) {
    epd_resume_info_t info;
    epd_resume_info_init(&info);
    if (result != nullptr) epd_result_init(result);
    epd_ticket_t number = ticket.get();
    const epd_status_t status = epd_group_advance(get(), &number, timeout_ms, result, &info);
    if (number == 0 || status == EPD_NOT_FOUND) ticket.release();
    detail::check(status);
    return info;
  }
  // epd_group_resume.
  epd_resume_info_t resume(std::int32_t timeout_ms = EPD_FOREVER) {
    Ticket none;
    return advance(none, timeout_ms);
  }
  // epd_group_restore.
  epd_resume_info_t restore(std::int32_t timeout_ms = 0) {
    epd_resume_info_t info;
    epd_resume_info_init(&info);
    detail::check(epd_group_restore(get(), timeout_ms, &info));
    return info;
  }

 private:
  friend class Session;
  explicit Group(std::shared_ptr<detail::GroupOwner> owner) : owner_(std::move(owner)) {}
  const detail::GroupOwner& owner() const {
    if (!owner_) throw Error(EPD_INVALID_ARGUMENT, "the group is empty");
    return *owner_;
  }

  std::shared_ptr<detail::GroupOwner> owner_;
};

// epd_region_bytes.
inline std::uint64_t region_bytes(const Config& config, epd_region_t region) {
  const epd_group_config_t raw = detail::make_config(config);
  std::uint64_t bytes = 0;
  detail::check(epd_region_bytes(&raw, region, &bytes));
  return bytes;
}

// epd_group_bytes.
inline epd_group_bytes_t group_bytes(const Config& config, epd_device_kind_t kind) {
  const epd_group_config_t raw = detail::make_config(config);
  epd_group_bytes_t bytes;
  epd_group_bytes_init(&bytes);
  detail::check(epd_group_bytes(&raw, kind, &bytes));
  return bytes;
}

// One attachment to one device. Copies are of the same session.
class Session {
 public:
  explicit Session(const AttachOptions& options = AttachOptions())
      : owner_(std::make_shared<detail::SessionOwner>()) {
    epd_attach_options_t raw;
    epd_attach_options_init(&raw);
    raw.socket_path = options.socket_path.empty() ? nullptr : options.socket_path.c_str();
    raw.device = options.device.empty() ? nullptr : options.device.c_str();
    raw.timeout_ms = options.timeout_ms;
    raw.wait_by = options.wait_by;
    detail::check(epd_session_attach(&raw, &owner_->handle));
  }

  epd_session_t* get() const noexcept { return owner_->handle; }
  epd_session_info_t info() const {
    epd_session_info_t info;
    epd_session_info_init(&info);
    detail::check(epd_session_info(get(), &info));
    return info;
  }
  // epd_session_check. Returns the status.
  epd_status_t check() const { return epd_session_check(get()); }

  // epd_group_join.
  Group join(const Config& config) {
    auto group = std::make_shared<detail::GroupOwner>(owner_, config);
    const epd_group_config_t raw = detail::make_config(config);
    detail::check(epd_group_join(get(), &raw, &group->handle));
    return Group(std::move(group));
  }

 private:
  std::shared_ptr<detail::SessionOwner> owner_;
};

}  // namespace epd
