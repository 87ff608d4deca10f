#include "hostile_ucx.h"

#include "far/seal.h"
#include "support/ranks.h"
#include "support/sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

namespace epd::test {
namespace {

// Lists mappings that are the process's own and can be written.
std::vector<std::pair<std::uint64_t, std::uint64_t>> heaps_of(pid_t pid) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> found;
  std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string range, rights, offset, device, inode;
    words >> range >> rights >> offset >> device >> inode;
    const std::size_t dash = range.find('-');
    if (!rights.starts_with("rw") || inode != "0" || dash == std::string::npos) continue;
    found.emplace_back(std::stoull(range.substr(0, dash), nullptr, 16),
                       std::stoull(range.substr(dash + 1), nullptr, 16));
  }
  return found;
}

}  // namespace

void tcp_write(const UniqueFd& fd, std::string_view bytes) {
  (void)::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// ---- the spy

bool Spy::can_read() const {
  const UniqueFd memory(::open(("/proc/" + std::to_string(engine_) + "/mem").c_str(), O_RDONLY | O_CLOEXEC));
  return memory.valid();
}

template <typename Found>
void Spy::search(std::string_view bytes, std::size_t room, const Found& found) const {
  const UniqueFd memory(::open(("/proc/" + std::to_string(engine_) + "/mem").c_str(), O_RDONLY | O_CLOEXEC));
  std::string piece;
  for (const auto& [begin, end] : heaps_of(engine_)) {
    constexpr std::uint64_t kMost = 256u << 20;  // no stack or arena of theirs is larger
    piece.resize(std::min(end - begin, kMost));
    const ssize_t got = ::pread(memory.get(), piece.data(), piece.size(), static_cast<off_t>(begin));
    if (got <= 0) continue;
    const std::string_view all(piece.data(), static_cast<std::size_t>(got));
    for (std::size_t at = all.find(bytes); at != std::string_view::npos; at = all.find(bytes, at + 1)) {
      if (at + room <= all.size()) found(all.substr(at));
    }
  }
}

std::set<Spy::Known> Spy::addresses() const {
  std::set<Known> known;
  search("EPDT", transport::kMaxAddressBytes, [&](std::string_view place) {
    const auto bytes = std::as_bytes(std::span(place));
    std::uint64_t payload = 0;
    std::memcpy(&payload, bytes.data() + 24, sizeof(payload));
    if (payload > transport::kMaxAddressBytes - 40) return;
    auto parts = transport::read_address(bytes.first(40 + payload), transport::AddressKind::kUcx);
    if (parts.ok()) known.insert({parts->transport, {parts->payload.begin(), parts->payload.end()}});
  });
  return known;
}

std::optional<Spy::Known> Spy::own_address() const {
  const std::uint16_t port = htons(listening_port(engine_));
  if (port == 0) return std::nullopt;
  const std::string_view wanted(reinterpret_cast<const char*>(&port), sizeof(port));
  for (const Known& known : addresses()) {
    const std::string_view text(reinterpret_cast<const char*>(known.ucx.data()), known.ucx.size());
    if (text.find(wanted) != std::string_view::npos) return known;
  }
  return std::nullopt;
}

std::optional<abi::FarHeader> Spy::last_message(std::uint64_t transport) const {
  std::optional<abi::FarHeader> last;
  search("EPDM", sizeof(Prefix) + sizeof(abi::FarHeader), [&](std::string_view place) {
    Prefix prefix;
    std::memcpy(&prefix, place.data(), sizeof(prefix));
    abi::FarHeader header;
    std::memcpy(&header, place.data() + sizeof(prefix), sizeof(header));
    if (prefix.format != Prefix{}.format || prefix.sender != transport) return;
    if (!far::header_is_whole(header)) return;
    if (abi::read_far_header(bytes_of(header), header.body_bytes, header) != abi::FarReason::kNone) return;
    const bool of_operation = header.tag != abi::far_epoch_tag(abi::epoch_of_tag(header.tag));
    if (!of_operation || header.from_rank == abi::kFarNoRank || (last && header.tag <= last->tag)) return;
    last = header;
  });
  return last;
}

// ---- the client of UCX

RawUcx::RawUcx(std::span<const std::byte> ucx_address) {
  for (const auto& [key, value] : transport::ucx_environment()) ::setenv(key.c_str(), value.c_str(), 1);
  transport::UcxOptions options;
  options.devices = "lo";
  Result<transport::UcxWorker> worker = transport::UcxWorker::open(options);
  RANK_CHECK(worker.ok(), worker.status().to_string());
  worker_.emplace(std::move(worker).value());
  ucp_ep_params_t params;
  std::memset(&params, 0, sizeof(params));
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(ucx_address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = [](void* self, ucp_ep_h, ucs_status_t) {
    static_cast<RawUcx*>(self)->failed_ = true;
  };
  params.err_handler.arg = this;
  const ucs_status_t status = worker_->ucx().ucp_ep_create(worker_->get(), &params, &endpoint_);
  RANK_CHECK(status == UCS_OK, worker_->ucx().ucs_status_string(status));
}

RawUcx::~RawUcx() {
  worker_.reset();
}

bool RawUcx::post(unsigned id, std::span<const std::byte> header, std::span<const std::byte> body,
                  std::uint32_t flags) {
  ucp_request_param_t param;
  std::memset(&param, 0, sizeof(param));
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = flags | UCP_AM_SEND_FLAG_REPLY;
  const ucs_status_ptr_t request = worker_->ucx().ucp_am_send_nbx(endpoint_, id, header.data(), header.size(),
                                                                  body.data(), body.size(), &param);
  return !UCS_PTR_IS_ERR(request);
}

bool RawUcx::send(unsigned id, std::span<const std::byte> header, std::span<const std::byte> body,
                  std::uint32_t flags) {
  ucp_request_param_t param;
  std::memset(&param, 0, sizeof(param));
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = flags;
  const ucs_status_ptr_t request = worker_->ucx().ucp_am_send_nbx(endpoint_, id, header.data(), header.size(),
                                                                  body.data(), body.size(), &param);
  if (!UCS_PTR_IS_PTR(request)) return !UCS_PTR_IS_ERR(request);
  const double end = now_s() + 1;
  while (worker_->ucx().ucp_request_check_status(request) == UCS_INPROGRESS && now_s() < end)
    worker_->ucx().ucp_worker_progress(worker_->get());
  const bool sent = worker_->ucx().ucp_request_check_status(request) == UCS_OK;
  worker_->ucx().ucp_request_free(request);
  return sent;
}

void RawUcx::progress_for(int ms) {
  for (const double end = now_s() + ms / 1000.0; now_s() < end;) {
    if (worker_->ucx().ucp_worker_progress(worker_->get()) == 0) sleep_ms(1);
  }
}

Bytes with_prefix(const Prefix& prefix, std::span<const std::byte> header) {
  Bytes bytes(sizeof(prefix) + header.size());
  std::memcpy(bytes.data(), &prefix, sizeof(prefix));
  if (!header.empty()) std::memcpy(bytes.data() + sizeof(prefix), header.data(), header.size());
  return bytes;
}

Bytes sealed(abi::FarHeader header, std::span<const std::byte> body) {
  far::seal(header, body, abi::FarCheck::kCrc);
  return bytes_of(header);
}

}  // namespace epd::test
