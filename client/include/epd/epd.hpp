// epd for C++17 and later: owning types over epd.h. Header only; link libepd.
//
//   epd::Session session;                       // $EPD_SOCKET, any device
//   epd::Config config;
//   config.name = "layer"; config.num_ranks = 2; ...
//   epd::Group group = session.join(config);
//   epd::Buffers b = group.buffers(0);          // write b.x, b.topk_idx, b.topk_weights
//   epd::Dispatch d = group.dispatch(0, num_tokens);
//   std::uint32_t rows = d.ticket.wait().num_recv_rows;
//   ...                                         // read b.recv_x, write b.y
//   group.combine(0, d.handle).wait();          // read b.out
//
// Failures throw epd::Error; try_ functions return the status instead where trying again is normal.
// Lifetime: a Group keeps its session alive, a Ticket its group; destroying the last owner leaves and
// detaches. Destroying a Ticket does not wait: the operation goes on, and its result is dropped. Threads:
// as in epd.h; one Ticket object belongs to one thread at a time.
#pragma once

#include "epd/epd.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace epd {

class Error : public std::runtime_error {
 public:
  Error(epd_status_t status, const std::string& text)
      : std::runtime_error(std::string(epd_status_name(status)) + ": " + text), status_(status) {}
  epd_status_t status() const noexcept { return status_; }

 private:
  epd_status_t status_;
};

namespace detail {
inline void check(epd_status_t status) {
  if (status != EPD_OK) throw Error(status, epd_last_error());
}
}  // namespace detail

// A view of count elements; the memory belongs to the group.
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
  std::string socket_path;                      // "": $EPD_SOCKET, else /run/epd/epd.sock
  std::string device;                           // "host:0"; "": the least used
  std::int32_t timeout_ms = 0;                  // 0: 5000
  epd_wait_by_t wait_by = EPD_WAIT_BY_DEFAULT;  // of streams, where a call says nothing
};

// The fields of epd_group_config_t; limits there.
struct Config {
  std::string name;
  std::int32_t rank = -1;
  std::uint32_t num_ranks = 1;
  std::uint32_t num_experts = 0;
  std::uint32_t max_tokens = 0;
  std::uint32_t hidden = 0;
  std::uint32_t topk = 0;
  std::uint32_t depth = 4;
  epd_payload_t payload = EPD_PAYLOAD_BF16;
  epd_index_type_t index_type = EPD_INDEX_INT32;
  epd_loss_policy_t policy = EPD_FAIL_FAST;
  std::uint32_t sms = 0;
  std::int32_t timeout_ms = 0;
  epd_layout_t layout = EPD_LAYOUT_COMPACT;
  epd_scale_format_t scale_format = EPD_SCALES_FLOAT32;
  std::uint32_t expert_alignment = 1;
  std::uint32_t opaque_bytes = 0;
  std::uint32_t num_biases = 0;
  std::uint32_t num_handles = 0;
  std::uint32_t max_recv_rows = 0;
  std::int32_t priority = 0;
  std::vector<epd_binding_t> bindings;  // regions in memory of your own
  epd_commands_t commands = EPD_COMMANDS_BY_HOST;
};

// The regions of a slot in whole arrays; how much of each an operation uses is told in epd.h. A region that
// the group does not have is empty. bf16 is given as std::uint16_t, e4m3 and opaque rows as bytes: of each
// pair topk_idx/topk_idx64, recv_topk_idx/recv_topk_idx64, x/x8 and recv_x/recv_x8 exactly one is not empty.
// Scales are float32 in recv_scales and x_scales, or four UE8M0 exponents to a word in ..._ue8m0.
struct Buffers {
  Span<std::uint16_t> x;
  Span<std::uint8_t> x8;
  Span<float> x_scales;
  Span<std::int32_t> x_scales_ue8m0;
  Span<std::int32_t> topk_idx;
  Span<std::int64_t> topk_idx64;
  Span<float> topk_weights;
  Span<std::uint16_t> recv_x;
  Span<std::uint8_t> recv_x8;
  Span<float> recv_scales;
  Span<std::int32_t> recv_scales_ue8m0;
  Span<std::int32_t> recv_topk_idx;
  Span<std::int64_t> recv_topk_idx64;
  Span<float> recv_topk_weights;
  Span<std::int32_t> recv_src;
  Span<std::int32_t> rank_offsets;
  Span<std::int32_t> expert_counts;
  Span<std::int32_t> expert_offsets;
  Span<std::int32_t> source_ranges;
  Span<std::uint16_t> y;
  Span<float> y_weights;
  Span<std::uint16_t> bias[2];
  Span<std::uint16_t> out;
  Span<float> out_weights;
};

struct Counts {
  std::uint32_t num_recv_rows = 0;
  Span<const std::int32_t> rank_offsets;
  Span<const std::int32_t> expert_counts;
  Span<const std::int32_t> expert_offsets;  // empty if compact
};

// The optional fields of epd_dispatch_args_t and epd_combine_args_t. stream: a cudaStream_t or CUstream, in
// which the operation begins and ends (nullptr: CUDA's default one); none: it begins at once. wait_by: by
// what that stream waits. num_tokens_at: with commands, where n is read in device memory; the call's is 0
// then.
struct DispatchOptions {
  bool weights = true;
  epd_handle_t handle = 0;  // not 0: the routing of that dispatch again
  bool keep_handle = false;
  bool defer_receive = false;
  bool zero_padding = false;
  bool mark_unused = false;
  std::uint32_t sms = 0;
  std::uint32_t timeout_ms = 0;
  std::optional<void*> stream;
  epd_wait_by_t wait_by = EPD_WAIT_BY_DEFAULT;
  const std::uint32_t* num_tokens_at = nullptr;
};
struct CombineOptions {
  bool weighted = false;
  std::uint32_t num_biases = 0;
  bool return_weights = false;
  bool defer_receive = false;
  std::uint32_t sms = 0;
  std::uint32_t timeout_ms = 0;
  std::optional<void*> stream;
  epd_wait_by_t wait_by = EPD_WAIT_BY_DEFAULT;
};

namespace detail {

struct SessionOwner {
  epd_session_t* handle = nullptr;
  SessionOwner() = default;
  SessionOwner(const SessionOwner&) = delete;
  SessionOwner& operator=(const SessionOwner&) = delete;
  ~SessionOwner() { epd_session_detach(handle); }
};

struct GroupOwner {
  std::shared_ptr<SessionOwner> session;  // outlives the handle
  epd_group_t* handle = nullptr;
  Config config;
  GroupOwner(std::shared_ptr<SessionOwner> owner, Config joined)
      : session(std::move(owner)), config(std::move(joined)) {}
  GroupOwner(const GroupOwner&) = delete;
  GroupOwner& operator=(const GroupOwner&) = delete;
  ~GroupOwner() { epd_group_leave(handle); }
};

// What a hook carries. It does not own the group: the last owner may not go away inside a hook.
using Hook = std::function<void(const epd_result_t&)>;
extern "C" inline void epd_hpp_call_hook(const epd_result_t* result, void* user) {
  const std::unique_ptr<Hook> hook(static_cast<Hook*>(user));
  (*hook)(*result);
}

// Points into `config`.
inline epd_group_config_t make_config(const Config& config) {
  epd_group_config_t raw = EPD_GROUP_CONFIG_INIT;
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
  raw.bindings = config.bindings.data();
  raw.num_bindings = static_cast<std::uint32_t>(config.bindings.size());
  raw.commands = config.commands;
  return raw;
}

// How many elements the regions have.
struct RegionSizes {
  explicit RegionSizes(const Config& c)
      : tokens(c.max_tokens),
        experts(c.num_experts / c.num_ranks),
        per_expert(c.layout != EPD_LAYOUT_COMPACT),
        choices(per_expert ? 1 : c.topk) {
    const std::size_t worst = std::size_t{c.num_ranks} * tokens;
    const std::size_t room = c.max_recv_rows;
    if (c.layout == EPD_LAYOUT_EXPERT) {
      rows = experts * (room != 0 ? room : worst);
    } else if (room != 0 || !per_expert) {
      rows = room != 0 ? room : worst;
    } else {
      const std::size_t alignment = c.expert_alignment != 0 ? c.expert_alignment : 1;
      rows = worst * std::min<std::size_t>(c.topk, experts) + experts * (alignment - 1);
    }
    const bool fp8 = c.payload == EPD_PAYLOAD_FP8 || c.payload == EPD_PAYLOAD_FP8_CAST;
    const std::size_t blocks = c.hidden / 128;
    if (fp8) scales = c.scale_format == EPD_SCALES_UE8M0 ? (blocks + 3) / 4 : blocks;
  }

  std::size_t tokens;
  std::size_t experts;  // of this rank
  bool per_expert;
  std::size_t choices;  // of a received row
  std::size_t rows = 0;
  std::size_t scales = 0;  // words of a row
};

template <typename T>
Span<T> span(void* data, std::size_t size) {
  return data != nullptr ? Span<T>(static_cast<T*>(data), size) : Span<T>();
}

inline Buffers make_buffers(const Config& c, const epd_buffers_t& raw) {
  const RegionSizes n(c);
  const bool opaque = c.payload == EPD_PAYLOAD_OPAQUE;
  Buffers b;
  if (c.payload == EPD_PAYLOAD_BF16 || c.payload == EPD_PAYLOAD_FP8_CAST) {
    b.x = span<std::uint16_t>(raw.x, n.tokens * c.hidden);
  } else {
    b.x8 = span<std::uint8_t>(raw.x, n.tokens * (opaque ? c.opaque_bytes : c.hidden));
  }
  if (c.payload == EPD_PAYLOAD_BF16) {
    b.recv_x = span<std::uint16_t>(raw.recv_x, n.rows * c.hidden);
  } else {
    b.recv_x8 = span<std::uint8_t>(raw.recv_x, n.rows * (opaque ? c.opaque_bytes : c.hidden));
  }
  if (c.scale_format == EPD_SCALES_UE8M0) {
    b.x_scales_ue8m0 = span<std::int32_t>(raw.x_scales, n.tokens * n.scales);
    b.recv_scales_ue8m0 = span<std::int32_t>(raw.recv_scales, n.rows * n.scales);
  } else {
    b.x_scales = span<float>(raw.x_scales, n.tokens * n.scales);
    b.recv_scales = span<float>(raw.recv_scales, n.rows * n.scales);
  }
  if (c.index_type == EPD_INDEX_INT64) {
    b.topk_idx64 = span<std::int64_t>(raw.topk_idx, n.tokens * c.topk);
    b.recv_topk_idx64 = span<std::int64_t>(raw.recv_topk_idx, n.rows * n.choices);
  } else {
    b.topk_idx = span<std::int32_t>(raw.topk_idx, n.tokens * c.topk);
    b.recv_topk_idx = span<std::int32_t>(raw.recv_topk_idx, n.rows * n.choices);
  }
  b.topk_weights = span<float>(raw.topk_weights, n.tokens * c.topk);
  b.recv_topk_weights = span<float>(raw.recv_topk_weights, n.rows * n.choices);
  b.recv_src = span<std::int32_t>(raw.recv_src, n.rows * 2);
  b.rank_offsets = span<std::int32_t>(raw.rank_offsets, std::size_t{c.num_ranks} + 1);
  b.expert_counts = span<std::int32_t>(raw.expert_counts, n.experts);
  b.expert_offsets = span<std::int32_t>(raw.expert_offsets, n.experts + 1);
  b.source_ranges = span<std::int32_t>(raw.source_ranges, n.experts * c.num_ranks * 2);
  b.y = span<std::uint16_t>(raw.y, n.rows * c.hidden);
  b.y_weights = span<float>(raw.y_weights, n.rows * n.choices);
  for (int i = 0; i < 2; ++i) b.bias[i] = span<std::uint16_t>(raw.bias[i], n.tokens * c.hidden);
  b.out = span<std::uint16_t>(raw.out, n.tokens * c.hidden);
  b.out_weights = span<float>(raw.out_weights, n.tokens * c.topk);
  return b;
}

}  // namespace detail

// One operation in flight, or nothing (after wait, on_complete, or a move). In a group with commands it is
// good for wait_on_stream alone.
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

  // The result, once the operation has ended well; throws its status otherwise. DEADLINE_EXCEEDED with
  // valid() still true: it is in flight yet.
  epd_result_t wait(std::int32_t timeout_ms = EPD_FOREVER) {
    epd_result_t result = EPD_RESULT_INIT;
    detail::check(try_wait(timeout_ms, result));
    return result;
  }
  // The operation's status, or WOULD_BLOCK / DEADLINE_EXCEEDED with valid() still true.
  epd_status_t try_wait(std::int32_t timeout_ms, epd_result_t& result) {
    result = EPD_RESULT_INIT;
    result.op_index = kUntouched;
    const epd_status_t status = epd_ticket_wait(handle(), ticket_, timeout_ms, &result);
    if (result.op_index != kUntouched || status == EPD_NOT_FOUND) release();
    return status;
  }
  // True, with the result, once the operation has ended well.
  bool poll(epd_result_t& result) {
    const epd_status_t status = try_wait(0, result);
    if (status == EPD_WOULD_BLOCK) return false;
    detail::check(status);
    return true;
  }

  // Of a dispatch: see epd_ticket_counts.
  Counts counts(std::int32_t timeout_ms = EPD_FOREVER) const {
    epd_counts_t counts = EPD_COUNTS_INIT;
    detail::check(epd_ticket_counts(handle(), ticket_, timeout_ms, &counts));
    const Config& c = group_->config;
    const std::size_t experts = c.num_experts / c.num_ranks;
    Counts result{counts.num_recv_rows,
                  {counts.rank_offsets, std::size_t{c.num_ranks} + 1},
                  {counts.expert_counts, experts},
                  {}};
    if (counts.expert_offsets != nullptr) result.expert_offsets = {counts.expert_offsets, experts + 1};
    return result;
  }

  // Of an operation with defer_receive: returns when its inputs may be written again. The ticket stays.
  void wait_sent(std::int32_t timeout_ms = EPD_FOREVER) const {
    detail::check(epd_ticket_wait_sent(handle(), ticket_, timeout_ms));
  }
  // Of an operation on a stream: what is enqueued in this stream from here on begins when it has ended. The
  // ticket stays.
  void wait_on_stream(void* stream, epd_wait_by_t wait_by = EPD_WAIT_BY_DEFAULT) const {
    detail::check(epd_ticket_wait_on_stream(handle(), ticket_, stream, wait_by));
  }
  // The arrival, to be called once: hook() is wait(). The ticket is empty afterwards.
  class ReceiveHook;
  ReceiveHook receive_hook();

  // hook(result) runs once, on a thread of the library. It must not throw and must not destroy the last
  // owner of the group. The ticket is empty afterwards.
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
  // Lets the library forget the result when it comes.
  void drop() noexcept {
    if (valid() && group_->config.commands == EPD_COMMANDS_BY_HOST) {
      epd_ticket_on_complete(
          group_->handle, ticket_, [](const epd_result_t*, void*) {}, nullptr);
    }
    release();
  }

  std::shared_ptr<detail::GroupOwner> group_;
  epd_ticket_t ticket_ = 0;
};

class Ticket::ReceiveHook {
 public:
  explicit ReceiveHook(Ticket ticket) : ticket_(std::move(ticket)) {}
  epd_result_t operator()(std::int32_t timeout_ms = EPD_FOREVER) { return ticket_.wait(timeout_ms); }

 private:
  Ticket ticket_;
};

inline Ticket::ReceiveHook Ticket::receive_hook() {
  return ReceiveHook(std::move(*this));
}

// A routing that stays until this is destroyed or reset; that waits for operations in flight that use it.
class KeptHandle {
 public:
  KeptHandle() = default;
  KeptHandle(KeptHandle&& other) noexcept
      : group_(std::move(other.group_)), handle_(std::exchange(other.handle_, 0)) {}
  KeptHandle& operator=(KeptHandle&& other) noexcept {
    if (this != &other) {
      reset();
      group_ = std::move(other.group_);
      handle_ = std::exchange(other.handle_, 0);
    }
    return *this;
  }
  KeptHandle(const KeptHandle&) = delete;
  KeptHandle& operator=(const KeptHandle&) = delete;
  ~KeptHandle() { reset(); }

  bool valid() const noexcept { return handle_ != 0; }
  epd_handle_t get() const noexcept { return handle_; }
  // Every operation ends, so this does. A handle that a break has taken back is no error.
  void reset() noexcept {
    if (handle_ == 0) return;
    while (epd_handle_release(group_->handle, handle_) == EPD_WOULD_BLOCK)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    handle_ = 0;
    group_.reset();
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
  KeptHandle kept;  // owns handle if it was to be kept; move it to where the routing is used
};

class Group {
 public:
  Group() = default;
  bool valid() const noexcept { return owner_ != nullptr; }
  epd_group_t* get() const { return owner().handle; }
  const Config& config() const { return owner().config; }
  std::uint32_t rank() const { return epd_group_rank(get()); }
  bool active(std::uint32_t rank) const { return epd_group_active(get(), rank) != 0; }

  Buffers buffers(std::uint32_t slot) const {
    epd_buffers_t raw = EPD_BUFFERS_INIT;
    detail::check(epd_group_buffers(get(), slot, &raw));
    return detail::make_buffers(config(), raw);
  }

  // Throws WOULD_BLOCK like any other status; try_dispatch returns it.
  Dispatch dispatch(std::uint32_t slot, std::uint32_t num_tokens, const DispatchOptions& options = {}) {
    epd_dispatch_args_t args = EPD_DISPATCH_ARGS_INIT;
    args.slot = slot;
    args.num_tokens = num_tokens;
    args.weights = options.weights ? 1 : 0;
    args.timeout_ms = options.timeout_ms;
    args.handle = options.handle;
    args.keep_handle = options.keep_handle ? 1 : 0;
    args.defer_receive = options.defer_receive ? 1 : 0;
    args.zero_padding = options.zero_padding ? 1 : 0;
    args.mark_unused = options.mark_unused ? 1 : 0;
    args.sms = options.sms;
    args.on_stream = options.stream.has_value() ? 1 : 0;
    args.stream = options.stream.value_or(nullptr);
    args.wait_by = options.wait_by;
    args.num_tokens_at = options.num_tokens_at;
    Dispatch result;
    detail::check(try_dispatch(args, result));
    return result;
  }
  epd_status_t try_dispatch(const epd_dispatch_args_t& args, Dispatch& result) {
    epd_ticket_t ticket = 0;
    epd_handle_t handle = 0;
    const epd_status_t status = epd_dispatch(get(), &args, &ticket, &handle);
    if (ticket == 0) return status;  // else it was submitted, whatever its stream does
    result.ticket = Ticket(owner_, ticket);
    result.handle = handle;
    result.kept = args.keep_handle != 0 ? KeptHandle(owner_, handle) : KeptHandle();
    return status;
  }

  Ticket combine(std::uint32_t slot, epd_handle_t handle, const CombineOptions& options = {}) {
    epd_combine_args_t args = EPD_COMBINE_ARGS_INIT;
    args.slot = slot;
    args.weighted = options.weighted ? 1 : 0;
    args.handle = handle;
    args.timeout_ms = options.timeout_ms;
    args.num_biases = options.num_biases;
    args.return_weights = options.return_weights ? 1 : 0;
    args.defer_receive = options.defer_receive ? 1 : 0;
    args.sms = options.sms;
    args.on_stream = options.stream.has_value() ? 1 : 0;
    args.stream = options.stream.value_or(nullptr);
    args.wait_by = options.wait_by;
    Ticket result;
    detail::check(try_combine(args, result));
    return result;
  }
  epd_status_t try_combine(const epd_combine_args_t& args, Ticket& result) {
    epd_ticket_t ticket = 0;
    const epd_status_t status = epd_combine(get(), &args, &ticket);
    if (ticket != 0) result = Ticket(owner_, ticket);
    return status;
  }

  Ticket noop(std::uint32_t slot) {
    epd_ticket_t ticket = 0;
    detail::check(epd_noop(get(), slot, &ticket));
    return Ticket(owner_, ticket);
  }
  Ticket noop_on_stream(std::uint32_t slot, void* stream, epd_wait_by_t wait_by = EPD_WAIT_BY_DEFAULT) {
    epd_ticket_t ticket = 0;
    const epd_status_t status = epd_noop_on_stream(get(), slot, stream, wait_by, &ticket);
    Ticket result;
    if (ticket != 0) result = Ticket(owner_, ticket);
    detail::check(status);
    return result;
  }

  // Throws what epd_group_check says.
  epd_progress_t check() const {
    epd_progress_t progress = EPD_PROGRESS_INIT;
    detail::check(epd_group_check(get(), &progress));
    return progress;
  }
  // See epd_group_resume.
  epd_resume_info_t resume(std::int32_t timeout_ms = EPD_FOREVER) {
    epd_resume_info_t info = EPD_RESUME_INFO_INIT;
    detail::check(epd_group_resume(get(), timeout_ms, &info));
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

// Bytes of a region in one slot, see epd_region_bytes.
inline std::uint64_t region_bytes(const Config& config, epd_region_t region) {
  const epd_group_config_t raw = detail::make_config(config);
  std::uint64_t bytes = 0;
  detail::check(epd_region_bytes(&raw, region, &bytes));
  return bytes;
}

class Session {
 public:
  explicit Session(const AttachOptions& options = AttachOptions())
      : owner_(std::make_shared<detail::SessionOwner>()) {
    epd_attach_options_t raw = EPD_ATTACH_OPTIONS_INIT;
    raw.socket_path = options.socket_path.empty() ? nullptr : options.socket_path.c_str();
    raw.device = options.device.empty() ? nullptr : options.device.c_str();
    raw.timeout_ms = options.timeout_ms;
    raw.wait_by = options.wait_by;
    detail::check(epd_session_attach(&raw, &owner_->handle));
  }

  epd_session_t* get() const noexcept { return owner_->handle; }
  epd_session_info_t info() const {
    epd_session_info_t info = EPD_SESSION_INFO_INIT;
    detail::check(epd_session_info(get(), &info));
    return info;
  }
  // OK while the daemon is there.
  epd_status_t check() const { return epd_session_check(get()); }

  Group join(const Config& config) {
    auto group = std::make_shared<detail::GroupOwner>(owner_, config);
    if (group->config.depth == 0) group->config.depth = 4;
    const epd_group_config_t raw = detail::make_config(config);
    detail::check(epd_group_join(get(), &raw, &group->handle));
    return Group(std::move(group));
  }

 private:
  std::shared_ptr<detail::SessionOwner> owner_;
};

}  // namespace epd
