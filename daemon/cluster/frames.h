// Frames: their limits and contents.
#pragma once

#include "channel.h"
#include "cluster/cluster.h"
#include "cluster/settings.h"
#include "epd/v1/cluster.pb.h"
#include "membership/messages.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace epd::cluster {

// 2: groups that span nodes. 3: row formats, of which a group has several. All nodes have both.
constexpr std::uint32_t kVersionMin = 3;
constexpr std::uint32_t kVersionMax = 3;
// The limit for a frame of a coordinator: the description of a group of 1024 engines, with addresses, fits.
constexpr std::size_t kMaxFrameBytes = std::size_t{4} << 20;
// The limit for a frame of a node. The node counts as heard when the whole frame has come: at the gate's pace
// 0.27 s after it has begun.
constexpr std::size_t kMaxNodeFrameBytes = std::size_t{1} << 19;
constexpr std::size_t kFrameHeadBytes = 1024;  // what a frame adds to its message, at most
constexpr std::uint64_t kMaxTerm = std::uint64_t{1} << 48;

// INVALID_ARGUMENT if the bytes are no frame, RESOURCE_EXHAUSTED if they are too many.
Result<v1::Frame> parse_frame(const std::string& bytes, std::size_t most);

// Parses the payload of a channel's message.
Result<v1::NodeMessage> parse_content(const std::string& payload);

// Messages of agents and coordinator in protobuf's encoding. Texts are cut, and made printable.
// Reports that would make more than `most` bytes are left out.
std::string encode(const membership::ToAgent& message);
std::string encode(membership::ToCoordinator message, std::size_t most);
// INVALID_ARGUMENT naming the field, its value and what is allowed.
Result<membership::ToAgent> decode_to_agent(std::string_view bytes);
Result<membership::ToCoordinator> decode_to_coordinator(std::string_view bytes);

// Judges whether a daemon would send such a name, boot id and texts.
Status check_description(const v1::NodeDescription& node);
// The name is allowed, and stands in the certificate.
Status check_identity(const v1::NodeDescription& node, const PeerFacts& peer, const Settings& settings);
// The highest version that both speak.
Result<std::uint32_t> common_version(const v1::Hello& hello);

BootId boot_id_of(const std::string& bytes);  // of 16

}  // namespace epd::cluster
