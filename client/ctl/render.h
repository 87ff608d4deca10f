// Answers of the daemon as text for people. Ends with a newline, no colours.
#pragma once

#include <string>
#include "epd/v1/control.pb.h"

namespace epd::ctl {

std::string render(const v1::GetStatusResponse& status);
std::string render(const v1::ListDevicesResponse& devices);
std::string render(const v1::ListSessionsResponse& sessions);
std::string render(const v1::ListGroupsResponse& groups, bool members);
std::string render(const v1::ListOperationsResponse& operations);
std::string render(const v1::GetConfigResponse& config);

}  // namespace epd::ctl
