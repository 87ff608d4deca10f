#include "process_state.h"

#include <fstream>
#include <sstream>
#include <string>

namespace epd::supervisor {
namespace {

// The fields of /proc/<pid>/stat from the state on; empty if the process is not to be seen.
std::istringstream stat_from_state(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const std::size_t name_end = line.rfind(')');  // the name may hold anything
  return std::istringstream(name_end == std::string::npos ? "" : line.substr(name_end + 1));
}

}  // namespace

bool is_stopped(pid_t pid) {
  char state = 0;
  stat_from_state(pid) >> state;
  return state == 'T' || state == 't';
}

bool is_ending(pid_t pid) {
  constexpr unsigned long kExiting = 0x4;  // the kernel's PF_EXITING
  std::istringstream fields = stat_from_state(pid);
  char state = 0;
  long skipped = 0;  // parent, process group, session, terminal, its process group
  unsigned long flags = 0;
  fields >> state >> skipped >> skipped >> skipped >> skipped >> skipped >> flags;
  return fields && (flags & kExiting) != 0;
}

}  // namespace epd::supervisor
