#include "support/client.h"

#include "proto/arena.h"
#include "support/cuda_memory.h"
#include "support/ranks.h"

#include <unistd.h>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <type_traits>
#include <utility>
#include <vector>

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

Session::Session(const std::string& socket, const std::string& device, epd_wait_by_t wait_by,
                 std::int32_t timeout_ms) {
  epd_attach_options_t options;
  epd_attach_options_init(&options);
  options.socket_path = socket.c_str();
  options.device = device.empty() ? nullptr : device.c_str();
  options.timeout_ms = timeout_ms;
  options.wait_by = wait_by;
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

// Calls move(region, pointer) for each region that the group has.
template <typename Move>
void each_region(epd_buffers_t& b, Move move) {
  using abi::Region;
  const auto visit = [&](Region region, auto*& pointer) {
    if (pointer == nullptr) return;
    void* place = pointer;
    move(region, place);
    pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(place);
  };
  visit(Region::kX, b.x);
  visit(Region::kXScales, b.x_scales);
  visit(Region::kTopkIdx, b.topk_idx);
  visit(Region::kTopkWeights, b.topk_weights);
  visit(Region::kRecvX, b.recv_x);
  visit(Region::kRecvScales, b.recv_scales);
  visit(Region::kRecvTopkIdx, b.recv_topk_idx);
  visit(Region::kRecvTopkWeights, b.recv_topk_weights);
  visit(Region::kRecvSrc, b.recv_src);
  visit(Region::kRankOffsets, b.rank_offsets);
  visit(Region::kExpertCounts, b.expert_counts);
  visit(Region::kExpertOffsets, b.expert_offsets);
  visit(Region::kSourceRanges, b.source_ranges);
  visit(Region::kY, b.y);
  visit(Region::kYWeights, b.y_weights);
  visit(Region::kBias0, b.bias[0]);
  visit(Region::kBias1, b.bias[1]);
  visit(Region::kOut, b.out);
  visit(Region::kOutWeights, b.out_weights);
}

// Where the regions of slots lie, as in an arena.
struct SlotLayout {
  std::array<std::uint64_t, abi::kNumRegions> bytes{};
  std::array<std::uint64_t, abi::kNumRegions> offset{};
  std::uint64_t slot_bytes = 0;

  explicit SlotLayout(const epd_group_config_t& config) {
    for (std::size_t i = 0; i < abi::kNumRegions; ++i) {
      must(epd_region_bytes(&config, static_cast<epd_region_t>(i), &bytes[i]), "region bytes");
      offset[i] = slot_bytes;
      slot_bytes += abi::align_up(bytes[i], abi::kRegionAlign);
    }
  }
  std::uint64_t at(std::uint32_t slot, abi::Region region) const {
    return slot_bytes * slot + offset[static_cast<std::size_t>(region)];
  }
  std::uint64_t bytes_of(abi::Region region) const { return bytes[static_cast<std::size_t>(region)]; }
};

}  // namespace

struct Group::Mirror {
  int gpu = 0;
  SlotLayout layout;                                // of the copy here
  std::vector<epd_buffers_t> device;                // by slot
  std::byte* host = nullptr;                        // all slots; aligned as the regions are
  std::map<epd_ticket_t, std::uint32_t> in_flight;  // slot of each
  std::unique_ptr<GpuStream> stream;                // null: operations are in none

  explicit Mirror(const epd_group_config_t& config) : layout(config) {}
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;
  ~Mirror() { std::free(host); }
  bool busy(std::uint32_t slot) const {
    for (const auto& [ticket, its_slot] : in_flight) {
      if (its_slot == slot) return true;
    }
    return false;
  }
  void push(std::uint32_t slot) {
    if (slot >= device.size() || busy(slot)) return;
    copy_to_gpu(gpu, device[slot].x, host + slot * layout.slot_bytes, layout.slot_bytes);
  }
  void pull(std::uint32_t slot) {
    copy_from_gpu(gpu, host + slot * layout.slot_bytes, device[slot].x, layout.slot_bytes);
  }
};

int gpu_of(const epd_session_info_t& session) {
  return std::atoi(std::strchr(session.device, ':') + 1);
}

Group::Group(const Session& session, const epd_group_config_t& config, bool in_stream) {
  epd_session_info_t info;
  epd_session_info_init(&info);
  must(epd_session_info(session.get(), &info), "session info");
  must(epd_group_join(session.get(), &config, &handle_), std::string("join ") + config.name);
  if (info.device_kind != EPD_DEVICE_KIND_CUDA) return;
  on_gpu_ = info.device_kind == EPD_DEVICE_KIND_CUDA;
  const std::uint32_t depth = config.depth != 0 ? config.depth : abi::kDefaultDepth;
  mirror_ = std::make_shared<Mirror>(config);
  mirror_->gpu = gpu_of(info);
  if (in_stream && on_gpu_) mirror_->stream = std::make_unique<GpuStream>(mirror_->gpu);
  mirror_->host =
      static_cast<std::byte*>(std::aligned_alloc(abi::kRegionAlign, mirror_->layout.slot_bytes * depth));
  for (std::uint32_t slot = 0; slot < depth; ++slot) mirror_->device.push_back(on_device(slot));
}

Group::Group(Group&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)),
      mirror_(std::move(other.mirror_)),
      on_gpu_(other.on_gpu_) {}

Group& Group::operator=(Group&& other) noexcept {
  if (this != &other) {
    epd_group_leave(handle_);
    handle_ = std::exchange(other.handle_, nullptr);
    mirror_ = std::move(other.mirror_);
    on_gpu_ = other.on_gpu_;
  }
  return *this;
}

epd_resume_info_t Group::restore() const {
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  must(epd_group_restore(handle_, 30'000, &info), "restore");
  for (std::uint32_t slot = 0; mirror_ != nullptr && slot < mirror_->device.size(); ++slot)
    mirror_->device[slot] = on_device(slot);
  return info;
}

epd_buffers_t Group::on_device(std::uint32_t slot) const {
  epd_buffers_t b;
  epd_buffers_init(&b);
  must(epd_group_buffers(handle_, slot, &b), "buffers of slot " + std::to_string(slot));
  return b;
}

epd_buffers_t Group::buffers(std::uint32_t slot) const {
  epd_buffers_t b = on_device(slot);
  if (mirror_ == nullptr) return b;
  each_region(
      b, [&](abi::Region region, void*& place) { place = mirror_->host + mirror_->layout.at(slot, region); });
  return b;
}

int Group::gpu() const {
  return mirror_->gpu;
}

std::size_t Group::slot_bytes() const {
  return mirror_->layout.slot_bytes;
}

std::byte* Group::slot_on_gpu(std::uint32_t slot) const {
  return static_cast<std::byte*>(mirror_->device[slot].x);
}

epd_buffers_t Group::buffers_in(std::byte* copy) const {
  epd_buffers_t b = on_device(0);
  each_region(b, [&](abi::Region region, void*& place) { place = copy + mirror_->layout.at(0, region); });
  return b;
}

void* Group::stream() const {
  return mirror_ != nullptr && mirror_->stream != nullptr ? mirror_->stream->get() : EPD_NO_STREAM;
}

epd_status_t Group::dispatch(const epd_dispatch_args_t* args, epd_ticket_t* ticket,
                             epd_handle_t* handle) const {
  const std::uint32_t slot = args != nullptr ? args->slot : ~0u;
  if (mirror_ != nullptr) mirror_->push(slot);
  return submitted(epd_dispatch(handle_, args, stream(), ticket, handle), slot, ticket);
}

epd_status_t Group::combine(const epd_combine_args_t* args, epd_ticket_t* ticket) const {
  const std::uint32_t slot = args != nullptr ? args->slot : ~0u;
  if (mirror_ != nullptr) mirror_->push(slot);
  return submitted(epd_combine(handle_, args, stream(), ticket), slot, ticket);
}

epd_status_t Group::submitted(epd_status_t status, std::uint32_t slot, const epd_ticket_t* ticket) const {
  if (mirror_ != nullptr && status == EPD_OK) mirror_->in_flight[*ticket] = slot;
  return status;
}

void Group::update(const void* part, std::size_t bytes) const {
  if (mirror_ == nullptr) return;
  const auto offset = static_cast<std::uint64_t>(static_cast<const std::byte*>(part) - mirror_->host);
  const auto slot = static_cast<std::uint32_t>(offset / mirror_->layout.slot_bytes);
  each_region(mirror_->device[slot], [&](abi::Region region, void* place) {
    const std::uint64_t first = mirror_->layout.at(slot, region);
    if (offset < first || offset >= first + mirror_->layout.bytes_of(region)) return;
    copy_to_gpu(mirror_->gpu, static_cast<std::byte*>(place) + (offset - first), part, bytes);
  });
}

void Group::ended(epd_ticket_t ticket) const {
  if (mirror_ == nullptr) return;
  const auto found = mirror_->in_flight.find(ticket);
  if (found == mirror_->in_flight.end()) return;
  mirror_->pull(found->second);
  mirror_->in_flight.erase(found);
}

std::vector<std::int32_t> Group::active_mask(std::uint32_t num_ranks) const {
  const std::int32_t* there = nullptr;
  must(epd_group_active_mask(handle_, &there), "mask of active ranks");
  std::vector<std::int32_t> mask(num_ranks);
  if (mirror_ == nullptr) {
    std::copy_n(there, num_ranks, mask.begin());
  } else {
    copy_from_gpu(mirror_->gpu, mask.data(), there, num_ranks * sizeof(std::int32_t));
  }
  return mask;
}

epd_status_t Group::wait(epd_ticket_t ticket, int timeout_ms, epd_result_t* result) const {
  const epd_status_t status = epd_ticket_wait(handle_, ticket, timeout_ms, result);
  if (mirror_ != nullptr && epd_ticket_pending(handle_, ticket) == 0) ended(ticket);
  return status;
}

epd_group_config_t small_config(const char* name, std::uint32_t rank, std::uint32_t num_ranks) {
  epd_group_config_t config;
  epd_group_config_init(&config);
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
      const Session session(socket, device, EPD_WAIT_BY_MEMOP, 2000);
      epd_group_config_t config = small_config(name.c_str(), 0, 1);
      config.timeout_ms = 5000;
      const Group group(session, config);
      epd_ticket_t ticket = 0;
      must(epd_noop(group.get(), 0, EPD_NO_STREAM, &ticket), "noop on " + device);
      must(group.wait(ticket, 5000), "noop on " + device);
    }
    return "";
  });
  const RankOutcome outcome = probe.wait(30);
  if (!outcome.ok && why != nullptr) *why = outcome.to_string();
  return outcome.ok;
}

}  // namespace epd::test
