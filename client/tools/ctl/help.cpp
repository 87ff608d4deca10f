#include "help.h"

namespace epd::ctl::help {

const char* const kProgram =
    R"HELP(epctl - look at a running epd daemon, change its settings, evict, drain, find out what is wrong.

epctl asks one daemon over its control socket. It never touches the data path: it answers
just as fast while the devices are busy.)HELP";

const char* const kProgramFooter = R"HELP(
EXIT CODES
  0  well
  1  the daemon answered, and said no
  2  wrong usage
  3  no daemon, no permission, or no answer in time
  4  doctor found problems; health: what was asked for does not serve
  5  standard output took not all of the answer (a full disk)

JSON
  With --json standard output carries exactly one JSON document, also on failure:
  {"error": {"class": "refused", "unreachable" or "usage", "status": ..., "message": ...}}. Fields are
  those of control.proto (epd.v1); units end their names; states are lower-case words. events and watch
  print one document per line, as they come. --help, --version and completion are {"text": ...}.

ENVIRONMENT
  EPD_CONTROL_SOCKET  the control socket, where --socket is not given
  EPD_SOCKET          the attach socket that doctor looks at while no daemon answers; of several, with colons
                      between them, the first where a daemon may listen

EXAMPLES
  epctl status
  epctl --socket /tmp/epd/control.sock devices
  epctl sessions --json | jq '.sessions[] | select(.device == "host:0") | .pid'
  epctl ops                    (who waits for whom)
  epctl watch                  (rates, each second)
  epctl size --ranks 8 --experts 256 --hidden 7168 --tokens 128 --topk 8
  epctl health && echo ready
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
  STATE       starting, ready, restarting (died; another one comes after a pause), failed (given up: see
              epctl restart), stopped (its engine stands still: by a signal, a debugger, or it hangs)
  ENGINE      process id of the engine
  SMS         SMs (host devices: threads) that operations may use; * if epctl set said so
  HEARTBEAT   when the engine's loop last turned; "sleeping" when it has nothing to do
  RESTARTS    engines that died, and how the last one ended; epctl restart does not count
GPUs have a second line, with what the driver said of them when the daemon started.
  CUDA        version that the driver speaks
  MPS         on: clients and engine run at the same time; off: they take turns
  STUCK       how often the GPU began no kernel for 100 ms
  NO P2P WITH devices whose memory it can't map: no group may have ranks on both

EXAMPLES
  epctl devices
  epctl devices --json | jq '.devices[] | {name, restarts, last_exit}'
)HELP"};

const Page kNodes = {"Nodes of the cluster, and who is lost", R"HELP(
One line per node, as this daemon knows it: the coordinator hears all nodes, the others hear the coordinator and show
what it told last. Fails with UNSUPPORTED if the daemon is in no cluster.
  STATE       up, silent (its stream has ended, or it has said nothing for half of cluster.node_timeout_ms), lost
              (for all of it, or nobody listens at its address any more), draining, unknown (the coordinator, which
              would tell, is away)
  SINCE       for how long it has been in that state
  ROLE        coordinator; * marks the node that answers
  HEARTBEAT   since its last message; of the nodes that this one hears itself
  ADDRESS     where other nodes reach it
Below it: reasons of states that are not up, what keeps this node from its coordinator, and how often something was
refused on this node's port.

EXAMPLES
  epctl nodes
  epctl nodes --json | jq -r '.nodes[] | select(.state == "lost") | .name'
)HELP"};

const Page kNetwork = {"Engines of other nodes, and what passes between them and those here", R"HELP(
One line per engine of this node and engine of another with which it shares groups, or did since it started. What the
engines here have counted since then. Fails with UNSUPPORTED if the daemon is in no cluster.
  DEVICE      of the engine here; NODE and FAR say which other one
  STATE       connected, connecting (it has not said anything yet), down (tried again and again), idle (no group
              needs it any more)
  CARRIER     what carries the messages; HERE / THERE if the two sides have different versions
  ROUND TRIP  of a ping from loop to loop, once a second
  HEARD       when the last ping was answered: above one second the link is silent
  GROUPS      that the two share
  WINDOWS     memory promised for them: windows and send buffers
  SENT, RECEIVED  batches and their bytes: rows, asks and sums; --json has each
  STALLS      how often an operation had something to send and no credit of a rank there, and for how long in all
  DROPPED     messages from there that were dropped; below it why
Below it: why engines are not connected, the longest stall with its rank and group, and for each engine here its
carrier, interfaces, and what of network.max_bytes is promised.

EXAMPLES
  epctl network
  epctl network --json | jq -r '.far_engines[] | select(.state != "connected") | .reason'
  epctl network --json | jq -r '.far_engines[].lanes'
)HELP"};

const Page kSessions = {"Attached client processes", R"HELP(
One line per session: a client process attached to one device. PID, UID and GID are what the kernel
says about the client; LIBRARY is what the client says about itself. PROGRAM is the name of the process when it
attached; --json has its control group too, which names a pod or a job. A client in another PID namespace
(a container) has no number here: PID is then what it says itself, as NUMBER@HOST?, and PROGRAM is not known.

EXAMPLES
  epctl sessions
  epctl sessions --json | jq '[.sessions[].arena_bytes] | add'
)HELP"};

const Page kGroups = {"Groups of ranks, and what they wait for", R"HELP(
One line per group. Below, for a group that forms, the ranks that have not joined, and for one that broke, why.
Commands take a group by its name or id. Users choose names, also such that are the id of another group or of another
user's group; then use id:ID. A name that begins with - stands behind --: epctl waits -- -name.
  STATE   forming (ranks are missing), starting, active, breaking (operations are being failed),
          lost (a rank is gone for good; the others are to leave)
  SMS     the group's own limit, or "all" of its devices; * if epctl set said so
  PRIO    priority among the groups of a device, -8 .. 7; higher goes first; * likewise
  EPOCH   grows with each break

EXAMPLES
  epctl groups
  epctl groups --members
  epctl groups --json | jq '.groups[] | select(.state == "forming") | .missing_ranks'
)HELP"};

const Page kOps = {"Operations in flight", R"HELP(
One line per operation and rank, a snapshot taken while the engines run.
  ID         for: epctl op ID
  OP         number of the operation in its group, the same on all ranks
  STAGE      planning, wait_ready (for a rank to submit the same operation), moving, wait_arrived (for
             the rows of a rank), breaking
  WAITS FOR  the rank that holds this one up; the slow rank itself waits for nobody

On a GPU operations are looked for every 50 ms, at most 16 of a rank: those that end sooner may not be
listed, and their AGE begins when they were first seen.

EXAMPLES
  epctl ops
  epctl ops --json | jq '[.operations[].waiting_for] | unique'
)HELP"};

const Page kConfig = {"Every option with its value and where it came from", R"HELP(
FROM is default, file, flag, environment, or operator (epctl set). RELOADABLE options change with epctl reload or
SIGHUP to the daemon, others with a restart. A reload that was refused is shown by: epctl status

EXAMPLES
  epctl config
  epctl config --json | jq -r '.entries[] | select(.origin != "default") | "\(.key) = \(.value)"'
)HELP"};

const Page kDrain = {"Stop admitting, let sessions finish, end the daemon", R"HELP(
New clients are refused at once; groups go on. Sessions that are left when the time is over are
ended, then the daemon exits. epctl returns when draining has begun, with --wait when the daemon
has gone. Here --timeout-ms is the time for sessions, not for the call; give the call's time before
the command: epctl --timeout-ms 500 drain. A second drain may shorten the time that is left,
and never lengthens it.

--wait gives up 10 seconds after the sessions' time, and exits with 1. It exits with 3 if the daemon
has died and so left its socket behind. "Gone" means the process too, where it is seen from here:
what it held is free for the next one.

EXAMPLES
  epctl drain
  epctl drain --timeout-ms 30000 --wait && systemctl start epd
)HELP"};

const Page kDoctor = {"Check daemon, devices and host, and say what to do", R"HELP(
Looks from the outside: sockets and permissions, versions, devices, what GPUs can and what follows (MPS, P2P), then limits and settings of this host. One line per check, OK, WARN or FAIL, with what to do below those that are not OK. Host
checks run without a daemon too. Exits with 4 if a check failed; with --strict also on warnings.

EXAMPLES
  epctl doctor
  sudo -u app epctl doctor     (as the user who can't attach)
  epctl doctor --json | jq '.checks[] | select(.level != "ok")'
)HELP"};

const Page kOp = {"One operation: whom it waits for, since when, and why", R"HELP(
Follows the operation to the rank that holds it up in the end and says what keeps that one: it has not
submitted the operation, its process or its engine is stopped, its engine is down, its rows still move.

EXAMPLES
  epctl ops
  epctl op 12:500
  epctl op 12:500 --json | jq -r '.waits[-1].text'
)HELP"};

const Page kStats = {"Counters and times of sessions and groups", R"HELP(
Counted by each device's present engine; its next start begins anew.
  DONE       begun by the device until done, with waits for other ranks: median and 99th percentile;
             estimates, good to a quarter
  FAILED     operations, by status
  REFUSED    calls that ended the session, by status
"others" are sessions (or ranks) beyond the 256 that an engine's table holds, together.

EXAMPLES
  epctl stats --ranks
  epctl stats --json | jq '.groups[] | {group_id, p99: .statistics.done.p99_us}'
)HELP"};

const Page kWaits = {"Who has waited for whom in a group", R"HELP(
One line per rank, and with a group below it how long each rank (line) has waited for each other (column). Of more
than 16 ranks it shows the longest waits of pairs. All of it since the group began; an engine's restart loses nothing.
On host devices the wait in progress counts for the rank that epctl ops names.
  OPERATIONS  dispatches and combines that all ranks have announced
  LAST        of them those that this rank announced last: it held the others up
  ROWS        received by dispatches
  WAITED      this rank, for all others
  WAITED FOR  all others, for this rank: until it announced an operation (READY), until it was done with them
              (ARRIVED)
Ranks are waited for at the same time, so that sums are longer than what passed. On a GPU a wait counts from one look
of the engine to the next, which is 50 ms later: shorter ones are hardly ever seen, and OPERATIONS and LAST are 0.

EXAMPLES
  epctl waits
  epctl waits training
  epctl waits training --json | jq '.groups[0].pairs | max_by(.ready_us)'
)HELP"};

const Page kEvents = {"What has happened: joins, losses, breaks, restarts, refusals", R"HELP(
Attaches and ends of sessions, joins and losses of ranks, breaks of groups with their causes, starts and
deaths of engines, reloads, settings, evictions, refusals (limited in rate; a "count" says how many are
left out). What an operator did has by_uid and by_pid. --level warning leaves out what is of less importance.
--since 1h leaves out what is older, --last 20 all but the last 20 of what is left. The daemon remembers 4096; then
the oldest of the user with the most goes. Where some are forgotten, a line tells how many. Each line is also in the
daemon's log. A client that a signal ends without a detach has died, whatever the signal: only its parent is told.

EXAMPLES
  epctl events --follow
  epctl events --json | jq -c 'select(.kind == "group_broke") | .fields'
  epctl events --since 120 --follow
  epctl events --since 1h --group training
  epctl events --level warning --last 20
)HELP"};

const Page kWatch = {"Rates of devices, sessions and groups, again and again", R"HELP(
Operations and bytes per second, and the median and 99th percentile of the time from an operation's begin
on the device to its end, between two looks (of a group: of its ranks together); failures since the look
before; and what the slowest operation waits for. JSON has the time of each look as unix_ms.
Redrawn on a terminal, else one block of text (or one line of JSON) per look.

EXAMPLES
  epctl watch
  epctl watch --interval 0.5 --count 10 --json | jq .groups
)HELP"};

const Page kSet = {"Change a device, a group, the log or limits while the daemon runs", R"HELP(
For users who may change the daemon: see access.operate in its configuration. Operations that are launched from now
on follow it; none is lost, no result changes. Nothing is written to the configuration file: what is set ends with
the daemon. It outlives engines. A reload of the configuration replaces what is set for an option (of devices:
devices.sms) if its value in the configuration has changed. The value "unset" takes back what was set.

WHAT CAN BE SET
  device DEVICE  sms=N         SMs (host devices: threads) that operations may use, from 1
  group GROUP    sms=N         the same for one group's operations; 0: all of the device's
                 priority=N    among the groups of a device, -8 .. 7, higher goes first
                 linger_us=N   GPUs: how long the SMs of an operation stay for the next one, 0 .. 50000
                               of a group that spans nodes: for its ranks on this node; say it on each node
  log            level=LEVELS  what is logged: debug, or with levels of rooms: info,session=debug
  limits         OPTION=VALUE  options of [limits] in the configuration: max_sessions=8, max_arena_bytes=64GiB

EXAMPLES
  epctl set device host:0 sms=4
  epctl set group layer-experts sms=2 priority=5
  epctl set log level=info,session=debug
  epctl set limits max_sessions=512 max_sessions_per_user=64
  epctl set limits max_sessions=unset
)HELP"};

const Page kSetLog = {"What the daemon and its engines log", R"HELP(
LEVELS is as log.level of the configuration: trace, debug, info, warning or error, then levels of single rooms of
the daemon, as info,session=debug,engine=trace.

EXAMPLES
  epctl set log level=debug
  epctl set log level=info,session=debug
  epctl set log level=unset
)HELP"};

const Page kSetLimits = {"Limits of sessions, groups and memory", R"HELP(
The options of [limits] in the configuration, by their names there. A lowered limit ends nothing that is there.
epctl config shows what is in force; FROM is "operator" where it was set.

EXAMPLES
  epctl set limits max_sessions=512 max_groups=64
  epctl set limits max_arena_bytes=64GiB
  epctl set limits max_sessions=unset
)HELP"};

const Page kHealth = {"What serves, with an exit status for probes", R"HELP(
Exits with 0 if SUBSYSTEM serves, or without one if the daemon does, and with 4 if not. Asks grpc.health.v1 on the
control socket, as other probes may.
  daemon       it has started, admits clients, and the files of its sockets are there
  control      the supervisor answers
  membership   groups can be listed
  cluster      the coordinator answers; only in a cluster
  device/NAME  the device is ready, and its engine does not stand still

Use daemon to know when clients may come (readiness), and control to know whether to restart the daemon (liveness):
all clients lose their sessions by that, so a failed device is no reason.

EXAMPLES
  epctl health
  epctl health device/cuda:0 || epctl restart device cuda:0
  epctl health --json | jq -r '.subsystems[] | select(.serving | not) | .name'
)HELP"};

const Page kReload = {"Read the configuration again", R"HELP(
As SIGHUP does: all of it is applied, or nothing, and then epctl prints why and exits with 1. Prints what has
changed. For users who may change the daemon: see access.operate in its configuration. Options that need a restart
are named by: epctl config

EXAMPLES
  epctl reload
  epctl reload --json | jq -r '.changes[] | "\(.key): \(.before) -> \(.after)"'
)HELP"};

const Page kSetDevice = {"SMs of a device", R"HELP(
EXAMPLE
  epctl set device host:0 sms=4
)HELP"};

const Page kSetGroup = {"SMs, priority and lingering of a group", R"HELP(
A group is named by its name, its id or id:ID; see epctl groups. Of a group that spans nodes the ranks on this node are
set; those on others keep theirs: say it on each node. With linger_us the group's SMs stay after each operation for
so many microseconds and take the next one some 4 us sooner; other kernels of the GPU miss them meanwhile. For a group
on host devices, which keep no SMs, it can only be 0.

EXAMPLES
  epctl set group layer-experts sms=2 priority=5
  epctl set group layer-experts sms=24 linger_us=1000
)HELP"};

const Page kEvict = {"End a session, or take a rank out of its group", R"HELP(
For users who may change the daemon: see access.operate in its configuration. The reason is one line of printable
text: clients and logs get it.

EXAMPLES
  epctl evict session 12 --reason "holds up the others"
  epctl evict group layer-experts rank 3
)HELP"};

const Page kEvictSession = {"End a session", R"HELP(
Its client gets ABORTED with the reason; its groups lose their ranks, and the other ranks are told why. On a
GPU under MPS all work of its process is terminated first, unless the process has another session or is
leaving by itself; the log says how that went.

EXAMPLE
  epctl evict session 12 --reason "holds up the others"
)HELP"};

const Page kEvictGroup = {"Take one rank out of its group", R"HELP(
As if the rank had left: all ranks, itself included, get RANK_LOST with the reason. Its session and its
other groups go on.

EXAMPLE
  epctl evict group layer-experts rank 3 --reason "node is to be serviced"
)HELP"};

const Page kRestart = {"Start a device's engine anew", R"HELP(
For a device that has failed, which nothing else starts again, or an engine that hangs. For users who may change
the daemon: see access.operate in its configuration.

EXAMPLES
  epctl restart device host:0
)HELP"};

const Page kRestartDevice = {"Start a device's engine anew", R"HELP(
A device that has failed takes sessions again as soon as its engine is ready. An engine that runs is killed
first: operations in flight get ENGINE_RESTARTED, its groups break and go on, no session ends. That is no error, and
no death that is counted. Its deaths so far no longer count towards engine.max_restarts_per_minute. Returns before
the engine is ready.

EXAMPLE
  epctl restart device host:0
)HELP"};

const Page kCompletion = {"Print the completion script of a shell", R"HELP(
The script asks epctl itself, so it knows every command of the installed epctl, and devices, groups,
sessions and operations of the running daemon. Packages install it where shells look.

EXAMPLES
  source <(epctl completion bash)
  epctl completion zsh > ~/.zfunc/_epctl
  epctl completion fish > ~/.config/fish/completions/epctl.fish
)HELP"};

const Page kSize = {"What a group takes of memory", R"HELP(
Tells what the daemon would make of memory for a group, before anybody joins it: by the rules that daemon and
library have, so a shape that a join would refuse is refused here with the same words. Needs no daemon.
  user arena       the regions of all slots, which the client reads and writes
  exchange arena   what ranks write to each other. In it: a routing record for each slot and kept handle, and
                   inboxes for rows of operations with few tokens (none if there may be many)
  board            a rank's state for its client
  quota            what a rank counts against this limit of the daemon's configuration
On a GPU the driver rounds each arena up to a whole allocation unit, 2 MiB as a rule. On a host device pages
that nobody has touched are not used yet.

EXAMPLES
  epctl size --ranks 8 --experts 256 --hidden 7168 --tokens 128 --topk 8 --layout expert --payload fp8_cast
  epctl size --ranks 8 --experts 256 --hidden 7168 --tokens 4096 --topk 8 --bound recv_x,y
  epctl size --ranks 8 --experts 256 --hidden 7168 --tokens 128 --topk 8 --json | jq .group.total_bytes
)HELP"};

const Page kVersion = {"Versions of epctl and of the daemon", R"HELP(
Release, shared-memory ABI and layout hash of both sides. A client library attaches only to a daemon
with the same layout hash. epctl's own line is printed even if no daemon answers (exit code 3).

EXAMPLES
  epctl version
  epctl version --json | jq -r .daemon.version
)HELP"};

}  // namespace epd::ctl::help
