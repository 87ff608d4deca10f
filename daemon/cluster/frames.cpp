#include "frames.h"

#include "cluster/address.h"

#include <algorithm>
#include <utility>

namespace epd::cluster {
namespace {

constexpr std::size_t kMaxText = 300;
constexpr std::size_t kBootIdBytes = std::tuple_size_v<BootId>;

bool is_printable(const std::string& text) {
  return text.size() <= kMaxText &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) { return c >= 0x20 && c < 0x7f; });
}

}  // namespace

Result<v1::Frame> parse_frame(const std::string& bytes, std::size_t most) {
  if (bytes.size() > most) {
    return resource_exhausted("a frame of " + std::to_string(bytes.size()) +
                              " bytes; allowed: " + std::to_string(most));
  }
  v1::Frame frame;
  if (!frame.ParseFromString(bytes))
    return invalid_argument(std::to_string(bytes.size()) + " bytes that are no frame");
  if (frame.what_case() == v1::Frame::WHAT_NOT_SET) return invalid_argument("an empty frame");
  return frame;
}

Result<v1::NodeMessage> parse_content(const std::string& payload) {
  v1::NodeMessage content;
  if (!content.ParseFromString(payload))
    return invalid_argument("a message of " + std::to_string(payload.size()) + " bytes that is none");
  return content;
}

Status check_description(const v1::NodeDescription& node) {
  if (!is_name(node.name()))
    return invalid_argument(std::string("the node's name is none; allowed: ") + kAllowedNames);
  if (node.boot_id().size() != kBootIdBytes) {
    return invalid_argument("the boot id of " + node.name() + " has " +
                            std::to_string(node.boot_id().size()) + " bytes; allowed: 16");
  }
  if (!parse_host_port(node.address()) || !parse_host_port(node.listen()))
    return invalid_argument("the addresses of " + node.name() + " are none; allowed: HOST:PORT");
  if (!is_printable(node.daemon_version()))
    return invalid_argument("the version of " + node.name() + " is no printable text");
  return {};
}

Status check_identity(const v1::NodeDescription& node, const PeerFacts& peer, const Settings& settings) {
  if (peer.secure && std::none_of(peer.names.begin(), peer.names.end(),
                                  [&](const std::string& name) { return same_name(name, node.name()); })) {
    return {StatusCode::kPermissionDenied,
            "it calls itself " + node.name() +
                ", which its certificate does not name; allowed: " + listed(peer.names).substr(0, kMaxText)};
  }
  if (!settings.allows(node.name())) {
    return {StatusCode::kPermissionDenied, "node " + node.name() + " is not allowed; cluster.nodes of " +
                                               settings.node + " is " +
                                               listed(settings.nodes).substr(0, kMaxText)};
  }
  return {};
}

Result<std::uint32_t> common_version(const v1::Hello& hello) {
  const std::uint32_t highest = std::min(kVersionMax, hello.version_max());
  if (hello.version_min() <= hello.version_max() && highest >= std::max(kVersionMin, hello.version_min()))
    return highest;
  return Status(StatusCode::kVersionMismatch, "it speaks versions " + std::to_string(hello.version_min()) +
                                                  ".." + std::to_string(hello.version_max()) +
                                                  ", this daemon " + std::to_string(kVersionMin) + ".." +
                                                  std::to_string(kVersionMax));
}

BootId boot_id_of(const std::string& bytes) {
  BootId id{};
  std::copy_n(bytes.begin(), std::min(bytes.size(), id.size()), id.begin());
  return id;
}

}  // namespace epd::cluster
