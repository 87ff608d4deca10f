// The supervisor's state as messages of the control plane. No loop and no state here; pages are those that
// engines write while they are read.
#pragma once

#include "cluster/cluster.h"
#include "fleet.h"
#include "membership/group.h"
#include "proto/link.h"
#include "supervisor/config.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>
#include "epd/v1/control.pb.h"

namespace epd::supervisor {

std::string hexadecimal(const std::array<std::uint8_t, 16>& bytes);
v1::DeviceState message_of(DeviceState state);
v1::GroupState message_of(membership::GroupPhase phase);
v1::GroupShape message_of(const abi::GroupShape& shape);
v1::Histogram message_of(const abi::Histogram& histogram);
v1::GetConfigResponse message_of(std::vector<ConfigEntry> entries);
google::protobuf::RepeatedPtrField<v1::OptionChange> messages_of(const std::vector<ConfigChange>& changes);

v1::ClusterStatus message_of(const cluster::Settings& settings, const cluster::View& view);
v1::Node message_of(const cluster::NodeView& node);

// Nothing is added if `op` is free, or was taken by another operation while it was read.
void add_operation(v1::ListOperationsResponse& list, const abi::OpView& op, const std::string& device,
                   std::uint64_t now_ns);
// The operation's engine is stopped: the wait that it showed last says nothing of now.
void mark_stopped(v1::Operation& operation);
void sort(v1::ListOperationsResponse& list);

// Adds one engine, and the engines of other nodes in its table. `list` has `engine`.
void add_far_engines(v1::ListFarEnginesResponse& list, v1::NetworkEngine& engine, const abi::FarTable& table,
                     std::uint64_t now_ns);
void sort(v1::ListFarEnginesResponse& list);

// The pages give statistics of sessions, ranks and groups, all in one: a group's sum needs the counts of its
// ranks.
struct DevicePage {
  const std::string& device;
  const abi::EnginePage& page;
};
v1::GetStatisticsResponse message_of(const std::vector<DevicePage>& pages);

// Sorts lists of messages of any kind.
template <typename Messages, typename Key>
void sort_by(Messages& messages, const Key& key) {
  std::sort(messages.pointer_begin(), messages.pointer_end(),
            [&](const auto* a, const auto* b) { return key(*a) < key(*b); });
}

}  // namespace epd::supervisor
