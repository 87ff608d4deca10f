#!/usr/bin/env bash
# Builds epd and shows it at work on emulated devices. See --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: deploy/demo.sh [--help] [OPTIONS OF epd-moe-demo]

Installs missing Debian packages, builds, starts a daemon with 4 emulated host devices, or with
--nodes N one on each of N nodes, runs a Mixture-of-Experts forward pass of DeepSeek-V3's shape on 4
client processes, shows the daemon's status meanwhile, and stops everything. Needs about 4 GiB of
memory. The first run builds (minutes); later ones take less than a minute.

Nodes are network namespaces joined by a bridge: that needs root or user namespaces.

Other options go to epd-moe-demo, for example:
  deploy/demo.sh --text README.md --layers 8 --steps 5
  deploy/demo.sh --sum-ranks 2      # two sum domains of two ranks: another checksum than with 4 (or 0)
  deploy/demo.sh --nodes 2          # the same checksum as with --sum-ranks 2, on two nodes of two ranks
  deploy/demo.sh --dump-routing routing.jsonl

Exit status: 0 if every result was bit-exact and the daemons stopped cleanly.
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
demo=

cleanup() {
  local status=$?
  trap - EXIT INT TERM
  # Its daemons end with it.
  if [[ -n $demo ]]; then kill -TERM "$demo" 2>/dev/null || true; wait "$demo" 2>/dev/null || true; fi
  if [[ -n $work ]]; then rm -rf "$work"; fi
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

( cd "$caller" && exec env TMPDIR="$work" "$bin/epd-moe-demo" "$@" >"$work/result" ) &
demo=$!
# Its daemons' status once its four clients work together.
for (( i = 0; i < 600; i++ )); do
  mapfile -t sockets < <(compgen -G "$work/epd-*/control.sock")
  if (( ${#sockets[@]} != 0 )) && "$bin/epctl" --socket "${sockets[0]}" --json groups 2>/dev/null | grep -q moe-demo; then
    sleep 2
    if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
    echo "epctl status, while it runs:"
    "$bin/epctl" --socket "${sockets[0]}" status || true
    if (( ${#sockets[@]} > 1 )); then echo; "$bin/epctl" --socket "${sockets[0]}" nodes || true; fi
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
echo "What was started has stopped cleanly."
