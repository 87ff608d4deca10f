// The texts of --help, which the manual page is made of: help.txt, in which "== COMMAND: SUMMARY" begins a
// page.
#pragma once

#include <string>

namespace epd::ctl::help {

extern const char* const kText;

struct Page {
  std::string summary;  // one line, for the list of commands
  std::string text;     // below the options
};
// `command`: "set device"; also "epctl" and "footer", which have no summary.
Page page(const std::string& command);

}  // namespace epd::ctl::help
