#!/usr/bin/env bash
# Model-checks calls, the doorbells and operations between nodes with spin. See --help.
set -euo pipefail

usage() {
  cat <<'END'
Usage: proto/model/check.sh [--help] [--full] [host | peers | calls | bell | together | far]...

Explores every state of each model (default: all six), then of its mutants, each with one rule of the protocol
broken: the model must pass, every mutant must fail in an assertion. Takes about a minute on one core.

  --full   larger bounds as well: some minutes, 4 GiB of memory

Exit status: 0 as it should be, 1 not, 77 a tool is missing.
END
}

host_mutants=(NO_RINGER_FENCE RING_BEFORE_CALL NO_SLEEPER_FENCE NO_LAST_LOOK NO_CLIENT_FENCE NO_CLIENT_LOOK
  NO_ENGINE_FENCE TOLD_BEFORE_TAKEN TOLD_SILENTLY EMPTIED_AFTER_PASSING_ON)
peers_mutants=(NO_RINGER_FENCE NO_SLEEPER_FENCE)
calls_mutants=(NO_RINGER_FENCE CLEARED_AFTER_RING RELAXED_RING CLOSED_NOT_LOOKED_FOR RELAXED_DONE FLAGS_FIRST)
bell_mutants=(NO_CALLER_FENCE BELL_FIRST BELL_CLEARED_LAST GATE_LOOKS_ONCE MAIN_DOES_NOT_LOOK EPOCH_BEFORE_INSIDE
  HALTED_BEFORE_EPOCH TOLD_AT_ONCE NO_GENERATION DONE_BEFORE_GENERATION OLD_PAIR_INSIDE OPENED_SILENTLY NOT_SET_AGAIN
  LEAVES_SILENTLY MAIN_DOES_NOT_ASK BEGUN_BEHIND_EPOCH)
together_mutants=(NO_SEQUENTIAL_FENCE OTHERS_NOT_RUNG BELL_CLEARED_LAST BEGINS_ALONE TELLS_LATE
  BEGUN_NOT_TOLD)
far_mutants=(WINDOW_OUT_OF_ORDER ONE_WINDOW SUMS_AS_ASKS_COME NOT_COUNTED STORED_BEFORE_OPEN NOTHING_NOT_COUNTED
  OWN_BLOCK_ONLY GREETING_SKIPPED GREETING_NOT_ANSWERED NO_EPOCH_CHECK OLD_CREDITS HELD_KEPT)

# The bounds that are explored: those of every run, those of --full.
host_bounds=("" "-DPORTER -DENGINE_DEATHS=0")
peers_bounds=("")
calls_bounds=("")
bell_bounds=("" "-DDEATHS=1" "-DLINGERS")
together_bounds=("" "-DWAITING=1" "-DRANKS=3 -DOPS=1 -DWAITING=3")
far_bounds=("" "-DDISPATCHES -DDEPTH=1" "-DBREAKS=1 -DPER_NODE=1 -DSMALL")
host_full=("-DPORTER" "-DENGINE_DEATHS=2" "-DCALLS=4")
peers_full=("-DROUNDS=3")
calls_full=("-DCALLS=6")
bell_full=("-DHALTS=2" "-DLINGERS -DDEATHS=1")
together_full=("-DOPS=3" "-DRANKS=3 -DOPS=1")
far_full=("-DDISPATCHES" "-DWINDOW=2" "-DBREAKS=1 -DPER_NODE=1" "-DBREAKS=1 -DSMALL")

full=
models=()
for argument in "$@"; do
  case $argument in
    --help | -h) usage; exit 0 ;;
    --full) full=1 ;;
    host | peers | calls | bell | together | far) models+=("$argument") ;;
    *) echo "error: '$argument'; allowed: --full, host, peers, calls, bell, together, far" >&2; exit 2 ;;
  esac
done
if (( ${#models[@]} == 0 )); then models=(host peers calls bell together far); fi
for tool in spin cc; do
  if ! command -v "$tool" >/dev/null; then echo "skipped: $tool is not installed"; exit 77; fi
done

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/epd-model-XXXXXX")
trap 'rm -rf "$work"' EXIT
cp "$here"/*.pml "$work"
cd "$work"
failed=

# explore MODEL OPTIONS OPTIMISATION: the checker's report in ./report. -E: the model judges whether it may come to a
# stop.
explore() {
  # shellcheck disable=SC2086  # options are words
  spin $2 -a "$1.pml" && cc -w "$3" -DSAFETY -o pan pan.c && ./pan -E -m1000000 >report 2>&1
}

complain() {
  echo "FAILED: $1"
  cat report
  failed=1
}

states() { awk '/states, stored/ {print $1}' report; }

for model in "${models[@]}"; do
  declare -n mutants=${model}_mutants bounds=${model}_bounds more=${model}_full
  if [[ -n $full ]]; then bounds+=("${more[@]}"); fi
  for options in "${bounds[@]}"; do
    begin=$SECONDS
    if explore "$model" "$options" -O1 && grep -q 'errors: 0' report && ! grep -q 'Search not completed' report; then
      echo "$model ${options:-(default bounds)}: holds in all $(states) states, $((SECONDS - begin)) s"
    else
      complain "$model $options"
    fi
  done
  for mutant in "${mutants[@]}"; do
    if explore "$model" "-DMUTANT_$mutant" -O0 && grep -q '^pan:1: assertion violated' report; then
      echo "$model $mutant: found, $(sed -n 's/^pan:1: assertion violated \(.*\) (at.*/\1/p' report)"
    else
      complain "$model: mutant $mutant was not found"
    fi
  done
done
if [[ -n $failed ]]; then exit 1; fi
