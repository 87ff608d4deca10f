// Hello and Welcome.
#include "session/session_table.h"

#include "base/event.h"
#include "common/gpu_uuid.h"
#include "porter.h"

#include <algorithm>
#include <cstdio>

namespace epd::session {
namespace {

std::string version_range(std::uint32_t low, std::uint32_t high) {
  return std::to_string(low) + ".." + std::to_string(high);
}

std::string hex(std::uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof(text), "0x%016llx", static_cast<unsigned long long>(value));
  return text;
}

bool sees(const abi::Hello& hello, const abi::GpuUuid& gpu) {
  return std::find(hello.gpus.begin(), hello.gpus.begin() + hello.num_gpus, gpu) !=
         hello.gpus.begin() + hello.num_gpus;
}

}  // namespace

std::string printable(const char* text, std::size_t length) {
  std::string clean(text, length);
  for (char& c : clean) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return clean;
}

std::string process_name(const Session& session) {
  if (session.peer.pid != 0 || session.claimed_pid == 0) return std::to_string(session.peer.pid);
  return std::to_string(session.claimed_pid) + "@" + session.claimed_host + "?";
}

Status SessionTable::check_hello(const Session& session, const abi::Hello& hello) const {
  if (Status status = host_.may_attach(session.peer); !status.ok()) return status;
  if (hello.version_min > abi::kAbiVersion || hello.version_max < abi::kAbiVersionMin ||
      hello.version_min > hello.version_max) {
    return {StatusCode::kVersionMismatch,
            "the client speaks versions " + version_range(hello.version_min, hello.version_max) +
                ", this daemon " + version_range(abi::kAbiVersionMin, abi::kAbiVersion)};
  }
  if (hello.layout_hash != abi::layout_hash()) {
    return {StatusCode::kVersionMismatch, "the client's shared-memory layout is " + hex(hello.layout_hash) +
                                              ", this daemon's " + hex(abi::layout_hash())};
  }
  if (hello.features != 0) {
    return {StatusCode::kUnsupported, "features are " + hex(hello.features) + "; allowed: 0"};
  }
  if (hello.num_gpus > hello.gpus.size()) {
    return invalid_argument("num_gpus is " + std::to_string(hello.num_gpus) + "; allowed: 0.." +
                            std::to_string(hello.gpus.size()));
  }
  if (attached_ >= options_.limits.max_sessions) {
    return resource_exhausted("there are " + std::to_string(attached_) + " sessions; allowed: " +
                              std::to_string(options_.limits.max_sessions) + " (limits.max_sessions)");
  }
  const auto of_user = std::count_if(connections_.begin(), connections_.end(), [&](const auto& entry) {
    return entry.second.attached && entry.second.peer.uid == session.peer.uid;
  });
  const Quota quota = host_.max_sessions_of(session.peer);
  const auto used = static_cast<std::uint64_t>(of_user);
  if (used >= quota.limit) return over_quota(session.peer.uid, used, "sessions", quota);
  // As many sessions again may be ending: a stopped engine frees none of them.
  const std::uint64_t ending = host_.ending_sessions(session.peer.uid);
  if (ending >= quota.limit)
    return over_quota(session.peer.uid, ending, "sessions that have ended, not let go by their engine yet",
                      quota);
  return {};
}

// A client that names no device gets a GPU if there are any, one that it sees if it says which. A host device
// must be named.
Result<std::uint32_t> SessionTable::choose_device(const Session& session, const abi::Hello& hello) const {
  const std::string wanted = printable(hello.device, abi::text_length(hello.device));
  std::string known;
  std::optional<std::uint32_t> best;
  Status unusable = hello.num_gpus == 0 ? not_found("there is no device") : none_visible(hello);
  const auto is_gpu = [](const Options::Device& device) { return device.kind == abi::DeviceKind::kCuda; };
  const bool gpus = std::any_of(options_.devices.begin(), options_.devices.end(), is_gpu);
  for (std::uint32_t i = 0; i < options_.devices.size(); ++i) {
    known += (i == 0 ? "" : ", ") + options_.devices[i].name;
    if (!wanted.empty() && options_.devices[i].name != wanted) continue;
    if (wanted.empty() && gpus && !is_gpu(options_.devices[i])) continue;
    if (wanted.empty() && hello.num_gpus != 0 && !sees(hello, options_.devices[i].uuid)) continue;
    if (Status status = host_.may_use_device(session.peer, i); !status.ok()) {
      if (!wanted.empty()) return status;
      unusable = status;
      continue;
    }
    if (!wanted.empty()) return i;
    if (!best || attached_on(i) < attached_on(*best)) best = i;
  }
  if (best) return *best;
  if (wanted.empty()) return unusable;
  return not_found("device is \"" + wanted + "\"; allowed: " + known);
}

Status SessionTable::none_visible(const abi::Hello& hello) const {
  std::string wanted;
  for (std::uint32_t i = 0; i < hello.num_gpus; ++i)
    wanted += (i == 0 ? "" : ", ") + uuid_text(hello.gpus[i]);
  std::string served;
  for (const Options::Device& device : options_.devices) {
    served += (served.empty() ? "" : ", ") + device.name;
    if (device.kind == abi::DeviceKind::kCuda) served += " (" + uuid_text(device.uuid) + ")";
  }
  return not_found("the client sees " + wanted + ", and this daemon serves " + served);
}

Result<ClientEnds> SessionTable::prepare(Session& session) const {
  if (Status status = session.descriptors.grow(kSegmentDescriptors); !status.ok()) return status;
  ClientEnds client;
  Result<Segments> segments = make_segments(client);
  if (!segments.ok()) return segments.status();
  session.segments = std::move(*segments);
  const FdList bells = {client.engine_bell_porter.get(), client.client_bell_porter.get(),
                        host_.engine_bell(session.device), session.segments.ring_client.get()};
  if (Status status = order(session.socket.get(), PorterOrder::kTakeBells, bells); !status.ok())
    return status;
  return client;
}

Status SessionTable::welcome(const Session& session, const abi::Hello& hello, std::uint32_t request_id,
                             const ClientEnds& client) const {
  abi::Welcome message{};
  message.version = std::min(hello.version_max, abi::kAbiVersion);
  message.device_index = session.device;
  message.layout_hash = abi::layout_hash();
  message.nonce = hello.nonce;
  message.session_id = session.id;
  std::copy(options_.boot_id.begin(), options_.boot_id.end(), message.boot_id);
  abi::set_text(message.daemon, options_.daemon.data(), options_.daemon.size());
  const Options::Device& device = options_.devices[session.device];
  abi::set_text(message.device, device.name.data(), device.name.size());
  message.device_kind = device.kind;
  message.device_uuid = device.uuid;
  return send_message(session.socket.get(), abi::AttachType::kWelcome, message,
                      {session.segments.a.get(), client.b_read_only.get(), client.engine_bell.get(),
                       client.client_bell.get()},
                      request_id);
}

void SessionTable::hello(Session& session, const Packet& packet) {
  const std::uint32_t request_id = packet.header.request_id;
  Result<abi::Hello> hello = packet.read<abi::Hello>();
  if (!hello.ok()) {
    malformed(session, request_id, hello.status());
    return;
  }
  Status status = check_hello(session, *hello);
  if (status.ok()) {
    Result<std::uint32_t> device = choose_device(session, *hello);
    status = device.status();
    if (device.ok()) session.device = *device;
  }
  session.library = printable(hello->library, abi::text_length(hello->library));
  session.claimed_pid = std::max(hello->pid, 0);
  session.claimed_host = printable(hello->host, abi::text_length(hello->host));
  if (status.ok()) {
    Result<ClientEnds> client = prepare(session);
    status = client.status();
    if (client.ok() && !welcome(session, *hello, request_id, *client).ok()) {
      close(session.id, "went away before it was welcomed");
      return;
    }
  }
  if (!status.ok()) {
    static LogLimiter limiter;
    limiter.record(EventKind::kRefused, LogLevel::kWarning, "attach refused",
                   {{"uid", session.peer.uid}, {"pid", session.peer.pid}, {"reason", status.to_string()}},
                   session.peer.uid);
    ++total_refused_;
    note_pending(session, request_id);
    refuse(session.id, request_id, status);
    close(session.id, "was refused");
    return;
  }
  name_program(session.peer);
  session.attached = true;
  ++attached_;
  ++total_attached_;
  record_of_user(session.peer.uid, EventKind::kSessionAttached, LogLevel::kInfo, "session attached",
                 {{"session", session.id},
                  {"uid", session.peer.uid},
                  {"pid", session.peer.pid},
                  {"program", session.peer.program},
                  {"cgroup", session.peer.cgroup},
                  {"claimed_process", std::to_string(session.claimed_pid) + "@" + session.claimed_host},
                  {"device", options_.devices[session.device].name},
                  {"library", session.library}});
  host_.session_opened(session);
}

}  // namespace epd::session
