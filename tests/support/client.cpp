#include "support/client.h"

#include "proto/arena.h"
#include "support/cuda_memory.h"
#include "support/ranks.h"

#include <unistd.h>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

namespace epd::test {

void must(epd_status_t status, const std::string& what, epd_status_t wanted) {
  if (status == wanted) return;
  std::string text = what + " gave " + epd_status_name(status);
  if (wanted != EPD_OK) text += ", not " + std::string(epd_status_name(wanted));
  if (status != EPD_OK) text += std::string(": ") + epd_last_error();
  throw RankFailure{text};
}

void must_say(const std::string& part) {
  const std::string text = epd_last_error();
  if (text.find(part) == std::string::npos)
    throw RankFailure{"the error says \"" + text + "\", without \"" + part + "\""};
}

Session::Session(const std::string& socket, const std::string& device, int timeout_ms) {
  epd_attach_options_t options = EPD_ATTACH_OPTIONS_INIT;
  options.socket_path = socket.c_str();
  options.device = device.empty() ? nullptr : device.c_str();
  options.timeout_ms = timeout_ms;
  must(epd_session_attach(&options, &handle_), "attach to " + device);
}

Session::Session(Session&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}

Session& Session::operator=(Session&& other) noexcept {
  if (this != &other) {
    epd_session_detach(handle_);
    handle_ = std::exchange(other.handle_, nullptr);
  }
  return *this;
}

namespace {

abi::GroupShape shape_of(const epd_group_config_t& c) {
  abi::GroupShape s{};
  s.num_ranks = c.num_ranks;
  s.num_experts = c.num_experts;
  s.max_tokens = c.max_tokens;
  s.hidden = c.hidden;
  s.topk = c.topk;
  s.depth = c.depth != 0 ? c.depth : abi::kDefaultDepth;
  s.payload = static_cast<abi::Payload>(c.payload);
  s.index_type = static_cast<abi::IndexType>(c.index_type);
  s.layout = static_cast<abi::Layout>(c.layout);
  s.scale_format = static_cast<abi::ScaleFormat>(c.scale_format);
  s.expert_alignment = c.expert_alignment != 0 ? c.expert_alignment : 1;
  s.opaque_bytes = c.opaque_bytes;
  s.num_biases = c.num_biases;
  s.num_handles = c.num_handles;
  s.max_recv_rows = c.max_recv_rows;
  return s;
}

}  // namespace

struct Group::Mirror {
  int gpu = 0;
  std::uint64_t slot_bytes = 0;
  std::uint32_t depth = 0;
  std::byte* host = nullptr;                        // all slots; aligned as the regions are
  std::byte* device = nullptr;                      // of slot 0
  std::map<epd_ticket_t, std::uint32_t> in_flight;  // slot of each

  Mirror() = default;
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;
  ~Mirror() { std::free(host); }
  std::byte* of(std::uint32_t slot) const { return host + slot * slot_bytes; }
  bool busy(std::uint32_t slot) const {
    for (const auto& [ticket, its_slot] : in_flight) {
      if (its_slot == slot) return true;
    }
    return false;
  }
  void push(std::uint32_t slot) {
    if (slot < depth && !busy(slot)) copy_to_gpu(gpu, device + slot * slot_bytes, of(slot), slot_bytes);
  }
  void pull(std::uint32_t slot) { copy_from_gpu(gpu, of(slot), device + slot * slot_bytes, slot_bytes); }
};

Group::Group(const Session& session, const epd_group_config_t& config) {
  must(epd_group_join(session.get(), &config, &handle_), std::string("join ") + config.name);
  epd_session_info_t info = EPD_SESSION_INFO_INIT;
  must(epd_session_info(session.get(), &info), "session info");
  if (info.device_kind != EPD_DEVICE_CUDA) return;
  const abi::GroupShape shape = shape_of(config);
  mirror_ = std::make_shared<Mirror>();
  mirror_->gpu = std::atoi(std::strchr(info.device, ':') + 1);
  mirror_->slot_bytes = abi::UserArenaLayout(shape).slot_bytes;
  mirror_->depth = shape.depth;
  mirror_->host =
      static_cast<std::byte*>(std::aligned_alloc(abi::kRegionAlign, mirror_->slot_bytes * shape.depth));
  epd_buffers_t first = EPD_BUFFERS_INIT;
  must(epd_group_buffers(handle_, 0, &first), "buffers");
  mirror_->device = static_cast<std::byte*>(first.x);
}

Group::Group(Group&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)), mirror_(std::move(other.mirror_)) {}

Group& Group::operator=(Group&& other) noexcept {
  if (this != &other) {
    epd_group_leave(handle_);
    handle_ = std::exchange(other.handle_, nullptr);
    mirror_ = std::move(other.mirror_);
  }
  return *this;
}

epd_buffers_t Group::buffers(std::uint32_t slot) const {
  epd_buffers_t b = EPD_BUFFERS_INIT;
  must(epd_group_buffers(handle_, slot, &b), "buffers of slot " + std::to_string(slot));
  return mirror_ != nullptr ? moved(b, mirror_->device, mirror_->host) : b;
}

epd_buffers_t Group::moved(epd_buffers_t b, const std::byte* from, std::byte* to) {
  const auto move = [&](auto*& pointer) {
    if (pointer == nullptr) return;
    const auto offset = reinterpret_cast<std::byte*>(pointer) - from;
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(to + offset);
  };
  move(b.x);
  move(b.x_scales);
  move(b.topk_idx);
  move(b.topk_weights);
  move(b.recv_x);
  move(b.recv_scales);
  move(b.recv_topk_idx);
  move(b.recv_topk_weights);
  move(b.recv_src);
  move(b.rank_offsets);
  move(b.expert_counts);
  move(b.expert_offsets);
  move(b.source_ranges);
  move(b.y);
  move(b.y_weights);
  move(b.bias[0]);
  move(b.bias[1]);
  move(b.out);
  move(b.out_weights);
  return b;
}

int Group::gpu() const {
  return mirror_->gpu;
}

std::size_t Group::slot_bytes() const {
  return mirror_->slot_bytes;
}

std::byte* Group::slot_on_gpu(std::uint32_t slot) const {
  return mirror_->device + slot * mirror_->slot_bytes;
}

epd_buffers_t Group::buffers_in(std::byte* copy) const {
  epd_buffers_t first = EPD_BUFFERS_INIT;
  must(epd_group_buffers(handle_, 0, &first), "buffers");
  return moved(first, mirror_->device, copy);
}

epd_status_t Group::dispatch(const epd_dispatch_args_t* args, epd_ticket_t* ticket,
                             epd_handle_t* handle) const {
  const std::uint32_t slot = args != nullptr ? args->slot : ~0u;
  if (mirror_ != nullptr) mirror_->push(slot);
  return submitted(epd_dispatch(handle_, args, ticket, handle), slot, ticket);
}

epd_status_t Group::combine(const epd_combine_args_t* args, epd_ticket_t* ticket) const {
  const std::uint32_t slot = args != nullptr ? args->slot : ~0u;
  if (mirror_ != nullptr) mirror_->push(slot);
  return submitted(epd_combine(handle_, args, ticket), slot, ticket);
}

epd_status_t Group::submitted(epd_status_t status, std::uint32_t slot, const epd_ticket_t* ticket) const {
  if (mirror_ != nullptr && status == EPD_OK) mirror_->in_flight[*ticket] = slot;
  return status;
}

void Group::update(const void* part, std::size_t bytes) const {
  if (mirror_ == nullptr) return;
  const auto offset = static_cast<const std::byte*>(part) - mirror_->host;
  copy_to_gpu(mirror_->gpu, mirror_->device + offset, part, bytes);
}

void Group::ended(epd_ticket_t ticket) const {
  if (mirror_ == nullptr) return;
  const auto found = mirror_->in_flight.find(ticket);
  if (found == mirror_->in_flight.end()) return;
  mirror_->pull(found->second);
  mirror_->in_flight.erase(found);
}

epd_status_t Group::wait(epd_ticket_t ticket, int timeout_ms, epd_result_t* result) const {
  const epd_status_t status = epd_ticket_wait(handle_, ticket, timeout_ms, result);
  if (mirror_ != nullptr && epd_ticket_pending(handle_, ticket) == 0) ended(ticket);
  return status;
}

epd_group_config_t small_config(const char* name, std::uint32_t rank, std::uint32_t num_ranks) {
  epd_group_config_t config = EPD_GROUP_CONFIG_INIT;
  config.name = name;
  config.rank = static_cast<std::int32_t>(rank);
  config.num_ranks = num_ranks;
  config.num_experts = num_ranks * 2;
  config.max_tokens = 16;
  config.hidden = 128;
  config.topk = 2;
  config.depth = 2;
  config.timeout_ms = 20000;
  return config;
}

bool all_devices_answer(const std::string& socket, const std::string& prefix, std::uint32_t num_devices,
                        std::string* why) {
  RankProcess probe([&]() -> std::string {
    for (std::uint32_t i = 0; i < num_devices; ++i) {
      const std::string device = prefix + ":" + std::to_string(i);
      const std::string name = "probe-" + std::to_string(::getpid()) + "-" + std::to_string(i);
      const Session session(socket, device, 2000);
      epd_group_config_t config = small_config(name.c_str(), 0, 1);
      config.timeout_ms = 5000;
      const Group group(session, config);
      epd_ticket_t ticket = 0;
      must(epd_noop(group.get(), 0, &ticket), "noop on " + device);
      must(group.wait(ticket, 5000), "noop on " + device);
    }
    return "";
  });
  const RankOutcome outcome = probe.wait(30);
  if (!outcome.ok && why != nullptr) *why = outcome.to_string();
  return outcome.ok;
}

}  // namespace epd::test
