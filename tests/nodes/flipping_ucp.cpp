// UCX over a network that flips bits though TCP's checksum fits: a library for network.library. All functions
// are libucp's, but for the one by which engines send. It spoils three batches of rows of each process: one
// bit of a body, of epd's header, and of the transport's, by which the receiver knows its peer.
#include "proto/far.h"

#include <dlfcn.h>
#include <ucp/api/ucp.h>
#include <cstring>
#include <mutex>
#include <vector>

namespace {

using epd::abi::FarHeader;
using epd::abi::FarType;

constexpr std::size_t kPrefixBytes = 16;  // the transport's header, before epd's
constexpr std::size_t kPeerAt = 8;        // the sender's number in it

decltype(&ucp_am_send_nbx) real() {
  static const auto function = reinterpret_cast<decltype(&ucp_am_send_nbx)>(
      ::dlsym(::dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL), "ucp_am_send_nbx"));
  return function;
}

const std::byte* flipped(const void* data, std::size_t bytes, std::size_t at) {
  // UCX may read it later.
  auto* const copy = new std::vector<std::byte>(bytes);
  std::memcpy(copy->data(), data, bytes);
  (*copy)[at] ^= std::byte{0x10};
  return copy->data();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ucs_status_ptr_t ucp_am_send_nbx(
    ucp_ep_h ep, unsigned id, const void* header, size_t header_length, const void* buffer, size_t count,
    const ucp_request_param_t* param) {
  static std::mutex mutex;
  static int messages = 0;
  static int spoiled = 0;
  FarHeader far{};
  const std::lock_guard lock(mutex);
  if (header_length == kPrefixBytes + sizeof(far)) {
    std::memcpy(&far, static_cast<const std::byte*>(header) + kPrefixBytes, sizeof(far));
    if (far.type == FarType::kRows && ++messages >= 60 * (spoiled + 1) && spoiled < 3) {
      switch (spoiled++) {
        case 0: buffer = flipped(buffer, count, count / 2); break;
        case 1: header = flipped(header, header_length, kPrefixBytes + offsetof(FarHeader, group)); break;
        default: header = flipped(header, header_length, kPeerAt); break;
      }
    }
  }
  return real()(ep, id, header, header_length, buffer, count, param);
}
