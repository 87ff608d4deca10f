#!/usr/bin/env bash
# Compares daemon/transport with raw UCX. See --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: tests/bench/transport.sh [--help] [--pairs N] [BIN]

Runs transport_bench (in BIN, default build/dev/bin) and ucx_perftest alternately, N times each (default 7),
over TCP on loopback with the same settings of UCX, each side on a core of its own, and prints medians and the
median of the N ratios. Messages are eager in both, and copied by UCX; the last line is by rendezvous.

Needs ucx_perftest (Debian: ucx-utils) and two cores. Exit status: 0, or 77 if ucx_perftest is missing.
END
}

pairs=7
bin=build/dev/bin
while (( $# > 0 )); do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --pairs) pairs=$2; shift ;;
    *) bin=$1 ;;
  esac
  shift
done
if ! command -v ucx_perftest >/dev/null; then echo "skipped: ucx_perftest is missing (ucx-utils)"; exit 77; fi

mapfile -t settings < <("$bin/transport_bench" --environment)
settings+=(UCX_TLS=tcp UCX_NET_DEVICES=lo)

# raw FIELD ARGUMENTS...: one number of ucx_perftest's last line.
raw() {
  local field=$1 port=$(( 20000 + RANDOM % 20000 )) server line
  shift
  env "${settings[@]}" timeout 60 ucx_perftest -p "$port" -c 0 >/dev/null 2>&1 &
  server=$!
  for (( i = 0; i < 50; ++i )); do
    if [[ -n $(ss -Hltn "sport = :$port" 2>/dev/null) ]]; then break; fi
    sleep 0.05
  done
  line=$(env "${settings[@]}" timeout 60 ucx_perftest 127.0.0.1 -p "$port" -c 1 -e -f "$@" 2>/dev/null | tail -n 1)
  kill "$server" 2>/dev/null || true
  wait "$server" 2>/dev/null || true
  awk -v field="$field" '{print $field}' <<<"$line"
}
eager() { UCX_RNDV_THRESH=inf UCX_ZCOPY_THRESH=inf raw "$@"; }
rendezvous() { UCX_RNDV_THRESH=1 UCX_ZCOPY_THRESH=inf raw "$@"; }
ours() { timeout 60 "$bin/transport_bench" "$@"; }
median() { sort -g | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }

# compare TITLE UNIT higher|lower 'OURS' 'RAW'
compare() {
  local title=$1 unit=$2 better=$3 a b our_values=() raw_values=() ratios=()
  for (( n = 0; n < pairs; ++n )); do
    a=$($4)
    b=$($5)
    our_values+=("$a")
    raw_values+=("$b")
    ratios+=("$(awk -v a="$a" -v b="$b" -v w="$better" 'BEGIN {print w == "higher" ? a / b : b / a}')")
  done
  printf '%-44s %10.2f %10.2f %-6s %6.2f\n' "$title" "$(printf '%s\n' "${our_values[@]}" | median)" \
    "$(printf '%s\n' "${raw_values[@]}" | median)" "$unit" "$(printf '%s\n' "${ratios[@]}" | median)"
}

printf '%-44s %10s %10s %-6s %6s\n' "" ours raw "" share
compare "256 KiB one way, 16 under way" MiB/s higher \
  "ours --bytes 262144 --messages 12000" "eager 5 -t ucp_am_bw -s 262144 -n 12000 -w 1200 -O 16"
compare "57344 B one way, 16 under way" MiB/s higher \
  "ours --bytes 57344 --messages 40000" "eager 5 -t ucp_am_bw -s 57344 -n 40000 -w 4000 -O 16"
compare "8 B, half a round trip" us lower \
  "ours --bytes 8 --messages 40000 --round-trip" "eager 3 -t ucp_am_lat -s 8 -n 40000 -w 4000"
compare "256 KiB, half a round trip" us lower \
  "ours --bytes 262144 --messages 3000 --round-trip" "eager 3 -t ucp_am_lat -s 262144 -n 3000 -w 300"
compare "256 KiB one way, both by rendezvous" MiB/s higher \
  "ours --bytes 262144 --messages 12000 --rendezvous" "rendezvous 5 -t ucp_am_bw -s 262144 -n 12000 -w 1200 -O 16"
