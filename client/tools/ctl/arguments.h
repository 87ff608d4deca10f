// The command line's arguments, and the exit codes of epctl.
#pragma once

#include "proto/shape.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::ctl {

// size: the shape of a group that need not exist.
struct SizeArguments {
  abi::GroupShape shape{};
  std::vector<std::string> more_formats;  // row formats beyond the shape's first, as on the command line
  std::string device_kind = "cuda";
};

inline constexpr const char* kDefaultSocket = "/run/epd/control.sock";

struct Arguments {
  std::string command;  // "set device"
  std::string socket = kDefaultSocket;
  // doctor: the socket to check while no daemon answers; several with colons between them, as for clients;
  // empty: the default, if `socket` is the default too
  std::string attach_socket;
  bool json = false;
  std::uint32_t timeout_ms = 2000;    // of one call
  bool members = false;               // groups: list the members too
  std::uint32_t drain_ms = 0;         // drain: for sessions to end; 0: the daemon's configured time
  bool wait = false;                  // drain: until the daemon has gone
  bool strict = false;                // doctor: warnings count as problems
  bool ranks = false;                 // stats: one line per rank too
  std::string operation;              // op: its id
  bool follow = false;                // events: new events too
  std::string since;                  // events: only after this number, or "1h": not older than that
  std::uint64_t last = 0;             // events: only this many of those remembered; 0: all
  std::string group;                  // events: only of this group, by name, id or id:ID
  std::string node;                   // events: only of this node
  std::string level = "info";         // events: of at least this importance
  double interval_s = 1;              // watch
  std::uint32_t count = 0;            // watch: frames; 0: until interrupted
  std::string target;                 // set, restart: name of the device or group; evict, waits: of the group
  std::vector<std::string> settings;  // set: "sms=4"
  std::uint64_t session_id = 0;       // evict session
  std::uint32_t rank = 0;             // evict group
  std::string reason;                 // evict
  std::string shell;                  // completion
  std::string subsystem;              // health; empty: all, and the daemon as a whole decides
  SizeArguments size;
};

// Exit codes of the process; documented, so never renumbered.
enum class Exit : int {
  kOk = 0,
  kRefused = 1,  // the daemon refused
  kUsage = 2,
  kUnreachable = 3,  // no daemon, no permission, no answer in time
  kProblems = 4,     // doctor found some, or health's subsystem does not serve
  kUnwritten = 5,    // the answer could not be written to standard output
};

struct Failure {
  Exit exit = Exit::kRefused;
  std::string status;   // epd's name of the status if the daemon said it, else gRPC's
  std::string message;  // a sentence: what is wrong, and what to do
};

}  // namespace epd::ctl
