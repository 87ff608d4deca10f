// Answers of the daemon as text for people, without colours. Each text ends with a newline.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include "epd/v1/control.pb.h"

namespace epd::ctl {

std::string render(const v1::GetStatusResponse& status);
std::string render(const v1::ListDevicesResponse& devices);
std::string render(const v1::ListNodesResponse& nodes);
std::string render(const v1::ListFarEnginesResponse& network);
std::string render(const v1::ListSessionsResponse& sessions);
std::string render(const v1::ListGroupsResponse& groups, bool members);
std::string render(const v1::ListOperationsResponse& operations);
std::string render(const v1::GetConfigResponse& config);
std::string render(const v1::GetOperationResponse& detail);
// `names` has the groups' names by id.
std::string render(const v1::GetStatisticsResponse& statistics, bool ranks,
                   const std::map<std::uint64_t, std::string>& names);
std::string render(const v1::GetWaitsResponse& waits);
// One line.
std::string render(const v1::Event& event);

}  // namespace epd::ctl
