// How long sessions take to begin, and to end when their process is killed.
#pragma once

#include "kit/daemon.h"
#include "plan.h"

#include <cstdint>

namespace epd::bench {

// `rounds` times attach, then detach, one after the other. Reports "attach" and "detach".
Reports measure_attach(const kit::OwnDaemon& daemon, std::uint32_t rounds);

// `rounds` times: a group of two, of which one is killed with SIGKILL while the other waits in a dispatch.
// "rank_lost": from the kill until that wait ends with RANK_LOST. "reuse": from the kill until a new session
// on the victim's device has been attached, as the survivor does at once. With a daemon of our own,
// it must in the end hold as few memory files as at the beginning: `correct`.
Reports measure_reap(const kit::OwnDaemon& daemon, std::uint32_t rounds);
std::string lifecycle_text(const Reports& reports);

}  // namespace epd::bench
