#!/usr/bin/env bash
# same_checksum.sh DEMO: the demo gives one checksum on one node, on two and on three, with equal sum domains, and
# another one with another domain. Exit status: 0 passed, 1 failed, 77 skipped because there can be no nodes here.
set -euo pipefail

demo=$1
small=(--layers 2 --steps 1 --tokens 16 --hidden 256 --expert-rank 4 --ranks 4 --json)

# checksum OPTIONS...: of a run that says itself that all results were right.
checksum() {
  local said
  if ! said=$("$demo" "${small[@]}" "$@" 2>&1); then
    if [[ $said == *"nodes can't be made here: "* ]]; then echo "skipped: $said" >&2; exit 77; fi
    echo "FAILED: $*: $said" >&2
    exit 1
  fi
  grep -o '"checksum":"[0-9a-f]*"' <<<"$said"
}

one=$(checksum --sum-ranks 2)
two=$(checksum --nodes 2)
three=$(checksum --nodes 3 --sum-ranks 2)
all=$(checksum)
echo "one node $one, two $two, three $three; sums of all ranks $all"
[[ $one == "$two" && $one == "$three" ]] || { echo "FAILED: the checksums differ" >&2; exit 1; }
[[ $one != "$all" ]] || { echo "FAILED: sum domains make no difference, so that this test shows nothing" >&2; exit 1; }
