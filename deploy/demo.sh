#!/usr/bin/env bash
# Builds epd and shows it at work on emulated devices. See --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: deploy/demo.sh [--help] [OPTIONS OF epd-moe-demo]

Installs missing Debian packages, builds, starts the daemon with 4 emulated host devices, runs a
Mixture-of-Experts forward pass of DeepSeek-V3's shape on 4 client processes, shows the daemon's
status meanwhile, and stops everything. Needs about 4 GiB of memory. The first run builds (minutes);
later ones take less than a minute.

Other options go to epd-moe-demo, for example:
  deploy/demo.sh --text README.md --layers 8 --steps 5
  deploy/demo.sh --sum-ranks 2      # two sum domains of two ranks: another checksum than with 4 (or 0)
  deploy/demo.sh --dump-routing routing.jsonl

Exit status: 0 if every result was bit-exact and the daemon stopped cleanly.
END
}

for argument in "$@"; do
  if [[ $argument == --help || $argument == -h ]]; then usage; exit 0; fi
done

caller=$PWD
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=deploy/dependencies.sh
source "$root/deploy/dependencies.sh"

work=
daemon=
demo=

stop_daemon() {  # returns the daemon's exit status; one that doesn't stop within 15 s is killed
  local pid=$daemon status=0 i
  daemon=
  kill -TERM "$pid" 2>/dev/null || true
  for (( i = 0; i < 150; i++ )); do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  kill -KILL "$pid" 2>/dev/null || true
  wait "$pid" || status=$?
  return "$status"
}

cleanup() {
  local status=$?
  trap - EXIT INT TERM
  if [[ -n $demo ]]; then kill -TERM "$demo" 2>/dev/null || true; wait "$demo" 2>/dev/null || true; fi
  if [[ -n $daemon ]]; then stop_daemon || true; fi
  if [[ -n $work ]]; then
    if (( status != 0 )) && [[ -s $work/epd.log ]]; then
      echo "--- the end of the daemon's log ---" >&2
      tail -n 20 "$work/epd.log" >&2
    fi
    rm -rf "$work"
  fi
  exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

install_dependencies
cd "$root"
quietly "Configuring" cmake --preset dev
quietly "Building" cmake --build build/dev --parallel "$(build_jobs)" --target epd epctl epd-moe-demo
bin=$root/build/dev/bin

work=$(mktemp -d "${TMPDIR:-/tmp}/epd-demo-XXXXXX")
cat >"$work/epd.toml" <<END
[daemon]
socket = "$work/epd.sock"
control_socket = "$work/control.sock"
[devices]
host = 4
cuda = "none"
END

"$bin/epd" serve --config "$work/epd.toml" >"$work/epd.log" 2>&1 &
daemon=$!
ready=
for (( i = 0; i < 200; i++ )); do
  if "$bin/epctl" --socket "$work/control.sock" status >/dev/null 2>&1; then ready=1; break; fi
  kill -0 "$daemon" 2>/dev/null || break
  sleep 0.1
done
if [[ -z $ready ]]; then echo "error: the daemon did not come up within 20 s" >&2; exit 1; fi
echo "epd serves 4 host devices (pid $daemon)"
echo

( cd "$caller" && exec "$bin/epd-moe-demo" --socket "$work/epd.sock" "$@" >"$work/result" ) &
demo=$!
# Its status once its four clients work together.
for (( i = 0; i < 300; i++ )); do
  if "$bin/epctl" --socket "$work/control.sock" --json groups 2>/dev/null | grep -q moe-demo; then
    sleep 2
    if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
    echo "epctl status, while it runs:"
    "$bin/epctl" --socket "$work/control.sock" status
    echo
    break
  fi
  kill -0 "$demo" 2>/dev/null || break
  sleep 0.1
done
status=0
wait "$demo" || status=$?
demo=
cat "$work/result"
if (( status != 0 )); then echo "error: epd-moe-demo ended with status $status" >&2; exit "$status"; fi

stop_daemon || { status=$?; echo "error: the daemon ended with status $status after SIGTERM" >&2; exit 1; }
echo "The daemon stopped cleanly."
