#include "attach.h"

#include "common/gpu_uuid.h"

#include <sys/random.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>
#include <vector>

namespace epd::client {
namespace {

constexpr char kLibrary[] = "libepd " EPD_CLIENT_VERSION;

Status make_hello(const std::string& device, abi::Hello& hello) {
  if (const std::optional<abi::GpuUuid> gpu = parse_gpu_uuid(device)) {
    hello.gpus[0] = *gpu;
    hello.num_gpus = 1;
  } else if (device.size() >= sizeof(hello.device)) {
    return invalid_argument("device \"" + device + "\" has " + std::to_string(device.size()) +
                            " characters; allowed: at most " + std::to_string(sizeof(hello.device) - 1));
  }
  hello.version_min = abi::kAbiVersionMin;
  hello.version_max = abi::kAbiVersion;
  hello.layout_hash = abi::layout_hash();
  abi::set_text(hello.library, kLibrary, sizeof(kLibrary) - 1);
  if (hello.num_gpus == 0) abi::set_text(hello.device, device.data(), device.size());
  hello.pid = ::getpid();
  char host[256] = {};
  if (::gethostname(host, sizeof(host) - 1) == 0) abi::set_text(hello.host, host, std::strlen(host));
  const ssize_t n = ::getrandom(&hello.nonce, sizeof(hello.nonce), 0);
  return n == sizeof(hello.nonce) ? Status() : errno_status("getrandom");
}

Status check_welcome(const abi::Welcome& welcome, const abi::Hello& hello) {
  if (welcome.nonce != hello.nonce) return internal_error("the daemon echoed another attach's nonce");
  const bool version_fits = welcome.version >= hello.version_min && welcome.version <= hello.version_max;
  if (!version_fits || welcome.layout_hash != hello.layout_hash) {
    return {StatusCode::kVersionMismatch,
            std::string(kLibrary) + " speaks protocol versions " + std::to_string(hello.version_min) +
                " .. " + std::to_string(hello.version_max) + " with layout " + hex(hello.layout_hash) +
                "; the daemon \"" + std::string(welcome.daemon, abi::text_length(welcome.daemon)) +
                "\" chose version " + std::to_string(welcome.version) + " with layout " +
                hex(welcome.layout_hash)};
  }
  return {};
}

Status map_segments(Packet& packet, Attachment& out) {
  if (Status status = check_descriptors(packet); !status.ok()) return status;
  if (packet.fds.size() != 4) {
    return internal_error("the daemon's welcome came with " + std::to_string(packet.fds.size()) +
                          " descriptors; needed: 4");
  }
  Result<Mapping> a = map_sealed(packet.fds[0], sizeof(abi::SegmentA), Access::kReadWrite, "segment A");
  if (!a.ok()) return a.status();
  Result<Mapping> b = map_sealed(packet.fds[1], sizeof(abi::SegmentB), Access::kReadOnly, "segment B");
  if (!b.ok()) return b.status();
  out.segment_a = std::move(*a);
  out.segment_b = std::move(*b);
  const std::uint32_t magic_a = out.segment_a.as<abi::SegmentA>()->magic;
  const std::uint32_t magic_b = out.segment_b.as<abi::SegmentB>()->magic;
  if (magic_a != abi::kSegmentAMagic || magic_b != abi::kSegmentBMagic) {
    return internal_error("the daemon's segments begin with " + hex(magic_a) + " and " + hex(magic_b) +
                          "; needed: " + hex(abi::kSegmentAMagic) + " and " + hex(abi::kSegmentBMagic));
  }
  out.engine_bell = std::move(packet.fds[2]);
  out.client_bell = std::move(packet.fds[3]);
  return {};
}

// Whether the daemon shall choose again: it chose a GPU, and this process sees others only. `hello` names
// them.
bool must_choose_again(const abi::Welcome& welcome, abi::Hello& hello) {
  std::vector<abi::GpuUuid> gpus;
  if (!visible_gpus(gpus).ok() || gpus.empty()) return false;  // open_device() says why
  if (std::find(gpus.begin(), gpus.end(), welcome.device_uuid) != gpus.end()) return false;
  hello.num_gpus = static_cast<std::uint32_t>(std::min(gpus.size(), hello.gpus.size()));
  std::copy_n(gpus.begin(), hello.num_gpus, hello.gpus.begin());
  return true;
}

Status open_device(Attachment& out) {
  const auto kind = static_cast<std::uint32_t>(out.welcome.device_kind);
  switch (out.welcome.device_kind) {
    case abi::DeviceKind::kHost: return {};
    case abi::DeviceKind::kCuda: {
      Status status = open_cuda_device(out.welcome, out.device);
      if (!status.ok() || out.wait_by != WaitBy::kKernel) return status;
      const Status kernels = out.device->has_kernels();
      if (kernels.ok()) return {};
      return {kernels.code(), "waiting by kernel: " + kernels.message() + "; allowed: EPD_WAIT_BY_MEMOP"};
    }
  }
  return {StatusCode::kUnsupported, "the daemon's device is of kind " + std::to_string(kind) + ", which " +
                                        kLibrary + " does not know"};
}

Status say_hello(const AttachRequest& request, const abi::Hello& hello, Packet& packet, Attachment& out) {
  Status status = connect_to(request.socket_path, request.deadline, out.socket);
  if (!status.ok()) return status;
  status = send(out.socket, abi::AttachType::kHello, 1, hello);
  // A daemon that refuses at once may have closed already. Its reason is still in the socket.
  if (!status.ok() && status.code() != StatusCode::kDaemonLost) return status;
  if (!wait_readable(out.socket, request.deadline)) {
    return {StatusCode::kDeadlineExceeded,
            "the daemon at " + request.socket_path + " did not answer the attach in time"};
  }
  Status error;
  switch (receive(out.socket, packet, error)) {
    case ReceiveResult::kPacket: break;
    case ReceiveResult::kMalformed: return error;
    case ReceiveResult::kNothing:
    case ReceiveResult::kClosed:
      return daemon_lost("the daemon at " + request.socket_path + " closed the connection during attach");
  }
  const auto welcome = packet.read<abi::Welcome>();
  if (type_of(packet) != abi::AttachType::kWelcome || !welcome.ok()) return refusal(packet);
  out.welcome = welcome.value();
  return check_welcome(out.welcome, hello);
}

// Whether another daemon of the node may take the session: there is none here, it is of another version, it
// drains, or it does not answer.
bool try_next(StatusCode code) {
  return code == StatusCode::kDaemonLost || code == StatusCode::kVersionMismatch ||
         code == StatusCode::kAborted || code == StatusCode::kDeadlineExceeded;
}

Status attach_to(const AttachRequest& request, Attachment& out) {
  abi::Hello hello{};
  Packet packet;
  Status status = make_hello(request.device, hello);
  if (status.ok()) status = say_hello(request, hello, packet, out);
  if (status.ok() && request.device.empty() && out.welcome.device_kind == abi::DeviceKind::kCuda) {
    // A process that needs no GPU should not start CUDA's driver, so the driver is asked only now. A second
    // attach is rare: it happens in containers that have some of the node's GPUs.
    if (must_choose_again(out.welcome, hello)) {
      send_detach(out.socket);
      packet = {};
      status = say_hello(request, hello, packet, out);
    }
  }
  if (!status.ok()) return status;
  out.wait_by = request.wait_by;
  status = map_segments(packet, out);
  if (status.ok()) status = open_device(out);
  if (!status.ok()) send_detach(out.socket);
  return status;
}

}  // namespace

Status attach(const AttachRequest& request, Attachment& out) {
  AttachRequest one = request;
  Status failed;
  for (std::size_t begin = 0; begin <= request.socket_path.size();) {
    const std::size_t end = std::min(request.socket_path.find(':', begin), request.socket_path.size());
    one.socket_path = request.socket_path.substr(begin, end - begin);
    begin = end + 1;
    // A daemon that stands still leaves the others their time.
    const auto others = std::count(request.socket_path.begin() + static_cast<std::ptrdiff_t>(end),
                                   request.socket_path.end(), ':');
    one.deadline = request.deadline.first_of(static_cast<std::size_t>(others) + 1);
    Attachment made;
    const Status status = attach_to(one, made);
    if (status.ok()) out = std::move(made);
    if (status.ok() || !try_next(status.code())) return status;
    // A daemon that is there has the better reason.
    const bool first = failed.ok() || failed.code() == StatusCode::kDaemonLost;
    const std::string before = failed.ok() ? "" : failed.message() + "; ";
    failed = Status(first ? status.code() : failed.code(), before + status.message());
  }
  return failed;
}

}  // namespace epd::client
