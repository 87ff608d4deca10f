#pragma once

#include "kit/daemon.h"
#include "kit/report.h"
#include "plan.h"

#include <cstdint>
#include <string>

namespace epd::bench {

// epbench layer: times of a whole layer, with operations and without, beside the daemon and without it.

// Starts a daemon of its own, and measures before it, beside it and after it. Throws kit::ToolError. This
// process must have one thread.
// The times are of one layer (a graph's time over its number of layers), of the slowest rank of each
// iteration.
Json measure_layer(const RunPlan& plan, const std::string& program);

// Throws kit::ToolError naming the bad value and what is allowed.
void validate_layer(const RunPlan& plan);

std::string layer_text(const Json& report);

// epbench attach and epbench reap: how long sessions take to begin, and to end when their process is killed.

// `rounds` times attach, then detach, one after the other. Reports "attach" and "detach".
Reports measure_attach(const kit::OwnDaemon& daemon, std::uint32_t rounds);

// `rounds` times: a group of two, of which one is killed with SIGKILL while the other waits in a dispatch.
// "rank_lost": from the kill until that wait ends with RANK_LOST. "reuse": from the kill until a new session
// on the victim's device has been attached, as the survivor does at once. With a daemon of our own,
// it must in the end hold as few memory files as at the beginning: `correct`.
Reports measure_reap(const kit::OwnDaemon& daemon, std::uint32_t rounds);
std::string lifecycle_text(const Reports& reports);

}  // namespace epd::bench
