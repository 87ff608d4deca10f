#include "families.h"

#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <system_error>

namespace epd::metrics {
namespace {

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

std::uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t all = 0, resident = 0;  // in pages
  file >> all >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::uint64_t open_fds() {
  std::error_code error;
  std::uint64_t count = 0;
  for (std::filesystem::directory_iterator i("/proc/self/fd", error), end; !error && i != end;
       i.increment(error))
    ++count;
  return count == 0 ? 0 : count - 1;  // less the one that reads this directory
}

// The machine's start; 0: not known.
double boot_seconds() {
  std::ifstream file("/proc/stat");
  std::string name;
  double seconds = 0;
  while (file >> name) {
    if (name == "btime" && file >> seconds) return seconds;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
}

double start_seconds() {
  constexpr int kFieldsBefore = 19;  // after the name: the start is the 22nd field of all
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  const std::size_t name_end = line.rfind(')');  // the name may contain anything
  std::istringstream fields(name_end == std::string::npos ? "" : line.substr(name_end + 1));
  std::string skipped;
  for (int i = 0; i < kFieldsBefore; ++i) fields >> skipped;
  double ticks = 0;
  const double boot = boot_seconds();
  return boot > 0 && fields >> ticks ? boot + ticks / static_cast<double>(::sysconf(_SC_CLK_TCK)) : 0;
}

}  // namespace

ProcessUse own_use() {
  ProcessUse use;
  rusage usage{};
  if (::getrusage(RUSAGE_SELF, &usage) == 0)
    use.cpu_seconds = seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime);
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) use.max_fds = limit.rlim_cur;
  use.start_seconds = start_seconds();
  use.resident_bytes = resident_bytes();
  use.open_fds = open_fds();
  return use;
}

}  // namespace epd::metrics
