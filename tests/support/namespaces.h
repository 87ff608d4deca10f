// Processes in PID, IPC and mount namespaces of their own, as containers have them: /dev/shm and /proc are
// theirs, files are shared.
#pragma once

#include "support/ranks.h"

#include <string>

namespace epd::test {

// "" or why no namespaces can be made here.
std::string why_no_namespaces();

// Called by a process without threads: it gets mount and IPC namespaces of its own, and what it forks from
// now on is in a PID namespace of its own, the first as PID 1. Throws RankFailure.
void enter_namespaces();
// Called by the first process there. Ends it on failure.
void mount_own_proc();

// A RankProcess whose body runs as PID 1 of namespaces of its own.
RankProcess contained(const RankProcess::Body& body, double seconds);

}  // namespace epd::test
