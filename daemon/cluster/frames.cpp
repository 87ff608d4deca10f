#include "frames.h"

#include "cluster/address.h"
#include "wire.h"

#include <algorithm>
#include <utility>

namespace epd::cluster {

// ---- frames

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

// ---- protobuf's encoding

bool take_varint(std::string_view& bytes, std::uint64_t& value) {
  value = 0;
  for (int shift = 0; shift < 70 && !bytes.empty(); shift += 7) {
    const auto byte = static_cast<unsigned char>(bytes.front());
    bytes.remove_prefix(1);
    value |= std::uint64_t{byte & 0x7fu} << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

bool take_fixed64(std::string_view& bytes, std::uint64_t& value) {
  if (bytes.size() < 8) return false;
  value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  bytes.remove_prefix(8);
  return true;
}

bool take_field(std::string_view& bytes, WireField& field) {
  std::uint64_t tag = 0;
  if (!take_varint(bytes, tag)) return false;
  field = {tag >> 3, static_cast<std::uint32_t>(tag & 7), 0, {}};
  if (field.number == 0) return false;
  if (field.type == WireField::kVarint) return take_varint(bytes, field.value);
  if (field.type == WireField::kFixed64) return take_fixed64(bytes, field.value);
  std::uint64_t size = 4;
  if (field.type != WireField::kFixed32 && (field.type != WireField::kBytes || !take_varint(bytes, size)))
    return false;
  if (size > bytes.size()) return false;
  if (field.type == WireField::kBytes) field.bytes = bytes.substr(0, size);
  bytes.remove_prefix(size);
  return true;
}

// ---- Writer

std::string Writer::printable(std::string text) {
  for (char& c : text) c = c >= 0x20 && c < 0x7f ? c : '?';
  return text;
}

void Writer::put_varint(std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
  bytes_ += static_cast<char>(value);
}

void Writer::put_fixed64(std::uint64_t value) {
  for (int i = 0; i < 8; ++i, value >>= 8) bytes_ += static_cast<char>(value);
}

void Writer::put_bytes(std::uint32_t number, const std::string& bytes) {
  put_tag(number, WireField::kBytes);
  put_varint(bytes.size());
  bytes_ += bytes;
}

// ---- Reader

std::string_view Reader::last(std::uint32_t number) const {
  std::string_view found;
  each(number, [&](const WireField& field) {
    if (field.type == WireField::kBytes) found = field.bytes;
  });
  return found;
}

std::size_t Reader::count(std::uint32_t number) const {
  std::size_t found = 0;
  each(number, [&](const WireField& field) { found += field.type == WireField::kBytes ? 1 : 0; });
  return found;
}

bool Reader::judge_encoding(const char* name, std::string_view bytes) {
  WireField field;
  for (std::string_view rest = bytes; !rest.empty();) {
    if (take_field(rest, field)) continue;
    refuse(name, std::to_string(bytes.size()) + " bytes that are no message", "protobuf's encoding");
    return false;
  }
  return true;
}

bool Reader::judge_text(const char* name, std::string_view wire, std::size_t most) {
  const auto bad =
      std::find_if(wire.begin(), wire.end(), [](unsigned char c) { return c < 0x20 || c >= 0x7f; });
  if (wire.size() > most) {
    refuse(name, "of " + std::to_string(wire.size()) + " characters", "at most " + std::to_string(most));
  } else if (bad != wire.end()) {
    refuse(name, "text with the byte " + std::to_string(static_cast<unsigned char>(*bad)), "32 .. 126");
  }
  return wire.size() <= most && bad == wire.end();
}

bool Reader::judge_size(const char* name, std::size_t size, std::size_t most) {
  if (size <= most) return true;
  refuse(name, "a list of " + std::to_string(size), "at most " + std::to_string(most));
  return false;
}

void Reader::refuse(const char* name, const std::string& value, const std::string& allowed) {
  if (status_.ok()) status_ = invalid_argument(path() + name + " is " + value + "; allowed: " + allowed);
}

std::string Reader::path() const {
  std::string text;
  for (const std::string_view name : path_) text += std::string(name) + ".";
  return text;
}

// ---- messages

// All ranks are there, in order. Members are some of them.
std::string check(const GroupDescription& group) {
  if (const std::string wrong = abi::check_shape(group.shape); !wrong.empty()) return "shape." + wrong;
  const std::string allowed =
      "; allowed: num_ranks, which is " + std::to_string(group.shape.num_ranks) + ", in their order";
  if (group.ranks.size() != group.shape.num_ranks)
    return "ranks is a list of " + std::to_string(group.ranks.size()) + allowed;
  for (std::size_t i = 0; i < group.ranks.size(); ++i) {
    if (group.ranks[i].rank != i)
      return "ranks.rank is " + std::to_string(group.ranks[i].rank) + " at place " + std::to_string(i) +
             allowed;
  }
  for (const MemberDescription& member : group.members) {
    if (member.rank >= group.ranks.size())
      return "members.rank is " + std::to_string(member.rank) + "; allowed: below num_ranks, which is " +
             std::to_string(group.ranks.size());
  }
  return "";
}

std::string check(const AcquireMemory& action) {
  if (const std::string wrong = abi::check_shape(action.shape); !wrong.empty()) return "shape." + wrong;
  if (action.rank < action.shape.num_ranks) return "";
  return "rank is " + std::to_string(action.rank) + "; allowed: below num_ranks, which is " +
         std::to_string(action.shape.num_ranks);
}

namespace {

constexpr std::size_t kMostHeadBytes = 8;  // of a part

template <typename Message>
std::string written(Message message) {
  Writer writer;
  fields(writer, message);
  return writer.take();
}

template <typename Message>
Result<Message> read(std::string_view bytes) {
  Message message;
  Reader reader;
  reader.read(bytes, message);
  if (!reader.status().ok()) return reader.status();
  return message;
}

}  // namespace

std::string encode(const ToAgent& message) {
  return written(message);
}

// Groups whose reports do not fit end when the coordinator changes.
std::string encode(ToCoordinator message, std::size_t most) {
  std::string bytes = written(message);
  auto* attach = std::get_if<Attach>(&message.body);
  if (bytes.size() <= most || attach == nullptr) return bytes;
  const std::vector<GroupReport> reports = std::exchange(attach->groups, {});
  std::size_t size = written(message).size() + 2 * kMostHeadBytes;
  for (const GroupReport& report : reports) {
    size += written(report).size() + kMostHeadBytes;
    if (size > most) break;
    attach->groups.push_back(report);
  }
  return written(message);
}

Result<ToAgent> decode_to_agent(std::string_view bytes) {
  return read<ToAgent>(bytes);
}

Result<ToCoordinator> decode_to_coordinator(std::string_view bytes) {
  return read<ToCoordinator>(bytes);
}

}  // namespace epd::cluster
