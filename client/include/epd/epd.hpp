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

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

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
  std::string socket_path;      // "": $EPD_SOCKET, else /run/epd/epd.sock
  std::string device;           // "host:0"; "": the least used
  std::int32_t timeout_ms = 0;  // 0: 5000
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
};

// The regions of a slot in whole arrays; how much of each an operation uses is told in epd.h. bf16 is given
// as std::uint16_t. Exactly one of each pair topk_idx/topk_idx64 and recv_topk_idx/recv_topk_idx64 is not
// empty, likewise of recv_x/recv_x8.
struct Buffers {
  Span<std::uint16_t> x;
  Span<std::int32_t> topk_idx;
  Span<std::int64_t> topk_idx64;
  Span<float> topk_weights;
  Span<std::uint16_t> recv_x;
  Span<std::uint8_t> recv_x8;
  Span<float> recv_scales;
  Span<std::int32_t> recv_topk_idx;
  Span<std::int64_t> recv_topk_idx64;
  Span<float> recv_topk_weights;
  Span<std::int32_t> recv_src;
  Span<std::int32_t> rank_offsets;
  Span<std::int32_t> expert_counts;
  Span<std::uint16_t> y;
  Span<std::uint16_t> out;
};

struct Counts {
  std::uint32_t num_recv_rows = 0;
  Span<const std::int32_t> rank_offsets;
  Span<const std::int32_t> expert_counts;
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

}  // namespace detail

// One operation in flight, or nothing (after wait, on_complete, or a move).
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
    return {counts.num_recv_rows,
            {counts.rank_offsets, std::size_t{c.num_ranks} + 1},
            {counts.expert_counts, c.num_experts / c.num_ranks}};
  }

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
    if (valid()) {
      epd_ticket_on_complete(
          group_->handle, ticket_, [](const epd_result_t*, void*) {}, nullptr);
    }
    release();
  }

  std::shared_ptr<detail::GroupOwner> group_;
  epd_ticket_t ticket_ = 0;
};

struct Dispatch {
  Ticket ticket;
  epd_handle_t handle = 0;
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
    const Config& c = config();
    const std::size_t tokens = c.max_tokens;
    const std::size_t rows = tokens * c.num_ranks;
    Buffers b;
    b.x = {static_cast<std::uint16_t*>(raw.x), tokens * c.hidden};
    b.topk_weights = {raw.topk_weights, tokens * c.topk};
    if (c.index_type == EPD_INDEX_INT64) {
      b.topk_idx64 = {static_cast<std::int64_t*>(raw.topk_idx), tokens * c.topk};
      b.recv_topk_idx64 = {static_cast<std::int64_t*>(raw.recv_topk_idx), rows * c.topk};
    } else {
      b.topk_idx = {static_cast<std::int32_t*>(raw.topk_idx), tokens * c.topk};
      b.recv_topk_idx = {static_cast<std::int32_t*>(raw.recv_topk_idx), rows * c.topk};
    }
    if (c.payload == EPD_PAYLOAD_FP8_CAST) {
      b.recv_x8 = {static_cast<std::uint8_t*>(raw.recv_x), rows * c.hidden};
      b.recv_scales = {raw.recv_scales, rows * (c.hidden / 128)};
    } else {
      b.recv_x = {static_cast<std::uint16_t*>(raw.recv_x), rows * c.hidden};
    }
    b.recv_topk_weights = {raw.recv_topk_weights, rows * c.topk};
    b.recv_src = {raw.recv_src, rows * 2};
    b.rank_offsets = {raw.rank_offsets, std::size_t{c.num_ranks} + 1};
    b.expert_counts = {raw.expert_counts, c.num_experts / c.num_ranks};
    b.y = {static_cast<std::uint16_t*>(raw.y), rows * c.hidden};
    b.out = {static_cast<std::uint16_t*>(raw.out), tokens * c.hidden};
    return b;
  }

  // Throws WOULD_BLOCK like any other status; try_dispatch returns it.
  Dispatch dispatch(std::uint32_t slot, std::uint32_t num_tokens, bool weights = true,
                    std::uint32_t timeout_ms = 0) {
    Dispatch result;
    detail::check(
        try_dispatch({sizeof(epd_dispatch_args_t), slot, num_tokens, weights ? 1u : 0u, timeout_ms}, result));
    return result;
  }
  epd_status_t try_dispatch(const epd_dispatch_args_t& args, Dispatch& result) {
    epd_ticket_t ticket = 0;
    const epd_status_t status = epd_dispatch(get(), &args, &ticket, &result.handle);
    if (status == EPD_OK) result.ticket = Ticket(owner_, ticket);
    return status;
  }

  Ticket combine(std::uint32_t slot, epd_handle_t handle, bool weighted = false,
                 std::uint32_t timeout_ms = 0) {
    Ticket result;
    detail::check(
        try_combine({sizeof(epd_combine_args_t), slot, weighted ? 1u : 0u, handle, timeout_ms, 0}, result));
    return result;
  }
  epd_status_t try_combine(const epd_combine_args_t& args, Ticket& result) {
    epd_ticket_t ticket = 0;
    const epd_status_t status = epd_combine(get(), &args, &ticket);
    if (status == EPD_OK) result = Ticket(owner_, ticket);
    return status;
  }

  Ticket noop(std::uint32_t slot) {
    epd_ticket_t ticket = 0;
    detail::check(epd_noop(get(), slot, &ticket));
    return Ticket(owner_, ticket);
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

class Session {
 public:
  explicit Session(const AttachOptions& options = AttachOptions())
      : owner_(std::make_shared<detail::SessionOwner>()) {
    epd_attach_options_t raw = EPD_ATTACH_OPTIONS_INIT;
    raw.socket_path = options.socket_path.empty() ? nullptr : options.socket_path.c_str();
    raw.device = options.device.empty() ? nullptr : options.device.c_str();
    raw.timeout_ms = options.timeout_ms;
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
    detail::check(epd_group_join(get(), &raw, &group->handle));
    return Group(std::move(group));
  }

 private:
  std::shared_ptr<detail::SessionOwner> owner_;
};

}  // namespace epd
