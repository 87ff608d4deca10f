#include "help.h"

namespace epd::ctl::help {

const char* const kProgram =
    R"HELP(epctl - look at a running epd daemon, drain it, find out what is wrong.

epctl asks one daemon over its control socket. It never touches the data path: it answers
just as fast while the devices are busy.)HELP";

const char* const kProgramFooter = R"HELP(
EXIT CODES
  0  well
  1  the daemon answered, and said no
  2  wrong usage
  3  no daemon, no permission, or no answer in time
  4  doctor found problems

JSON
  With --json standard output carries exactly one JSON document, also on failure:
  {"error": {"class": "refused" or "unreachable", "status": ..., "message": ...}}. Fields are those
  of control.proto (epd.v1); units end their names; states are lower-case words.

ENVIRONMENT
  EPD_CONTROL_SOCKET  the control socket, where --socket is not given
  EPD_SOCKET          the attach socket that doctor looks at while no daemon answers

EXAMPLES
  epctl status
  epctl --socket /tmp/epd/control.sock devices
  epctl sessions --json | jq '.sessions[] | select(.device == "host:0") | .pid'
  epctl ops                    (who waits for whom)
  epctl drain --timeout-ms 30000 --wait
)HELP";

const Page kStatus = {"The daemon and its devices at one glance", R"HELP(
Version, state, sockets, sessions, groups and arena memory of the daemon, then one line per device.
STATE is starting, serving or draining. "arenas" is memory promised to clients; pages that nobody
has touched are not used yet.

EXAMPLES
  epctl status
  epctl status --json | jq -r .daemon.state
)HELP"};

const Page kDevices = {"Devices, their engines and counters", R"HELP(
One line per device. Counters are those of the present engine; a restart begins them anew.
  STATE       starting, ready, restarting (died; another one comes after a pause), failed (given up)
  ENGINE      process id of the engine
  SMS         SMs (host devices: threads) that operations may use
  HEARTBEAT   when the engine's loop last turned; "sleeping" when it has nothing to do
  RESTARTS    engines that died, and how the last one ended

EXAMPLES
  epctl devices
  epctl devices --json | jq '.devices[] | {name, restarts, last_exit}'
)HELP"};

const Page kSessions = {"Attached client processes", R"HELP(
One line per session: a client process attached to one device. PID, UID and GID are what the kernel
says about the client; LIBRARY is what the client says about itself.

EXAMPLES
  epctl sessions
  epctl sessions --json | jq '[.sessions[].arena_bytes] | add'
)HELP"};

const Page kGroups = {"Groups of ranks, and what they wait for", R"HELP(
One line per group. Below, for a group that forms, the ranks that have not joined, and for one that broke, why.
  STATE   forming (ranks are missing), starting, active, breaking (operations are being failed),
          lost (a rank is gone for good; the others are to leave)
  SMS     the group's own limit, or "all" of its devices
  EPOCH   grows with each break

EXAMPLES
  epctl groups
  epctl groups --members
  epctl groups --json | jq '.groups[] | select(.state == "forming") | .missing_ranks'
)HELP"};

const Page kOps = {"Operations in flight", R"HELP(
One line per operation and rank, a snapshot taken while the engines run.
  OP         number of the operation in its group, the same on all ranks
  STAGE      planning, wait_ready (for a rank to submit the same operation), moving, wait_arrived (for
             the rows of a rank), breaking
  WAITS FOR  the rank that holds this one up; the slow rank itself waits for nobody

EXAMPLES
  epctl ops
  epctl ops --json | jq '[.operations[].waiting_for] | unique'
)HELP"};

const Page kConfig = {"Every option with its value and where it came from", R"HELP(
FROM is default, file, flag or environment. RELOADABLE options change with SIGHUP to the daemon, others
with a restart. A reload that was refused is shown by: epctl status

EXAMPLES
  epctl config
  epctl config --json | jq -r '.entries[] | select(.origin != "default") | "\(.key) = \(.value)"'
)HELP"};

const Page kDrain = {"Stop admitting, let sessions finish, end the daemon", R"HELP(
New clients are refused at once; groups go on. Sessions that are left when the time is over are
ended, then the daemon exits. epctl returns when draining has begun, with --wait when the daemon
has gone. Here --timeout-ms is the time for sessions, not for the call; give the call's time before
the command: epctl --timeout-ms 500 drain. A second drain is accepted and changes
nothing.

--wait gives up 10 seconds after the sessions' time (without --timeout-ms: after 10 minutes) and
exits with 1.

EXAMPLES
  epctl drain
  epctl drain --timeout-ms 30000 --wait && systemctl start epd
)HELP"};

const Page kDoctor = {"Check daemon, devices and host, and say what to do", R"HELP(
Looks from the outside: sockets and permissions, versions, devices, then limits and settings of
this host. One line per check, OK, WARN or FAIL, with what to do below those that are not OK. Host
checks run without a daemon too. Exits with 4 if a check failed; with --strict also on warnings.

EXAMPLES
  epctl doctor
  sudo -u app epctl doctor     (as the user who can't attach)
  epctl doctor --json | jq '.checks[] | select(.level != "ok")'
)HELP"};

const Page kVersion = {"Versions of epctl and of the daemon", R"HELP(
Release, shared-memory ABI and layout hash of both sides. A client library attaches only to a daemon
with the same layout hash. epctl's own line is printed even if no daemon answers (exit code 3).

EXAMPLES
  epctl version
  epctl version --json | jq -r .daemon.version
)HELP"};

}  // namespace epd::ctl::help
