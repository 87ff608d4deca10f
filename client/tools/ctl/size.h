// epctl size: what a group takes of memory. Asks no daemon.
#pragma once

#include "arguments.h"

#include <string>
#include <vector>

namespace epd::ctl {

// The words that the command line takes, as in JSON; in the order of their numbers.
const std::vector<std::string>& payload_words();
const std::vector<std::string>& index_type_words();
const std::vector<std::string>& layout_words();
const std::vector<std::string>& scale_format_words();
const std::vector<std::string>& row_format_words();
const std::vector<std::string>& scale_layout_words();
const std::vector<std::string>& device_kind_words();
const std::vector<std::string>& region_words();

}  // namespace epd::ctl
